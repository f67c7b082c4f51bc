"""Pruning in PostgreSQL: removes records past retention that no recovery point needs.

It has two steps, because the first may read very much. ``find_needed`` finds the records past
retention that are still needed, in its own transaction and without a lock. ``prune_snapshots``
removes the others under the store's lock. No other record can become needed in between: captures
only add newer records, and a reset does not make an old one eligible.
"""

from collections.abc import Collection, Generator
from contextlib import closing
from datetime import datetime
from typing import Any

from budget_recovery_dagster.adapters.postgres.database import Connection
from budget_recovery_dagster.adapters.postgres.recovery_point import stream_verified
from budget_recovery_dagster.domain.snapshots import DatedUsages, PruneReport, needed_past_retention
from budget_recovery_dagster.domain.windows import tokens_at

# Open windows (by their token; a stored end may be damaged, so a later one counts as well, to be
# safe) with records past retention, except those whose newest intact covering record is
# within retention: in this usual case, no expired record is needed. A damaged record covers
# nothing. Records before ``since``, a covering record, are not needed; null: no record covers. But
# it covers only eligible usages: it may lack those of records up to ``reset_at``, the newest reset
# of the window, that the reset excludes. These stay needed, because a restore can ignore resets.
# ``whole_since`` is the newest record that covers all usages of the earlier ones, because it was
# stored before the first reset was recorded.
# `offset 0` makes the server verify the newest first: usually one content of each window.
_DOUBTFUL_WINDOWS = """
with expired as (
    select tenant, budget_id, window_token, min(captured_at) as oldest
    from budget_recovery.budget_record
    where tenant = any(%(tenants)s)
      and captured_at < %(cutoff)s
      and (window_token = any(%(tokens)s) or window_end > %(now)s)
    group by tenant, budget_id, window_token
)
select e.tenant, e.budget_id, e.window_token, c.captured_at as since,
       w.captured_at as whole_since, s.reset_at
from expired e
left join lateral (
    select r.captured_at
    from (
        select captured_at, content_id
        from budget_recovery.budget_record
        where tenant = e.tenant
          and budget_id = e.budget_id
          and window_token = e.window_token
          and covers_earlier
        order by captured_at desc
        offset 0
    ) r
    where budget_recovery.is_stored_intact(r.content_id)
    order by r.captured_at desc
    limit 1
) c on true
left join lateral (
    select max(s.at) as reset_at, min(s.recorded_at) as first_recorded_at
    from budget_recovery.budget_reset s
    where s.tenant = e.tenant
      and s.budget_id = e.budget_id
      and (s.window_token is null or s.window_token = e.window_token)
) s on true
left join lateral (
    select r.captured_at
    from (
        select r.captured_at, r.content_id
        from budget_recovery.budget_record r
        join budget_recovery.capture p on p.tenant = r.tenant and p.captured_at = r.captured_at
        where r.tenant = e.tenant
          and r.budget_id = e.budget_id
          and r.window_token = e.window_token
          and r.covers_earlier
          and p.stored_at < s.first_recorded_at
        order by r.captured_at desc
        offset 0
    ) r
    where budget_recovery.is_stored_intact(r.content_id)
    order by r.captured_at desc
    limit 1
) w on true
where c.captured_at is null or c.captured_at < %(cutoff)s or e.oldest <= s.reset_at
"""
# Of records with the same content, only the newest can be needed.
_CONTENTS_OF_WINDOW = """
select content_id, max(captured_at) as newest
from budget_recovery.budget_record
where tenant = %s and budget_id = %s and window_token = %s
  and (
      captured_at >= coalesce(%s::timestamptz, '-infinity')
      or captured_at between coalesce(%s::timestamptz, '-infinity') and %s
  )
group by content_id
order by newest desc
"""
_DELETE_RECORDS = """
with needed (tenant, budget_id, window_token, captured_at) as (
    select * from unnest(
        %(kept_tenants)s::text[], %(kept_budgets)s::text[], %(kept_windows)s::text[],
        %(kept_times)s::timestamptz[]
    )
), gone as (
    delete from budget_recovery.budget_record r
    where r.tenant = any(%(tenants)s)
      and r.captured_at < %(cutoff)s
      and not exists (
          select from needed n
          where n.tenant = r.tenant
            and n.budget_id = r.budget_id
            and n.window_token = r.window_token
            and n.captured_at = r.captured_at
      )
    returning r.content_id
)
select count(*), coalesce(array_agg(distinct content_id), '{}') from gone
"""
_DELETE_CAPTURES = """
delete from budget_recovery.capture c
where c.tenant = any(%(tenants)s)
  and c.captured_at < %(cutoff)s
  and not exists (
      select from budget_recovery.budget_record r
      where r.tenant = c.tenant and r.captured_at = c.captured_at
  )
"""
# Marks expired snapshots that have lost records.
_MARK_CAPTURES = """
update budget_recovery.capture c
set pruned_at = %(now)s
where c.tenant = any(%(tenants)s)
  and c.captured_at < %(cutoff)s
  and c.pruned_at is null
  and c.record_count > (
      select count(*) from budget_recovery.budget_record r
      where r.tenant = c.tenant and r.captured_at = c.captured_at
  )
"""
# Only contents of the deleted records can be unused now. Under the lock on the store's row, no
# commit can share one of them meanwhile.
_DELETE_CONTENTS = """
delete from budget_recovery.budget_content c
where c.content_id = any(%s)
  and not exists (
      select from budget_recovery.budget_record r where r.content_id = c.content_id
  )
"""
# For all tenants: some names are keys without a tenant, or tenants that no longer exist.
_DELETE_FAILURES = "delete from budget_recovery.capture_failure where failed_at < %(cutoff)s"
_DELETE_OUTCOMES = "delete from budget_recovery.tenant_outcome where at < %(cutoff)s"
RecordKey = tuple[str, str, str, datetime]
"""Tenant, budget, window token and time of a record."""


