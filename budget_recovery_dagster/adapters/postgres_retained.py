"""Retained snapshots in PostgreSQL, as the tables of tenants are made of them."""

from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import NamedTuple

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.adapters.postgres_contents import stream_contents
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.recovery_point import Usages
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.domain.windows import Window
from budget_recovery_dagster.table_ports import StoredRecord

_TENANTS_IN = """
select distinct tenant
from budget_recovery.capture
where captured_at >= %s and captured_at < %s and pruned_at is null
order by tenant
"""

# Every session's time zone is UTC.
_HOURS_OF = """
select distinct tenant, date_trunc('hour', captured_at)
from budget_recovery.capture
where tenant = any(%s) and pruned_at is null
"""

# A snapshot may well have no records: of a tenant whose keys were all unreadable.
_IS_RETAINED = """
select
from budget_recovery.capture
where tenant = %(tenant)s and captured_at >= %(start)s and captured_at < %(end)s
  and pruned_at is null
limit 1
"""

# Narrow rows only; the wide contents follow by id, one by one.
_RECORDS = """
select r.captured_at, c.source, r.budget_id, r.window_token, r.is_truncated, c.is_partial,
       r.omitted_count, r.content_id
from budget_recovery.capture c
join budget_recovery.budget_record r using (tenant, captured_at)
where c.tenant = %(tenant)s
  and c.captured_at >= %(start)s and c.captured_at < %(end)s
  and c.pruned_at is null
order by r.captured_at, r.budget_id, r.window_token
"""


class RecordRow(NamedTuple):
    """A record as it is stored, without its usages."""

    captured_at: datetime
    source: str
    budget: str
    window: str
    is_truncated: bool
    is_partial: bool
    omitted_count: int
    content_id: int

    @property
    def of(self) -> BudgetWindow:
        """What the record is about."""
        return BudgetWindow(self.budget, Window.parse(self.window))

    def holding(self, usages: Usages) -> StoredRecord:
        """Return the record with usages."""
        return StoredRecord(
            captured_at=self.captured_at.astimezone(UTC),
            source=CaptureSource(self.source),
            of=self.of,
            usages=usages,
            is_truncated=self.is_truncated,
            is_partial=self.is_partial,
            omitted_count=self.omitted_count,
        )


class PostgresRetainedSnapshots:
    """The snapshots that are within retention."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def tenants_in(self, hour: Hour) -> tuple[str, ...]:
        """Return the tenants that have a retained snapshot of an hour, by name."""
        with self._database.reading() as connection:
            rows = connection.execute(_TENANTS_IN, (hour.start, hour.end))
            return tuple(tenant for (tenant,) in rows)

    def hours_of(self, tenants: Collection[str]) -> Mapping[str, frozenset[Hour]]:
        """Return the hours of which these tenants have a retained snapshot; none: no key."""
        hours: defaultdict[str, set[Hour]] = defaultdict(set)
        with self._database.reading() as connection:
            for tenant, start in connection.execute(_HOURS_OF, (list(tenants),)):
                hours[tenant].add(Hour(start))
        return {tenant: frozenset(each) for tenant, each in hours.items()}

    @contextmanager
    def records_of(self, tenant: str, hour: Hour) -> Iterator[Iterator[StoredRecord] | None]:
        """Give the records of a tenant's retained snapshots of an hour, read as they are used."""
        scope = {"tenant": tenant, "start": hour.start, "end": hour.end}
        with self._database.reading() as connection:
            if connection.execute(_IS_RETAINED, scope).fetchone() is None:
                yield None
                return
            rows = [RecordRow(*row) for row in connection.execute(_RECORDS, scope)]
            # Closed before the transaction, also where a reader gives up in the middle.
            with closing(_records(connection, rows)) as records:
                yield records


def _records(connection: Connection, rows: list[RecordRow]) -> Generator[StoredRecord]:
    contents = stream_contents(connection, [row.content_id for row in rows])
    for row, (_, usages) in zip(rows, contents, strict=True):
        yield row.holding(usages)
