"""Recovery points with the snapshots that they come from, in PostgreSQL."""

from collections.abc import Mapping
from datetime import UTC, datetime

from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.adapters.postgres_recovery_points import stream_point
from budget_recovery_dagster.adapters.postgres_resets import read_resets
from budget_recovery_dagster.adapters.postgres_retained import RecordRow
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.recovery_point import Usages, max_merge
from budget_recovery_dagster.domain.resets import eligible
from budget_recovery_dagster.table_ports import PointRecord, StoredRecord

_NEWEST_SNAPSHOTS = """
select tenant, max(captured_at) from budget_recovery.capture group by tenant order by tenant
"""

# Backwards by time and only to the first: it is among the newest records, except of a tenant that
# has nothing current.
_NEWEST_POINTS = """
select t.tenant, newest.captured_at
from (select distinct tenant from budget_recovery.capture) t
cross join lateral (
    select r.captured_at
    from budget_recovery.budget_record r
    where r.tenant = t.tenant
      and (r.window_start is null or r.window_start <= %(now)s)
      and (r.window_end is null or r.window_end > %(now)s)
    order by r.captured_at desc
    limit 1
) newest
order by t.tenant
"""

# Whoever a run failed to capture after the last snapshot that there is of them.
_FAILING = """
select f.tenant, newest.captured_at
from (
    select name as tenant, max(failed_at) as failed_at
    from budget_recovery.capture_failure
    where kind = 'tenant'
    group by name
) f
left join lateral (
    select max(c.captured_at) as captured_at, max(c.stored_at) as stored_at
    from budget_recovery.capture c
    where c.tenant = f.tenant
) newest on true
where newest.stored_at is null or newest.stored_at < f.failed_at
order by f.tenant
"""

# Of every budget and window that is current: its newest record.
_NEWEST_RECORDS = """
with newest as (
    select budget_id, window_token, max(captured_at) as captured_at
    from budget_recovery.budget_record
    where tenant = %(tenant)s
      and (window_start is null or window_start <= %(now)s)
      and (window_end is null or window_end > %(now)s)
    group by budget_id, window_token
)
select captured_at, c.source, budget_id, window_token, r.is_truncated, c.is_partial,
       r.omitted_count, r.content_id
from newest
join budget_recovery.budget_record r using (budget_id, window_token, captured_at)
join budget_recovery.capture c using (tenant, captured_at)
where tenant = %(tenant)s
order by budget_id, window_token
"""


class PostgresRecoveryPoints:
    """What a restore would bring back, and where it comes from."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def newest_snapshots(self) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest snapshot, of all that have one."""
        with self._database.reading() as connection:
            rows = connection.execute(_NEWEST_SNAPSHOTS)
            return {tenant: captured_at.astimezone(UTC) for tenant, captured_at in rows}

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest record of a window that is current at ``now``."""
        with self._database.reading() as connection:
            rows = connection.execute(_NEWEST_POINTS, {"now": now})
            return {tenant: captured_at.astimezone(UTC) for tenant, captured_at in rows}

    def failing(self) -> Mapping[str, datetime | None]:
        """Return the tenants whose last capture failed, with the time of their newest snapshot."""
        with self._database.reading() as connection:
            return {
                tenant: captured_at and captured_at.astimezone(UTC)
                for tenant, captured_at in connection.execute(_FAILING)
            }

    def windows_of(self, tenant: str, now: datetime) -> tuple[PointRecord, ...]:
        """Return the windows of a tenant that are current at ``now``, by budget and token."""
        point: dict[BudgetWindow, Usages] = {}
        newest: dict[BudgetWindow, StoredRecord] = {}
        with self._database.reading() as connection:
            found = connection.execute(_NEWEST_RECORDS, {"tenant": tenant, "now": now}).fetchall()
            rows = {row.of: row for row in (RecordRow(*each) for each in found)}
            resets = read_resets(connection, tenant)
            for content_id, holders, usages in stream_point(connection, tenant, now):
                for of, captured_at in holders:
                    used = eligible(usages, captured_at, of, resets)
                    point[of] = max_merge(point.get(of, {}), used)
                    if content_id == rows[of].content_id:
                        newest[of] = rows[of].holding(usages)
        return tuple(PointRecord(newest[of], point[of]) for of in rows)
