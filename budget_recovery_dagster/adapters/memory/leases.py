"""Leases in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane
from budget_recovery_dagster.adapters.stored_forms import storable
from budget_recovery_dagster.domain.admission import (
    Holding,
    lease_lost,
    require_free,
    require_lease_of,
    require_ours,
)
from budget_recovery_dagster.ports import Lease

_DURATION = timedelta(seconds=30)


class MemoryLeases:
    """Leases whose holders are always alive: setting the clock forward ends none of them.

    ``lose`` ends one as if its holder could not renew it any more.
    """

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    @contextmanager
    def hold(self, name: str, holder: str) -> Iterator[Lease]:
        """Hold a lease until the context ends.

        Raises:
            LeaseHeldError: another holder has it.
        """
        lease = self._take(name, holder)
        try:
            yield lease
        finally:
            self._release(lease)

    def lose(self, name: str) -> None:
        """Let a held lease expire, so that its holder finds it lost and others may take it."""
        with self._plane.lock:
            del self._plane.holdings[name]

    def _take(self, name: str, holder: str) -> "_MemoryLease":
        with self._plane.lock:
            now = self._plane.clock.now()
            require_free(name, current_holding(self._plane, name), now)
            token = self._plane.tokens.get(name, 0) + 1
            self._plane.tokens[name] = token
            self._plane.holdings[name] = Holding(storable(holder), token, now, now + _DURATION)
            return _MemoryLease(self._plane, name, token)

    def _release(self, lease: "_MemoryLease") -> None:
        with self._plane.lock:
            holding = self._plane.holdings.get(lease.name)
            if holding is not None and holding.token == lease.token:
                del self._plane.holdings[lease.name]


@dataclass(frozen=True, slots=True)
class _MemoryLease:
    plane: ControlPlane
    name: str
    token: int

    def require_held(self) -> None:
        holding = self.plane.holdings.get(self.name)
        if holding is None or holding.token != self.token:
            raise lease_lost(self.name, "it could not be renewed in time")


def current_holding(plane: ControlPlane, name: str) -> Holding | None:
    """Return who holds a lease; a living holder has just renewed it."""
    holding = plane.holdings.get(name)
    if holding is None:
        return None
    return Holding(
        holding.holder, holding.token, holding.acquired_at, plane.clock.now() + _DURATION
    )


def require_lease(plane: ControlPlane, lease: Lease, *, name: str) -> None:
    """Refuse to work under a lease that is not in force.

    Raises:
        LeaseLostError: it is not held any more.
        ValueError: it is of another name.
    """
    require_lease_of(lease.name, name)
    lease.require_held()
    require_ours(lease.name, lease.token, current_holding(plane, lease.name), plane.clock.now())
