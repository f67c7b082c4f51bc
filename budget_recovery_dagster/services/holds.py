"""Holding a restore, and letting it go on: what a person decides, whatever the runs do."""

from dataclasses import dataclass

from budget_recovery_dagster.domain.incident import Incident, RecoveryState
from budget_recovery_dagster.errors import IncidentMovedError
from budget_recovery_dagster.ports import Incidents


@dataclass(frozen=True, slots=True)
class HoldService:
    """Puts the open incident on hold, and releases it."""

    incidents: Incidents

    def hold(self, reason: str, by: str) -> Incident:
        """Keep the restore of the open incident from going on.

        Raises:
            IncidentMovedError: there is no incident that a restore is at.
        """
        return self.incidents.hold(reason, by, judged=self._recovering())

    def release(self, by: str) -> Incident:
        """Let the restore of the open incident go on, with all its attempts.

        Raises:
            IncidentMovedError: there is no incident that a restore is at.
        """
        return self.incidents.release(by, judged=self._recovering())

    def _recovering(self) -> Incident:
        recovery = self.incidents.recovery()
        if recovery.incident is None or recovery.state is not RecoveryState.RECOVERING:
            raise IncidentMovedError(
                f"The store is {recovery.state}: no restore is under way.",
                "see `budget-recovery status`.",
            )
        return recovery.incident
