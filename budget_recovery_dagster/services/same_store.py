"""Whether the store is still the one that a restore began in."""

from dataclasses import dataclass

from budget_recovery_dagster.domain.detection import Sighting, accepted_marker, judge_sighting
from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    IncidentMovedError,
    StoreLostError,
)
from budget_recovery_dagster.ports import Clock
from budget_recovery_dagster.recovery_ports import StoreChecks
from budget_recovery_dagster.restore_ports import RecoverableStore
from budget_recovery_dagster.services.losses import Losses, check_of, look_or_gone


@dataclass(frozen=True, slots=True)
class SameStore:
    """Compares an opened store with the ground that the recovery of an incident stands on.

    ``next_step`` is what to do where it is another one.
    """

    store: RecoverableStore
    deployment_id: str
    losses: Losses
    checks: StoreChecks
    clock: Clock
    next_step: str

    def require(self, incident: Incident, *, found_by: str) -> Sighting:
        """See that the store is the one that was marked before the first reading.

        Raises:
            StoreLostError: it was lost once more; the incident says so.
            AttemptFailedError: that cannot be seen.
            PossibleLossError, StoreError: likewise.
        """
        ground = incident.ground
        seen = look_or_gone(self._look)
        judgement = judge_sighting(ground, seen, self.clock.now())
        if judgement.verdict.is_loss:
            lost = StoreLostError(
                f"The store was lost once more meanwhile. {judgement.reason}", self.next_step
            )
            try:
                joined = self.losses.join(judgement, self._look, judged=incident, found_by=found_by)
            except IncidentMovedError as error:
                # A check was quicker, and has kept the loss.
                raise lost from error
            self.checks.record(check_of(joined))
            raise lost
        if not judgement.verdict.is_good or (seen is not None and not seen.is_led):
            raise AttemptFailedError(
                f"The store could not be seen to be the same. {judgement.reason}",
                f"wait for the cluster to settle. {self.next_step}",
            )
        if ground is None or seen is None or accepted_marker(ground, seen) != ground.marker:
            raise AttemptFailedError(
                "Our marker is no longer in the store, so it may not be the one that was restored.",
                "see who deletes keys of the gateway's bucket that begin with __guard.",
            )
        return seen

    def _look(self) -> Sighting:
        return self.store.look(self.deployment_id)
