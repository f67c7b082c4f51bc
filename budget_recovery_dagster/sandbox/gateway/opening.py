"""Opens a connection to the bucket and the stream of costs, and makes what is not there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, RetentionPolicy, StorageType, StreamConfig, StreamInfo

from budget_recovery_dagster.sandbox.gateway.store import (
    ANSWER_SECONDS,
    Store,
    bucket_stream,
    cost_stream,
    cost_subject,
    heed_cancellation,
)

_CONNECT_SECONDS = 5.0
_EXISTS_WITH_ANOTHER_CONFIGURATION = 10058

# A cost whose acknowledgement was lost is sent again within seconds, and need not be counted to be
# left out. No count relies on that: what comes later stands below the counters' marks. No longer,
# for the server remembers every id of that time.
_DUPLICATE_SECONDS = 120.0


@contextlib.asynccontextmanager
async def opened(url: str, bucket: str, name: str) -> AsyncIterator[Store]:
    """Connect as ``name`` to the servers at ``url``; make the bucket and stream if they are gone.

    Raises:
        StoreLostError, nats.errors.Error, OSError, TimeoutError: it cannot be done.
    """
    broken = asyncio.Event()

    async def has_broken() -> None:
        broken.set()

    client = Client()
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            await client.connect(
                url.split(","),
                name=name,
                connect_timeout=int(ANSWER_SECONDS),
                # Only both together make the driver give up at the first failure.
                allow_reconnect=False,
                max_reconnect_attempts=1,
                disconnected_cb=has_broken,
                # What fails is raised where it is waited for; the driver's own log adds nothing.
                error_cb=_ignored,
            )
        js = client.jetstream(timeout=ANSWER_SECONDS)
        infos = await _provide_bucket(js, bucket), await _provide_costs(js, bucket)
        heed_cancellation()
        yield Store(client, bucket, broken, infos)
    finally:
        await _close(client)


async def _close(client: Client) -> None:
    transport = client._transport  # noqa: SLF001 - see below
    try:
        await client.close()
    except (nats.errors.Error, OSError, TimeoutError):
        pass  # it gives up where it cannot send what is left
    finally:
        # After a handshake that failed, and where it gave up, it forgets to close the socket.
        if transport is not None:
            transport.close()  # type: ignore[no-untyped-call]


async def _ignored(_error: Exception) -> None:
    """Let an error be."""


async def _provide_bucket(js: JetStreamContext, bucket: str) -> StreamInfo:
    async def make() -> None:
        config = KeyValueConfig(bucket, history=1, storage=StorageType.FILE)
        await js.create_key_value(config)

    return await _provide(js, bucket_stream(bucket), make)


async def _provide_costs(js: JetStreamContext, bucket: str) -> StreamInfo:
    async def make() -> None:
        config = StreamConfig(
            name=cost_stream(bucket),
            subjects=[cost_subject(bucket)],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            duplicate_window=_DUPLICATE_SECONDS,
        )
        await js.add_stream(config)

    return await _provide(js, cost_stream(bucket), make)


async def _provide(
    js: JetStreamContext, stream: str, make: Callable[[], Awaitable[None]]
) -> StreamInfo:
    try:
        return await js.stream_info(stream)
    except nats.js.errors.NotFoundError:  # an answer with authority: there is no such stream
        pass
    try:
        await make()
    except nats.js.errors.BadRequestError as error:
        # Another part has just made it, or somebody in their own way.
        if error.err_code != _EXISTS_WITH_ANOTHER_CONFIGURATION:
            raise
    return await js.stream_info(stream)
