"""Reads tenants from the bucket: lists them, reads their keys, and decodes what was read.

Usages come from counters or from leaderboards, which list the largest of each budget and window. A
full leaderboard may omit entities, and the entities on an unreadable one are unknown. A reading
reports both, so that an unlisted entity is not reported as missing.
"""

import contextlib
import logging
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import NamedTuple, TypeVar

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
from budget_recovery_dagster.adapters.nats.consumers import (
    Delivery,
    Drain,
    ReadInterruptedError,
    opened_consumer,
)
from budget_recovery_dagster.adapters.nats.stream import (
    BucketStream,
    KeysRead,
    LiveKey,
    StreamInfo,
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
    StoreChangedError,
    StoreError,
    StorePermissionError,
    StoreReadError,
)

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
_MIN_READS = 3
_RETRY_DELAY_SECONDS = 0.2
# A new consumer may not respond for this long: in a busy cluster, interest in it can arrive after
# the response that it was created, and a server that restarts delays both.
_MIN_RETRY_SECONDS = 5.0
_MAX_LISTINGS = 3
# To count the keys of a filter by name, the server copies and sorts all their names, while writes
# wait. Above this number the pending messages of a consumer cost less.
_COUNTED_BY_NAME = 20_000
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

    ``find_tenants`` lists the tenants of a first token. ``read_keys`` returns the keys under a
    prefix that ends in a dot, ``present_keys`` only the names of those that are not deleted.
    """

    source: Source
    find_tenants: Callable[[str], TenantListing]
    read_keys: Callable[[str], KeysRead]
    present_keys: Callable[[str], Iterable[str]]

    def list_tenants(self) -> TenantListing:
        """List the tenants that have keys; a tenant whose keys are all deleted may be listed."""
        return self.find_tenants(self.source.first)

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
            return boards_in(self.present_keys(prefix_to_read(BOARDS, tenant)))
        except StoreError as error:
            _log.warning("Could not list the leaderboards of tenant %r: %s", tenant, error)
            return None


@dataclass(slots=True)
class TenantsFound:
    """The tenants of keys that all have ``first`` as the first token, and the unreadable keys.

    A key may be added again. No key has an effect on another one.
    """

    first: str
    _names: dict[str, str | UnusableNameError] = field(default_factory=dict, init=False)
    _unreadable: dict[str, str] = field(default_factory=dict, init=False)

    def add(self, key: str) -> None:
        """Add the tenant of a key; a key without one is unreadable."""
        token, dot, _ = key[len(self.first) + 1 :].partition(".")
        name = self._names.get(token)
        if dot and isinstance(name, str):
            return
        if not dot:
            self._unreadable[key] = "ends after the tenant"
            return
        if name is None:
            name = self._names[token] = self._decoded(token)
        if not isinstance(name, str):
            self._unreadable[key] = str(name)

    def listing(self) -> TenantListing:
        """Return what was found; the unreadable keys are in order."""
        return TenantListing(
            frozenset(name for name in self._names.values() if isinstance(name, str)),
            tuple(UnreadableKey(printable(key), self._unreadable[key]) for key in self._sorted()),
        )

    def _sorted(self) -> list[str]:
        return sorted(self._unreadable, key=printable)

    def _decoded(self, token: str) -> str | UnusableNameError:
        try:
            name = decode_name(token)
            tenant_prefix(self.first, name)
        except UnusableNameError as error:
            return error
        return name


def list_tenants(first: str, keys: Iterable[str]) -> TenantListing:
    """Return the tenants of these keys, which all have ``first`` as the first token."""
    found = TenantsFound(first)
    for key in keys:
        found.add(key)
    return found.listing()


def _changes_after(sequence: int) -> Delivery:
    return {
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": sequence + 1,
        "headers_only": True,
    }


# The server looks up the newest message of each key first, and then reads only these.
_NEWEST: Delivery = {"deliver_policy": "last_per_subject"}


def _newest_of_all(info: StreamInfo) -> Delivery:
    # With all keys, or to be counted, it need not look them up if it keeps no others.
    return {"deliver_policy": "all"} if info.keeps_one else _NEWEST


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


async def read_keys(stream: BucketStream, prefix: str, delivery: Delivery = _NEWEST) -> KeysRead:
    """Read all keys under ``prefix``, which ends in a dot, with their revisions.

    The result includes every key that existed before the call. The consumer is removed afterwards.
    ``delivery`` delivers the newest message of each key.

    Raises:
        StoreReadError: the read timed out, or was interrupted repeatedly.
    """

    async def read() -> KeysRead:
        return await _read_once(stream, prefix, delivery)

    async with _within_time(stream, prefix):
        found = await _restarted(read)
        return await _restarted(read) if found.is_partial else found


async def present_keys(stream: BucketStream, prefix: str) -> frozenset[str]:
    """List the keys under ``prefix``, which ends in a dot, that are not deleted.

    The names of a stream include deleted keys, so those that exist are read, without their values.

    Raises:
        StoreReadError: as ``read_keys``, or if some could not be read.
    """
    if not await stream.keys(prefix):
        return frozenset()
    found = await read_keys(stream, prefix, {**_NEWEST, "headers_only": True})
    if found.is_partial:
        raise StoreReadError(
            f"Fewer keys arrived of {prefix}> than the store announces.",
            "check whether keys are purged from the gateway's bucket.",
        )
    return frozenset(found.values())


async def find_tenants(stream: BucketStream, first: str) -> TenantListing:
    """List the tenants of all keys with this first token, without reading any value.

    To ask the server for the names of all keys would cost less here. But while it copies and sorts
    them, the gateway's writes wait: seconds with a million keys.

    Raises:
        StoreReadError: the listing timed out, or was interrupted repeatedly.
    """
    found = TenantsFound(first)
    known: frozenset[str] | None = None

    async def read() -> bool:
        return await _list_once(stream, found)

    async with _within_time(stream, f"{first}."):
        for _ in range(_MAX_LISTINGS):
            try:
                is_whole, listing = await _restarted(read), found.listing()
            except StorePermissionError:
                # A user who may read only some tenants may still ask for the names of all keys.
                return list_tenants(first, await stream.keys(f"{first}."))
            # Keys that expire or are purged are announced and never arrive. A purge can also end
            # the delivery of the others, so a listing that is short needs a second opinion.
            if is_whole or listing.tenants == known:
                return listing
            known = listing.tenants
    raise StoreReadError(
        f"Could not list the bucket {stream.bucket}: too many keys were removed meanwhile.",
        "wait until the purge has finished, then check what it removed.",
    )


async def _list_once(stream: BucketStream, found: TenantsFound) -> bool:
    """Add all keys; return False if fewer arrived than the server announced."""
    info = await stream.info()
    delivers = {**_newest_of_all(info), "headers_only": True}
    skipped = len(stream.subject_prefix)
    arrived = _ArrivedKeys(info.identity.last_sequence)

    def add(message: Msg) -> None:
        found.add(message.subject[skipped:])
        arrived.add(message)

    async with opened_consumer(stream, f"{found.first}.>", info.leader, delivers) as consumer:
        await Drain(stream, add).run(consumer.name)
    return arrived.count() >= consumer.pending


class _ArrivedKeys:
    """How many keys have arrived: one that is overwritten meanwhile arrives again, and counts once.

    A key that is new since the announcement counts as well: it looks like one that was overwritten
    before it arrived. No name is kept, because there may be millions; equal hashes of different
    keys would only cause one more listing.
    """

    def __init__(self, until: int) -> None:
        # Up to the sequence before the announcement, each key arrives once.
        self._until = until
        self._before = array("q")
        self._after: set[int] = set()

    def add(self, message: Msg) -> None:
        """Count the key of a message."""
        sequence, _ = sequence_and_time(message.reply)
        key = hash(message.subject)
        if sequence <= self._until:
            self._before.append(key)
        else:
            self._after.add(key)

    def count(self) -> int:
        """Return how many different keys have arrived."""
        again = self._after.intersection(self._before) if self._after else ()
        return len(self._before) + len(self._after) - len(again)


async def count_keys(
    stream: BucketStream, filters: Mapping[str, int], *, within: float
) -> dict[str, int]:
    """Count the keys that match each filter, deleted ones included.

    Those not in time, and those whose own count fails, are left out. ``filters`` has the keys that
    each is expected to match.

    Raises:
        StoreChangedError: the connection leads to another store.
        StoreUnreachableError: nothing was counted in time.
        StoreError: as ``BucketStream.ask``; nothing was counted.
    """
    started = anyio.current_time()
    small = [each for each, expected in filters.items() if expected < _COUNTED_BY_NAME]
    counts = dict(zip(small, await stream.count_matching(small, within=within), strict=True))
    left = within - (anyio.current_time() - started)
    failure: StoreError | None = None
    with anyio.move_on_after(left):
        for each in [each for each in filters if each not in counts]:
            try:
                counts[each] = await _count_pending(stream, each, within=left)
            except StoreChangedError:
                raise
            except StoreError as error:
                _log.warning("Could not count the keys of %s: %s", each, error)
                failure = error
    found = {each: count for each, count in counts.items() if count is not None}
    if failure is not None and not found:
        raise failure
    return found


async def _count_pending(stream: BucketStream, key_filter: str, *, within: float) -> int | None:
    info = await stream.info()
    try:
        async with opened_consumer(
            stream, key_filter, info.leader, _newest_of_all(info)
        ) as consumer:
            return consumer.pending
    except StorePermissionError:
        [count] = await stream.count_matching([key_filter], within=within)
        return count


async def read_deletions(
    stream: BucketStream, after: int, at_most: int, within: float
) -> Deletions:
    """Find the delete marks of counters after a sequence, those of expired keys included.

    About ``at_most`` messages are read, without their values, for at most ``within`` seconds.

    Raises:
        StoreReadError: nothing was read in time, or the read was interrupted.
    """
    subjects, changed = f"{COUNTERS}.>", _NewestMessages(stream)
    drain = Drain(stream, changed.keep, at_most)
    with anyio.move_on_after(within) as limit:
        info = await stream.info()
        async with opened_consumer(
            stream, subjects, info.leader, _changes_after(after)
        ) as consumer:
            await drain.run(consumer.name)
    newest = max((live.revision for live in changed.keys.values()), default=0)
    # Messages arrive in the order of the stream.
    if drain.is_cut or (limit.cancelled_caught and newest):
        return deletions_in(changed.keys, newest)
    if limit.cancelled_caught:
        raise StoreReadError(
            f"Reading the changes of {subjects} timed out after {within:g} s.",
            "check the load of the NATS servers.",
        )
    return deletions_in(changed.keys, max(newest, info.identity.last_sequence))


def deletions_in(keys: Mapping[str, LiveKey], until: int) -> Deletions:
    """Return the delete marks of counters among these keys."""
    deleted = {key: live.revision for key, live in keys.items() if live.value is None}
    decoded, _ = decode_keys(deleted, decode_key)
    found = ((TenantWindow(counter.tenant, counter.of), deleted[key]) for key, counter in decoded)
    return Deletions(tuple(found), until)


@contextlib.asynccontextmanager
async def _within_time(stream: BucketStream, prefix: str) -> AsyncIterator[None]:
    try:
        with anyio.fail_after(stream.timeouts.reading):
            yield
    except TimeoutError as error:
        raise StoreReadError(
            f"Reading {prefix}> timed out after {stream.timeouts.reading:g} s.",
            "check whether the gateway writes faster than this host reads, and the servers' load. A"
            " large store may need a longer BUDGET_RECOVERY_READ_TIMEOUT_SECONDS.",
        ) from error


async def _restarted(read: Callable[[], Awaitable[Result]]) -> Result:
    """Read, and restart if the server interrupts the read: a consumer dies with its leader.

    Gives up after at least three reads and at least ``_MIN_RETRY_SECONDS``.
    """
    give_up_at = anyio.current_time() + _MIN_RETRY_SECONDS
    reads = 0
    while True:
        reads += 1
        try:
            return await read()
        except ReadInterruptedError:
            if reads >= _MIN_READS and anyio.current_time() > give_up_at:
                raise
            await anyio.sleep(_RETRY_DELAY_SECONDS)


async def _read_once(stream: BucketStream, prefix: str, delivery: Delivery) -> KeysRead:
    info, newest = await stream.info(), _NewestMessages(stream)
    async with opened_consumer(stream, f"{prefix}>", info.leader, delivery) as consumer:
        await Drain(stream, newest.keep).run(consumer.name)
    # The announced messages include deleted keys.
    is_partial = len(newest.keys) < consumer.pending
    return KeysRead(newest.keys, is_partial, info.identity.last_sequence)


class _NewestMessages:
    """The newest message of each key."""

    def __init__(self, stream: BucketStream) -> None:
        self._stream = stream
        self.keys: dict[str, LiveKey] = {}

    def keep(self, message: Msg) -> None:
        """Keep a message unless a newer one of its key is known."""
        revision, written_ns = sequence_and_time(message.reply)
        key = message.subject.removeprefix(self._stream.subject_prefix)
        known = self.keys.get(key)
        if known is None or known.revision <= revision:
            self.keys[key] = read_message(message.data, message.headers, revision, written_ns)
