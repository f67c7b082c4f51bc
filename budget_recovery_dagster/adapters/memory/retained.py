"""Stored snapshots as they are shown to people, in memory."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane, StoredSnapshot
from budget_recovery_dagster.adapters.memory.snapshots import MemorySnapshots
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.snapshots import BudgetRecord
from budget_recovery_dagster.ports import Uncaptured
from budget_recovery_dagster.table_ports import PointRecord, StoredRecord


class MemoryRetainedSnapshots:
    """The snapshots of a control plane that are within retention."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    def tenants_in(self, hour: Hour) -> tuple[str, ...]:
        """Return the tenants that have a retained snapshot of an hour, by name."""
        return tuple(sorted({stored.summary.tenant for stored in self._of_hour(hour)}))

    def hours_of(self, tenants: Collection[str]) -> Mapping[str, frozenset[Hour]]:
        """Return the hours of which these tenants have a retained snapshot; none: no key."""
        hours: defaultdict[str, set[Hour]] = defaultdict(set)
        for stored in self._whole():
            if stored.summary.tenant in tenants:
                hours[stored.summary.tenant].add(Hour.containing(stored.summary.captured_at))
        return {tenant: frozenset(each) for tenant, each in hours.items()}

    @contextmanager
    def records_of(self, tenant: str, hour: Hour) -> Iterator[Iterator[StoredRecord] | None]:
        """Give the records of a tenant's retained snapshots of an hour."""
        snapshots = [each for each in self._of_hour(hour) if each.summary.tenant == tenant]
        records = [
            _stored_record(stored, stored.records[of])
            for stored in sorted(snapshots, key=lambda each: each.summary.captured_at)
            for of in sorted(stored.records, key=_order)
        ]
        yield iter(records) if snapshots else None

    def _of_hour(self, hour: Hour) -> Iterator[StoredSnapshot]:
        for stored in self._whole():
            if Hour.containing(stored.summary.captured_at) == hour:
                yield stored

    def _whole(self) -> Iterator[StoredSnapshot]:
        for stored in self._plane.snapshots.values():
            if len(stored.records) == stored.summary.record_count:
                yield stored


class MemoryRecoveryPoints:
    """What a restore would bring back, from a control plane in memory."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane
        self._snapshots = MemorySnapshots(control_plane)

    def newest_snapshots(self) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest snapshot, of all that have one."""
        # A tenant's snapshots are in the order of their times.
        return dict(sorted(self._plane.snapshots))

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest record of a window that is current at ``now``."""
        newest = {}
        for (tenant, captured_at), stored in sorted(self._plane.snapshots.items(), key=_by_key):
            if any(of.window.is_current(now) for of in stored.records):
                newest[tenant] = captured_at
        return newest

    def failing(self) -> Mapping[str, datetime | None]:
        """Return the tenants whose last capture failed, with the time of their newest snapshot."""
        failed_at: dict[str, datetime] = {}
        for (_, kind, name), noted in self._plane.failures.items():
            if kind is Uncaptured.TENANT:
                failed_at[name] = max(noted.failed_at, failed_at.get(name, noted.failed_at))
        newest = {
            tenant: (captured_at, stored.stored_at)
            for (tenant, captured_at), stored in sorted(self._plane.snapshots.items(), key=_by_key)
        }
        return {
            tenant: newest[tenant][0] if tenant in newest else None
            for tenant in sorted(failed_at)
            if tenant not in newest or newest[tenant][1] < failed_at[tenant]
        }

    def windows_of(self, tenant: str, now: datetime) -> tuple[PointRecord, ...]:
        """Return the windows of a tenant that are current at ``now``, by budget and token."""
        point = self._snapshots.recovery_point(tenant, now)
        newest: dict[BudgetWindow, StoredRecord] = {}
        for (name, _), stored in sorted(self._plane.snapshots.items(), key=_by_key):
            for of, record in stored.records.items():
                if name == tenant and of.window.is_current(now):
                    newest[of] = _stored_record(stored, record)
        return tuple(
            PointRecord(newest[of], point.get(of, {})) for of in sorted(newest, key=_order)
        )


def _stored_record(stored: StoredSnapshot, record: BudgetRecord) -> StoredRecord:
    return StoredRecord(
        captured_at=stored.summary.captured_at,
        source=stored.summary.source,
        of=record.of,
        usages=record.usages,
        is_truncated=record.is_truncated,
        is_partial=stored.summary.is_partial,
        omitted_count=len(record.omitted),
    )


def _by_key(item: tuple[tuple[str, datetime], StoredSnapshot]) -> tuple[str, datetime]:
    return item[0]


def _order(of: BudgetWindow) -> tuple[str, str]:
    return of.budget, of.window.token
