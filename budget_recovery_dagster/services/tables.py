"""Builds the tables of an hour from the stored snapshots."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from budget_recovery_dagster.domain.snapshots import RemovedTables, TableFile
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import (
    DatabaseUnreachableError,
    HourNotCapturedError,
    describe_error,
)
from budget_recovery_dagster.ports import ControlPlane, OpenedTables, UsageTables

# The retained hours are read for so many tenants at once: those of all tenants, at the longest
# retention, may not fit into memory.
_TENANTS_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class TableWritten:
    """A tenant's table is written."""

    tenant: str
    file: TableFile


@dataclass(frozen=True, slots=True)
class TableFailed:
    """A tenant's table is not written; an earlier one of the hour is unchanged."""

    tenant: str
    reason: str
    hint: str
    error: Exception

    @classmethod
    def because(cls, tenant: str, error: Exception) -> "TableFailed":
        """Return the failure that an error causes."""
        return cls(tenant, *describe_error(error), error)


@dataclass(frozen=True, slots=True)
class TablesBuilt:
    """The result of every tenant's table of an hour, and of removing tables past retention."""

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


def build_tables(
    plane: ControlPlane,
    tables: UsageTables,
    hour: Hour,
    *,
    on_failure: Callable[[TableFailed], None],
    on_progress: Callable[[str], None] = lambda _: None,
) -> TablesBuilt:
    """Rewrite each tenant's table of an hour; no tenant's failure stops another.

    Tables of pruned snapshots are removed. ``on_failure`` receives each failure as it happens,
    ``on_progress`` a sentence for each table, and while tables are removed.

    Raises:
        HourNotCapturedError: no snapshot of the hour is retained; tables past retention are
            removed all the same.
        TablesError: the directory of the tables cannot be used.
        SettingsError: the database belongs to another bucket.
        DatabaseError: the database failed.
    """
    started = time.monotonic()
    owner = plane.registry.claim().deployment_id
    with tables.opened(owner) as opened:
        written: list[TableWritten] = []
        failed: list[TableFailed] = []
        # Read only now, under the lock: so the last writer has the newest snapshots.
        tenants = plane.snapshots.tenants_in(hour)
        for number, tenant in enumerate(tenants, 1):
            on_progress(f"{hour}: table of tenant {tenant!r}, {number} of {len(tenants)}.")
            try:
                table = _write(plane, opened, tenant, hour)
            except DatabaseUnreachableError:
                raise
            except Exception as error:  # noqa: BLE001 - reported by name; no tenant stops another
                failed.append(TableFailed.because(tenant, error))
                on_failure(failed[-1])
            else:
                written.extend([table] if table else [])
        pruned = opened.keep_only(_retained_hours(plane, on_progress))
    if not written and not failed:
        raise HourNotCapturedError(
            f"No table of the hour {hour} can be written: no snapshot of it is retained. None was "
            "taken, or it is past retention.",
            "choose an hour that is green in budget_usage_snapshots and within retention, or "
            f"capture the current one, {Hour.containing(plane.clock.now()).key}.",
        )
    return TablesBuilt(
        place=tables.place,
        written=tuple(written),
        failed=tuple(failed),
        pruned=pruned,
        seconds=time.monotonic() - started,
    )


def _write(
    plane: ControlPlane, opened: OpenedTables, tenant: str, hour: Hour
) -> TableWritten | None:
    """Write a tenant's table; None if its snapshots were pruned since they were listed."""
    with plane.snapshots.records_of(tenant, hour) as records:
        if records is None:
            return None
        return TableWritten(tenant, opened.write(tenant, hour, records))


def _retained_hours(
    plane: ControlPlane, on_progress: Callable[[str], None]
) -> Iterator[tuple[str, frozenset[Hour]]]:
    tenants = sorted(plane.snapshots.tenants())
    for first in range(0, len(tenants), _TENANTS_AT_ONCE):
        some = tenants[first : first + _TENANTS_AT_ONCE]
        hours = plane.snapshots.hours_of(some)
        for number, tenant in enumerate(some, first + 1):
            on_progress(f"Tables past retention: tenant {number} of {len(tenants)}.")
            yield tenant, hours.get(tenant, frozenset())
