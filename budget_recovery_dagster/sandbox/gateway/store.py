"""The bucket and the stream of costs: their keys, and one connection to both.

A connection is never repaired. When it breaks, or when the bucket or the stream is lost or
replaced, all work on it ends. ``keep_working`` then starts again on a new connection, without any
state of the old one.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    Header,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)

from budget_recovery_dagster.adapters.nats.codec import (
    COUNTERS,
    CounterKey,
    UnreadableKeyError,
    decode_key,
    encode_key,
)

log = logging.getLogger("gateway")

Result = TypeVar("Result")

BLOCKED = "blocked"
"""``blocked.<tenant>.<budget>.<window>.<entity>``: an entity that has reached its limit."""

ANSWER_SECONDS = 2.0
"""How long the server may take for an answer."""

CHECK_SECONDS = 0.4
"""The interval of checks for changes that no message reports."""

RETRY_SECONDS = 0.3
"""The pause before work on a store starts again."""

_CONNECT_SECONDS = 5.0

# Long enough for running watchers; a later one sees that the key does not exist.
_MARKER_SECONDS = 600
# After this time, the cost of an aggregator that died is delivered to the next one.
_ACK_SECONDS = 1.0
# A cost whose acknowledgement was lost is sent again within seconds, and the server then drops it.
# Correct counts do not rely on that: the counters' marks cover later duplicates. The server keeps
# every id for this time, so it is short.
_DUPLICATE_SECONDS = 120.0

# The server lists no more subjects in one answer.
_MOST_SUBJECTS = 100_000

_NO_MESSAGE = 10037
_WRONG_REVISION = (10071, 10164)
_EXISTS_WITH_ANOTHER_CONFIGURATION = 10058
_AGGREGATOR = "aggregator"


class WorkInterruptedError(Exception):
    """The bucket, the stream, the connection or a message is lost; the message says which."""


FAILURES = (WorkInterruptedError, nats.errors.Error, OSError, TimeoutError)
"""The errors after which work on a store must start again."""


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket and its servers: ``url`` names one NATS server, or several separated by commas."""

    url: str
    bucket: str


@dataclass(frozen=True, slots=True)
class Seen:
    """The last known state of a key; ``data`` is None if the key does not exist."""

    revision: int
    data: bytes | None

    @classmethod
    def of(cls, revision: int, data: bytes | None, headers: Mapping[str, str] | None) -> "Seen":
        """Read a message of the bucket's stream."""
        is_marker = headers is not None and (
            headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers
        )
        return cls(revision, None if is_marker else data or b"")


NOTHING = Seen(0, None)
"""A key that never existed."""


def suffix_of(counter: CounterKey) -> str:
    """Return the part that the keys of a counter and of its block have in common.

    Raises:
        UnusableNameError: no key can hold one of the names.
    """
    return encode_key(counter).removeprefix(f"{COUNTERS}.")


# A burst changes the same counters and their blocks again and again.
@lru_cache(maxsize=100_000)
def counter_of(suffix: str) -> CounterKey:
    """Read what ``suffix_of`` writes.

    Raises:
        UnreadableKeyError: it names no counter.
    """
    return decode_key(f"{COUNTERS}.{suffix}")


def described(suffix: str) -> str:
    """Name a counter for people."""
    try:
        counter = counter_of(suffix)
    except UnreadableKeyError:
        return suffix
    entity = "" if counter.entity is None else f" for {counter.entity!r}"
    return f"budget {counter.of.budget!r} of {counter.tenant!r}{entity}, {counter.of.window.token}"


def bucket_stream(bucket: str) -> str:
    """Return the name of the stream behind a bucket."""
    return f"KV_{bucket}"


def cost_stream(bucket: str) -> str:
    """Return the name of the stream with the costs to count in a bucket."""
    return f"COSTS_{bucket}"


def cost_subject(bucket: str) -> str:
    """Return the subject on which these costs are published."""
    return f"costs.{bucket}"


async def answer_to(call: Awaitable[Result]) -> Result:
    """Wait for an answer of the driver; stop if this task was cancelled meanwhile.

    If both happen at the same time, the driver swallows the cancellation (before Python 3.12).
    """
    try:
        return await call
    finally:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError


