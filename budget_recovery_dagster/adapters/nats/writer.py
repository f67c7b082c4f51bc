"""A live tenant whose counters can be raised, by pipelined compare-and-set writes."""

import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, TypeVarTuple

import anyio
from anyio.lowlevel import checkpoint
from nats.aio.msg import Msg

from budget_recovery_dagster.adapters.nats.changes import (
    BoardChange,
    ChangeResults,
    counter_changes,
    rebuild,
)
from budget_recovery_dagster.adapters.nats.codec import BOARDS, COUNTERS
from budget_recovery_dagster.adapters.nats.connection import Exchange
from budget_recovery_dagster.adapters.nats.failures import (
    no_stream_accepts_writes,
    value_error,
    write_error,
)
from budget_recovery_dagster.adapters.nats.reader import (
    prefix_to_read,
    read_counters,
    read_live_keys,
)
from budget_recovery_dagster.adapters.nats.stream import (
    MAX_CONFLICTS,
    NEVER_WRITTEN,
    NO_RESPONDERS,
    STATUS,
    TTL_HEADER,
    BucketStream,
    Change,
    LiveKey,
    LiveKeysRead,
    Outcome,
    WriteTerms,
    changes_too_fast,
    error_in,
)
from budget_recovery_dagster.domain.snapshots import TenantReading
from budget_recovery_dagster.errors import StoreUnreachableError, StoreWriteError
from budget_recovery_dagster.ports import BoardOrder, BoardResult, IsOpen, RaiseOrder, RaiseResult

IN_FLIGHT = 2000
"""The limit of pending requests; the server drops requests above some thousands."""
BYTES_IN_FLIGHT = 16 * 2**20
"""The limit of pending values in bytes; a single value may have a million."""
EXPECTED_REVISION = "Nats-Expected-Last-Subject-Sequence"
"""The header with which the server rejects a write over any other revision."""
WRONG_REVISION = frozenset({10071, 10164})
"""The server's error codes for a key that is not at the expected revision."""
# The server's error code for too many pending requests.
_TOO_MANY_REQUESTS = 10167
_MAX_TIMEOUTS = 3
_CHECKPOINT_EVERY = 1000
_MIN_WAIT_SECONDS = 0.1
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Call(Protocol):
    """Runs an operation on the store's event loop and waits for its result."""

    def __call__(
        self,
        operation: Callable[[*Arguments], Awaitable[Result]],
        *arguments: *Arguments,
    ) -> Result:
        """Run the operation in the store's thread and return its result."""
        ...


