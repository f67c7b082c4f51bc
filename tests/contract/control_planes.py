"""A control plane for the contract tests, on the fakes or on PostgreSQL."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import count
from typing import Any

import psycopg

from budget_recovery_dagster import ports
from budget_recovery_dagster.adapters.postgres import (
    Database,
    PostgresLeases,
    PostgresStoreRegistry,
)
from budget_recovery_dagster.domain import (
    CAPTURE_LEASE,
    CAPTURES_AFTER_GAP,
    EVERYONE,
    RESTORE_LEASE,
    Baseline,
    BudgetWindow,
    CaptureSource,
    CounterReading,
    Entity,
    Everyone,
    FallOutcome,
    Hour,
    OmittedCounter,
    PruneReport,
    RecoveryState,
    Reset,
    RetentionPolicy,
    StoreIdentity,
    TenantReading,
    TenantSnapshot,
    TenantUsages,
    UnreadableKey,
    ValueShape,
    Window,
    WindowPoint,
    take_snapshot,
)
from budget_recovery_dagster.errors import LeaseLostError
from budget_recovery_dagster.ports import Lease, StoreRegistry
from budget_recovery_dagster.wiring import control_plane_on
from tests.fakes.control_plane import ManualClock
from tests.fakes.incidents import MemoryStoreRegistry
from tests.fakes.plane import MemoryControlPlane
from tests.waiting import wait_until

BUCKET = "budget-usage"
NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
"""A Wednesday, in the middle of day, month and quarter."""

BORN = datetime(2026, 11, 1, 8, 30, 0, 123456, tzinfo=UTC)

Counters = Mapping[tuple[str, str], Mapping[Any, str]]
"""Usages as plain digits, by budget and window and then by entity."""

WEEK = RetentionPolicy(days=7)


def of(budget: str, token: str) -> BudgetWindow:
    return BudgetWindow(budget, Window.parse(token))


def point_of(counters: Counters) -> TenantUsages:
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
            CounterReading(budget_window, entity, usage, ValueShape.TEXT, expiry=86400)
            for budget_window, usages in point_of(counters).items()
            for entity, usage in usages.items()
        ),
        omitted=omitted,
        unreadable=unreadable,
        is_partial=is_partial,
    )


# Usages that are far too high, with the hash of the captured ones.
_CORRUPT = """
update budget_recovery.budget_content c
set usages = array(select 1000000000 + usage from unnest(c.usages) as usage)
from budget_recovery.budget_record r
where r.content_id = c.content_id
  and r.tenant = %s and r.captured_at = %s and r.budget_id = %s and r.window_token = %s
