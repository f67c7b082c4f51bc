"""Whether an incident is on hold, as JSON; see ``json_values``."""

from budget_recovery_dagster.cli.json_values import dumped, moment_or_none
from budget_recovery_dagster.domain.incident import Incident


def held_json(incident: Incident) -> str:
    """Write who holds an incident, or held it last, since when and why."""
    held = incident.held
    return dumped(
        incident_id=incident.incident_id,
        is_held=incident.is_held,
        held=held and {"at": moment_or_none(held.at), "by": held.by, "reason": held.reason},
        released_at=moment_or_none(incident.released_at),
        error=None,
    )