class NatsLiveTenant:
    """A tenant's counters and leaderboards in the bucket, usable while the store is open."""

    def __init__(self, call: Call, stream: BucketStream, tenant: str) -> None:
        self._call = call
        self._stream = stream
        self._tenant = tenant
        found = self._read(COUNTERS)
        self._counters: Mapping[str, LiveKey] = found.keys
        self._reading = read_counters(tenant, found.without_deleted())

    @property
    def reading(self) -> TenantReading:
        """The counters as read when the tenant was opened."""
        return self._reading

    def raise_counters(
        self, orders: Sequence[RaiseOrder], *, is_open: IsOpen
    ) -> tuple[RaiseResult, ...]:
        """Raise counters; return the results in the order of the orders."""
        if not orders:
            return ()
        changes = counter_changes(self._tenant, orders, self._terms(is_open))
        return tuple(self._call(write_changes, self._stream, changes, self._counters).all())

    def rebuild_boards(
        self, orders: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> tuple[BoardResult, ...]:
        """Update leaderboards; return the results in the order of the orders."""
        if not orders:
            return ()
        terms, boards = self._terms(is_open), self._read(BOARDS).keys

        def write(changes: Sequence[BoardChange]) -> list[BoardResult | str]:
            return self._call(write_changes, self._stream, changes, boards).all_or_reasons()

        return rebuild(self._tenant, orders, terms, write)

    def _read(self, first: str) -> LiveKeysRead:
        return self._call(read_live_keys, self._stream, prefix_to_read(first, self._tenant))

    def _terms(self, is_open: IsOpen) -> WriteTerms:
        return self._call(_read_terms, self._stream, is_open)


async def _read_terms(stream: BucketStream, is_open: IsOpen) -> WriteTerms:
    info = await stream.info()
    server_time, since = info.server_time or datetime.now(UTC), time.monotonic()

    def now() -> datetime:
        return server_time + timedelta(seconds=time.monotonic() - since)

    return WriteTerms(is_open=is_open, now=now, supports_ttl=info.supports_ttl)


async def write_changes(
    stream: BucketStream, changes: Sequence[Change[Outcome]], known: Mapping[str, LiveKey]
) -> ChangeResults[Outcome]:
    """Carry out changes and return their results.

    ``known`` are the keys as read before. A key that has changed since is read again from the
    leader. A rejected write, or a key with too many conflicts, does not stop the other changes; see
    ChangeResults.

    Raises:
        StoreUnreachableError, StoreNoQuorumError, StoreMissingError: the store is unavailable.
        StorePermissionError: the user may not write or read a key.
        StoreReadError: a response is unexpected.
    """
    async with stream.connection.exchange() as exchange:
        return await _ChangeWriter(stream, exchange, changes).run(known)


def conditional_headers(revision: int, ttl: str | None) -> dict[str, str]:
    """Return the headers of a write over a revision, with the text of a time to live."""
    headers = {EXPECTED_REVISION: str(revision)}
    if ttl is not None:
        headers[TTL_HEADER] = ttl
    return headers


def error_in_write_response(response: Msg) -> Mapping[str, Any] | None:
    """Return the error in the response to a write; None: the write is stored.

    Raises:
        ValueError, TypeError, AttributeError: the response is unexpected.
    """
    # Parsing the many responses without an error would cost time for nothing.
    if response.data and b'"error"' not in response.data:
        return None
    return error_in(json.loads(response.data))


class _PendingRead(NamedTuple):
    """A pending read of a key, for the change with this number."""

    number: int
    deadline: float


class _PendingWrite(NamedTuple, Generic[Outcome]):
    """A pending write for the change with this number, and its result once it is stored."""

    number: int
    deadline: float
    revision: int
    data: bytes
    outcome: Outcome

    def is_stored_as(self, live: LiveKey) -> bool:
        """Whether a key has the value of this write, which got no response."""
        is_later = live.revision > self.revision
        return is_later and live.value is not None and live.value.data == self.data


class _ChangeWriter(Generic[Outcome]):
    """Carries out changes in one exchange."""

    def __init__(
        self, stream: BucketStream, exchange: Exchange, changes: Sequence[Change[Outcome]]
    ) -> None:
        self._stream = stream
        self._exchange = exchange
        self._changes = changes
        self._results = ChangeResults(changes)
        # By reply subject, the oldest first.
        self._pending: dict[str, _PendingRead | _PendingWrite[Outcome]] = {}
        self._pending_bytes = 0
        self._rereads: Counter[int] = Counter()
        self._timeouts: Counter[int] = Counter()
        self._unconfirmed: dict[int, _PendingWrite[Outcome]] = {}

    async def run(self, known: Mapping[str, LiveKey]) -> ChangeResults[Outcome]:
        """Carry out all changes that the store accepts."""
        for number, change in enumerate(self._changes):
            while len(self._pending) >= IN_FLIGHT or self._pending_bytes >= BYTES_IN_FLIGHT:
                await self._handle_responses()
            if self._results.is_given_up:
                break
            await self._decide(number, known.get(change.key, NEVER_WRITTEN))
            if number % _CHECKPOINT_EVERY == 0:
                # Without writes, nothing else in this loop yields to other tasks.
                await checkpoint()
        while self._pending:
            await self._handle_responses()
        return self._results

    async def _decide(self, number: int, live: LiveKey) -> None:
        change = self._changes[number]
        outcome, write = change.decide(live)
        if write is None:
            self._results.skip(number, outcome)
            return
        subject = f"{self._stream.subject_prefix}{change.key}"
        headers = conditional_headers(live.revision, write.ttl)
        try:
            reply_to = await self._exchange.send(subject, write.data, headers)
        except StoreWriteError as error:
            self._results.reject_value(number, outcome, error.message.removesuffix("."))
            return
        self._pending_bytes += len(write.data)
        self._pending[reply_to] = _PendingWrite(
            number, self._deadline(), live.revision, write.data, outcome
        )

    async def _read_again(self, number: int) -> None:
        key = self._changes[number].key
        self._rereads[number] += 1
        if self._rereads[number] > MAX_CONFLICTS:
            self._results.reject(number, changes_too_fast(self._stream.bucket, key))
            return
        reply_to = await self._exchange.send(*self._stream.key_request(key))
        self._pending[reply_to] = _PendingRead(number, self._deadline())

    async def _handle_responses(self) -> None:
        """Handle the responses that have arrived; if none arrives in time, read the keys again."""
        oldest = next(iter(self._pending.values()))
        responses: list[Msg] = []
        # If deciding took longer than the timeout, responses may already be waiting.
        with anyio.move_on_after(max(oldest.deadline - anyio.current_time(), _MIN_WAIT_SECONDS)):
            responses = await self._exchange.receive()
        for response in responses:
            # A late response to a request that has timed out adds nothing.
            if response.subject in self._pending:
                await self._handle_response(self._remove_pending(response.subject), response)
        if not responses:
            now = anyio.current_time()
            overdue = [to for to, request in self._pending.items() if request.deadline <= now]
            for reply_to in overdue:
                await self._handle_timeout(self._remove_pending(reply_to))

    def _remove_pending(self, reply_to: str) -> "_PendingRead | _PendingWrite[Outcome]":
        request = self._pending.pop(reply_to)
        if isinstance(request, _PendingWrite):
            self._pending_bytes -= len(request.data)
        return request

    async def _handle_response(
        self, request: "_PendingRead | _PendingWrite[Outcome]", response: Msg
    ) -> None:
        number = request.number
        if isinstance(request, _PendingRead):
            live = self._stream.key_in(response)
            unconfirmed = self._unconfirmed.pop(number, None)
            if unconfirmed is not None and unconfirmed.is_stored_as(live):
                self._results.store(number, unconfirmed.outcome)
            elif not self._results.is_given_up:
                await self._decide(number, live)
            return
        if (response.headers or {}).get(STATUS) == NO_RESPONDERS:
            raise no_stream_accepts_writes(self._stream.bucket)
        with self._stream.parsing():
            error = error_in_write_response(response)
        if error is None:
            self._results.store(number, request.outcome)
        elif error.get("err_code") in WRONG_REVISION | {_TOO_MANY_REQUESTS}:
            await self._read_again(number)
        else:
            self._handle_error(request, error)

    def _handle_error(self, request: _PendingWrite[Outcome], error: Mapping[str, Any]) -> None:
        if reason := value_error(error):
            self._results.reject_value(request.number, request.outcome, reason)
            return
        key = self._changes[request.number].key
        rejection = write_error(self._stream.bucket, key, error)
        if not isinstance(rejection, StoreWriteError):
            raise rejection
        self._results.reject(request.number, rejection)

    async def _handle_timeout(self, request: "_PendingRead | _PendingWrite[Outcome]") -> None:
        """Read a key again after a timeout: its write may be stored, or be stored later."""
        if isinstance(request, _PendingWrite):
            self._unconfirmed[request.number] = request
        self._timeouts[request.number] += 1
        if self._timeouts[request.number] >= _MAX_TIMEOUTS:
            raise StoreUnreachableError(
                f"No response for {self._changes[request.number].key} in the bucket"
                f" {self._stream.bucket}: {_MAX_TIMEOUTS} requests timed out after"
                f" {self._stream.timeouts.answer:g} s each.",
                "check the NATS servers and the leader of the bucket's stream.",
            )
        await self._read_again(request.number)

    def _deadline(self) -> float:
        return anyio.current_time() + self._stream.timeouts.answer
