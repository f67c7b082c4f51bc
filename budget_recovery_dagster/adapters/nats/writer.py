"""Changes of counters and leaderboards: what to write, and pipelined compare-and-set writes."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import anyio
from anyio.lowlevel import checkpoint
from nats.aio.msg import Msg

from budget_recovery_dagster.adapters.nats.codec import (
    BoardKey,
    CounterKey,
    ExpiredKeyError,
    drop_times,
    element_texts,
    encode_board_key,
    encode_key,
    member_texts,
    remaining_ttl,
    replace_all,
    replace_members,
    ttl_of_new_key,
    usage_in,
)
from budget_recovery_dagster.adapters.nats.connection import Exchange
from budget_recovery_dagster.adapters.nats.driver import HeaderLines
from budget_recovery_dagster.adapters.nats.reader import Board, BoardEntry, read_board
from budget_recovery_dagster.adapters.nats.stream import (
    NEVER_WRITTEN,
    TTL_HEADER,
    BucketStream,
    LiveKey,
    MessageSizes,
    nanoseconds,
    value_error,
    write_error,
)
from budget_recovery_dagster.domain.counters import (
    BOARD_SIZE,
    Entity,
    UnreadableUsageError,
    UnusableNameError,
    Usages,
    ValueShape,
    by_rank,
    format_usage,
    max_merge,
    parse_usage,
    rank,
)
from budget_recovery_dagster.domain.plan import (
    BoardOrder,
    BoardResult,
    IsOpen,
    RaiseOrder,
    RaiseResult,
    Room,
    StoreLimits,
    Written,
)
from budget_recovery_dagster.errors import StoreUnreachableError, StoreWriteError

MAX_REJECTIONS = 100
"""After so many rejected writes in a row the remaining changes are not tried."""
_NOT_TRIED = f"Not tried: the store rejected {MAX_REJECTIONS} writes in a row."
Outcome = TypeVar("Outcome")
Outcome_co = TypeVar("Outcome_co", covariant=True)
MAX_CONFLICTS = 50
"""How often a key is read again after another client's write; then its change fails."""
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
# The driver sends what is buffered only when other tasks run. A worker that is suspended in between
# sends it after it has resumed, when its lease and the window may have ended: so it must be little.
_CHECKPOINT_EVERY = 50
_MIN_WAIT_SECONDS = 0.1
WriteBoards = Callable[[Sequence["BoardChange"]], Sequence[BoardResult | str]]
"""Carries out changes; returns the result of each, or the reason of its failure."""


class Write(NamedTuple):
    """A value to write, with the text of its time to live (None: no time to live).

    ``headers`` are those of the gateway on the value that it replaces.
    """

    data: bytes
    ttl: str | None
    headers: HeaderLines = ()


class Decision(NamedTuple, Generic[Outcome_co]):
    """The result of a change; with a ``write``, it is valid once the store has accepted that."""

    outcome: Outcome_co
    write: Write | None = None


class Change(Protocol[Outcome]):
    """A change of one key."""

    @property
    def key(self) -> str:
        """The key to change."""
        ...

    def decide(self, live: LiveKey) -> Decision[Outcome]:
        """Decide what to write over the live value; called immediately before the write."""
        ...

    def stored(self, outcome: Outcome, revision: int) -> Outcome:
        """Return the result that replaces ``outcome`` once the value is stored."""
        ...

    def rejected(self, outcome: Outcome, reason: str) -> Outcome:
        """Return the result that replaces ``outcome`` if the store rejects the value."""
        ...


@dataclass(frozen=True, slots=True)
class WriteTerms:
    """What every write depends on, in addition to its key.

    ``now`` returns the store's time (aware). If the ``limits`` allow no times to live of single
    keys, a key is kept too long, which does no harm.
    """

    is_open: IsOpen
    now: Callable[[], datetime]
    limits: StoreLimits

    def write(
        self, live: LiveKey, order: RaiseOrder | BoardOrder, text: Callable[[str], str]
    ) -> Write:
        """Return the write of a value that expires when the live one does, or as ordered.

        ``text`` returns the value with the store's time, formatted as in stored values.

        Raises:
            ExpiredKeyError: the key expires in less than a second.
        """
        now = self.now()
        headers: HeaderLines = ()
        if live.value is None:
            ttl = ttl_of_new_key(order.expiry, order.of.window, nanoseconds(now))
        else:
            ttl = remaining_ttl(live.value.ttl, live.value.written_ns, nanoseconds(now))
            headers = live.value.headers
        data = text(format_updated_at(now)).encode()
        return Write(data, ttl if self.limits.supports_ttl else None, headers)


