"""What the services that show stored snapshots to people need; as in ``ports``, with promises.

They read the control-plane database only, so that they work while the usage store is down.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.recovery_point import Usages
from budget_recovery_dagster.domain.snapshots import CaptureSource


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A stored record, with what is told of its whole snapshot: source and whether it is partial.

    ``omitted_count`` is how many counters of this budget and window could not be read.
    """

    captured_at: datetime
    source: CaptureSource
    of: BudgetWindow
    usages: Usages
    is_truncated: bool
    is_partial: bool
    omitted_count: int


@dataclass(frozen=True, slots=True)
class PointRecord:
    """A window of a recovery point: the newest record of it, and what a restore would use.

    ``usages`` may be higher than those of the newest record, and of more entities; they are empty
    where none could be read. What deliberate resets make ineligible is not in them, though the
    newest record may well hold it.
    """

    newest: StoredRecord
    usages: Usages


class RetainedSnapshots(Protocol):
    """The snapshots that are within retention, whole.

    One of which retention has removed records and kept those that a recovery point needs is none.
    """

    def tenants_in(self, hour: Hour) -> tuple[str, ...]:
        """Return the tenants that have a retained snapshot of an hour, by name."""
        ...

    def hours_of(self, tenants: Collection[str]) -> Mapping[str, frozenset[Hour]]:
        """Return the hours of which these tenants have a retained snapshot; none: no key."""
        ...

    def records_of(
        self, tenant: str, hour: Hour
    ) -> AbstractContextManager[Iterator[StoredRecord] | None]:
        """Give the records of a tenant's retained snapshots of an hour, read as they are used.

        They come by time, budget and window token. All are of one moment of the database. None
        means that no such snapshot is retained, or not any more.
        """
        ...


class RecoveryPoints(Protocol):
    """What a restore would bring back, and from which snapshots it would be."""

    def newest_snapshots(self) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest snapshot, of all that have one."""
        ...

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest record of a window that is current at ``now``.

        A tenant of which no window is current is not in it.
        """
        ...

    def failing(self) -> Mapping[str, datetime | None]:
        """Return the tenants whose last capture failed, with the time of their newest snapshot.

        None: there is no snapshot of the tenant.
        """
        ...

    def windows_of(self, tenant: str, now: datetime) -> tuple[PointRecord, ...]:
        """Return the windows of a tenant that are current at ``now``, by budget and token."""
        ...


@dataclass(frozen=True, slots=True)
class TableFile:
    """A table as it was written; ``path`` for people, ``size`` in bytes."""

    path: str
    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class RemovedTables:
    """Which tables were removed, and of which that failed, in a sentence each."""

    removed: int
    failures: tuple[str, ...]


class OpenedTables(Protocol):
    """The tables of tenants, while nobody else writes them."""

    def write(self, tenant: str, hour: Hour, records: Iterable[StoredRecord]) -> TableFile:
        """Write a tenant's table of an hour, in the order of ``records``; replace an earlier one.

        Either the whole table stands under its name at the end, or what stood there before. Equal
        records give an equal file.

        Raises:
            TablesError: it could not be written.
        """
        ...

    def keep_only(self, retained: Iterable[tuple[str, Collection[Hour]]]) -> RemovedTables:
        """Remove the tables of all but these hours of these tenants, and leftovers of dead runs.

        What was not written by ``write`` is left alone.
        """
        ...


class UsageTables(Protocol):
    """The place where the tables of tenants lie."""

    @property
    def place(self) -> str:
        """Where that is, for people."""
        ...

    def opened(self, owner: str) -> AbstractContextManager[OpenedTables]:
        """Have the tables for this process alone; wait for whoever has them.

        ``owner`` is the id of the installation, whose they are from then on.

        Raises:
            TablesError: the place cannot be used, or others have it for too long.
            ForeignTablesError: the tables are another installation's.
        """
        ...
