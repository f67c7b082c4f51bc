"""Pipelined compare-and-set publishing, and a live tenant whose counters can be raised."""

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
    Outcomes,
    counter_changes,
    rebuild,
)
from budget_recovery_dagster.adapters.nats.codec import BOARDS, COUNTERS
from budget_recovery_dagster.adapters.nats.connection import Exchange
from budget_recovery_dagster.adapters.nats.failures import (
    nobody_writes,
    refused_value,
    refused_write,
)
from budget_recovery_dagster.adapters.nats.reader import (
    prefix_to_read,
    read_counters,
    read_live_keys,
)
from budget_recovery_dagster.adapters.nats.stream import (
    NEVER_WRITTEN,
    NO_RESPONDERS,
    STATUS,
    TRIES,
    TTL_HEADER,
    BucketStream,
    Change,
    LiveKey,
    LiveKeysRead,
    Outcome,
    WritingTerms,
    changes_too_fast,
    error_in,
)
from budget_recovery_dagster.domain.snapshots import TenantReading
from budget_recovery_dagster.errors import StoreUnreachableError, StoreWriteError
from budget_recovery_dagster.ports import BoardOrder, BoardResult, IsOpen, RaiseOrder, RaiseResult

IN_FLIGHT = 2000
"""Requests under way; the server takes no more than some thousands before it drops any."""
BYTES_IN_FLIGHT = 16 * 2**20
"""Of values under way, one of which may have a million."""
EXPECTED_REVISION = "Nats-Expected-Last-Subject-Sequence"
"""The header by which the server refuses a writing over anything else than this revision."""
WRONG_REVISION = frozenset({10071, 10164})
"""The server's errors that say that a key is not at the expected revision."""
# What it says while more is under way than it can take.
_TOO_MANY_REQUESTS = 10167
_UNANSWERED = 3
_A_WHILE = 1000
_A_MOMENT = 0.1


def conditional_headers(revision: int, ttl: str | None) -> dict[str, str]:
    """Return the headers of a writing over a revision."""
    headers = {EXPECTED_REVISION: str(revision)}
    if ttl is not None:
        headers[TTL_HEADER] = ttl
    return headers


def error_of(answer: Msg) -> Mapping[str, Any] | None:
    """Return the error that the server answered a writing with; None: it has stored it.

    Raises:
        ValueError, TypeError, AttributeError: the answer makes no sense.
    """
    # Nearly all are plain, and not worth being parsed.
    if answer.data and b'"error"' not in answer.data:
        return None
    return error_in(json.loads(answer.data))


async def write_changes(
    stream: BucketStream, changes: Sequence[Change[Outcome]], known: Mapping[str, LiveKey]
) -> Outcomes[Outcome]:
    """Bring changes about, and give what became of each.

    ``known`` are the keys as they were read before; of those that have changed since, or that are
    not among them, the leader is asked. A key that the store refuses, or that changes faster than
    can be decided, keeps no other from being written; see Outcomes.

    Raises:
        StoreUnreachableError, StoreNoQuorumError, StoreMissingError: no answer, or no sound one.
        StorePermissionError: the user may not write a key, or not read it.
        StoreReadError: an answer makes no sense.
    """
    async with stream.connection.exchange() as exchange:
        return await _Writing(stream, exchange, changes).run(known)


class _Reading(NamedTuple):
    """A question to the leader about the key of the change of this number."""

    number: int
    deadline: float


class _Publication(NamedTuple, Generic[Outcome]):
    """A writing for the change of this number, and what becomes of it once it is stored."""

    number: int
    deadline: float
    revision: int
    data: bytes
    outcome: Outcome

    def is_stored_as(self, live: LiveKey) -> bool:
        """Whether a key stands as this writing, of which no answer came, would have left it."""
        is_later = live.revision > self.revision
        return is_later and live.value is not None and live.value.data == self.data


