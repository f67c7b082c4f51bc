"""Reads tenants from the bucket: raw pulls from the leader, until it responds with status 404.

Usages come from counters or from leaderboards, which list the largest of each budget and window. A
full leaderboard may omit entities, and the entities on an unreadable one are unknown. A reading
reports both, so that an unlisted entity is not reported as missing.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from secrets import token_hex
from typing import NamedTuple

import anyio
from nats.aio.msg import Msg

from budget_recovery_dagster.adapters.nats.codec import (
    BOARDS,
    COUNTERS,
    CounterKey,
    StoredValue,
    decode_board_key,
    decode_json,
    decode_key,
    decode_keys,
    decode_name,
    expiry_after,
    is_json_text,
    printable,
    require_counter_key,
    require_encodable,
    shortened,
    tenant_prefix,
    usage_in,
    usage_of,
)
from budget_recovery_dagster.adapters.nats.connection import Exchange
from budget_recovery_dagster.adapters.nats.stream import (
    STATUS,
    BucketStream,
    KeysRead,
    LiveKey,
    read_message,
    sequence_and_time,
)
from budget_recovery_dagster.domain.counters import (
    BOARD_SIZE,
    BudgetWindow,
    CounterReading,
    Entity,
    OmittedCounter,
    UnlistedEntities,
    UnreadableKey,
    UnreadableUsageError,
    UnusableNameError,
    ValueShape,
)
from budget_recovery_dagster.domain.falls import Deletions, TenantWindow
from budget_recovery_dagster.domain.snapshots import CaptureSource, TenantListing, TenantReading
from budget_recovery_dagster.errors import (
    StoreError,
    StoreNoQuorumError,
    StorePermissionError,
    StoreReadError,
    StoreUnreachableError,
)

_log = logging.getLogger(__name__)
BATCH = 5000
MAX_BYTES = 16 * 2**20
"""The limit of one pull; a server disconnects clients with 64 MB (its default) pending."""
CONSUMER_PREFIX = "budget-recovery-"
INACTIVE_SECONDS = 30
"""How long after its last pull the server removes an abandoned consumer."""
_NS_PER_SECOND = 10**9
_MIN_READS = 3
_RETRY_DELAY_SECONDS = 0.2
# A new consumer may not respond for this long: in a busy cluster, interest in it can arrive after
# the response that it was created, and a server that restarts delays both.
_MIN_RETRY_SECONDS = 5.0
_MAX_PLACEMENTS = 30
_PLACEMENT_TIMEOUT = 1.0
_NO_QUORUM_SECONDS = 3.0
_DELETE_TIMEOUT = 2.0
_NO_MESSAGES = "404"
_TOO_LARGE = "409 message size exceeds maxbytes"
_BATCH_DONE = "409 batch completed"
_PULL = f'{{"batch":{BATCH},"max_bytes":{MAX_BYTES},"no_wait":true}}'.encode()
_PULL_ONE = b'{"batch":1,"no_wait":true}'
Delivery = Mapping[str, object]
"""The part of a consumer's configuration that decides which messages it delivers."""
_NEWEST: Delivery = {"deliver_policy": "last_per_subject"}
# How much of a name a reason quotes, so that the error after it stays visible.
_SHOWN_NAME = 80


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of keys: their first token, and how to decode those of a tenant."""

    first: str
    decode: Callable[[str, KeysRead], TenantReading]


@dataclass(frozen=True, slots=True)
class SourceReader:
    """Reads tenants from one source of a store, with the windows that have a leaderboard.

    ``list_keys`` returns the keys under a prefix that ends in a dot, ``read_keys`` also their
    values.
    """

    source: Source
    list_keys: Callable[[str], Iterable[str]]
    read_keys: Callable[[str], KeysRead]

    def list_tenants(self) -> TenantListing:
        """List the tenants that have keys; a tenant whose keys are all deleted may be listed."""
        return list_tenants(self.source.first, self.list_keys(f"{self.source.first}."))

    def read(self, tenant: str) -> TenantReading:
        """Read a tenant's counters from every key of the source that existed before the call."""
        found = self.read_keys(prefix_to_read(self.source.first, tenant))
        reading = self.source.decode(tenant, found)
        if reading.boards is None:
            reading = replace(reading, boards=self._boards_of(tenant))
        return reading

    def _boards_of(self, tenant: str) -> frozenset[BudgetWindow] | None:
        """Return a tenant's leaderboards; None if they cannot be listed, as the counters matter."""
        try:
            return boards_in(self.list_keys(prefix_to_read(BOARDS, tenant)))
        except StoreError as error:
            _log.warning("Could not list the leaderboards of tenant %r: %s", tenant, error)
            return None


