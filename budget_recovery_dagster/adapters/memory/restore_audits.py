"""What restores did, in memory."""

from budget_recovery_dagster.adapters.audit_trails import join_trails
from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane
from budget_recovery_dagster.adapters.stored_recovery import storable_trail
from budget_recovery_dagster.restore_ports import AuditTrail


class MemoryRestoreAudits:
    """Audit trails that are forgotten with their control plane."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    def record(self, trail: AuditTrail) -> None:
        """Keep what a restore did."""
        with self._plane.lock:
            self._plane.audits.append(storable_trail(trail))

    def of_incident(self, incident_id: str) -> tuple[AuditTrail, ...]:
        """Return the trails of an incident, oldest first; one of each run and time."""
        with self._plane.lock:
            return join_trails(
                trail for trail in self._plane.audits if trail.incident_id == incident_id
            )
