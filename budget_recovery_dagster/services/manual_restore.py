"""Manual restores: what a person has chosen, applied as it was previewed.

The same plan as the preview's is made, from the same points, on what the store holds by now; every
difference from the preview is told. A restore after which the whole store has all that its recovery
point says ends the open incident.
"""

from dataclasses import dataclass

from budget_recovery_dagster.domain.incident import Incident, Outcome
from budget_recovery_dagster.domain.plan_differences import Difference, differences
from budget_recovery_dagster.domain.restore_choice import RestoreChoice
from budget_recovery_dagster.errors import AttemptFailedError
from budget_recovery_dagster.preview_ports import KeptPreview, Previews
from budget_recovery_dagster.services.attempt import uncovered
from budget_recovery_dagster.services.by_hand import HandTools, HandWork, Order, Remainder
from budget_recovery_dagster.services.chosen_points import Choosing, ChosenPoints, RestoreRequest
from budget_recovery_dagster.services.preview import require_same
from budget_recovery_dagster.services.tenant_restore import TenantRestored
from budget_recovery_dagster.services.tenants_restored import undone_error


@dataclass(frozen=True, slots=True)
class Applied:
    """What a manual restore did.

    ``preview`` is the one that it was compared with, None: none of the last day was of just this
    choice; then nothing is known of ``differences``. ``failure`` is why some tenants are not done.
    ``incident`` is the one that was open, as it is now; ``remainder`` is what keeps it open, None
    where that was not looked at.
    """

    choice: RestoreChoice
    preview: KeptPreview | None
    differences: tuple[Difference, ...]
    tenants: tuple[TenantRestored, ...]
    failure: AttemptFailedError | None
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

    def apply(self, request: RestoreRequest, order: Order) -> Applied:
        """Raise the counters that are asked for, and end the incident if nothing is left.

        Raises:
            ChoiceError: what is asked for does not exist, or no reason is given.
            LeaseHeldError: somebody else restores; the message says who and since when.
            PreviewOutdatedError: the store is another one than at the preview.
            PossibleLossError, StoreLostError: the store is lost, or was lost meanwhile.
            SettingsError: the database belongs to another bucket.
            StoreError, DatabaseError, LeaseLostError: the work was cut short; what was raised
                stays raised.
        """
        order.require_reason()
        chosen = self.choosing.choose(request)
        with self.tools.at_work(order) as work:
            seen = work.await_ready()
            preview = self.previews.newest(chosen.choice)
            if preview is None:
                order.tell("There is no preview of just this from the last day to compare with")
            else:
                require_same(preview, seen.identity)
            if refusal := work.take_ground():
                raise refusal
            return self._restore(chosen, work, preview)

    def _restore(
        self, chosen: ChosenPoints, work: HandWork, preview: KeptPreview | None
    ) -> Applied:
        restores = work.restores(chosen)
        found: list[Difference] = []
        for tenant in chosen.tenants():
            restored = restores.restore(tenant)
            if preview is not None and restored is not None and restored.plan is not None:
                previewed = self.previews.entries_of(preview.preview_id, tenant)
                found += differences(tenant, previewed, restored.plan.entries)
        failure = undone_error(restores.undone) if restores.undone else None
        remainder = work.remainder() if work.incident is not None and failure is None else None
        seen = work.require_same()
        incident = work.incident
        if incident is not None and remainder is not None and remainder.is_nothing:
            incident = work.close(
                Outcome.BY_HAND, uncovered(incident), seen, boards=restores.boards
            )
        return Applied(
            choice=chosen.choice,
            preview=preview,
            differences=tuple(found),
            tenants=tuple(restores.tenants),
            failure=failure,
            incident=incident,
            remainder=remainder,
        )