def list_tenants(first: str, keys: Iterable[str]) -> TenantListing:
    """Return the tenants of these keys, which all have ``first`` as the first token."""
    tenants: dict[str, str] = {}
    unreadable: list[UnreadableKey] = []
    for key in keys:
        token, dot, _ = key.removeprefix(f"{first}.").partition(".")
        try:
            if not dot:
                raise UnusableNameError("ends after the tenant")
            if token not in tenants:
                tenants[token] = decode_name(token)
                tenant_prefix(first, tenants[token])
        except UnusableNameError as error:
            tenants.pop(token, None)
            unreadable.append(UnreadableKey(printable(key), str(error)))
    return TenantListing(
        frozenset(tenants.values()), tuple(sorted(unreadable, key=lambda key: key.key))
    )


def _changes_after(sequence: int) -> Delivery:
    return {
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": sequence + 1,
        "headers_only": True,
    }


def prefix_to_read(first: str, tenant: str) -> str:
    """Return the prefix of a tenant's keys with this first token.

    Raises:
        StoreReadError: no key can contain this name.
    """
    try:
        return tenant_prefix(first, tenant)
    except UnusableNameError as error:
        raise StoreReadError(
            f"The tenant name {tenant[:100]!a} cannot occur in a key: {error}.",
            "use the tenant's name as in the gateway.",
        ) from error


def read_counters(tenant: str, found: KeysRead) -> TenantReading:
    """Decode all counters under a tenant's prefix; the reading names what is unreadable."""
    values = found.values()
    keys, unreadable = decode_keys(values, decode_key)
    counters: list[CounterReading] = []
    omitted: list[OmittedCounter] = []
    for key, counter in keys:
        value = values[key]
        try:
            usage, shape = usage_in(value)
        except UnreadableUsageError as error:
            omitted.append(OmittedCounter(counter.of, counter.entity, key, str(error)))
            continue
        expiry = expiry_after(value.ttl, value.written_ns, counter.of.window)
        counters.append(CounterReading(counter.of, counter.entity, usage, shape, expiry))
    return TenantReading(
        tenant=tenant,
        source=CaptureSource.COUNTERS,
        counters=tuple(counters),
        omitted=tuple(omitted),
        unreadable=unreadable,
        is_partial=found.is_partial,
        other_keys=_other_keys(found.keys, keys),
        read_after=found.read_after,
    )


def _other_keys(
    found: Iterable[str], counters: Iterable[tuple[str, CounterKey]]
) -> dict[BudgetWindow, int]:
    """Count the keys that a count of a budget and window includes, although none is a counter."""
    named = {key for key, _ in counters}
    others = Counter(key.rpartition(".")[0] for key in found if key not in named)
    decoded, _ = decode_keys((f"{window}.=" for window in others), decode_key)
    return {counter.of: others[key.rpartition(".")[0]] for key, counter in decoded}


class BoardEntry(NamedTuple):
    """A readable entry of a leaderboard; ``shape`` is the form of its usage."""

    entity: Entity
    usage: Decimal
    shape: ValueShape


@dataclass(slots=True)
class Board:
    """The readable content of a leaderboard.

    ``entries`` are in the order of the list; ``usages`` has the highest one of each entity.
    ``length`` counts all entries, readable or not.
    """

    tenant: str
    of: BudgetWindow
    key: str
    length: int = 0
    entries: list[BoardEntry] = field(default_factory=list)
    usages: dict[Entity, Decimal] = field(default_factory=dict)
    omitted: list[OmittedCounter] = field(default_factory=list)

    @property
    def counters(self) -> list[CounterReading]:
        """The listed usages that are readable."""
        return [
            CounterReading(self.of, entity, usage, shape=None, expiry=None)
            for entity, usage in self.usages.items()
        ]

    @property
    def unlisted(self) -> UnlistedEntities | None:
        """What is known about entities without a usage here; None: there are no such entities."""
        is_truncated = self.length >= BOARD_SIZE
        if not all(omission.is_entity_known for omission in self.omitted):
            return UnlistedEntities(self.of, None, is_truncated)
        if is_truncated:
            # Valid even if some usages are unreadable: an unlisted entity has at most the lowest
            # listed usage, which is not above the lowest readable one.
            lowest = min(self.usages.values(), default=None)
            return UnlistedEntities(self.of, lowest, is_truncated)
        return None