class _Writing(Generic[Outcome]):
    """The conversation in which changes are brought about."""

    def __init__(
        self, stream: BucketStream, exchange: Exchange, changes: Sequence[Change[Outcome]]
    ) -> None:
        self._stream = stream
        self._exchange = exchange
        self._changes = changes
        self._outcomes = Outcomes(changes)
        # By the subjects of their answers, the oldest first.
        self._under_way: dict[str, _Reading | _Publication[Outcome]] = {}
        self._bytes_under_way = 0
        self._readings: Counter[int] = Counter()
        self._unanswered: Counter[int] = Counter()
        self._unsure: dict[int, _Publication[Outcome]] = {}

    async def run(self, known: Mapping[str, LiveKey]) -> Outcomes[Outcome]:
        """Bring all changes about, as far as the store takes them."""
        for number, change in enumerate(self._changes):
            while len(self._under_way) >= IN_FLIGHT or self._bytes_under_way >= BYTES_IN_FLIGHT:
                await self._take_answers()
            if self._outcomes.is_given_up:
                break
            await self._decide(number, known.get(change.key, NEVER_WRITTEN))
            if number % _A_WHILE == 0:
                # Where nothing needs to be written, nothing else would let others run.
                await checkpoint()
        while self._under_way:
            await self._take_answers()
        return self._outcomes

    async def _decide(self, number: int, live: LiveKey) -> None:
        change = self._changes[number]
        outcome, write = change.decide(live)
        if write is None:
            self._outcomes.leave(number, outcome)
            return
        subject = f"{self._stream.subject_prefix}{change.key}"
        headers = conditional_headers(live.revision, write.ttl)
        try:
            answer_to = await self._exchange.send(subject, write.data, headers)
        except StoreWriteError as error:
            self._outcomes.refuse_value(number, outcome, error.message.removesuffix("."))
            return
        self._bytes_under_way += len(write.data)
        self._under_way[answer_to] = _Publication(
            number, self._deadline(), live.revision, write.data, outcome
        )

    async def _read_again(self, number: int) -> None:
        key = self._changes[number].key
        self._readings[number] += 1
        if self._readings[number] > TRIES:
            self._outcomes.refuse(number, changes_too_fast(self._stream.bucket, key))
            return
        answer_to = await self._exchange.send(*self._stream.key_request(key))
        self._under_way[answer_to] = _Reading(number, self._deadline())

    async def _take_answers(self) -> None:
        """Take what has arrived; where nothing does in time, ask again."""
        oldest = next(iter(self._under_way.values()))
        answers: list[Msg] = []
        # Where deciding took longer than an answer may, answers may have come that are not read.
        with anyio.move_on_after(max(oldest.deadline - anyio.current_time(), _A_MOMENT)):
            answers = await self._exchange.receive()
        for answer in answers:
            # One that was not waited for any longer says nothing new.
            if answer.subject in self._under_way:
                await self._take(self._end(answer.subject), answer)
        if not answers:
            now = anyio.current_time()
            overdue = [to for to, request in self._under_way.items() if request.deadline <= now]
            for answer_to in overdue:
                await self._miss(self._end(answer_to))

    def _end(self, answer_to: str) -> "_Reading | _Publication[Outcome]":
        request = self._under_way.pop(answer_to)
        if isinstance(request, _Publication):
            self._bytes_under_way -= len(request.data)
        return request

    async def _take(self, request: "_Reading | _Publication[Outcome]", answer: Msg) -> None:
        number = request.number
        if isinstance(request, _Reading):
            live = self._stream.key_in(answer)
            unsure = self._unsure.pop(number, None)
            if unsure is not None and unsure.is_stored_as(live):
                self._outcomes.store(number, unsure.outcome)
            elif not self._outcomes.is_given_up:
                await self._decide(number, live)
            return
        if (answer.headers or {}).get(STATUS) == NO_RESPONDERS:
            raise nobody_writes(self._stream.bucket)
        with self._stream.making_sense():
            error = error_of(answer)
        if error is None:
            self._outcomes.store(number, request.outcome)
        elif error.get("err_code") in WRONG_REVISION | {_TOO_MANY_REQUESTS}:
            await self._read_again(number)
        else:
            self._refuse(request, error)

    def _refuse(self, request: _Publication[Outcome], error: Mapping[str, Any]) -> None:
        if reason := refused_value(error):
            self._outcomes.refuse_value(request.number, request.outcome, reason)
            return
        key = self._changes[request.number].key
        refusal = refused_write(self._stream.bucket, key, error)
        if not isinstance(refusal, StoreWriteError):
            raise refusal
        self._outcomes.refuse(request.number, refusal)

    async def _miss(self, request: "_Reading | _Publication[Outcome]") -> None:
        """Ask about a key of which no answer has come: the writing may be there, or come yet."""
        if isinstance(request, _Publication):
            self._unsure[request.number] = request
        self._unanswered[request.number] += 1
        if self._unanswered[request.number] >= _UNANSWERED:
            raise StoreUnreachableError(
                f"No answer about {self._changes[request.number].key} in the bucket"
                f" {self._stream.bucket}, {_UNANSWERED} times within"
                f" {self._stream.timeouts.answer:g} s each.",
                "see whether the NATS servers and the leader of the bucket's stream are up.",
            )
        await self._read_again(request.number)

    def _deadline(self) -> float:
        return anyio.current_time() + self._stream.timeouts.answer


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
