"""Whether a store can be restored now: it is there, has settled, and its clock can be trusted."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from budget_recovery_dagster.domain.convergence import (
    SETTLED_FOR,
    ClusterView,
    objection,
    why_not_converged,
)
from budget_recovery_dagster.domain.moments import RESTORE_CLOCK_SKEW
from budget_recovery_dagster.errors import StoreError, StoreNotReadyError
from budget_recovery_dagster.ports import Clock
from budget_recovery_dagster.restore_ports import RecoverableStore

# Three looks must span the twelve seconds for which a cluster is known to be blind.
_POLL_EVERY = timedelta(seconds=3)
_TO_SETTLE = SETTLED_FOR + _POLL_EVERY


class Ready(Protocol):
    """What is asked of a store before anything is written into it."""

    def await_ready(self, store: RecoverableStore) -> None:
        """Return once the store can be restored; see ``Readiness``."""
        ...


@dataclass(frozen=True, slots=True)
class Readiness:
    """Waits for at most ``timeout`` for a store that has something to be objected to.

    One that is well is given the time that it takes to prove it, too, however short the timeout.
    ``keep_going`` raises once waiting is of no use.
    """

    clock: Clock
    timeout: timedelta
    keep_going: Callable[[], None]
    tell: Callable[[str], None]

    def await_ready(self, store: RecoverableStore) -> None:
        """Return once the store can be restored.

        Raises:
            StoreNotReadyError: it has not converged in time, or its clock is not the database's.
            StoreError: it could not be reached, or is not there, at the end of that time.
        """
        self._await_convergence(store)
        require_one_time(store, self.clock)

    def _await_convergence(self, store: RecoverableStore) -> None:
        give_up_at = self.clock.now() + self.timeout
        views: list[ClusterView] = []
        said = ""
        while True:
            problem = self._problem(store, views)
            if problem is None:
                return
            is_well = bool(views) and objection(views[-1]) is None
            if self.clock.now() >= give_up_at + (_TO_SETTLE if is_well else timedelta(0)):
                raise problem
            if problem.message != said:
                said = problem.message
                self.tell(f"Waiting for the store: {said}")
            self.keep_going()
            self.clock.wait_until(self.clock.now() + _POLL_EVERY)

    def _problem(self, store: RecoverableStore, views: list[ClusterView]) -> StoreError | None:
        """Look once more, and say why the store has not converged; None if it has."""
        try:
            views.append(store.cluster_view(self.clock.now()))
        except StoreError as error:
            # What was seen before says nothing about a store that has been away since.
            views.clear()
            return error
        reason = why_not_converged(views)
        if reason is None:
            return None
        return StoreNotReadyError(
            f"The usage store has not converged: {reason}.",
            "bring back the servers that are missing: an automatic restore is tried again by "
            "itself, and one by hand can accept an unconverged store.",
        )


@dataclass(frozen=True, slots=True)
class Unconverged:
    """Takes a store as it is, because a person has said so; only its clock must be trusted."""

    clock: Clock
    tell: Callable[[str], None]

    def await_ready(self, store: RecoverableStore) -> None:
        """Return at once.

        Raises:
            StoreNotReadyError: its clock is not the database's.
            StoreError: it could not be reached, or is not there.
        """
        problem = objection(store.cluster_view(self.clock.now()))
        if problem is not None:
            self.tell(f"Going on although the store has not converged: {problem}")
        require_one_time(store, self.clock)


def require_one_time(store: RecoverableStore, clock: Clock) -> None:
    """Refuse a store whose clock is not the database's.

    Raises:
        StoreNotReadyError: it is not.
        StoreError: it could not be asked.
    """
    told, now = store.now(), clock.now()
    if told is not None and abs(told - now) > RESTORE_CLOCK_SKEW:
        raise StoreNotReadyError(
            f"The clocks disagree: the database's says {now:%Y-%m-%d %H:%M:%S}, the usage "
            f"store's {told:%Y-%m-%d %H:%M:%S} UTC. By which one a window is still open "
            "cannot be told.",
            "set the clocks of both servers by NTP.",
        )