def read_boards(tenant: str, found: KeysRead) -> TenantReading:
    """Decode all leaderboards under a tenant's prefix; the reading names what is unreadable."""
    values = found.values()
    keys, unreadable = decode_keys(values, decode_board_key)
    boards = [read_board(tenant, board.of, key, values[key]) for key, board in keys]
    return TenantReading(
        tenant=tenant,
        source=CaptureSource.LEADERBOARDS,
        counters=tuple(counter for board in boards for counter in board.counters),
        omitted=tuple(omission for board in boards for omission in board.omitted),
        unreadable=unreadable,
        is_partial=found.is_partial,
        unlisted=tuple(board.unlisted for board in boards if board.unlisted is not None),
        boards=frozenset(board.of for _, board in keys),
    )


def boards_in(keys: Iterable[str]) -> frozenset[BudgetWindow]:
    """Return the budgets and windows of those keys that are valid keys of leaderboards."""
    boards, _ = decode_keys(keys, decode_board_key)
    return frozenset(board.of for _, board in boards)


def read_board(tenant: str, of: BudgetWindow, key: str, value: StoredValue) -> Board:
    """Decode one leaderboard; its ``omitted`` name what is unreadable."""
    board = Board(tenant, of, key)
    try:
        entries = _entries(value)
    except UnreadableUsageError as error:
        board.omitted.append(
            OmittedCounter(board.of, None, board.key, str(error), is_entity_known=False)
        )
        return board
    board.length = len(entries)
    for position, entry in enumerate(entries, start=1):
        _read_entry(board, f"entry {position}", entry)
    return board


def _read_entry(board: Board, place: str, entry: object) -> None:
    try:
        entity, fields = _entity(entry)
        require_counter_key(CounterKey(board.tenant, board.of, entity), board_key=board.key)
    except UnusableNameError as error:
        # An invalid name may be a damaged valid one, so the entity is unknown.
        reason = f"{place}: {error}"
        board.omitted.append(
            OmittedCounter(board.of, None, board.key, reason, is_entity_known=False)
        )
        return
    try:
        usage, shape = usage_of(fields)
    except UnreadableUsageError as error:
        reason = shortened(f"{place}, {_shown(entity)}: {error}")
        board.omitted.append(OmittedCounter(board.of, entity, board.key, reason))
        return
    board.entries.append(BoardEntry(entity, usage, shape))
    board.usages[entity] = max(usage, board.usages.get(entity, usage))


def _entries(value: StoredValue) -> list[object]:
    """Return a leaderboard's entries, not yet decoded.

    Raises:
        UnreadableUsageError: there is no list of entries; the message is short printable ASCII.
    """
    if value.fault is not None:
        raise UnreadableUsageError(value.fault)
    content = decode_json(value.data)
    if not isinstance(content, dict):
        raise UnreadableUsageError("the value is not an object")
    if "entries" not in content:
        raise UnreadableUsageError("the value has no field entries")
    if not isinstance(content["entries"], list):
        raise UnreadableUsageError("entries is not a list")
    return content["entries"]


def _entity(entry: object) -> tuple[Entity, dict[str, object]]:
    """Return an entry's entity and fields.

    Raises:
        UnusableNameError: the entry has no valid entity.
    """
    if not isinstance(entry, dict):
        raise UnusableNameError("not an object")
    if "entity" not in entry:
        raise UnusableNameError("no field entity")
    entity = entry["entity"]
    if entity is None:
        return None, entry
    if not is_json_text(entity):
        raise UnusableNameError("entity is neither a string nor null")
    return require_encodable(entity), entry


def _shown(entity: Entity) -> str:
    if entity is None:
        return "the aggregate"
    return ascii(entity if len(entity) <= _SHOWN_NAME else f"{entity[:_SHOWN_NAME]}...")


SOURCES: Mapping[CaptureSource, Source] = {
    CaptureSource.COUNTERS: Source(COUNTERS, read_counters),
    CaptureSource.LEADERBOARDS: Source(BOARDS, read_boards),
}


async def read_keys(stream: BucketStream, prefix: str) -> KeysRead:
    """Read all keys under ``prefix``, which ends in a dot, with their revisions.

    The result includes every key that existed before the call. The consumer is removed afterwards.

    Raises:
        StoreReadError: the read timed out, or was interrupted repeatedly.
    """
    try:
        with anyio.fail_after(stream.timeouts.reading):
            found = await _read_whole(stream, prefix)
            return await _read_whole(stream, prefix) if found.is_partial else found
    except TimeoutError as error:
        raise StoreReadError(
            f"Reading {prefix}> timed out after {stream.timeouts.reading:g} s.",
            "check whether the gateway writes faster than this host reads, and the servers' load.",
        ) from error


