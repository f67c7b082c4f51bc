"""Reads tenants from the bucket: a raw pull read of the leader that ends on status 404."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from secrets import token_hex

import anyio
from nats.aio.msg import Msg

from budget_recovery_dagster.adapters.nats.boards import read_boards
from budget_recovery_dagster.adapters.nats.codec import (
    BOARDS,
    COUNTERS,
    KeysRead,
    decode_key,
    decode_keys,
    decode_name,
    decode_value,
    expiry_after,
    printable,
    tenant_prefix,
)
from budget_recovery_dagster.adapters.nats.connection import Exchange
from budget_recovery_dagster.adapters.nats.stream import (
    STATUS,
    BucketStream,
    LiveKey,
    LiveKeysRead,
    read_message,
    sequence_and_time,
)
from budget_recovery_dagster.domain.counters import (
    CounterReading,
    OmittedCounter,
    UnreadableKey,
    UnreadableUsageError,
    UnusableNameError,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource, TenantReading
from budget_recovery_dagster.errors import (
    StoreError,
    StoreNoQuorumError,
    StorePermissionError,
    StoreReadError,
    StoreUnreachableError,
)
from budget_recovery_dagster.ports import TenantListing

_log = logging.getLogger(__name__)
BATCH = 5000
MAX_BYTES = 16 * 2**20
"""The most to be sent at one pull; a server drops whoever lets 64 MB (its default) pile up."""
CONSUMER_PREFIX = "budget-recovery-"
INACTIVE_SECONDS = 30
"""So long after its last pull the server removes a consumer that was left behind."""
_NS_PER_SECOND = 10**9
_READINGS = 3
_SETTLING_SECONDS = 0.2
# So long a consumer may answer nobody though it was just made: interest in it spreads through a
# busy cluster apart from the answer that it was made, and a server that comes back disturbs both.
_UNSETTLED_SECONDS = 5.0
_PLACEMENTS = 30
_PLACEMENT_SECONDS = 1.0
_QUORUM_SECONDS = 3.0
_DELETE_SECONDS = 2.0
_NOTHING_LEFT = "404"
_TOO_LARGE = "409 message size exceeds maxbytes"
_BATCH_DONE = "409 batch completed"
_PULL = f'{{"batch":{BATCH},"max_bytes":{MAX_BYTES},"no_wait":true}}'.encode()
_PULL_ONE = b'{"batch":1,"no_wait":true}'


class _BrokenOffError(StoreReadError):
    """The server ended a reading before its end, and said so."""


async def read_keys(stream: BucketStream, prefix: str) -> KeysRead:
    """Read all values under a prefix; see ``read_live_keys``."""
    return (await read_live_keys(stream, prefix)).without_deleted()


async def read_live_keys(stream: BucketStream, prefix: str) -> LiveKeysRead:
    """Read all keys that begin with ``prefix``, which ends in a dot, with their revisions.

    Every key that existed before the call is in it. Nothing is left behind in the store.

    Raises:
        StoreReadError: it took too long, or was broken off again and again.
    """
    try:
        with anyio.fail_after(stream.timeouts.reading):
            keys, is_complete = await _read_whole(stream, prefix)
            if not is_complete:
                keys, is_complete = await _read_whole(stream, prefix)
    except TimeoutError as error:
        raise StoreReadError(
            f"Reading {prefix}> took longer than {stream.timeouts.reading:g} s.",
            "see whether the gateway writes faster than can be read, or raise the time-out.",
        ) from error
    return LiveKeysRead(keys, is_partial=not is_complete)


async def _read_whole(stream: BucketStream, prefix: str) -> tuple[dict[str, LiveKey], bool]:
    """Read, and begin anew where the server breaks off: a consumer dies with its leader.

    Three times, however long each takes; and for some seconds, however many that are.
    """
    no_later = anyio.current_time() + _UNSETTLED_SECONDS
    readings = 0
    while True:
        readings += 1
        try:
            return await _read_once(stream, prefix)
        except _BrokenOffError:
            if readings >= _READINGS and anyio.current_time() > no_later:
                raise
            await anyio.sleep(_SETTLING_SECONDS)


async def _read_once(stream: BucketStream, prefix: str) -> tuple[dict[str, LiveKey], bool]:
    announced = await stream.count(prefix)
    drain = _Drain(stream)
    async with _consumer(stream, prefix, announced.leader) as consumer:
        await drain.run(consumer)
    # Deleted keys are announced, too.
    return drain.keys, len(drain.keys) >= announced.subject_count


class _Drain:
    """Takes all messages of a consumer and keeps the newest of each key."""

    def __init__(self, stream: BucketStream) -> None:
        self._stream = stream
        self._taken = 0
        self.keys: dict[str, LiveKey] = {}

    async def run(self, consumer: str) -> None:
        """Pull until the server says that nothing is left."""
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream.name}.{consumer}"
        async with self._stream.connection.exchange() as exchange:
            outstanding, request = 0, _PULL
            while True:
                if outstanding <= 0:
                    await exchange.send(subject, request)
                    outstanding = 1 if request == _PULL_ONE else BATCH
                    request, before = _PULL, self._taken
                for message in await self._receive(exchange, subject):
                    # A status is all that comes without a place for an acknowledgement.
                    if message.reply:
                        outstanding -= 1
                        self._take(message)
                        continue
                    status = _status(message).lower()
                    if status == _TOO_LARGE:
                        outstanding = 0
                        # The first of a pull can only be larger than all of it may be.
                        request = _PULL if self._taken > before else _PULL_ONE
                    elif status != _BATCH_DONE:
                        self._require_end(message)
                        return
                    elif self._taken > before:
                        # Else it is about the pull before, the last message of which came first.
                        outstanding = 0

    async def _receive(self, exchange: Exchange, subject: str) -> list[Msg]:
        answer = self._stream.timeouts.answer
        try:
            with anyio.fail_after(answer):
                with anyio.move_on_after(answer / 2):
                    return await exchange.receive()
                # A pull whose bytes are used up exactly ends without a word.
                await exchange.send(subject, _PULL)
                return await exchange.receive()
        except TimeoutError as error:
            raise StoreReadError(
                f"The bucket {self._stream.bucket} stopped answering in mid-reading.",
                "see whether the NATS servers and the stream's leader are healthy.",
            ) from error

    def _take(self, message: Msg) -> None:
        self._taken += 1
        revision, written_ns = sequence_and_time(message.reply)
        key = message.subject.removeprefix(self._stream.subject_prefix)
        known = self.keys.get(key)
        if known is None or known.revision <= revision:
            headers = message.headers or {}
            self.keys[key] = read_message(message.data, headers, revision, written_ns)

    def _require_end(self, message: Msg) -> None:
        if (message.headers or {}).get(STATUS) != _NOTHING_LEFT:
            raise _BrokenOffError(
                f"Reading the bucket {self._stream.bucket} was broken off: {_status(message)}.",
                "wait for the stream's leader to settle; the next reading begins anew.",
            )


def _status(message: Msg) -> str:
    headers = message.headers or {}
    # The driver may put more lines of the status into its description.
    return " ".join(f"{headers.get(STATUS)} {headers.get('Description', '')}".split())


@contextlib.asynccontextmanager
async def _consumer(stream: BucketStream, prefix: str, leader: str | None) -> AsyncIterator[str]:
    """Hold a consumer where the stream's leader is; it is gone afterwards, whatever happens."""
    name = await _place(stream, prefix, leader)
    try:
        yield name
    except BaseException:
        await _discard(stream, name)
        raise
    await _delete(stream, name)


