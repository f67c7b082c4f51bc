"""The standing of the store: its state and baseline, and the incident that is open in it.

Whoever moves something of it names what it was judged against: if that is not so any more, the move
is refused, and nothing changes.
"""

from dataclasses import dataclass

from budget_recovery_dagster.domain.identity import Baseline
from budget_recovery_dagster.domain.incident import Incident, RecoveryState
from budget_recovery_dagster.errors import IncidentMovedError

READ_AGAIN = "read the incident again, and go on from what it is now."


@dataclass(frozen=True, slots=True)
class Move:
    """What a standing becomes; the incident may be closed by it."""

    state: RecoveryState
    baseline: Baseline | None
    incident: Incident
    launches_before: int


@dataclass(frozen=True, slots=True)
class Standing:
    """The store with its baseline, and the incident that is open in it, if one is.

    ``launches_before`` is how many of its launches came before its newest attempt, its newest loss
    or its newest release: the backoff counts from there.
    """

    state: RecoveryState
    baseline: Baseline | None
    incident: Incident | None = None
    launches_before: int = 0

    def with_incident(self, incident: Incident) -> Move:
        """Move the incident alone."""
        return Move(self.state, self.baseline, incident, self.launches_before)

    def the_same(self, judged: Incident) -> Incident:
        """Return the open incident, whatever has become of it since it was judged.

        Raises:
            IncidentMovedError: it is closed.
        """
        if self.incident is None:
            raise _moved(judged, "it is closed")
        if self.incident.incident_id != judged.incident_id:
            raise _moved(judged, f"it is closed, and {self.incident.short_id} is open")
        return self.incident

    def on_the_same_ground(self, judged: Incident) -> Incident:
        """Return the open incident, unless it stands on another store than when it was judged.

        Raises:
            IncidentMovedError: its ground is not that of ``judged``, or it is closed.
        """
        incident = self.the_same(judged)
        if incident.ground != judged.ground:
            raise _moved(judged, "the store that it stands on is another now")
        return incident

    def require_recovering(self, judged: Incident) -> None:
        """Refuse what is only for a store that is being restored.

        Raises:
            IncidentMovedError: it is not.
        """
        if self.state is not RecoveryState.RECOVERING:
            raise _moved(judged, f"the store is {self.state}")


def _moved(judged: Incident, why: str) -> IncidentMovedError:
    return IncidentMovedError(
        f"Incident {judged.short_id} is not as it was judged: {why}.", READ_AGAIN
    )
