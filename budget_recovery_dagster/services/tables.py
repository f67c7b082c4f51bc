"""Builds the tables of an hour from the stored snapshots."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import (
    DatabaseUnreachableError,
    HourNotCapturedError,
    describe_error,
)
from budget_recovery_dagster.ports import (
    Clock,
    OpenedTables,
    RemovedTables,
    RetainedSnapshots,
    Snapshots,
    StoreRegistry,
    TableFile,
    UsageTables,
)

# Of so many tenants at once the retained hours are asked for, so that all of them, at the longest
# retention, need not fit into memory.
_TENANTS_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class TableWritten:
    """A tenant's table is written."""

    tenant: str
    file: TableFile


@dataclass(frozen=True, slots=True)
class TableFailed:
    """A tenant's table is not written; an earlier one of the hour is as it was."""

    tenant: str
    reason: str
    hint: str
    error: Exception

    @classmethod
    def because(cls, tenant: str, error: Exception) -> "TableFailed":
        """Put an error into words."""
        return cls(tenant, *describe_error(error), error)


@dataclass(frozen=True, slots=True)
class TablesBuilt:
    """What became of every tenant's table of an hour, and of the tables past retention."""

    place: str
    written: tuple[TableWritten, ...]
    failed: tuple[TableFailed, ...]
    pruned: RemovedTables
    seconds: float

    @property
    def rows(self) -> int:
        """How many rows the written tables have."""
        return sum(each.file.rows for each in self.written)

    @property
    def size(self) -> int:
        """How many bytes the written tables have."""
        return sum(each.file.size for each in self.written)


@dataclass(frozen=True, slots=True)
class UsageTablesService:
    """Builds the tables of an hour from the database, and removes those of pruned snapshots."""

    snapshots: Snapshots
    retained: RetainedSnapshots
    registry: StoreRegistry
    tables: UsageTables
    clock: Clock
    bucket: str

    def build(self, hour: Hour, *, on_failure: Callable[[TableFailed], None]) -> TablesBuilt:
        """Write each tenant's table of an hour anew; no tenant's failure stops another.

        ``on_failure`` hears of each as soon as it has failed.

        Raises:
            HourNotCapturedError: no snapshot of the hour is retained; what is past retention has
                been removed all the same.
            TablesError: the place of the tables cannot be used.
            SettingsError: the database belongs to another bucket.
            DatabaseError: the database did not do what was asked.
        """
        begun = time.monotonic()
        owner = self.registry.claim(self.bucket).deployment_id
        with self.tables.opened(owner) as opened:
            written: list[TableWritten] = []
            failed: list[TableFailed] = []
            # Asked only now, when nobody else writes: so the last to write knows the most.
            tenants = self.retained.tenants_in(hour)
            for tenant in tenants:
                try:
                    table = self._write(opened, tenant, hour)
                except DatabaseUnreachableError:
                    raise
                except Exception as error:  # noqa: BLE001 - reported by name; no one stops another
                    failed.append(TableFailed.because(tenant, error))
                    on_failure(failed[-1])
                else:
                    written.extend([table] if table else [])
            pruned = opened.keep_only(self._hours())
        if not written and not failed:
            raise self._not_captured(hour)
        return TablesBuilt(
            place=self.tables.place,
            written=tuple(written),
            failed=tuple(failed),
            pruned=pruned,
            seconds=time.monotonic() - begun,
        )

    def _write(self, opened: OpenedTables, tenant: str, hour: Hour) -> TableWritten | None:
        """Write a tenant's table; None if its snapshots were pruned since they were listed."""
        with self.retained.records_of(tenant, hour) as records:
            if records is None:
                return None
            return TableWritten(tenant, opened.write(tenant, hour, records))

    def _hours(self) -> Iterator[tuple[str, frozenset[Hour]]]:
        tenants = sorted(self.snapshots.tenants())
        for first in range(0, len(tenants), _TENANTS_AT_ONCE):
            some = tenants[first : first + _TENANTS_AT_ONCE]
            hours = self.retained.hours_of(some)
            for tenant in some:
                yield tenant, hours.get(tenant, frozenset())

    def _not_captured(self, hour: Hour) -> HourNotCapturedError:
        return HourNotCapturedError(
            f"No table of the hour {hour} can be made: no snapshot of it is retained. None was "
            "taken, or it is past retention.",
            "choose an hour that is green in budget_usage_snapshots and within retention, or "
            f"capture the current one, {Hour.containing(self.clock.now()).key}.",
        )
