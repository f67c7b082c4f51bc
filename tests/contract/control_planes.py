"""One control plane for the contract tests, over the fakes or over PostgreSQL."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg

from budget_recovery_dagster.adapters.memory import control_plane as memory
from budget_recovery_dagster.adapters.memory.baselines import MemoryBaselines
from budget_recovery_dagster.adapters.memory.control_plane import ManualClock
from budget_recovery_dagster.adapters.memory.incidents import MemoryIncidents
from budget_recovery_dagster.adapters.memory.leases import MemoryLeases
from budget_recovery_dagster.adapters.memory.resets import MemoryResets
from budget_recovery_dagster.adapters.memory.restore_audits import MemoryRestoreAudits
from budget_recovery_dagster.adapters.memory.restore_points import MemoryRestorePoints
from budget_recovery_dagster.adapters.memory.retained import (
    MemoryRecoveryPoints,
    MemoryRetainedSnapshots,
)
from budget_recovery_dagster.adapters.memory.snapshot_list import MemorySnapshotList
from budget_recovery_dagster.adapters.memory.snapshots import MemorySnapshots
from budget_recovery_dagster.adapters.memory.store_checks import MemoryStoreChecks
from budget_recovery_dagster.adapters.memory.store_registry import MemoryStoreRegistry
from budget_recovery_dagster.adapters.postgres_baselines import PostgresBaselines
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.adapters.postgres_incidents import PostgresIncidents
from budget_recovery_dagster.adapters.postgres_leases import PostgresLeases
from budget_recovery_dagster.adapters.postgres_point_windows import PostgresRecoveryPoints
from budget_recovery_dagster.adapters.postgres_registry import PostgresStoreRegistry
from budget_recovery_dagster.adapters.postgres_resets import PostgresResets
from budget_recovery_dagster.adapters.postgres_restore_audits import PostgresRestoreAudits
from budget_recovery_dagster.adapters.postgres_restore_points import PostgresRestorePoints
from budget_recovery_dagster.adapters.postgres_retained import PostgresRetainedSnapshots
from budget_recovery_dagster.adapters.postgres_snapshot_list import PostgresSnapshotList
from budget_recovery_dagster.adapters.postgres_snapshots import PostgresSnapshots
from budget_recovery_dagster.adapters.postgres_store_checks import PostgresStoreChecks
from budget_recovery_dagster.audit_ports import (
    RestoreAudits,
)
from budget_recovery_dagster.domain.admission import CAPTURE_LEASE, RESTORE_LEASE
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    CounterReading,
    Entity,
    OmittedCounter,
    UnreadableKey,
    ValueShape,
)
from budget_recovery_dagster.domain.identity import Baseline, StoreIdentity
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.recovery_point import RecoveryPoint
from budget_recovery_dagster.domain.resets import EVERYONE, Everyone, Reset
from budget_recovery_dagster.domain.retention import RetentionPolicy
from budget_recovery_dagster.domain.snapshots import (
    CaptureSource,
    TenantReading,
    TenantSnapshot,
    take_snapshot,
)
from budget_recovery_dagster.domain.windows import Window
from budget_recovery_dagster.errors import LeaseLostError
from budget_recovery_dagster.ports import (
    CaptureReports,
    Lease,
    Leases,
    PruneReport,
    Snapshots,
    StoreRegistry,
)
from budget_recovery_dagster.recovery_ports import Baselines, Incidents, StoreChecks
from budget_recovery_dagster.reset_ports import Resets
from budget_recovery_dagster.restore_ports import (
    RestorePoints,
)
from budget_recovery_dagster.snapshot_ports import SnapshotList
from budget_recovery_dagster.table_ports import RecoveryPoints, RetainedSnapshots
from tests.waiting import wait_until

BUCKET = "budget-usage"
NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
"""A Wednesday in the middle of the day, the month and the quarter."""

BORN = datetime(2026, 11, 1, 8, 30, 0, 123456, tzinfo=UTC)

Counters = Mapping[tuple[str, str], Mapping[Any, str]]
"""Usages in plain digits by entity, by budget and window."""

WEEK = RetentionPolicy(days=7)


def of(budget: str, token: str) -> BudgetWindow:
    return BudgetWindow(budget, Window.parse(token))


def point_of(counters: Counters) -> RecoveryPoint:
    return {
        of(*budget_window): {entity: Decimal(usage) for entity, usage in usages.items()}
        for budget_window, usages in counters.items()
    }


def reading(
    tenant: str,
    counters: Counters,
    *,
    omitted: tuple[OmittedCounter, ...] = (),
    unreadable: tuple[UnreadableKey, ...] = (),
    is_partial: bool = False,
) -> TenantReading:
    return TenantReading(
        tenant=tenant,
        source=CaptureSource.COUNTERS,
        counters=tuple(
            CounterReading(budget_window, entity, usage, ValueShape.TEXT, expiry_seconds=86400)
            for budget_window, usages in point_of(counters).items()
            for entity, usage in usages.items()
        ),
        omitted=omitted,
        unreadable=unreadable,
        is_partial=is_partial,
    )


# Far too high usages, under the hash of what was captured.
_CORRUPT = """
update budget_recovery.budget_content c
set usages = array(select 1000000000 + usage from unnest(c.usages) as usage)
from budget_recovery.budget_record r
where r.content_id = c.content_id
  and r.tenant = %s and r.captured_at = %s and r.budget_id = %s and r.window_token = %s
