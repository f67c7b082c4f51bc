"""Whether the store is the accepted one, while no incident is open."""

from dataclasses import dataclass
from functools import partial

from budget_recovery_dagster.domain.detection import Judgement, Sighting, judge_sighting
from budget_recovery_dagster.errors import (
    PossibleLossError,
    StoreLostError,
    StoreNotReadyError,
)
from budget_recovery_dagster.ports import Clock, Snapshots, StoreRegistry
from budget_recovery_dagster.recovery_ports import Incidents
from budget_recovery_dagster.restore_ports import RecoverableStore
from budget_recovery_dagster.services.losses import look_or_gone, stand_in

# A check renews the marker in between: then what was accepted is read again.
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class AcceptedStore:
    """Compares an opened store with the baseline; it opens no incident, which is for a check."""

    store: RecoverableStore
    registry: StoreRegistry
    snapshots: Snapshots
    incidents: Incidents
    clock: Clock
    bucket: str

    def require(self) -> Sighting:
        """See that the store is the accepted one.

        Raises:
            StoreLostError: an incident has been opened.
            PossibleLossError: it is another one, and no check has found that yet.
            StoreNotReadyError, StoreError: that cannot be seen.
        """
        judgement, seen = self.judge()
        incident = self.incidents.recovery().incident
        if incident is not None:
            raise StoreLostError(
                f"The store was lost: incident {incident.short_id} has been opened.",
                "see `budget-recovery status`, and preview once more.",
            )
        if judgement.verdict.is_loss:
            raise PossibleLossError(
                f"The store is not the one that was accepted. {judgement.reason}",
                "wait for the next check, which opens an incident if it finds the same; then "
                "restore.",
            )
        if seen is None or not seen.is_led or not judgement.verdict.is_good:
            raise StoreNotReadyError(
                f"The store could not be seen to be the accepted one. {judgement.reason}",
                "wait until the store answers for itself, then try again.",
            )
        return seen

    def judge(self) -> tuple[Judgement, Sighting | None]:
        """Compare a look at the store with what is accepted; the look is None where it is gone.

        Raises:
            StoreError: there is no look.
        """
        for _ in range(_ROUNDS):
            record = self.registry.claim(self.bucket)
            accepted = record.baseline or stand_in(self.snapshots)
            seen = look_or_gone(partial(self.store.look, record.deployment_id))
            judgement = judge_sighting(accepted, seen, self.clock.now())
            is_moved = self.registry.claim(self.bucket).baseline != record.baseline
            if judgement.verdict.is_good or not is_moved:
                break
        return judgement, seen
