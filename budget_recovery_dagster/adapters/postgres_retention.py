"""Pruning in PostgreSQL: removing what is past retention and needed by no recovery point."""

from collections.abc import Collection
from datetime import datetime
from typing import Any

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.adapters.postgres_contents import read_contents
from budget_recovery_dagster.domain.retention import DatedUsages, needed_past_retention
from budget_recovery_dagster.ports import PruneReport

# Windows that have not closed and have records past retention, except those whose newest covering
# record is within it: that one alone makes all the expired ones needless, and it is the usual
# case. ``since`` is where reading must begin, as nothing before a covering record is needed; null:
# no record covers.
_DOUBTFUL_WINDOWS = """
with expired as (
    select distinct tenant, budget_id, window_token
    from budget_recovery.budget_record
    where tenant = any(%(tenants)s)
      and captured_at < %(cutoff)s
      and (window_end is null or window_end > %(now)s)
)
select e.tenant, e.budget_id, e.window_token, c.captured_at as since
from expired e
left join lateral (
    select r.captured_at
    from budget_recovery.budget_record r
    where r.tenant = e.tenant
      and r.budget_id = e.budget_id
      and r.window_token = e.window_token
      and r.covers_earlier
    order by r.captured_at desc
    limit 1
) c on true
where c.captured_at is null or c.captured_at < %(cutoff)s
"""

_RECORDS_OF_WINDOW = """
select captured_at, content_id
from budget_recovery.budget_record
where tenant = %s and budget_id = %s and window_token = %s
  and captured_at >= coalesce(%s::timestamptz, '-infinity')
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

# What is left of an expired snapshot is no longer the whole of it.
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

# Only what the deleted records referred to can have become useless. The lock on the store's row
# keeps a commit from sharing one of these at this moment.
_DELETE_CONTENTS = """
delete from budget_recovery.budget_content c
where c.content_id = any(%s)
  and not exists (
      select from budget_recovery.budget_record r where r.content_id = c.content_id
  )
"""

_DELETE_FAILURES = """
delete from budget_recovery.capture_failure
where tenant = any(%(tenants)s) and failed_at < %(cutoff)s
"""

_Key = tuple[str, str, str, datetime]


def prune_snapshots(
    connection: Connection, tenants: Collection[str], *, cutoff: datetime, now: datetime
) -> PruneReport:
    """Remove within a transaction, that holds the store's row, what is older than ``cutoff``."""
    scope = {"tenants": list(tenants), "cutoff": cutoff, "now": now}
    records, content_ids = _delete_records(connection, scope)
    captures = connection.execute(_DELETE_CAPTURES, scope).rowcount
    connection.execute(_MARK_CAPTURES, scope)
    return PruneReport(
        records=records,
        captures=captures,
        contents=connection.execute(_DELETE_CONTENTS, (content_ids,)).rowcount,
        failures=connection.execute(_DELETE_FAILURES, scope).rowcount,
    )


def _delete_records(connection: Connection, scope: dict[str, Any]) -> tuple[int, list[int]]:
    needed = _needed(connection, scope)
    tenants, budgets, windows, times = zip(*needed, strict=True) if needed else ((), (), (), ())
    kept = {
        "kept_tenants": list(tenants),
        "kept_budgets": list(budgets),
        "kept_windows": list(windows),
        "kept_times": list(times),
    }
    [(count, content_ids)] = connection.execute(_DELETE_RECORDS, scope | kept).fetchall()
    return count, content_ids


def _needed(connection: Connection, scope: dict[str, Any]) -> list[_Key]:
    """Find the expired records that some recovery point cannot do without, window by window."""
    cutoff = scope["cutoff"]
    needed: list[_Key] = []
    for *window, since in connection.execute(_DOUBTFUL_WINDOWS, scope).fetchall():
        records = connection.execute(_RECORDS_OF_WINDOW, (*window, since)).fetchall()
        contents = read_contents(connection, (content_id for _, content_id in records))
        times = needed_past_retention(
            expired=(DatedUsages(at, contents[each]) for at, each in records if at < cutoff),
            retained=(contents[each] for at, each in records if at >= cutoff),
        )
        needed.extend((*window, captured_at) for captured_at in times)
    return needed