async def _place(stream: BucketStream, prefix: str, leader: str | None) -> str:
    """Create a consumer on the leader's server.

    The cluster puts it on any server with a replica, also on one that is still catching up, whose
    readings are short and look complete, or on one that has just died. So it is created until it
    lands on the leader. For a moment after a change of the cluster's own leader nothing can be
    created.
    """
    failure: StoreError | None = None
    no_later = anyio.current_time() + _QUORUM_SECONDS
    for _ in range(1 if leader is None else _PLACEMENTS):
        name = f"{CONSUMER_PREFIX}{token_hex(8)}"
        is_unwanted = True
        try:
            if leader in (None, await _create(stream, prefix, name, is_replicated=bool(leader))):
                is_unwanted = False
                return name
        except StoreNoQuorumError as error:
            is_unwanted = False
            if leader is None or anyio.current_time() > no_later:
                raise
            failure = error
            await anyio.sleep(_SETTLING_SECONDS)
        except StoreUnreachableError as error:
            failure = error
        finally:
            if is_unwanted:
                await _discard(stream, name)
    raise failure or StoreReadError(
        f"No consumer could be placed on the leader of the bucket {stream.bucket}.",
        "wait for the stream's leader to settle; the next reading begins anew.",
    )


async def _create(
    stream: BucketStream, prefix: str, name: str, *, is_replicated: bool
) -> str | None:
    subjects = f"{stream.subject_prefix}{prefix}>"
    created = await stream.ask(
        # The form that names the filter: by it a user can be confined to some tenants.
        f"CONSUMER.CREATE.{stream.name}.{name}.{subjects}",
        {
            "stream_name": stream.name,
            "config": {
                "name": name,
                "ack_policy": "none",
                "deliver_policy": "last_per_subject",
                "filter_subject": subjects,
                "replay_policy": "instant",
                "inactive_threshold": INACTIVE_SECONDS * _NS_PER_SECOND,
                "mem_storage": True,
                "num_replicas": 1,
            },
        },
        within=min(_PLACEMENT_SECONDS, stream.timeouts.answer) if is_replicated else None,
    )
    placed_on: str | None = (created.get("cluster") or {}).get("leader")
    return placed_on


