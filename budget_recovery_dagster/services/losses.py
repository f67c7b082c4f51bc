"""Believing a loss: two looks that agree, and then an incident, whoever it was that looked first.

The ten-minute check and every capture compare the store with what was accepted. Both come here when
it differs, so that the same loss is one incident.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from budget_recovery_dagster.domain.detection import (
    AGREEING_AFTER,
    Judgement,
    Sighting,
    judge_sighting,
)
from budget_recovery_dagster.domain.identity import Baseline
from budget_recovery_dagster.domain.incident import Incident, Loss
from budget_recovery_dagster.errors import PossibleLossError, StoreMissingError
from budget_recovery_dagster.ports import Clock, Snapshots
from budget_recovery_dagster.recovery_ports import Check, Incidents

Look = Callable[[], Sighting]
"""Looks at the store; raises StoreMissingError where the cluster says that there is none."""


def look_or_gone(look: Look) -> Sighting | None:
    """Look at the store; None where the cluster says that it does not exist."""
    try:
        return look()
    except StoreMissingError:
        return None


def stand_in(snapshots: Snapshots) -> Baseline | None:
    """Return what was accepted where its row is lost: while snapshots exist, no store is new."""
    newest = snapshots.newest_identity()
    return None if newest is None else Baseline(newest, version=0)


def ground_of(seen: Sighting | None) -> Baseline | None:
    """Return what a recovery stands on that begins with this look: no marker is known in it."""
    return None if seen is None else Baseline(seen.identity, version=1)


@dataclass(frozen=True, slots=True)
class Losses:
    """Confirms losses and keeps them as incidents."""

    incidents: Incidents
    clock: Clock

    def open(
        self,
        judgement: Judgement,
        look: Look,
        *,
        accepted: Baseline | None,
        judged: Baseline | None,
        found_by: str,
    ) -> Incident:
        """Confirm a loss against ``accepted`` by a second look, and open an incident for it.

        ``judged`` is the baseline as it is stored; ``accepted`` may stand in for one that is not.

        Raises:
            PossibleLossError: the second look does not find the same.
            BaselineMovedError: the baseline has moved; judge again.
            IncidentMovedError: an incident is open already.
            StoreError: there is no second look.
        """
        seen, found_at = self._look_again(judgement, look, accepted)
        loss = _loss(judgement, accepted, seen, found_by, found_at)
        return self.incidents.open(loss, ground=ground_of(seen), judged=judged)

    def join(
        self, judgement: Judgement, look: Look, *, judged: Incident, found_by: str
    ) -> Incident:
        """Confirm a further loss against an incident's ground, and add it to the incident.

        Raises:
            PossibleLossError, StoreError: as ``open``.
            IncidentMovedError: the incident has moved; judge again.
        """
        seen, found_at = self._look_again(judgement, look, judged.ground)
        loss = _loss(judgement, judged.ground, seen, found_by, found_at)
        return self.incidents.join(loss, ground=ground_of(seen), judged=judged)

    def _look_again(
        self, judgement: Judgement, look: Look, accepted: Baseline | None
    ) -> tuple[Sighting | None, datetime]:
        self.clock.wait_until(self.clock.now() + AGREEING_AFTER)
        seen = look_or_gone(look)
        now = self.clock.now()
        again = judge_sighting(accepted, seen, now)
        if again.verdict is not judgement.verdict:
            raise PossibleLossError(
                f"Two looks at the store disagree: {judgement.reason} Then: {again.reason}",
                "wait for the next check, which looks again.",
            )
        return seen, now


def check_of(incident: Incident) -> Check:
    """Return the newest loss of an incident as a check that found it."""
    loss = incident.losses[-1]
    return Check(
        checked_at=loss.found_at,
        checked_by=loss.found_by,
        verdict=loss.verdict,
        reason=loss.reason,
        identity=loss.after,
        incident_id=incident.incident_id,
    )


def _loss(
    judgement: Judgement,
    accepted: Baseline | None,
    seen: Sighting | None,
    found_by: str,
    found_at: datetime,
) -> Loss:
    if accepted is None:
        raise ValueError("nothing can be lost that was never accepted")
    return Loss(
        found_at=found_at,
        found_by=found_by,
        verdict=judgement.verdict,
        reason=judgement.reason,
        before=accepted.identity,
        after=None if seen is None else seen.identity,
    )
