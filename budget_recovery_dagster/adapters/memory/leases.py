"""Leases in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane
from budget_recovery_dagster.adapters.stored_forms import storable
from budget_recovery_dagster.domain.admission import (
    Holding,
    holder_at,
    lease_lost,
    require_free,
    require_lease_of,
    require_ours,
)
from budget_recovery_dagster.ports import Lease, LeaseStanding

_DURATION = timedelta(seconds=30)
_NEVER = datetime.max.replace(tzinfo=UTC)


class MemoryLeases:
    """Leases whose holders are always alive.

    Setting the clock forward ends only those that are held for a time ``at_most``; ``lose`` ends
    one as if its holder could not renew it any more.
    """

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    def look(self, name: str) -> LeaseStanding:
        """Return how a lease stands, without touching it."""
        with self._plane.lock:
            holder = holder_at(current_holding(self._plane, name), self._plane.clock.now())
            return LeaseStanding(self._plane.tokens.get(name, 0), holder)

    @contextmanager
    def hold(self, name: str, holder: str, *, at_most: timedelta | None = None) -> Iterator[Lease]:
        """Hold a lease until the context ends, or until ``at_most`` has passed.

        Raises:
            LeaseHeldError: another holder has it.
        """
        lease = self._take(name, holder, at_most)
        try:
            yield lease
        finally:
            self._release(lease)

    def lose(self, name: str) -> None:
        """Let a held lease expire, so that its holder finds it lost and others may take it."""
        with self._plane.lock:
            del self._plane.holdings[name]

    def _take(self, name: str, holder: str, at_most: timedelta | None) -> "_MemoryLease":
        with self._plane.lock:
            now = self._plane.clock.now()
            require_free(name, current_holding(self._plane, name), now)
            token = self._plane.tokens.get(name, 0) + 1
            self._plane.tokens[name] = token
            renewed_until = _NEVER if at_most is None else now + at_most
            self._plane.holdings[name] = Holding(storable(holder), token, now, renewed_until)
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
        holding = current_holding(self.plane, self.name)
        if (
            holding is None
            or holding.token != self.token
            or self.plane.clock.now() >= holding.expires_at
        ):
            raise lease_lost(self.name, "it could not be renewed in time")


def current_holding(plane: ControlPlane, name: str) -> Holding | None:
    """Return who holds a lease; a living holder has just renewed it, if it still may."""
    holding = plane.holdings.get(name)
    if holding is None:
        return None
    return replace(holding, expires_at=min(holding.expires_at, plane.clock.now() + _DURATION))


def require_lease(plane: ControlPlane, lease: Lease, *, name: str) -> None:
    """Refuse to work under a lease that is not in force.

    Raises:
        LeaseLostError: it is not held any more.
        ValueError: it is of another name.
    """
    require_lease_of(lease.name, name)
    lease.require_held()
    require_ours(lease.name, lease.token, current_holding(plane, lease.name), plane.clock.now())
