"""The real services behind the story of ``budget-recovery demo``."""

import time
from dataclasses import dataclass
from uuid import uuid4

from budget_recovery_dagster.domain.store import Verdict
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    HourClosedError,
    HourNotCapturedError,
)
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.sandbox.demo.protection import (
    LossFound,
    RecoveryEnded,
    SnapshotTaken,
)
from budget_recovery_dagster.sandbox.errors import DemoError
from budget_recovery_dagster.services.capture import Captured, Paused, Verified, capture_hour
from budget_recovery_dagster.services.restore.automatic import (
    GaveUp,
    NothingToDo,
    Recovered,
    RecoveryResult,
    StillWaiting,
    recover_store,
)
from budget_recovery_dagster.services.store_watch import Checked, check_store
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import store_opener

_HOLDER = "budget-recovery demo"
# In an installation it is the sensors that try again.
_TRIES = 3
_PAUSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Services:
    """Captures, checks and recoveries on an opened database, without Dagster."""

    plane: ControlPlane
    settings: Settings

    def take_snapshot(self) -> SnapshotTaken:
        """Capture every tenant into the present hour, or the next one if that closes meanwhile."""
        for _ in range(_TRIES):
            hour = Hour.containing(self.plane.clock.now())
            captured = self._capture(hour)
            if isinstance(captured, Captured) and not (captured.failed or captured.stopped_by):
                counters = sum(tenant.entries for tenant in captured.stored)
                return SnapshotTaken(captured.captured_at, len(captured.stored), counters)
            if not hour.is_past(self.plane.clock.now()):
                break
        raise DemoError(f"The snapshot is not stored: {_why_not(captured)}", "run it again.")

    def _capture(
        self, hour: Hour
    ) -> Captured | Verified | Paused | HourClosedError | HourNotCapturedError:
        try:
            return capture_hour(
                self.plane,
                store_opener(self.settings),
                hour,
                source=self.settings.capture_source,
                retention=self.settings.retention,
                run_id=str(uuid4()),
                holder=_HOLDER,
                on_outcome=lambda _: None,
            )
        except (HourClosedError, HourNotCapturedError) as error:
            return error

    def find_loss(self) -> LossFound:
        """Check the store, once more where a check cannot tell."""
        checked = self._check()
        for _ in range(_TRIES - 1):
            if checked.check.verdict is not Verdict.UNKNOWN:
                break
            time.sleep(_PAUSE_SECONDS)
            checked = self._check()
        incident = checked.recovery.incident
        if incident is None:
            raise DemoError(
                f"The check does not find that the store was lost. {checked.check.reason}",
                checked.hint or "run it again.",
            )
        return LossFound(incident.losses[0].reason, incident.short_id)

    def _check(self) -> Checked:
        return check_store(self.plane, store_opener(self.settings), checked_by=_HOLDER)

    def recover(self) -> RecoveryEnded:
        """Recover, once more where that has to wait or an attempt fails."""
        result = self._recover()
        for _ in range(_TRIES - 1):
            if not isinstance(result, StillWaiting | AttemptFailedError):
                break
            time.sleep(_PAUSE_SECONDS)
            result = self._recover()
        match result:
            case Recovered(incident=incident):
                return RecoveryEnded(
                    is_recovered=True, detail=incident.ended.detail if incident.ended else ""
                )
            case GaveUp(detail=detail):
                return RecoveryEnded(
                    is_recovered=False, detail=f"The restore is given up. {detail}"
                )
            case StillWaiting(reason=reason) | NothingToDo(reason=reason):
                return RecoveryEnded(is_recovered=False, detail=f"Nothing is restored. {reason}")
            case AttemptFailedError(message=message):
                return RecoveryEnded(is_recovered=False, detail=message)

    def _recover(self) -> RecoveryResult | AttemptFailedError:
        try:
            return recover_store(
                self.plane,
                store_opener(self.settings),
                run_id=str(uuid4()),
                holder=_HOLDER,
                convergence_timeout=self.settings.convergence_timeout,
                on_progress=lambda _: None,
            )
        except AttemptFailedError as error:
            return error


def _why_not(
    captured: Captured | Verified | Paused | HourClosedError | HourNotCapturedError,
) -> str:
    match captured:
        case Captured(stopped_by=None, failed=failed) if failed:
            return f"of tenant {failed[0].tenant!r}, {failed[0].reason}"
        case Captured(stopped_by=error):
            return str(error)
        case Paused(state=state):
            return f"the store is {state}."
        case Verified(hour=hour):
            return f"the hour {hour} closed."
        case HourClosedError() | HourNotCapturedError():
            return captured.message