@dataclass(frozen=True, slots=True)
class CounterChange:
    """Raises the counter under a key, as ordered."""

    key: str
    order: RaiseOrder
    terms: WriteTerms

    def decide(self, live: LiveKey) -> Decision[RaiseResult]:
        """Return the raised counter, or the reason to leave the live one."""
        before, shape, reason = _read(live)
        if not self.terms.is_open(self.order.of.window):
            return self._skipped(Written.CLOSED, before)
        if reason:
            return self._skipped(Written.UNREADABLE, before, reason)
        if before is not None and before >= self.order.usage:
            return Decision(RaiseResult(self.order, Written.KEPT, before, revision=live.revision))
        try:
            write = self.terms.write(live, self.order, partial(self._text, live, shape))
        except ExpiredKeyError:
            return self._skipped(Written.EXPIRED, before)
        expires_at, ages_out_at = drop_times(write.ttl, self.terms.now(), self.terms.limits.max_age)
        raised = RaiseResult(
            self.order, Written.RAISED, before, expires_at=expires_at, ages_out_at=ages_out_at
        )
        return Decision(raised, write)

    def stored(self, outcome: RaiseResult, revision: int) -> RaiseResult:
        """Return the result with the sequence of the write."""
        return replace(outcome, revision=revision)

    def rejected(self, outcome: RaiseResult, reason: str) -> RaiseResult:
        """Return the result for a value that the store rejected."""
        return replace(outcome, written=Written.REFUSED, reason=reason)

    def _skipped(
        self, written: Written, before: Decimal | None, reason: str = ""
    ) -> Decision[RaiseResult]:
        return Decision(RaiseResult(self.order, written, before, reason))

    def _text(self, live: LiveKey, shape: ValueShape | None, now: str) -> str:
        if live.value is None or shape is None:
            return _new_text(self.order, now)
        return _raised_text(live.value.data.decode(), shape, self.order.usage, now)


def counter_changes(
    tenant: str, orders: Iterable[RaiseOrder], terms: WriteTerms
) -> list[CounterChange]:
    """Return the changes that carry out orders.

    Raises:
        StoreWriteError: no key can contain a counter's name.
    """
    return [CounterChange(_key(tenant, order), order, terms) for order in orders]


@dataclass(frozen=True, slots=True)
class BoardChange:
    """Updates the leaderboard under a key, as ordered; ``usages`` are the order's, normalized."""

    tenant: str
    key: str
    order: BoardOrder
    usages: Usages
    terms: WriteTerms

    def decide(self, live: LiveKey) -> Decision[BoardResult]:
        """Return the rewritten leaderboard, or the reason to leave the live one."""
        board = Board(self.tenant, self.order.of, self.key)
        if live.value is not None:
            board = read_board(self.tenant, self.order.of, self.key, live.value)
        elif not self.order.may_create:
            return Decision(BoardResult(self.order.of, is_written=False, is_missing=True))
        higher = {
            entity: usage
            for entity, usage in rank(max_merge(board.usages, self.usages).items())
            if board.usages.get(entity) != usage
        }
        if not board.omitted and not higher:
            return self._skipped("")
        if not self.terms.is_open(self.order.of.window):
            return self._skipped(Written.CLOSED)
        if board.omitted:
            # A rewrite would drop the unreadable entries.
            return self._skipped(f"it is unreadable: {board.omitted[0].reason}")
        try:
            write = self.terms.write(live, self.order, partial(_board_text, live, board, higher))
        except ExpiredKeyError:
            return self._skipped(Written.EXPIRED)
        return Decision(BoardResult(self.order.of, is_written=True), write)

    def stored(self, outcome: BoardResult, revision: int) -> BoardResult:  # noqa: ARG002 - of a Change
        """Return the result as it is."""
        return outcome

    def rejected(self, outcome: BoardResult, reason: str) -> BoardResult:
        """Return the result for a value that the store rejected."""
        return replace(outcome, is_written=False, reason=reason)

    def _skipped(self, reason: str) -> Decision[BoardResult]:
        return Decision(BoardResult(self.order.of, is_written=False, reason=str(reason)))