async def read_deletions(
    stream: BucketStream, after: int, at_most: int, within: float
) -> Deletions:
    """Find the delete marks of counters after a sequence, those of expired keys included.

    About ``at_most`` messages are read, without their values, for at most ``within`` seconds.

    Raises:
        StoreReadError: nothing was read in time, or the read was interrupted.
    """
    prefix = f"{COUNTERS}."
    drain = _Drain(stream, at_most)
    with anyio.move_on_after(within) as limit:
        info = await stream.info()
        async with _consumer(stream, prefix, info.leader, _changes_after(after)) as consumer:
            await drain.run(consumer)
    newest = max((live.revision for live in drain.keys.values()), default=0)
    # Messages arrive in the order of the stream.
    if drain.is_cut or (limit.cancelled_caught and newest):
        return deletions_in(drain.keys, newest)
    if limit.cancelled_caught:
        raise StoreReadError(
            f"Reading the changes of {prefix}> timed out after {within:g} s.",
            "check the load of the NATS servers.",
        )
    return deletions_in(drain.keys, max(newest, info.identity.last_sequence))


def deletions_in(keys: Mapping[str, LiveKey], until: int) -> Deletions:
    """Return the delete marks of counters among these keys."""
    deleted = {key: live.revision for key, live in keys.items() if live.value is None}
    decoded, _ = decode_keys(deleted, decode_key)
    found = ((TenantWindow(counter.tenant, counter.of), deleted[key]) for key, counter in decoded)
    return Deletions(tuple(found), until)


class _ReadInterruptedError(StoreReadError):
    """The server ended a read early, with a status."""


async def _read_whole(stream: BucketStream, prefix: str) -> KeysRead:
    """Read, and restart if the server interrupts the read: a consumer dies with its leader.

    Gives up after at least three reads and at least ``_MIN_RETRY_SECONDS``.
    """
    give_up_at = anyio.current_time() + _MIN_RETRY_SECONDS
    reads = 0
    while True:
        reads += 1
        try:
            return await _read_once(stream, prefix)
        except _ReadInterruptedError:
            if reads >= _MIN_READS and anyio.current_time() > give_up_at:
                raise
            await anyio.sleep(_RETRY_DELAY_SECONDS)


async def _read_once(stream: BucketStream, prefix: str) -> KeysRead:
    announced = await stream.count(prefix)
    drain = _Drain(stream)
    async with _consumer(stream, prefix, announced.leader, _NEWEST) as consumer:
        await drain.run(consumer)
    # The announced count includes deleted keys.
    is_partial = len(drain.keys) < announced.subject_count
    return KeysRead(drain.keys, is_partial, announced.identity.last_sequence)


class _Drain:
    """Receives all messages of a consumer and keeps the newest one of each key.

    After ``at_most`` messages or a few more it stops, and ``is_cut``.
    """

    def __init__(self, stream: BucketStream, at_most: int | None = None) -> None:
        self._stream = stream
        self._at_most = at_most
        self._received = 0
        self.is_cut = False
        self.keys: dict[str, LiveKey] = {}

    async def run(self, consumer: str) -> None:
        """Pull until the server responds that no message is left."""
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream.name}.{consumer}"
        async with self._stream.connection.exchange() as exchange:
            outstanding, request = 0, _PULL
            while True:
                if outstanding <= 0:
                    await exchange.send(subject, request)
                    outstanding = 1 if request == _PULL_ONE else BATCH
                    request, before = _PULL, self._received
                if self._at_most is not None and self._received >= self._at_most:
                    self.is_cut = True
                    return
                for message in await self._receive(exchange, subject):
                    # Only a status has no reply subject.
                    if message.reply:
                        outstanding -= 1
                        self._keep(message)
                        continue
                    status = _status(message).lower()
                    if status == _TOO_LARGE:
                        outstanding = 0
                        # Nothing arrived: the first message alone exceeds the limit of a pull.
                        request = _PULL if self._received > before else _PULL_ONE
                    elif status != _BATCH_DONE:
                        self._require_end(message)
                        return
                    elif self._received > before:
                        # Otherwise the status belongs to the previous pull.
                        outstanding = 0

    async def _receive(self, exchange: Exchange, subject: str) -> list[Msg]:
        answer = self._stream.timeouts.answer
        try:
            with anyio.fail_after(answer):
                with anyio.move_on_after(answer / 2):
                    return await exchange.receive()
                # A pull that ends exactly at its byte limit ends without a status.
                await exchange.send(subject, _PULL)
                return await exchange.receive()
        except TimeoutError as error:
            raise StoreReadError(
                f"The bucket {self._stream.bucket} stopped responding during a read.",
                "check the NATS servers and the stream's leader.",
            ) from error

    def _keep(self, message: Msg) -> None:
        self._received += 1
        revision, written_ns = sequence_and_time(message.reply)
        key = message.subject.removeprefix(self._stream.subject_prefix)
        known = self.keys.get(key)
        if known is None or known.revision <= revision:
            self.keys[key] = read_message(message.data, message.headers, revision, written_ns)

    def _require_end(self, message: Msg) -> None:
        if (message.headers or {}).get(STATUS) != _NO_MESSAGES:
            raise _ReadInterruptedError(
                f"Read of the bucket {self._stream.bucket} interrupted: {_status(message)}.",
                "wait until the stream's leader is stable, then retry.",
            )