def find_needed(
    connection: Connection, tenants: Collection[str], *, cutoff: datetime, now: datetime
) -> list[RecordKey]:
    """Find the records older than ``cutoff`` that a recovery point needs."""
    scope = {
        "tenants": list(tenants),
        "tokens": list(tokens_at(now)),
        "cutoff": cutoff,
        "now": now,
    }
    needed: list[RecordKey] = []
    for *window, since, whole_since, reset_at in connection.execute(
        _DOUBTFUL_WINDOWS, scope
    ).fetchall():
        # An open stream locks the connection, and not all records may be read.
        with closing(_newest_first(connection, (*window, since, whole_since, reset_at))) as records:
            needed.extend(
                (*window, captured_at)
                for captured_at in needed_past_retention(records, cutoff, covered_since=since)
            )
    return needed


def _newest_first(connection: Connection, window: tuple[object, ...]) -> Generator[DatedUsages]:
    newest: dict[int, datetime] = dict(connection.execute(_CONTENTS_OF_WINDOW, window).fetchall())
    for content_id, usages in stream_verified(connection, list(newest)):
        yield DatedUsages(newest[content_id], usages)


def prune_snapshots(
    connection: Connection,
    tenants: Collection[str],
    *,
    needed: Collection[RecordKey],
    cutoff: datetime,
    now: datetime,
) -> PruneReport:
    """Remove records older than ``cutoff``, in a transaction that locks the store's row.

    ``needed`` is kept: the result of ``find_needed`` under the lease that is still held.
    """
    scope = {"tenants": list(tenants), "cutoff": cutoff, "now": now}
    records, content_ids = _delete_records(connection, scope, needed)
    captures = connection.execute(_DELETE_CAPTURES, scope).rowcount
    connection.execute(_MARK_CAPTURES, scope)
    connection.execute(_DELETE_OUTCOMES, scope)
    return PruneReport(
        records=records,
        captures=captures,
        contents=connection.execute(_DELETE_CONTENTS, (content_ids,)).rowcount,
        failures=connection.execute(_DELETE_FAILURES, scope).rowcount,
    )


def _delete_records(
    connection: Connection, scope: dict[str, Any], needed: Collection[RecordKey]
) -> tuple[int, list[int]]:
    tenants, budgets, windows, times = zip(*needed, strict=True) if needed else ((), (), (), ())
    kept = {
        "kept_tenants": list(tenants),
        "kept_budgets": list(budgets),
        "kept_windows": list(windows),
        "kept_times": list(times),
    }
    [(count, content_ids)] = connection.execute(_DELETE_RECORDS, scope | kept).fetchall()
    return count, content_ids