def rebuild(
    tenant: str, orders: Sequence[BoardOrder], terms: WriteTerms, write: WriteBoards
) -> tuple[BoardResult, ...]:
    """Carry out orders with ``write``; return the results in the order of the orders."""
    changes: dict[int, BoardChange] = {}
    results: dict[int, BoardResult | str] = {}
    for number, change in enumerate(board_changes(tenant, orders, terms)):
        if isinstance(change, str):
            results[number] = change
        else:
            changes[number] = change
    results.update(zip(changes, write(list(changes.values())), strict=True))
    return tuple(
        BoardResult(order.of, is_written=False, reason=result)
        if isinstance(result := results[number], str)
        else result
        for number, order in enumerate(orders)
    )


def board_changes(
    tenant: str, orders: Iterable[BoardOrder], terms: WriteTerms
) -> Iterator[BoardChange | str]:
    """Return the changes that carry out orders; the reason, if a leaderboard has no valid key."""
    for order in orders:
        try:
            key = encode_board_key(BoardKey(tenant, order.of))
        except UnusableNameError as error:
            yield f"No valid key: {error}."
        else:
            yield BoardChange(tenant, key, order, _normalized(order.usages), terms)


class ChangeResults(Generic[Outcome]):
    """The results of changes so far, by the number of the change."""

    def __init__(self, changes: Sequence[Change[Outcome]]) -> None:
        self._changes = changes
        self._outcomes: dict[int, Outcome] = {}
        self._rejections: dict[int, StoreWriteError] = {}
        self._rejected_in_a_row = 0
        self.is_given_up = False
        """Whether to stop, because the store rejects one write after another."""

    def skip(self, number: int, outcome: Outcome) -> None:
        """Record a change that needs no write."""
        self._outcomes[number] = outcome

    def store(self, number: int, outcome: Outcome, revision: int) -> None:
        """Record a write that the store accepted at this sequence."""
        self._outcomes[number] = self._changes[number].stored(outcome, revision)
        self._rejected_in_a_row = 0

    def reject_value(self, number: int, outcome: Outcome, reason: str) -> None:
        """Record a rejected value; writes with other values may still succeed."""
        self._outcomes[number] = self._changes[number].rejected(outcome, reason)

    def reject(self, number: int, error: StoreWriteError) -> None:
        """Record a write that the store rejects whatever the value."""
        self._rejections[number] = error
        self._rejected_in_a_row += 1
        if self._rejected_in_a_row >= MAX_REJECTIONS:
            self.is_given_up = True

    def all(self) -> list[Outcome]:
        """Return the results in the order of the changes.

        Raises:
            StoreWriteError: the first write that was rejected whatever the value.
        """
        for error in self._rejections.values():
            raise error
        return [self._outcomes[number] for number in range(len(self._changes))]

    def all_or_reasons(self) -> list[Outcome | str]:
        """Return the results in the order of the changes; a failed one is its reason."""
        return [
            self._outcomes[number] if number in self._outcomes else self._reason(number)
            for number in range(len(self._changes))
        ]

    def _reason(self, number: int) -> str:
        error = self._rejections.get(number)
        return _NOT_TRIED if error is None else error.message


def _key(tenant: str, order: RaiseOrder) -> str:
    try:
        return encode_key(CounterKey(tenant, order.of, order.entity))
    except UnusableNameError as error:
        raise StoreWriteError(
            f"The counter of {order.entity!a} in {str(order.of)!a} has no valid key: {error}.",
            "restore the tenant's other budgets by name, and find the origin of this name.",
        ) from error


def changes_too_fast(bucket: str, key: str) -> StoreWriteError:
    """Return the error for a key that other clients wrote before each of our attempts."""
    return StoreWriteError(
        f"Could not write {key} in the bucket {bucket}: {MAX_CONFLICTS} write conflicts in a row.",
        "find the client that writes it so often, then run the restore again.",
    )


def format_updated_at(time: datetime) -> str:
    """Format a time (aware) as in stored values: UTC, to the second."""
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _read(live: LiveKey) -> tuple[Decimal | None, ValueShape | None, str]:
    """Return a live counter's usage and shape, if it exists, or why it is unreadable."""
    if live.value is None:
        return None, None, ""
    try:
        return *usage_in(live.value), ""
    except UnreadableUsageError as error:
        return None, None, str(error)


def _new_text(order: RaiseOrder, now: str) -> str:
    if order.shape is ValueShape.BARE:
        return _digits(order.usage)
    return f'{{"usage":{_usage_text(order.usage, order.shape)},"updated_at":"{now}"}}'


