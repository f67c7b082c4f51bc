"""Holds: a person keeps the restore of an incident from going on, and lets it go on again.

What a person wants goes by the incident alone: neither a store that has just been marked nor a
further loss may get in its way.
"""

from dataclasses import replace
from datetime import datetime

from budget_recovery_dagster.domain.incident import Held, Incident
from budget_recovery_dagster.domain.standing import Move, Standing
from budget_recovery_dagster.errors import IncidentHeldError


def hold(standing: Standing, held: Held, *, judged: Incident) -> Move:
    """Put the incident on hold; one that is on hold already stays so as it is.

    Raises:
        IncidentMovedError: the incident is closed, or the store is not RECOVERING.
    """
    incident = _recovering(standing, judged)
    return standing.with_incident(
        replace(incident, held=incident.held if incident.is_held else held)
    )


def release(standing: Standing, *, judged: Incident, now: datetime) -> Move:
    """Let the restore go on, at once, with all attempts; an incident not on hold stays as it is.

    Raises:
        IncidentMovedError: as ``hold``.
    """
    incident = _recovering(standing, judged)
    if not incident.is_held:
        return standing.with_incident(incident)
    released = replace(
        incident,
        released_at=now,
        attempts=0,
        waiting=None,
        next_launch_at=None,
    )
    return Move(standing.state, standing.baseline, released, launches_before=incident.launches)


def require_not_held(incident: Incident) -> None:
    """Refuse to go on with a restore that a person has put on hold.

    Raises:
        IncidentHeldError: it is on hold; the message says who, since when and why.
    """
    if incident.on_hold is not None:
        raise IncidentHeldError(
            incident.on_hold,
            "let it go on with `budget-recovery release` once that reason is gone.",
        )


def _recovering(standing: Standing, judged: Incident) -> Incident:
    incident = standing.the_same(judged)
    standing.require_recovering(judged)
    return incident
