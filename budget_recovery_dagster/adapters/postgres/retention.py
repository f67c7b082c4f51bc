"""Pruning in PostgreSQL: removes records past retention that no recovery point needs.

It also discards snapshots dated in the future, if an operator says so.

Pruning has two steps, because the first may read very much. ``find_needed`` finds the records past
retention that are still needed, in its own transaction and without a lock. ``prune_snapshots``
removes the others under the store's lock. No other record can become needed in between: captures
only add newer records, and a reset does not make an old one eligible.

What is past retention depends on the database's clock, which may be wrong. So nothing is removed
after a gap between captures until enough captures have followed (``count_awaited``): a clock that
was set forward by weeks makes such a gap. Records dated in the future count for nothing here, since
an operator may discard them.
"""

from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any

from budget_recovery_dagster.adapters.postgres.contents import stream_verified
from budget_recovery_dagster.adapters.postgres.database import Connection, storable
from budget_recovery_dagster.domain.recovery_point import latest_time
from budget_recovery_dagster.domain.snapshots import (
    CAPTURES_AFTER_GAP,
    MAX_CAPTURE_GAP,
    DatedUsages,
    PruneReport,
    awaited_captures,
    needed_past_retention,
)
from budget_recovery_dagster.domain.windows import tokens_at

# All tenants of a capture share its time.
_NEWEST_RUNS = """
select min(stored_at), max(stored_at)
from budget_recovery.capture
group by captured_at
order by max(commit_number) desc
limit %s
"""
# Of the captures ``p``, the newest with an intact covering record of the window ``e``.
# `offset 0` makes the server verify the newest first: usually one content of each window.
_NEWEST_COVERING = """cross join lateral (
        select content_id
        from budget_recovery.budget_record
        where tenant = e.tenant
          and budget_id = e.budget_id
          and window_token = e.window_token
          and captured_at = p.captured_at
          and covers_earlier
        offset 0
    ) r
    where budget_recovery.is_stored_intact(r.content_id)
    order by p.commit_number desc
    limit 1
"""
# Open windows (by their token; a stored end may be damaged, so a later one counts as well, to be
# safe) with records past retention, except those whose newest intact covering record is newer than
# all of them: in this usual case, no expired record is needed. A damaged record covers nothing, and
# one dated in the future neither. Records before ``since``, a covering record, are not needed;
# null: no record covers. But it covers only eligible usages: it may lack those of records up to
# ``excluded`` or ``reset_at``, that a reset of the window excludes. These stay needed, because a
# restore can ignore resets. ``whole_since`` is the newest record that covers all usages of the
# earlier ones, because it was stored before the first reset was recorded.
_DOUBTFUL_WINDOWS = f"""
with expired as (
    select r.tenant, r.budget_id, r.window_token, min(r.captured_at) as oldest_at,
           min(p.commit_number) as oldest, max(p.commit_number) as newest
    from budget_recovery.budget_record r
    join budget_recovery.capture p on p.tenant = r.tenant and p.captured_at = r.captured_at
    where r.tenant = any(%(tenants)s)
      and r.captured_at < %(cutoff)s
      and (r.window_token = any(%(tokens)s) or r.window_end > %(now)s)
    group by r.tenant, r.budget_id, r.window_token
)
select e.tenant, e.budget_id, e.window_token, c.commit_number as since,
       w.commit_number as whole_since, s.excluded, s.reset_at
from expired e
left join lateral (
    select p.commit_number
    from (
        select commit_number, captured_at
        from budget_recovery.capture
        where tenant = e.tenant and captured_at <= %(latest)s
        order by commit_number desc
        offset 0
    ) p
    {_NEWEST_COVERING}
) c on true
left join lateral (
    select max(s.last_excluded) as excluded, max(s.at) as reset_at,
           min(s.last_excluded) as first_excluded
    from budget_recovery.budget_reset s
    where s.tenant = e.tenant
      and s.budget_id = e.budget_id
      and (s.window_token is null or s.window_token = e.window_token)
) s on true
left join lateral (
    select p.commit_number
    from (
        select commit_number, captured_at
        from budget_recovery.capture
        where tenant = e.tenant and captured_at <= %(latest)s and commit_number <= s.first_excluded
        order by commit_number desc
        offset 0
    ) p
    {_NEWEST_COVERING}
) w on true
where c.commit_number is null
   or e.newest >= c.commit_number
   or e.oldest <= s.excluded
   or e.oldest_at <= s.reset_at
"""  # noqa: S608 - of constants
# Of records with the same content, only the newest can be needed.
_CONTENTS_OF_WINDOW = """
select r.content_id, p.commit_number, p.captured_at
from (
    select r.content_id, max(p.commit_number) as newest
    from budget_recovery.budget_record r
    join budget_recovery.capture p on p.tenant = r.tenant and p.captured_at = r.captured_at
    where r.tenant = %(tenant)s and r.budget_id = %(budget)s and r.window_token = %(window)s
      and r.captured_at <= %(latest)s
      and (
          p.commit_number >= coalesce(%(since)s::bigint, 0)
          or (
              p.commit_number >= coalesce(%(whole_since)s::bigint, 0)
              and (
                  p.commit_number <= %(excluded)s::bigint
                  or p.captured_at <= %(reset_at)s::timestamptz
              )
          )
      )
    group by r.content_id
) r
join budget_recovery.capture p on p.commit_number = r.newest
order by p.commit_number desc
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
_NOTE_DISCARDED = """
insert into budget_recovery.discarded_capture (
    commit_number, tenant, captured_at, stored_at, run_id, record_count, entry_count,
    discarded_at, discarded_by, reason
)
select commit_number, tenant, captured_at, stored_at, run_id, record_count, entry_count,
       %(now)s, %(by)s, %(reason)s
