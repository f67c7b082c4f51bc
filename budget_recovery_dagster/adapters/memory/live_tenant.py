"""A tenant of the usage store in memory, read once and ready to be raised."""

from collections.abc import Sequence
from typing import Protocol

from budget_recovery_dagster.adapters.board_changes import BoardChange, rebuild
from budget_recovery_dagster.adapters.counter_changes import counter_changes
from budget_recovery_dagster.adapters.live_keys import (
    NEVER_WRITTEN,
    TRIES,
    Change,
    LiveKey,
    LiveKeysRead,
    Outcome,
    Write,
    WritingTerms,
    changes_too_fast,
)
from budget_recovery_dagster.adapters.nats_codec import BOARDS, COUNTERS
from budget_recovery_dagster.adapters.nats_counters import read_counters
from budget_recovery_dagster.adapters.nats_sources import prefix_to_read
from budget_recovery_dagster.adapters.write_outcomes import Outcomes
from budget_recovery_dagster.domain.snapshots import TenantReading
from budget_recovery_dagster.errors import StoreWriteError
from budget_recovery_dagster.restore_ports import (
    BoardOrder,
    BoardResult,
    IsOpen,
    RaiseOrder,
    RaiseResult,
)


class Keys(Protocol):
    """The store, as far as a live tenant needs it."""

    def read_live_keys(self, prefix: str) -> LiveKeysRead:
        """Read all keys under a prefix, deleted ones too."""
        ...

    def live_key(self, key: str) -> LiveKey:
        """Read one key."""
        ...

    def refusal_of(self, write: Write) -> str | None:
        """Say why the store would never take this value; None where it would."""
        ...

    def write_over(self, key: str, revision: int, write: Write) -> bool:
        """Write a key over a revision; False where it has another."""
        ...

    def terms(self, is_open: IsOpen) -> WritingTerms:
        """Return under what terms is written."""
        ...


class MemoryLiveTenant:
    """A tenant's counters and leaderboards in memory."""

    def __init__(self, keys: Keys, tenant: str) -> None:
        self._keys = keys
        self._tenant = tenant
        self._counters = keys.read_live_keys(prefix_to_read(COUNTERS, tenant))
        self._reading = read_counters(tenant, self._counters.without_deleted())

    @property
    def reading(self) -> TenantReading:
        """The counters as they were read."""
        return self._reading

    def raise_counters(
        self, orders: Sequence[RaiseOrder], *, is_open: IsOpen
    ) -> tuple[RaiseResult, ...]:
        """Raise counters, and give the results in the order of the orders."""
        changes = counter_changes(self._tenant, orders, self._keys.terms(is_open))
        return tuple(self._write(changes, self._counters).all())

    def rebuild_boards(
        self, orders: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> tuple[BoardResult, ...]:
        """Bring leaderboards in line, and give the results in the order of the orders."""
        terms = self._keys.terms(is_open)
        boards = self._keys.read_live_keys(prefix_to_read(BOARDS, self._tenant))

        def write(changes: Sequence[BoardChange]) -> list[BoardResult | str]:
            return self._write(changes, boards).all_or_why()

        return rebuild(self._tenant, orders, terms, write)

    def _write(self, changes: Sequence[Change[Outcome]], known: LiveKeysRead) -> Outcomes[Outcome]:
        outcomes = Outcomes(changes)
        for number, change in enumerate(changes):
            if outcomes.is_given_up:
                break
            try:
                self._settle(outcomes, number, change, known)
            except StoreWriteError as error:
                outcomes.refuse(number, error)
        return outcomes

    def _settle(
        self,
        outcomes: Outcomes[Outcome],
        number: int,
        change: Change[Outcome],
        known: LiveKeysRead,
    ) -> None:
        live = known.keys.get(change.key, NEVER_WRITTEN)
        for _ in range(TRIES + 1):
            outcome, write = change.decide(live)
            if write is None:
                return outcomes.leave(number, outcome)
            if reason := self._keys.refusal_of(write):
                return outcomes.refuse_value(number, outcome, reason)
            if self._keys.write_over(change.key, live.revision, write):
                return outcomes.store(number, outcome)
            live = self._keys.live_key(change.key)
        raise changes_too_fast("in memory", change.key)
