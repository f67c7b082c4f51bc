"""Deliberate resets, in memory."""

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane
from budget_recovery_dagster.adapters.stored_forms import storable_reset
from budget_recovery_dagster.domain.resets import Reset


class MemoryResets:
    """The resets of a control plane."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    def record(self, reset: Reset) -> Reset:
        """Keep a reset, and return it as it is kept."""
        kept = storable_reset(reset)
        with self._plane.lock:
            self._plane.resets.append(kept)
        return kept

    def of_tenant(self, tenant: str) -> tuple[Reset, ...]:
        """Return the resets of a tenant, in the order of their recording."""
        return resets_of(self._plane, tenant)

    def recent(self, count: int) -> tuple[Reset, ...]:
        """Return the resets of any tenant that were recorded last, the newest first."""
        return tuple(reversed(self._plane.resets))[:count]


def resets_of(plane: ControlPlane, tenant: str) -> tuple[Reset, ...]:
    """Return the resets of a tenant, in the order of their recording."""
    return tuple(reset for reset in plane.resets if reset.tenant == tenant)