from budget_recovery.capture
where captured_at = any(%(times)s)
"""
_DISCARD_RECORDS = """
with gone as (
    delete from budget_recovery.budget_record
    where captured_at = any(%(times)s)
    returning content_id
)
select coalesce(array_agg(distinct content_id), '{}') from gone
"""
_DISCARD_CAPTURES = "delete from budget_recovery.capture where captured_at = any(%(times)s)"
_DELETE_OUTCOMES = "delete from budget_recovery.tenant_outcome where at < %(cutoff)s"

RecordKey = tuple[str, str, str, datetime]
"""Tenant, budget, window token and time of a record."""


def count_awaited(connection: Connection, now: datetime) -> int:
    """Return how many captures must follow a gap before anything is removed; 0: none."""
    runs = connection.execute(_NEWEST_RUNS, (CAPTURES_AFTER_GAP,)).fetchall()
    return awaited_captures(runs, now)


def find_needed(
    connection: Connection, tenants: Collection[str], *, cutoff: datetime, now: datetime
) -> list[RecordKey]:
    """Find the records older than ``cutoff`` that a recovery point needs.

    A window that ended a short while ago may still be open: a clock that is ahead by less than a
    gap between captures is not noticed.
    """
    surely_past = now - MAX_CAPTURE_GAP
    scope = {
        "tenants": list(tenants),
        "tokens": list(tokens_at(now) | tokens_at(surely_past)),
        "cutoff": cutoff,
        "latest": latest_time(now),
        "now": surely_past,
    }
    needed: list[RecordKey] = []
    for tenant, budget, window, since, *rest in connection.execute(
        _DOUBTFUL_WINDOWS, scope
    ).fetchall():
        whole_since, excluded, reset_at = rest
        of_window = {
            "tenant": tenant,
            "budget": budget,
            "window": window,
            "since": since,
            "whole_since": whole_since,
            "excluded": excluded,
            "reset_at": reset_at,
            "latest": scope["latest"],
        }
        # An open stream locks the connection, and not all records may be read.
        with closing(_newest_first(connection, of_window)) as records:
            needed.extend(
                (tenant, budget, window, captured_at)
                for captured_at in needed_past_retention(records, cutoff, covered_since=since)
            )
    return needed


def _newest_first(connection: Connection, window: dict[str, Any]) -> Generator[DatedUsages]:
    rows = connection.execute(_CONTENTS_OF_WINDOW, window).fetchall()
    newest: dict[int, tuple[int, datetime]] = {
        content_id: (number, captured_at) for content_id, number, captured_at in rows
    }
    for content_id, usages in stream_verified(connection, list(newest)):
        number, captured_at = newest[content_id]
        yield DatedUsages(number, captured_at, usages)


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


def discard_snapshots(
    connection: Connection, times: Sequence[datetime], *, by: str, reason: str, now: datetime
) -> None:
    """Discard the snapshots of all tenants at these times; the store's row must be locked."""
    scope = {"times": times, "now": now, "by": storable(by), "reason": storable(reason)}
    connection.execute(_NOTE_DISCARDED, scope)
    [(content_ids,)] = connection.execute(_DISCARD_RECORDS, scope).fetchall()
    connection.execute(_DISCARD_CAPTURES, scope)
    connection.execute(_DELETE_CONTENTS, (content_ids,))
