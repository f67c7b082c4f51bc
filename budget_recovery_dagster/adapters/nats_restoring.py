"""A tenant of the bucket, read once and ready to be raised."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypeVar, TypeVarTuple

from budget_recovery_dagster.adapters.board_changes import BoardChange, rebuild
from budget_recovery_dagster.adapters.counter_changes import counter_changes
from budget_recovery_dagster.adapters.live_keys import LiveKey, LiveKeysRead, WritingTerms
from budget_recovery_dagster.adapters.nats_codec import BOARDS, COUNTERS
from budget_recovery_dagster.adapters.nats_counters import read_counters
from budget_recovery_dagster.adapters.nats_publishing import write_changes
from budget_recovery_dagster.adapters.nats_reader import read_live_keys
from budget_recovery_dagster.adapters.nats_sources import prefix_to_read
from budget_recovery_dagster.adapters.nats_stream import BucketStream
from budget_recovery_dagster.domain.snapshots import TenantReading
from budget_recovery_dagster.restore_ports import (
    BoardOrder,
    BoardResult,
    IsOpen,
    RaiseOrder,
    RaiseResult,
)

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Call(Protocol):
    """Runs an operation on the store's event loop, and waits for its end."""

    def __call__(
        self,
        operation: Callable[[*Arguments], Awaitable[Result]],
        *arguments: *Arguments,
    ) -> Result:
        """Run it in the store's thread, and return what it returns."""
        ...


class NatsLiveTenant:
    """A tenant's counters and leaderboards in the bucket, good for as long as the store is open."""

    def __init__(self, call: Call, stream: BucketStream, tenant: str) -> None:
        self._call = call
        self._stream = stream
        self._tenant = tenant
        found = self._read(COUNTERS)
        self._counters: Mapping[str, LiveKey] = found.keys
        self._reading = read_counters(tenant, found.without_deleted())

    @property
    def reading(self) -> TenantReading:
        """The counters as they were read."""
        return self._reading

    def raise_counters(
        self, orders: Sequence[RaiseOrder], *, is_open: IsOpen
    ) -> tuple[RaiseResult, ...]:
        """Raise counters, and give the results in the order of the orders."""
        if not orders:
            return ()
        changes = counter_changes(self._tenant, orders, self._terms(is_open))
        return tuple(self._call(write_changes, self._stream, changes, self._counters).all())

    def rebuild_boards(
        self, orders: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> tuple[BoardResult, ...]:
        """Bring leaderboards in line, and give the results in the order of the orders."""
        if not orders:
            return ()
        terms, boards = self._terms(is_open), self._read(BOARDS).keys

        def write(changes: Sequence[BoardChange]) -> list[BoardResult | str]:
            return self._call(write_changes, self._stream, changes, boards).all_or_why()

        return rebuild(self._tenant, orders, terms, write)

    def _read(self, first: str) -> LiveKeysRead:
        return self._call(read_live_keys, self._stream, prefix_to_read(first, self._tenant))

    def _terms(self, is_open: IsOpen) -> WritingTerms:
        return self._call(_terms, self._stream, is_open)


async def _terms(stream: BucketStream, is_open: IsOpen) -> WritingTerms:
    info = await stream.info()
    told_at, since = info.told_at or datetime.now(UTC), time.monotonic()

    def now() -> datetime:
        return told_at + timedelta(seconds=time.monotonic() - since)

    return WritingTerms(is_open=is_open, now=now, keeps_ttl=info.keeps_ttl)