class Store:
    """The bucket and the stream of costs; ``opened`` makes it.

    Every method that asks the server raises one of FAILURES if there is no usable answer.
    """

    def __init__(
        self,
        client: Client,
        bucket: str,
        broken: asyncio.Event,
        of_bucket: StreamInfo,
        of_costs: StreamInfo,
    ) -> None:
        self.client = client
        self.bucket = bucket
        self.js = client.jetstream(timeout=ANSWER_SECONDS)
        self._broken = broken
        self._created: Mapping[str, datetime | None] = {
            bucket_stream(bucket): of_bucket.created,
            cost_stream(bucket): of_costs.created,
        }
        self._marker_headers = (
            {"Nats-TTL": str(_MARKER_SECONDS)} if of_bucket.config.allow_msg_ttl else {}
        )

    async def read(self, key: str) -> Seen:
        """Read a key from the leader, which is always current."""
        request = self.js.get_msg(
            bucket_stream(self.bucket), subject=self.subject(key), direct=False
        )
        try:
            message = await answer_to(request)
        except nats.js.errors.NotFoundError as error:
            if error.err_code != _NO_MESSAGE:
                raise
            return NOTHING
        return Seen.of(message.seq or 0, message.data, message.headers)

    async def write(self, key: str, data: bytes, *, expecting: int) -> int | None:
        """Write a key if its revision is ``expecting`` (0: no key), else return None."""
        return await self._publish(key, data, expecting, {})

    async def remove(self, key: str, *, expecting: int) -> int | None:
        """Purge a key if its revision is ``expecting``, else return None."""
        headers = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", **self._marker_headers}
        return await self._publish(key, b"", expecting, headers)

    async def _publish(
        self, key: str, data: bytes, expecting: int, headers: Mapping[str, str]
    ) -> int | None:
        conditional = {**headers, Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(expecting)}
        try:
            ack = await answer_to(self.js.publish(self.subject(key), data, headers=conditional))
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_REVISION:
                return None
            raise
        return ack.seq

    async def report(self, message: bytes, *, message_id: str) -> None:
        """Publish a cost; the server drops a second one with the same id."""
        headers: dict[str, str] = {Header.MSG_ID: message_id}
        await answer_to(self.js.publish(cost_subject(self.bucket), message, headers=headers))

    async def cost_consumer(self) -> str:
        """Provide the consumer that delivers the costs one after the other; return its name."""
        config = ConsumerConfig(
            durable_name=_AGGREGATOR,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=_ACK_SECONDS,
            # The next cost only after the last one is counted: the marks rely on the order.
            max_ack_pending=1,
        )
        await self.js.add_consumer(cost_stream(self.bucket), config)
        return _AGGREGATOR

    async def fail_when_lost(self) -> None:
        """Run until the connection breaks, or the bucket or the stream is lost, and then raise."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._broken.wait()
                raise WorkInterruptedError("the connection broke")
            for stream in self._created:
                await self._check(stream)

    async def existing(self, prefix: str) -> frozenset[str] | None:
        """Return all keys under a prefix, markers of removed keys included; None if too many.

        Raises:
            WorkInterruptedError: the bucket is lost or was replaced.
        """
        info = await self._check(bucket_stream(self.bucket), subjects=f"{self.subject(prefix)}>")
        subjects = info.state.subjects or {}
        if len(subjects) >= _MOST_SUBJECTS:
            return None
        return frozenset(each[len(self.subject("")) :] for each in subjects)

    def subject(self, key: str) -> str:
        """Return the subject of a key."""
        return f"$KV.{self.bucket}.{key}"

    async def _check(self, stream: str, *, subjects: str | None = None) -> StreamInfo:
        try:
            info = await answer_to(self.js.stream_info(stream, subjects_filter=subjects))
        except nats.js.errors.NotFoundError as error:
            raise WorkInterruptedError(f"the stream {stream} is gone") from error
        if info.created != self._created[stream]:
            raise WorkInterruptedError(f"the stream {stream} was replaced")
        return info


@contextlib.asynccontextmanager
async def opened(place: Place, name: str) -> AsyncIterator[Store]:
    """Connect under ``name``, and create the bucket and the stream if they do not exist.

    Raises:
        WorkInterruptedError, nats.errors.Error, OSError, TimeoutError: it cannot be done.
    """
    broken = asyncio.Event()

    async def has_broken() -> None:
        broken.set()

    async def ignored(_error: Exception) -> None:
        """Every call raises its own error; the log of the driver adds nothing."""

    client = Client()
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            await client.connect(
                place.url.split(","),
                name=name,
                connect_timeout=int(ANSWER_SECONDS),
                # The driver gives up at the first failure only with both of these.
                allow_reconnect=False,
                max_reconnect_attempts=1,
                disconnected_cb=has_broken,
                error_cb=ignored,
            )
        js = client.jetstream(timeout=ANSWER_SECONDS)
        bucket_config = KeyValueConfig(place.bucket, history=1, storage=StorageType.FILE)
        cost_config = StreamConfig(
            name=cost_stream(place.bucket),
            subjects=[cost_subject(place.bucket)],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            duplicate_window=_DUPLICATE_SECONDS,
        )
        of_bucket = await _find_or_create(
            js, bucket_stream(place.bucket), lambda: js.create_key_value(bucket_config)
        )
        of_costs = await _find_or_create(
            js, cost_stream(place.bucket), lambda: js.add_stream(cost_config)
        )
        yield Store(client, place.bucket, broken, of_bucket, of_costs)
    finally:
        await _close(client)


async def _find_or_create(
    js: JetStreamContext, stream: str, create: Callable[[], Awaitable[object]]
) -> StreamInfo:
    # The server answers "not found" only if the stream does not exist.
    with contextlib.suppress(nats.js.errors.NotFoundError):
        return await answer_to(js.stream_info(stream))
    try:
        await answer_to(create())
    except nats.js.errors.BadRequestError as error:
        # Another process has created it meanwhile.
        if error.err_code != _EXISTS_WITH_ANOTHER_CONFIGURATION:
            raise
    return await answer_to(js.stream_info(stream))


async def _close(client: Client) -> None:
    transport = client._transport  # noqa: SLF001 - see below
    try:
        await client.close()
    except (nats.errors.Error, OSError, TimeoutError):
        pass  # the driver cannot send its last messages
    finally:
        # After a failed handshake, and after such an error, the driver leaves the socket open.
        if transport is not None:
            transport.close()  # type: ignore[no-untyped-call]


Part = Callable[[Store], Coroutine[Any, Any, None]]
"""Work on a store that runs until something fails."""


async def keep_working(place: Place, name: str, *parts: Part) -> None:
    """Run all parts on the bucket at the same time, and start again whenever one fails.

    The bucket and the stream of costs are created if they are missing. The same failure is logged
    once until the work succeeds again.
    """
    logged: str | None = None

    async def work() -> None:
        nonlocal logged
        async with opened(place, name) as store, asyncio.TaskGroup() as tasks:
            log.info("%s is connected to bucket %s.", name.capitalize(), place.bucket)
            logged = None
            tasks.create_task(store.fail_when_lost())
            for part in parts:
                tasks.create_task(part(store))

    while True:
        reason = await attempt(work())
        if reason != logged:
            logged = reason
            log.warning("No access to the bucket: %s. Trying again.", reason)
        await asyncio.sleep(RETRY_SECONDS)


async def attempt(work: Coroutine[Any, Any, None]) -> str | None:
    """Run work on a store; return None if it succeeded, else the reason of its failure.

    The work runs in its own task: before Python 3.13, a task looks cancelled for the rest of its
    life once a task group in it has failed.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    reason = None
    try:
        task.result()
    except* FAILURES as failures:
        reason = _reason(failures)
    return reason


def _reason(failure: BaseException) -> str:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    match failure:
        case nats.js.errors.NoStreamResponseError():
            return "no stream accepts writes"
        case TimeoutError():
            return "the server does not answer"
        case _:
            return str(failure).rstrip(".") or type(failure).__name__