def _status(message: Msg) -> str:
    headers = message.headers or {}
    # The driver may return a description of several lines.
    return " ".join(f"{headers.get(STATUS)} {headers.get('Description', '')}".split())


@contextlib.asynccontextmanager
async def _consumer(
    stream: BucketStream, prefix: str, leader: str | None, delivers: Delivery
) -> AsyncIterator[str]:
    """Provide a consumer on the leader's server; it is deleted at the end in any case."""
    name = await _create_on_leader(stream, prefix, leader, delivers)
    try:
        yield name
    except BaseException:
        await _delete_after_failure(stream, name)
        raise
    await _delete(stream, name)


async def _create_on_leader(
    stream: BucketStream, prefix: str, leader: str | None, delivers: Delivery
) -> str:
    """Create a consumer on the leader's server.

    The cluster places a consumer on any server with a replica: also on one that is catching up,
    whose reads are incomplete without a sign of it, or on one that has just died. So this creates
    consumers until one is on the leader. Right after an election of the meta leader, creation
    fails for a short time.
    """
    failure: StoreError | None = None
    give_up_at = anyio.current_time() + _NO_QUORUM_SECONDS
    for _ in range(1 if leader is None else _MAX_PLACEMENTS):
        name = f"{CONSUMER_PREFIX}{token_hex(8)}"
        is_unwanted = True
        try:
            placed_on = await _create(stream, prefix, name, delivers, is_replicated=bool(leader))
            if leader in (None, placed_on):
                is_unwanted = False
                return name
        except StoreNoQuorumError as error:
            is_unwanted = False
            if leader is None or anyio.current_time() > give_up_at:
                raise
            failure = error
            await anyio.sleep(_RETRY_DELAY_SECONDS)
        except StoreUnreachableError as error:
            failure = error
        finally:
            if is_unwanted:
                await _delete_after_failure(stream, name)
    raise failure or StoreReadError(
        f"Could not create a consumer on the leader of the bucket {stream.bucket}.",
        "wait until the stream's leader is stable, then retry.",
    )


async def _create(
    stream: BucketStream, prefix: str, name: str, delivers: Delivery, *, is_replicated: bool
) -> str | None:
    subjects = f"{stream.subject_prefix}{prefix}>"
    created = await stream.ask(
        # With the filter in the subject, permissions can restrict a user to some tenants.
        f"CONSUMER.CREATE.{stream.name}.{name}.{subjects}",
        {
            "stream_name": stream.name,
            "config": {
                "name": name,
                "ack_policy": "none",
                **delivers,
                "filter_subject": subjects,
                "replay_policy": "instant",
                "inactive_threshold": INACTIVE_SECONDS * _NS_PER_SECOND,
                "mem_storage": True,
                "num_replicas": 1,
            },
        },
        within=min(_PLACEMENT_TIMEOUT, stream.timeouts.answer) if is_replicated else None,
    )
    placed_on: str | None = (created.get("cluster") or {}).get("leader")
    return placed_on


async def _delete(stream: BucketStream, name: str) -> None:
    try:
        with anyio.fail_after(_DELETE_TIMEOUT, shield=True):
            await stream.ask(f"CONSUMER.DELETE.{stream.name}.{name}", {})
    except StorePermissionError:
        raise
    except (StoreError, TimeoutError) as error:
        _log.warning(
            "Could not delete consumer %s of %s; the server removes it in %d s. %s",
            name,
            stream.name,
            INACTIVE_SECONDS,
            error,
        )


async def _delete_after_failure(stream: BucketStream, name: str) -> None:
    """Delete a consumer after another failure, which is the one to report."""
    with contextlib.suppress(StorePermissionError):
        await _delete(stream, name)
