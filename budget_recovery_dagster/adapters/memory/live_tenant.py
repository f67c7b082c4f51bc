"""A tenant of the usage store in memory, read once and ready to be raised."""

from collections.abc import Sequence
from typing import Protocol

from budget_recovery_dagster.adapters.board_changes import board_changes
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
from budget_recovery_dagster.domain.snapshots import TenantReading
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
        return tuple(self._settle(change, self._counters) for change in changes)

    def rebuild_boards(
        self, orders: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> tuple[BoardResult, ...]:
        """Bring leaderboards in line, and give the results in the order of the orders."""
        changes = board_changes(self._tenant, orders, self._keys.terms(is_open))
        boards = self._keys.read_live_keys(prefix_to_read(BOARDS, self._tenant))
        return tuple(self._settle(change, boards) for change in changes)

    def _settle(self, change: Change[Outcome], known: LiveKeysRead) -> Outcome:
        live = known.keys.get(change.key, NEVER_WRITTEN)
        for _ in range(TRIES + 1):
            outcome, write = change.decide(live)
            if write is None or self._keys.write_over(change.key, live.revision, write):
                return outcome
            live = self._keys.live_key(change.key)
        raise changes_too_fast("in memory", change.key)