"""

_RESETS = """
select tenant, budget_id, window_token, of_everyone, entity, at, reset_by, reason, recorded_at
from budget_recovery.budget_reset
order by reset_id
"""


_OUTCOMES = """
select tenant, budget_id, window_token, ended_at, outcome
from budget_recovery.usage_fall
where ended_at is not null
order by tenant, budget_id, window_token, ended_at
"""


@dataclass(frozen=True)
class ControlPlane(ports.ControlPlane):
    """A control plane on one state, with operations that only tests need."""

    clock: ManualClock
    corrupt: Callable[[str, datetime, BudgetWindow], None]
    set_state: Callable[[RecoveryState], None]
    lose_lease: Callable[[Lease], None]
    registry_of: Callable[[str], StoreRegistry]
    recorded_resets: Callable[[], list[Reset]]
    fall_outcomes: Callable[[], list[tuple[str, str, datetime, FallOutcome]]]
    """Tenant, budget and window of the falls that ended, when and how, in this order."""
    sequences: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.registry.claim()

    @property
    def baseline(self) -> Baseline | None:
        return self.registry.claim().baseline

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        with self.leases.hold(CAPTURE_LEASE, "a test") as lease:
            yield lease

    @contextmanager
    def restore_lease(self) -> Iterator[Lease]:
        with self.leases.hold(RESTORE_LEASE, "a test") as lease:
            yield lease

    def take(self, read: TenantReading, *, at: datetime | None = None) -> TenantSnapshot:
        """Turn a reading into a snapshot as a capture does; the sequence of the store advances."""
        captured_at = at or self.clock.now()
        return take_snapshot(
            read,
            captured_at,
            StoreIdentity(BORN, next(self.sequences)),
            self.points.current_usages(read.tenant, captured_at),
        )

    def commit(self, snapshot: TenantSnapshot, *, run_id: str = "a run") -> Baseline:
        """Store a snapshot in its hour, under a lease and with the present baseline."""
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
        """Read, take and commit; set the clock to the time of the capture."""
        if at is not None:
            self.clock.set(at)
        snapshot = self.take(reading(tenant, counters))
        self.commit(snapshot, run_id=run_id)
        return snapshot

    def reset(
        self,
        at: datetime,
        who: Entity | frozenset[Entity] | Everyone = EVERYONE,
        *,
        budget: str = "team",
        window: str | None = None,
        tenant: str = "acme",
    ) -> Reset:
        """Record a reset now, or at its own time if that is later."""
        now = max(at, self.clock.now())
        return self.resets.record(Reset(tenant, budget, window, who, at, "ann", "pardoned", now))

    def current_windows(self, tenant: str) -> list[WindowPoint]:
        """Return the open windows of a tenant's recovery point."""
        now = self.clock.now()
        point = self.points.point_of(tenant, now)
        windows = point.windows if point else ()
        return [window for window in windows if window.of.window.is_current(now)]

    def end_gap(self) -> None:
        """Capture another tenant so often that a gap before it no longer delays pruning."""
        name = f"pulse {next(self.sequences)}"
        now = self.clock.now()
        for left in range(CAPTURES_AFTER_GAP, 0, -1):
            at = now - timedelta(microseconds=left)
            self.capture(name, {("pulse", "lifetime"): {None: "0.000001"}}, at=at)
        self.clock.set(now)

    def prune(self, *tenants: str, policy: RetentionPolicy = WEEK) -> PruneReport:
        """Prune at once, even after a gap."""
        report = self.prune_after_gap(*tenants, policy=policy)
        if not report.awaited_captures:
            return report
        self.end_gap()
        return self.prune_after_gap(*tenants, policy=policy)

    def prune_after_gap(self, *tenants: str, policy: RetentionPolicy = WEEK) -> PruneReport:
        """Prune as a capture does: not before enough captures have followed a gap."""
        with self.lease() as lease:
            return self.snapshots.prune(tenants, policy=policy, now=self.clock.now(), lease=lease)


def in_memory() -> ControlPlane:
    memory = MemoryControlPlane.at(NOON, BUCKET)
    return ControlPlane(
        **_parts(memory),
        corrupt=memory.points.corrupt,
        set_state=memory.registry.set_state,
        lose_lease=lambda lease: memory.leases.lose(lease.name),
        registry_of=lambda bucket: MemoryStoreRegistry(memory.state, bucket),
        recorded_resets=lambda: memory.state.resets,
        fall_outcomes=lambda: sorted(
            (each.fall.at.tenant, str(each.fall.at.of), each.ended_at, each.outcome)
            for each in memory.state.ended_falls
        ),
    )


def _parts(plane: ports.ControlPlane) -> dict[str, Any]:
    return {part.name: getattr(plane, part.name) for part in fields(ports.ControlPlane)}


@contextmanager
def on_postgres(
    url: str, *, lease_duration: timedelta = timedelta(seconds=30)
) -> Iterator[ControlPlane]:
    """Open a control plane on a PostgreSQL database, with a manual clock."""
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

    def recorded_resets() -> list[Reset]:
        with psycopg.connect(url) as connection:
            return [
                Reset(tenant, budget, window, EVERYONE if of_everyone else entity, *rest)
                for tenant, budget, window, of_everyone, entity, *rest in connection.execute(
                    _RESETS
                )
            ]

    def fall_outcomes() -> list[tuple[str, str, datetime, FallOutcome]]:
        with psycopg.connect(url) as connection:
            return [
                (tenant, str(of(budget, token)), ended_at, FallOutcome(outcome))
                for tenant, budget, token, ended_at, outcome in connection.execute(_OUTCOMES)
            ]

    with Database(url, clock=lambda _: clock.now()) as database:
        leases = PostgresLeases(
            database, duration=lease_duration, renew_every=timedelta(seconds=0.05)
        )
        parts = _parts(replace(control_plane_on(database, BUCKET), leases=leases))
        yield ControlPlane(
            **{**parts, "clock": clock},
            corrupt=corrupt,
            set_state=set_state,
            lose_lease=lose_lease,
            registry_of=lambda bucket: PostgresStoreRegistry(database, bucket),
            recorded_resets=recorded_resets,
            fall_outcomes=fall_outcomes,
        )


def is_held(lease: Lease) -> bool:
    try:
        lease.require_held()
    except LeaseLostError:
        return False
    return True
