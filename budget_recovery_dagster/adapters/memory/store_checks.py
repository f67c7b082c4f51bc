"""The checks of the store, in memory."""

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane
from budget_recovery_dagster.adapters.stored_recovery import storable_check
from budget_recovery_dagster.domain.retention import CHECKS_KEPT_FOR
from budget_recovery_dagster.recovery_ports import Check


class MemoryStoreChecks:
    """Checks that are forgotten with their control plane."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    def record(self, check: Check) -> None:
        """Keep a check, and drop what is older than is kept, but not the newest good one."""
        with self._plane.lock:
            self._plane.checks.append(storable_check(check))
            cutoff = self._plane.clock.now() - CHECKS_KEPT_FOR
            newest_good = self.newest_good()
            self._plane.checks = [
                each
                for each in self._plane.checks
                if each.checked_at >= cutoff or each is newest_good
            ]

    def newest(self, count: int) -> tuple[Check, ...]:
        """Return the newest checks."""
        return tuple(self._newest_first()[:count])

    def newest_good(self) -> Check | None:
        """Return the newest check that found the store whole."""
        return next((each for each in self._newest_first() if each.is_good), None)

    def _newest_first(self) -> list[Check]:
        # Of those of one moment, the one that was written last comes first.
        return sorted(self._plane.checks, key=lambda each: each.checked_at)[::-1]
