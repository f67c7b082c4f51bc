"""A capture service with everything around it in memory."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal

from budget_recovery_dagster.domain import (
    Baseline,
    BudgetWindow,
    CaptureSource,
    Hour,
    PruneReport,
    RetentionPolicy,
    Window,
)
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    StorePermissionError,
)
from budget_recovery_dagster.services import (
    Captured,
    CaptureService,
    Paused,
    TenantOutcome,
    TenantStored,
    Verified,
)
from tests.boards import board, board_key
from tests.fakes.control_plane import ControlPlane, ManualClock, MemoryLeases
from tests.fakes.incidents import MemoryIncidents, MemoryStoreChecks, MemoryStoreRegistry
from tests.fakes.snapshots import MemorySnapshots
from tests.fakes.usage_store import MemoryUsageStore

NOW = datetime(2026, 11, 25, 12, 5, tzinfo=UTC)


BORN = datetime(2026, 11, 1, tzinfo=UTC)


REBORN = datetime(2026, 11, 25, 12, 4, tzinfo=UTC)


LIFETIME = BudgetWindow("spend", Window.parse("lifetime"))


@dataclass
class House:
    """A capture service with everything around it in memory."""

    store: MemoryUsageStore = field(default_factory=lambda: MemoryUsageStore(BORN))
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW))
    outcomes: list[TenantOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plane = ControlPlane(self.clock)
        self.snapshots = MemorySnapshots(self.plane)
        self.registry = MemoryStoreRegistry(self.plane)
        self.leases = MemoryLeases(self.plane)
        self.incidents = MemoryIncidents(self.plane)
        self.checks = MemoryStoreChecks(self.plane)
        self.service = CaptureService(
            open_store=lambda: nullcontext(self.store),
            snapshots=self.snapshots,
            reports=self.snapshots,
            incidents=self.incidents,
            checks=self.checks,
            registry=self.registry,
            leases=self.leases,
            clock=self.clock,
            bucket="budget-usage",
            source=CaptureSource.COUNTERS,
            retention=RetentionPolicy(7),
        )

    @property
    def baseline(self) -> Baseline:
        baseline = self.registry.claim("budget-usage").baseline
        assert baseline is not None
        return baseline

    @property
    def hour(self) -> Hour:
        return Hour.containing(self.clock.now())

    def spend(self, tenant: str, usage: str, entity: str | None = None) -> None:
        self.store.put_usage(tenant, "spend", "lifetime", entity, usage)

    def rank(self, tenant: str, usages: Mapping[str | None, str]) -> None:
        self.store.put(board_key(tenant, "spend", "lifetime"), board(usages))

    def use(self, source: CaptureSource) -> None:
        """Capture from this source from now on."""
        self.service = replace(self.service, source=source)

    def run(self, run_id: str = "a run", hour: Hour | None = None) -> Captured | Verified | Paused:
        return self.service.capture(
            hour or self.hour, run_id=run_id, holder=run_id, on_outcome=self.outcomes.append
        )

    def capture(self, run_id: str = "a run") -> Captured:
        captured = self.run(run_id)
        assert isinstance(captured, Captured)
        return captured

    def known(self, tenant: str, entity: str | None = None) -> Decimal:
        return self.snapshots.recovery_point(tenant, self.clock.now())[LIFETIME][entity]

    def while_reading(self, tenant: str, happen: Callable[[], object]) -> None:
        """Let something happen when half of the tenant's keys have been read, once."""

        def hook(read: str) -> None:
            if read == tenant:
                self.store.in_mid_reading = None
                happen()

        self.store.in_mid_reading = hook


class RefusingSnapshots(MemorySnapshots):
    """A database in which every commit is refused."""

    def __init__(self, plane: ControlPlane, error: BudgetRecoveryError) -> None:
        super().__init__(plane)
        self._error = error

    def commit(self, *_: object, **__: object) -> Baseline:
        raise self._error


class UnprunableSnapshots(MemorySnapshots):
    """A database in which pruning is refused."""

    def __init__(self, plane: ControlPlane, error: BudgetRecoveryError) -> None:
        super().__init__(plane)
        self._error = error

    def prune(self, *_: object, **__: object) -> PruneReport:
        raise self._error


def names(outcomes: tuple[TenantOutcome, ...] | tuple[TenantStored, ...]) -> list[str]:
    return [outcome.tenant for outcome in outcomes]


DENIED = StorePermissionError("The user may not read tenant b.", "grant it.")