def _raised_text(text: str, shape: ValueShape, usage: Decimal, now: str) -> str:
    if shape is ValueShape.BARE:
        return replace_all(text, _digits(usage))
    return replace_members(text, {"usage": _usage_text(usage, shape)}, {"updated_at": f'"{now}"'})


def _usage_text(usage: Decimal, shape: ValueShape) -> str:
    """Return the JSON of a field ``usage``: a string or a number."""
    return f'"{_digits(usage)}"' if shape is ValueShape.TEXT else _digits(usage)


def _digits(usage: Decimal) -> str:
    """Format a usage without exponent and trailing zeros, after checking that it parses."""
    return format_usage(parse_usage(format_usage(usage)))


def _board_text(live: LiveKey, board: Board, higher: Usages, now: str) -> str:
    """Return a leaderboard with some higher usages; its other entries and fields are unchanged."""
    if live.value is None:
        return f'{{"entries":{_entries_text([], [], higher)},"updated_at":"{now}"}}'
    text = live.value.data.decode()
    entries = _entries_text(board.entries, element_texts(member_texts(text)["entries"]), higher)
    return replace_members(text, {"entries": entries}, {"updated_at": f'"{now}"'})


def _entries_text(entries: Sequence[BoardEntry], texts: Sequence[str], higher: Usages) -> str:
    """Write entries, given with their texts, with the ``higher`` usages; largest first.

    The list has as many entries as a leaderboard may have, or as it had before.
    """
    missing = dict(higher)
    listed: list[tuple[Entity, Decimal, str]] = []
    # Of an entity that is listed several times, the highest entry counts.
    for entry, text in sorted(
        zip(entries, texts, strict=True), key=lambda each: each[0].usage, reverse=True
    ):
        if (usage := missing.pop(entry.entity, None)) is None:
            listed.append((entry.entity, entry.usage, text))
        else:
            raised = replace_members(text, {"usage": _usage_text(usage, entry.shape)}, {})
            listed.append((entry.entity, usage, raised))
    shapes = Counter(entry.shape for entry in entries)
    shape = max(shapes, key=shapes.__getitem__, default=ValueShape.TEXT)
    for entity, usage in missing.items():
        name = json.dumps(entity, ensure_ascii=False)
        listed.append((entity, usage, f'{{"entity":{name},"usage":{_usage_text(usage, shape)}}}'))
    most = max(BOARD_SIZE, len(entries))
    return f"[{','.join(text for *_, text in by_rank(listed)[:most])}]"


def _normalized(usages: Usages) -> Usages:
    """Remove trailing zeros, as a reader of counters does."""
    return {entity: parse_usage(format_usage(usage)) for entity, usage in usages.items()}


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


def conditional_headers(
    revision: int, ttl: str | None, others: HeaderLines = ()
) -> list[tuple[str, str]]:
    """Return the headers of a write over a revision, with the text of a time to live."""
    headers = [(EXPECTED_REVISION, str(revision))]
    if ttl is not None:
        headers.append((TTL_HEADER, ttl))
    return [*headers, *others]


def room_for_changes(
    changes: Iterable[Change[Any]], known: Mapping[str, LiveKey], sizes: MessageSizes
) -> Room:
    """Return the room that changes of these live keys take."""
    room = Room()
    for change in changes:
        live = known.get(change.key, NEVER_WRITTEN)
        write = change.decide(live).write
        if write is not None:
            room += _room_for(change.key, live, write, sizes)
    return room


def _room_for(key: str, live: LiveKey, write: Write, sizes: MessageSizes) -> Room:
    """Return the room that a write over a live key takes.

    Of the overwritten message only the TTL and the gateway's headers are known, so this may be too
    much.
    """
    headers = conditional_headers(live.revision, write.ttl, write.headers)
    size = sizes.of(key, write.data, headers)
    if not live.revision or not sizes.keeps_one:
        return Room(1, size)
    data, ttl = (b"", None) if live.value is None else (live.value.data, live.value.ttl)
    known = () if live.value is None else tuple(live.value.headers)
    old = sizes.of(key, data, known if ttl is None else ((TTL_HEADER, ttl), *known))
    return Room(0, max(size - old, 0))


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
                # Nothing else in this loop surely yields to other tasks.
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
        headers = conditional_headers(live.revision, write.ttl, write.headers)
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
                self._results.store(number, unconfirmed.outcome, live.revision)
            elif not self._results.is_given_up:
                await self._decide(number, live)
            return
        error = self._stream.error_in_write(response)
        if error is None:
            self._results.store(number, request.outcome, self._stream.sequence_in(response))
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