async def _delete(stream: BucketStream, name: str) -> None:
    try:
        with anyio.fail_after(_DELETE_SECONDS, shield=True):
            await stream.ask(f"CONSUMER.DELETE.{stream.name}.{name}", {})
    except StorePermissionError:
        raise
    except (StoreError, TimeoutError) as error:
        _log.warning(
            "Consumer %s of %s could not be deleted; the server removes it in %d s. %s",
            name,
            stream.name,
            INACTIVE_SECONDS,
            error,
        )


async def _discard(stream: BucketStream, name: str) -> None:
    """Delete a consumer because of another failure, which is the one to be told."""
    with contextlib.suppress(StorePermissionError):
        await _delete(stream, name)


def read_counters(tenant: str, found: KeysRead) -> TenantReading:
    """Decode all that was found under a tenant's prefix; what cannot be read is named."""
    keys, unreadable = decode_keys(found.values, decode_key)
    counters: list[CounterReading] = []
    omitted: list[OmittedCounter] = []
    for key, counter in keys:
        value = found.values[key]
        try:
            if value.fault is not None:
                raise UnreadableUsageError(value.fault)
            usage, shape = decode_value(value.data)
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
    )


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of keys: how they begin, and what those of a tenant mean."""

    first: str
    decode: Callable[[str, KeysRead], TenantReading]


SOURCES: Mapping[CaptureSource, Source] = {
    CaptureSource.COUNTERS: Source(COUNTERS, read_counters),
    CaptureSource.LEADERBOARDS: Source(BOARDS, read_boards),
}


@dataclass(frozen=True, slots=True)
class SourceReader:
    """Reads tenants from one source of a store.

    The store gives what it has under a prefix that ends in a dot: ``list_keys`` the keys, and
    ``read_values`` their values too.
    """

    source: Source
    list_keys: Callable[[str], Iterable[str]]
    read_values: Callable[[str], KeysRead]

    def list_tenants(self) -> TenantListing:
        """List the tenants by their keys; one whose keys are all deleted may still be listed."""
        return list_tenants(self.source.first, self.list_keys(f"{self.source.first}."))

    def read(self, tenant: str) -> TenantReading:
        """Read a tenant's counters from every key of the source that existed before the call."""
        return self.source.decode(
            tenant, self.read_values(prefix_to_read(self.source.first, tenant))
        )


def list_tenants(first: str, keys: Iterable[str]) -> TenantListing:
    """Tell the tenants that these keys, which begin with the token ``first``, belong to."""
    tenants: dict[str, str] = {}
    unreadable: list[UnreadableKey] = []
    for key in keys:
        token, goes_on, _ = key.removeprefix(f"{first}.").partition(".")
        try:
            if not goes_on:
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


def prefix_to_read(first: str, tenant: str) -> str:
    """Return the prefix under which all that belongs to a tenant is read.

    Raises:
        StoreReadError: no counter can belong to a tenant of this name.
    """
    try:
        return tenant_prefix(first, tenant)
    except UnusableNameError as error:
        raise StoreReadError(
            f"No counter can belong to the tenant {tenant[:100]!a}: {error}.",
            "use the name of a tenant as the gateway knows it.",
        ) from error
