"""Previews, manual restores and resolving, with everything around them in memory."""

from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta

from budget_recovery_dagster.domain import MAX_ATTEMPTS, RecoveryState
from budget_recovery_dagster.services import Preview, PreviewService
from budget_recovery_dagster.services.restore import (
    Applied,
    Choosing,
    HandTools,
    ManualRestoreService,
    Order,
    Resolved,
    ResolveService,
    RestoreRequest,
)
from tests.fakes.control_plane import MemoryBudgets, MemoryPreviews
from tests.fakes.snapshots import MemorySnapshotList
from tests.unit.recovery_house import RecoveryHouse, captured

EVERYTHING = RestoreRequest()
OF_A = RestoreRequest(tenant="a")
OF_B = RestoreRequest(tenant="b")


@dataclass
class HandHouse(RecoveryHouse):
    """A house in which people preview, restore and resolve."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budgets = MemoryBudgets()
        self.previews = MemoryPreviews(self.clock)
        self.choosing = Choosing(self.points, MemorySnapshotList(self.plane))
        self.previewing = PreviewService(
            open_store=lambda: nullcontext(self.store),
            registry=self.registry,
            snapshots=self.snapshots,
            incidents=self.incidents,
            choosing=self.choosing,
            definitions=self.budgets,
            previews=self.previews,
            clock=self.clock,
            bucket="budget-usage",
        )
        self.tools = HandTools(
            open_store=lambda: nullcontext(self.store),
            registry=self.registry,
            incidents=self.incidents,
            snapshots=self.snapshots,
            points=self.points,
            audits=self.audits,
            checks=self.checks,
            leases=self.leases,
            clock=self.clock,
            bucket="budget-usage",
            convergence_timeout=timedelta(seconds=30),
        )
        self.manual_restores = ManualRestoreService(self.tools, self.choosing, self.previews)

    def preview(self, request: RestoreRequest = EVERYTHING) -> Preview:
        return self.previewing.preview(request, by="ann", tell=self.said.append)

    def apply(
        self, request: RestoreRequest = EVERYTHING, reason: str = "looked right", by: str = "ann"
    ) -> Applied:
        return self.manual_restores.apply(request, self.order(reason, by))

    def resolve(self, reason: str = "all is well") -> Resolved:
        return ResolveService(self.tools).resolve(self.order(reason))

    def order(self, reason: str, by: str = "ann", *, unconverged: bool = False) -> Order:
        return Order(by, reason, "a run", self.said.append, accept_unconverged=unconverged)

    def fail(self) -> None:
        """Lose the store and let all attempts to restore it die; a last look gives it up."""
        self.wipe()
        for _ in range(MAX_ATTEMPTS):
            self.die_in_an_attempt()
        self.recover()


def captured_hand_house() -> HandHouse:
    """A store of two tenants that was captured and checked, ten minutes ago."""
    return captured(HandHouse())


def failed_hand_house() -> HandHouse:
    """The same, lost and given up."""
    house = captured_hand_house()
    house.fail()
    assert house.state is RecoveryState.FAILED
    return house
