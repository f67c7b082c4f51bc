"""Which snapshots there are to restore from, in PostgreSQL."""

from datetime import UTC
from typing import Any

from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.snapshot_ports import ListedSnapshot

# The sums are of any number of bigints, so they come as numeric.
_ALL = """
select captured_at, source, count(*), sum(record_count), sum(entry_count), sum(omitted_count),
       sum(unreadable_count), sum(drop_count), count(*) filter (where is_partial),
       bool_or(pruned_at is not null)
from budget_recovery.capture
where %(tenant)s::text is null or tenant = %(tenant)s
group by captured_at, source
order by captured_at desc, source
"""

# From one budget to the next by the index, however many records each has.
_BUDGETS = """
with recursive found as (
    (select r.budget_id from budget_recovery.budget_record r
     where r.tenant = %(tenant)s
     order by r.budget_id
     limit 1)
    union all
    select (
        select r.budget_id from budget_recovery.budget_record r
        where r.tenant = %(tenant)s and r.budget_id > f.budget_id
        order by r.budget_id
        limit 1
    )
    from found f
    where f.budget_id is not null
)
select budget_id from found where budget_id is not null order by budget_id
"""


class PostgresSnapshotList:
    """The stored snapshots, summed up."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self, tenant: str | None) -> tuple[ListedSnapshot, ...]:
        """Return a tenant's snapshots, or of None all tenants' by their moments; newest first."""
        with self._database.reading() as connection:
            return tuple(_listed(row) for row in connection.execute(_ALL, {"tenant": tenant}))

    def budgets_of(self, tenant: str) -> tuple[str, ...]:
        """Return the budgets of a tenant that have a retained record, by name."""
        with self._database.reading() as connection:
            rows = connection.execute(_BUDGETS, {"tenant": tenant})
            return tuple(budget for (budget,) in rows)


def _listed(row: tuple[Any, ...]) -> ListedSnapshot:
    captured_at, source, *counts, is_pruned = row
    tenants, records, entries, omitted, unreadable, drops, partial = map(int, counts)
    return ListedSnapshot(
        captured_at=captured_at.astimezone(UTC),
        source=CaptureSource(source),
        tenants=tenants,
        records=records,
        entries=entries,
        omitted=omitted,
        unreadable=unreadable,
        drops=drops,
        partial=partial,
        is_pruned=is_pruned,
    )
