"""A harness for preview, manual restore and resolve."""

from contextlib import nullcontext
from dataclasses import dataclass

from budget_recovery_dagster.domain import MAX_ATTEMPTS, RecoveryState, RetentionPolicy
from budget_recovery_dagster.services import Preview, preview_restore
from budget_recovery_dagster.services.restore import (
    Acceptance,
    Applied,
    Order,
    Resolved,
    RestoreRequest,
    resolve_incident,
    restore_manually,
)
from tests.fakes.usage_store import MemoryUsageStore
from tests.unit.recovery_harness import RecoveryHarness, captured

EVERYTHING = RestoreRequest()
OF_A = RestoreRequest(tenant="a")
OF_B = RestoreRequest(tenant="b")


@dataclass
class ManualHarness(RecoveryHarness):
    """A recovery harness that can also preview, restore manually and resolve."""

    def preview(self, request: RestoreRequest = EVERYTHING) -> Preview:
        return preview_restore(
            self.plane, self.opened, request, by="ann", on_progress=self.messages.append
        )

    def apply(
        self,
        request: RestoreRequest = EVERYTHING,
        reason: str = "looked right",
        by: str = "ann",
        preview_id: str | None = None,
    ) -> Applied:
        return self.carry_out(request, self.order(reason, by), preview_id)

    def carry_out(
        self, request: RestoreRequest, order: Order, preview_id: str | None = None
    ) -> Applied:
        return restore_manually(
            self.plane,
            self.opened,
            request,
            order,
            convergence_timeout=self.convergence_timeout,
            preview_id=preview_id,
        )

    def resolve(
        self,
        reason: str = "all is well",
        acceptance: Acceptance = Acceptance.KEEP_SNAPSHOTS,
        preview_id: str | None = None,
    ) -> Resolved:
        return self.end(self.order(reason), acceptance, preview_id)

    def end(
        self,
        order: Order,
        acceptance: Acceptance = Acceptance.KEEP_SNAPSHOTS,
        preview_id: str | None = None,
    ) -> Resolved:
        return resolve_incident(
            self.plane,
            self.opened,
            order,
            acceptance=acceptance,
            retention=RetentionPolicy(7),
            convergence_timeout=self.convergence_timeout,
            preview_id=preview_id,
        )

    def opened(self) -> nullcontext[MemoryUsageStore]:
        return nullcontext(self.store)

    def order(self, reason: str, by: str = "ann", *, unconverged: bool = False) -> Order:
        return Order(by, reason, "a run", self.messages.append, accept_unconverged=unconverged)

    def fail(self) -> None:
        """Lose the store, let all restore attempts die, and let the final check give it up."""
        self.wipe()
        for _ in range(MAX_ATTEMPTS):
            self.die_in_an_attempt()
        self.recover()


def closes_incident(applied: Applied) -> bool:
    """Whether a restore has ended the incident that was open."""
    return applied.incident is not None and applied.incident.ended is not None


def captured_manual_harness() -> ManualHarness:
    """Return a store of two tenants, captured and checked ten minutes ago."""
    return captured(ManualHarness())


def failed_manual_harness() -> ManualHarness:
    """Return the same store, lost and FAILED."""
    harness = captured_manual_harness()
    harness.fail()
    assert harness.state is RecoveryState.FAILED
    return harness
