"""Manual restores: what a person has chosen, applied as it was previewed.

The same plan as the preview's is made, from the same points, on what the store holds by now; every
difference from the preview is told. A restore after which the whole store has all that its recovery
point says ends the open incident.
"""

from dataclasses import dataclass, field

from budget_recovery_dagster.domain.incident import Incident, Outcome
from budget_recovery_dagster.domain.plan import RecoveryPlan
from budget_recovery_dagster.domain.plan_differences import Difference
from budget_recovery_dagster.domain.restore_choice import RestoreChoice
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.preview_ports import KeptPreview, Previews
from budget_recovery_dagster.services.attempt import uncovered
from budget_recovery_dagster.services.by_hand import HandTools, HandWork
from budget_recovery_dagster.services.chosen_points import Choosing, ChosenPoints, RestoreRequest
from budget_recovery_dagster.services.comparing import (
    Comparison,
    require_no_loss_since,
    require_same,
)
from budget_recovery_dagster.services.orders import Order
from budget_recovery_dagster.services.remainder import Remainder
from budget_recovery_dagster.services.tenant_restore import TenantRestored
from budget_recovery_dagster.services.tenants_restored import TenantRestores, undone_error


@dataclass(frozen=True, slots=True)
class Applied:
    """What a manual restore did.

    ``preview`` is the one that it was compared with, None: none of the last day was of just this
    choice; then nothing is known of ``differences``, as of those ``uncompared``. ``absent`` are the
    tenants of which the chosen snapshot holds nothing. ``failure`` is why not all is done; what was
    raised stays raised. ``incident`` is the one that was open, as it is now; ``remainder`` is what
    keeps it open, None where that was not looked at.
    """

    choice: RestoreChoice
    preview: KeptPreview | None
    differences: tuple[Difference, ...]
    uncompared: tuple[str, ...]
    absent: tuple[str, ...]
    tenants: tuple[TenantRestored, ...]
    failure: BudgetRecoveryError | None
    incident: Incident | None
    remainder: Remainder | None

    @property
    def raised(self) -> int:
        """How many counters were raised."""
        return sum(tenant.raised for tenant in self.tenants)

    @property
    def boards(self) -> int:
        """How many leaderboards were written."""
        return sum(tenant.boards for tenant in self.tenants)

    @property
    def has_ended_incident(self) -> bool:
        """Whether the store is HEALTHY by it."""
        return self.incident is not None and self.incident.ended is not None


@dataclass(frozen=True, slots=True)
class ManualRestoreService:
    """Restores by hand what was chosen."""

    tools: HandTools
    choosing: Choosing
    previews: Previews

    def apply(
        self, request: RestoreRequest, order: Order, preview_id: str | None = None
    ) -> Applied:
        """Raise the counters that are asked for, and end the incident if nothing is left.

        It is compared with the preview of this id, or else with the newest one of just this choice.
        What is raised here means that nothing was written but our marker; what goes wrong later is
        told in the result.

        Raises:
            ChoiceError: what is asked for does not exist, or no reason is given.
            LeaseHeldError: somebody else restores; the message says who and since when.
            PreviewOutdatedError: the store is another one than at the preview.
            PossibleLossError, StoreLostError: the store is lost.
            SettingsError: the database belongs to another bucket.
            StoreError, DatabaseError, IncidentMovedError: it could not begin.
        """
        order.require_reason()
        self.choosing.choose(request)
        with self.tools.at_work(order) as work:
            seen = work.await_ready()
            # Once more: retention may have taken the snapshot while the store was waited for.
            chosen = self.choosing.choose(request)
            comparison = Comparison.of(self.previews, chosen.choice, preview_id)
            if comparison.preview is None:
                order.tell("There is no preview of just this from the last day to compare with")
            else:
                require_same(comparison.preview, seen.identity)
            if refusal := work.take_ground():
                raise refusal
            if comparison.preview is not None:
                require_no_loss_since(comparison.preview, work.incident)
            return _Run(chosen, work, comparison).restore()


@dataclass(slots=True)
class _Run:
    """One manual restore, on its ground."""

    chosen: ChosenPoints
    work: HandWork
    comparison: Comparison
    absent: list[str] = field(default_factory=list)
    remainder: Remainder | None = None
    restores: TenantRestores = field(init=False)

    def __post_init__(self) -> None:
        self.restores = self.work.restores(self.chosen)

    def restore(self) -> Applied:
        failure: BudgetRecoveryError | None = None
        incident = self.work.incident
        try:
            for tenant in sorted({*self.chosen.tenants(), *self.comparison.tenants()}):
                self._restore(tenant)
            if self.restores.undone:
                failure = undone_error(self.restores.undone)
            incident = self._end(failure)
        except BudgetRecoveryError as error:
            # What was raised by then is to be told, whatever became of the rest.
            failure = error
        return Applied(
            choice=self.chosen.choice,
            preview=self.comparison.preview,
            differences=tuple(self.comparison.found),
            uncompared=tuple(self.comparison.uncompared),
            absent=tuple(self.absent),
            tenants=tuple(self.restores.tenants),
            failure=failure,
            incident=incident,
            remainder=self.remainder,
        )

    def _restore(self, tenant: str) -> None:
        previewed = self.comparison.previewed(tenant)
        restored = self.restores.restore(tenant)
        if restored is None:
            self.absent.append(tenant)
            self.comparison.add(tenant, previewed, RecoveryPlan(tenant, ()))
        else:
            self.comparison.add(tenant, previewed, restored.plan)

    def _end(self, failure: BudgetRecoveryError | None) -> Incident | None:
        """End the open incident if nothing of the whole store is left; return how it is now."""
        if self.work.incident is not None and failure is None:
            self.remainder = self.work.remainder()
        seen = self.work.require_same()
        incident, remainder = self.work.incident, self.remainder
        if incident is None or remainder is None or not remainder.is_nothing:
            return incident
        told = " ".join([*remainder.unknown(), uncovered(incident)])
        return self.work.close(Outcome.BY_HAND, told, seen, boards=self.restores.boards)
