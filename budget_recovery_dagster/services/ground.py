"""Taking ground: marking a store that can be restored as the one that is."""

from dataclasses import dataclass, replace

from budget_recovery_dagster.domain.detection import Sighting, judge_sighting
from budget_recovery_dagster.domain.identity import Baseline
from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.errors import (
    StoreNotReadyError,
    StorePermissionError,
    StoreWriteError,
)
from budget_recovery_dagster.restore_ports import RecoverableStore
from budget_recovery_dagster.services.attempt import RestoreTools
from budget_recovery_dagster.services.losses import check_of
from budget_recovery_dagster.services.marking import MarkerWriting, new_nonce
from budget_recovery_dagster.services.tenants_restored import Worker


@dataclass(frozen=True, slots=True)
class Ground:
    """The incident, standing on a store that is ready and marked.

    ``refusal`` is why the store did not take the marker: it takes no writes at all.
    """

    incident: Incident
    refusal: StoreWriteError | None = None


def require_led(seen: Sighting) -> None:
    """Refuse to stand on what may be shown by a leader that was cut off.

    Raises:
        StoreNotReadyError: it may be.
    """
    if not seen.is_led:
        raise StoreNotReadyError(
            "Whoever answered for the store may not be its leader any more.",
            "bring back so many servers that most of them hear each other.",
        )


@dataclass(frozen=True, slots=True)
class GroundTaking:
    """Lets a recovery stand on the store as it is now, which must be ready."""

    tools: RestoreTools
    worker: Worker
    deployment_id: str

    def take(self, store: RecoverableStore, incident: Incident) -> Ground:
        """Mark the store as the one to be restored.

        A store that was lost once more is joined to the incident. A marker that may not be written
        keeps nobody from restoring: less is noticed without it.

        Raises:
            StoreError: the store cannot be restored now.
            PossibleLossError: two looks at it disagree.
            IncidentMovedError: somebody else has moved the incident.
        """
        incident, seen = self._see(store, incident)
        ground = incident.ground or Baseline(seen.identity, version=1)
        ground = replace(ground, identity=seen.identity, intended=ground.intended or new_nonce())
        incident = self.tools.incidents.stand_on(ground, judged=incident)
        marking = MarkerWriting(store, self.deployment_id)
        try:
            ground = marking.renew(ground, seen, self.tools.clock.now())
        except StorePermissionError as error:
            self.worker.tell(f"A further loss may go unnoticed: {error}")
            return Ground(incident)
        except StoreWriteError as error:
            return Ground(incident, refusal=error)
        return Ground(self.tools.incidents.stand_on(ground, judged=incident))

    def _see(self, store: RecoverableStore, incident: Incident) -> tuple[Incident, Sighting]:
        def look() -> Sighting:
            return store.look(self.deployment_id)

        seen = look()
        require_led(seen)
        judgement = judge_sighting(incident.ground, seen, self.tools.clock.now())
        if not judgement.verdict.is_loss:
            return incident, seen
        joined = self.tools.losses.join(
            judgement, look, judged=incident, found_by=self.worker.holder
        )
        self.tools.checks.record(check_of(joined))
        self.worker.tell(f"The store was lost once more. {judgement.reason}")
        return joined, look()