"""


@dataclass
class ControlPlane:
    """The ports over one state, and what only a test may do to it."""

    clock: ManualClock
    registry: StoreRegistry
    snapshots: Snapshots
    reports: CaptureReports
    leases: Leases
    retained: RetainedSnapshots
    points: RecoveryPoints
    baselines: Baselines
    checks: StoreChecks
    incidents: Incidents
    restore_points: RestorePoints
    audits: RestoreAudits
    resets: Resets
    snapshot_list: SnapshotList
    corrupt: Callable[[str, datetime, BudgetWindow], None]
    set_state: Callable[[RecoveryState], None]
    lose_lease: Callable[[Lease], None]
    sequence: int = field(default=0)

    def __post_init__(self) -> None:
        self.registry.claim(BUCKET)

    @property
    def baseline(self) -> Baseline | None:
        return self.registry.claim(BUCKET).baseline

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        with self.leases.hold(CAPTURE_LEASE, "a test") as lease:
            yield lease

    @contextmanager
    def restore_lease(self) -> Iterator[Lease]:
        with self.leases.hold(RESTORE_LEASE, "a test") as lease:
            yield lease

    def take(self, read: TenantReading, *, at: datetime | None = None) -> TenantSnapshot:
        """Turn a reading into a snapshot as a capture does; the store has gone on by then."""
        moment = at or self.clock.now()
        self.sequence += 1
        return take_snapshot(
            read,
            moment,
            StoreIdentity(BORN, self.sequence),
            self.snapshots.recovery_point(read.tenant, moment),
        )

    def commit(self, snapshot: TenantSnapshot, *, run_id: str = "a run") -> Baseline:
        """Store a snapshot under all the right circumstances."""
        with self.lease() as lease:
            return self.snapshots.commit(
                snapshot,
                hour=Hour.containing(snapshot.captured_at),
                run_id=run_id,
                lease=lease,
                judged=self.baseline,
            )

    def capture(
        self, tenant: str, counters: Counters, *, at: datetime | None = None, run_id: str = "a run"
    ) -> TenantSnapshot:
        """Read, take and commit; the clock is put to the moment of the capture."""
        if at is not None:
            self.clock.set(at)
        snapshot = self.take(reading(tenant, counters))
        self.commit(snapshot, run_id=run_id)
        return snapshot

    def reset(
        self,
        at: datetime,
        who: Entity | Everyone = EVERYONE,
        *,
        budget: str = "team",
        window: str | None = None,
        tenant: str = "acme",
    ) -> Reset:
        """Record a reset now, or where that is later, at its own time."""
        now = max(at, self.clock.now())
        return self.resets.record(Reset(tenant, budget, window, who, at, "ann", "pardoned", now))

    def prune(self, *tenants: str, policy: RetentionPolicy = WEEK) -> PruneReport:
        with self.lease() as lease:
            return self.snapshots.prune(tenants, policy=policy, now=self.clock.now(), lease=lease)


def in_memory() -> ControlPlane:
    clock = ManualClock(NOON)
    state = memory.ControlPlane(clock)
    registry = MemoryStoreRegistry(state)
    leases = MemoryLeases(state)
    snapshots = MemorySnapshots(state)
    restore_points = MemoryRestorePoints(state)
    return ControlPlane(
        clock=clock,
        registry=registry,
        snapshots=snapshots,
        reports=snapshots,
        leases=leases,
        retained=MemoryRetainedSnapshots(state),
        points=MemoryRecoveryPoints(state),
        baselines=MemoryBaselines(state),
        checks=MemoryStoreChecks(state),
        incidents=MemoryIncidents(state),
        restore_points=restore_points,
        audits=MemoryRestoreAudits(state),
        resets=MemoryResets(state),
        snapshot_list=MemorySnapshotList(state),
        corrupt=restore_points.corrupt,
        set_state=registry.set_state,
        lose_lease=lambda lease: leases.lose(lease.name),
    )


@contextmanager
def on_postgres(
    url: str, *, lease_duration: timedelta = timedelta(seconds=30)
) -> Iterator[ControlPlane]:
    """Open a control plane on a database of its own, judged by a clock that is set by hand."""
    clock = ManualClock(NOON)

    def set_state(state: RecoveryState) -> None:
        with psycopg.connect(url) as connection:
            connection.execute("update budget_recovery.store set state = %s", (state.value,))

    def corrupt(tenant: str, captured_at: datetime, of: BudgetWindow) -> None:
        with psycopg.connect(url) as connection:
            connection.execute(_CORRUPT, (tenant, captured_at, of.budget, of.window.token))

    def lose_lease(lease: Lease) -> None:
        with psycopg.connect(url) as connection:
            connection.execute(
                "update budget_recovery.lease"
                " set holder = null, acquired_at = null, expires_at = null where name = %s",
                (lease.name,),
            )
        wait_until(lambda: not is_held(lease))

    with Database(url, clock=lambda _: clock.now()) as database:
        snapshots = PostgresSnapshots(database)
        yield ControlPlane(
            clock=clock,
            registry=PostgresStoreRegistry(database),
            snapshots=snapshots,
            reports=snapshots,
            leases=PostgresLeases(
                database, duration=lease_duration, renew_every=timedelta(seconds=0.05)
            ),
            retained=PostgresRetainedSnapshots(database),
            points=PostgresRecoveryPoints(database),
            baselines=PostgresBaselines(database),
            checks=PostgresStoreChecks(database),
            incidents=PostgresIncidents(database),
            restore_points=PostgresRestorePoints(database),
            audits=PostgresRestoreAudits(database),
            resets=PostgresResets(database),
            snapshot_list=PostgresSnapshotList(database),
            corrupt=corrupt,
            set_state=set_state,
            lose_lease=lose_lease,
        )


def is_held(lease: Lease) -> bool:
    try:
        lease.require_held()
    except LeaseLostError:
        return False
    return True
