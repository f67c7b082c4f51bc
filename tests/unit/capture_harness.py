"""A harness for captures, with an in-memory control plane and a fake store."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal

from budget_recovery_dagster.domain import (
    Baseline,
    BudgetWindow,
    CaptureSource,
    Hour,
    PruneReport,
    RecoveryState,
    RetentionPolicy,
    Window,
)
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    StorePermissionError,
)
from budget_recovery_dagster.ports import UsageStore
from budget_recovery_dagster.services import (
    Captured,
    Paused,
    TenantOutcome,
    TenantStored,
    Verified,
    capture_hour,
)
from tests.boards import board, board_key
from tests.fakes.control_plane import ManualClock, MemoryState
from tests.fakes.plane import MemoryControlPlane
from tests.fakes.snapshots import MemorySnapshots
from tests.fakes.usage_store import MemoryUsageStore

NOW = datetime(2026, 11, 25, 12, 5, tzinfo=UTC)


BORN = datetime(2026, 11, 1, tzinfo=UTC)


REBORN = datetime(2026, 11, 25, 12, 4, tzinfo=UTC)


LIFETIME = BudgetWindow("spend", Window.parse("lifetime"))


@dataclass
class Harness:
    """The capture service with an in-memory control plane and a fake store."""

    store: MemoryUsageStore = field(default_factory=lambda: MemoryUsageStore(BORN))
    plane: MemoryControlPlane = field(default_factory=lambda: MemoryControlPlane.at(NOW))
    source: CaptureSource = CaptureSource.COUNTERS
    outcomes: list[TenantOutcome] = field(default_factory=list)

    @property
    def clock(self) -> ManualClock:
        return self.plane.clock

    @property
    def state(self) -> RecoveryState:
        return self.plane.incidents.recovery().state

    @property
    def baseline(self) -> Baseline:
        baseline = self.plane.registry.claim().baseline
        assert baseline is not None
        return baseline

    @property
    def hour(self) -> Hour:
        return Hour.containing(self.clock.now())

    def spend(self, tenant: str, usage: str, entity: str | None = None) -> None:
        self.store.put_usage(tenant, "spend", "lifetime", entity, usage)

    def rank(self, tenant: str, usages: Mapping[str | None, str]) -> None:
        self.store.put(board_key(tenant, "spend", "lifetime"), board(usages))

    def run(
        self, run_id: str = "a run", hour: Hour | None = None, store: UsageStore | None = None
    ) -> Captured | Verified | Paused:
        return capture_hour(
            self.plane,
            lambda: nullcontext(store or self.store),
            hour or self.hour,
            source=self.source,
            retention=RetentionPolicy(7),
            run_id=run_id,
            holder=run_id,
            on_outcome=self.outcomes.append,
        )

    def capture(self, run_id: str = "a run", store: UsageStore | None = None) -> Captured:
        is_first = self.plane.registry.claim().baseline is None
        began_at = self.clock.now()
        captured = self.run(run_id, store=store)
        if is_first:
            # The two seconds until a second observation are taken back, so times stay round.
            self.clock.set(began_at)
        assert isinstance(captured, Captured)
        return captured

    def known(self, tenant: str, entity: str | None = None) -> Decimal:
        return self.plane.points.current_usages(tenant, self.clock.now())[LIFETIME][entity]

    def while_reading(self, tenant: str, action: Callable[[], object]) -> None:
        """Call something once, when half of the tenant's keys have been read."""

        def hook(read: str) -> None:
            if read == tenant:
                self.store.during_read = None
                action()

        self.store.during_read = hook


class RefusingSnapshots(MemorySnapshots):
    """A database in which every commit is refused."""

    def __init__(self, state: MemoryState, error: BudgetRecoveryError) -> None:
        super().__init__(state)
        self._error = error

    def commit(self, *_: object, **__: object) -> Baseline:
        raise self._error


class UnprunableSnapshots(MemorySnapshots):
    """A database in which pruning is refused."""

    def __init__(self, state: MemoryState, error: BudgetRecoveryError) -> None:
        super().__init__(state)
        self._error = error

    def prune(self, *_: object, **__: object) -> PruneReport:
        raise self._error


def names(outcomes: tuple[TenantOutcome, ...] | tuple[TenantStored, ...]) -> list[str]:
    return [outcome.tenant for outcome in outcomes]


DENIED = StorePermissionError("The user may not read tenant b.", "grant it.")
