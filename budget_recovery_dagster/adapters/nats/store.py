"""The usage store on NATS: identity, marker, readers and live tenants."""

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from budget_recovery_dagster.adapters.nats.address import Access, open_access
from budget_recovery_dagster.adapters.nats.codec import NEVER, encode_name
from budget_recovery_dagster.adapters.nats.connection import NatsConnection, Timeouts
from budget_recovery_dagster.adapters.nats.failures import nobody_writes, refused_write
from budget_recovery_dagster.adapters.nats.reader import SOURCES, SourceReader, read_keys
from budget_recovery_dagster.adapters.nats.stream import (
    NO_RESPONDERS,
    STATUS,
    BucketStream,
    LiveKey,
    check_bucket,
)
from budget_recovery_dagster.adapters.nats.writer import (
    WRONG_REVISION,
    Arguments,
    NatsLiveTenant,
    Result,
    conditional_headers,
    error_of,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.domain.store import ClusterView, FoundMarker, Marker, Observation
from budget_recovery_dagster.errors import MarkerConflictError, StoreReadError

GUARD = "__guard"
"""The first token of every marker's key."""
_WRITTEN_BY = "budget-recovery"


def marker_key(deployment_id: str) -> str:
    """Return the key of a deployment's marker."""
    return f"{GUARD}.{encode_name(deployment_id)}"


def marker_value(nonce: str) -> bytes:
    """Write a marker."""
    return json.dumps({"nonce": nonce, "written_by": _WRITTEN_BY}).encode()


def found_marker(live: LiveKey) -> FoundMarker | None:
    """Tell what stands under a marker's key; None: nothing that the store knows of."""
    if live.value is not None:
        nonce = None if live.value.fault is not None else _nonce(live.value.data)
        return FoundMarker(nonce, live.revision)
    return FoundMarker(None, live.revision, is_deleted=True) if live.revision else None


def _nonce(data: bytes) -> str | None:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    match content:
        case {"nonce": str(nonce), "written_by": str(written_by)} if written_by == _WRITTEN_BY:
            return nonce
    return None


def marker_conflict(bucket: str, key: str, after: int) -> MarkerConflictError:
    """Say that something else stands where a marker was to be written over ``after``."""
    seen = f"what stood there at sequence {after}" if after else "nothing"
    return MarkerConflictError(
        f"{key} in the bucket {bucket} is not {seen} any more, so it was not written.",
        "look again; if it goes on, another installation uses a copy of this database.",
    )


async def observe(stream: BucketStream, deployment_id: str) -> Observation:
    """Read identity and marker from the stream's leader; raises as ``BucketStream.ask``."""
    info = await stream.info()
    live = await stream.read_key(marker_key(deployment_id))
    # Where keys may have times of their own, the marker is written to stay, whatever the age.
    keeps_for = None if info.keeps_ttl else info.keeps_for
    return Observation(info.identity, found_marker(live), keeps_for, info.is_led)


async def write_marker(stream: BucketStream, deployment_id: str, nonce: str, after: int) -> Marker:
    """Write a marker over the sequence ``after``, and wait until it is stored.

    It outlives the age at which the bucket drops other keys, if the bucket lets it.

    Raises:
        MarkerConflictError: something else stands there; nothing was overwritten.
        StoreWriteError: the store refuses it.
        StoreUnreachableError: no answer, so it may have been written.
        StoreMissingError, StoreNoQuorumError, StorePermissionError: as they say.
    """
    info = await stream.info()
    key = marker_key(deployment_id)
    answer = await stream.connection.ask(
        f"{stream.subject_prefix}{key}",
        marker_value(nonce),
        conditional_headers(after, NEVER if info.keeps_ttl else None),
    )
    if (answer.headers or {}).get(STATUS) == NO_RESPONDERS:
        raise nobody_writes(stream.bucket)
    with stream.making_sense():
        error = error_of(answer)
    if error is None:
        return Marker(nonce, stream.sequence_in(answer))
    if error.get("err_code") in WRONG_REVISION:
        raise marker_conflict(stream.bucket, key, after)
    raise refused_write(stream.bucket, key, error)


@contextmanager
def open_usage_store(
    url: str,
    bucket: str,
    *,
    credentials: Path | None = None,
    certificate_authority: Path | None = None,
    timeouts: Timeouts | None = None,
) -> Iterator["NatsUsageStore"]:
    """Open the usage store at ``url`` (more servers after a comma).

    Nothing is sent before the first call; a connection that is lost is made anew by the next one.
    The store may be used from several threads. At the end, also that of an exception, calls that
    still run are broken off, and nothing stays behind: no connection, thread or consumer.

    Raises:
        SettingsError: the URL, the bucket's name or a file is wrong; the message names it.
    """
    access = open_access(url, credentials, certificate_authority)
    check_bucket(bucket)
    with start_blocking_portal("asyncio") as portal:
        store = NatsUsageStore(portal, access, bucket, timeouts or Timeouts())
        try:
            yield store
        finally:
            portal.call(store.close)


class NatsUsageStore:
    """The gateway's bucket, read and written with the rights of one NATS user."""

    def __init__(
        self, portal: BlockingPortal, access: Access, bucket: str, timeouts: Timeouts
    ) -> None:
        self._portal = portal
        self._connection = NatsConnection(access, timeouts)
        self._stream = BucketStream(self._connection, bucket, timeouts)
        self._running: dict[anyio.CancelScope, anyio.Event] = {}

    def now(self) -> datetime | None:
        """Return the time of the stream's leader; None where its server does not tell."""
        return self._call(self._stream.info).told_at

    def observe(self, deployment_id: str) -> Observation:
        """Read identity and marker from the stream's leader."""
        return self._call(observe, self._stream, deployment_id)

    def write_marker(self, deployment_id: str, nonce: str, *, after: int) -> Marker:
        """Write our marker over what stands under its key at sequence ``after``; 0: nothing."""
        return self._call(write_marker, self._stream, deployment_id, nonce, after)

    def cluster_view(self, seen_at: datetime) -> ClusterView:
        """Ask for the servers that hold the stream; ``seen_at`` is the time of now."""
        return self._call(self._stream.cluster_view, seen_at)

    def open_tenant(self, tenant: str) -> NatsLiveTenant:
        """Read a tenant's counters to be raised."""
        return NatsLiveTenant(self._call, self._stream, tenant)

    def reader(self, source: CaptureSource) -> SourceReader:
        """Return a reader of one source, good for as long as the store is open."""
        return SourceReader(
            SOURCES[source],
            list_keys=lambda prefix: self._call(self._stream.keys, prefix),
            read_values=lambda prefix: self._call(read_keys, self._stream, prefix),
        )

    async def close(self) -> None:
        """Break off what runs, let it tidy up, and disconnect. To be called on the event loop."""
        for scope in self._running:
            scope.cancel()
        for ended in list(self._running.values()):
            await ended.wait()
        await self._connection.close()

    def _call(
        self,
        operation: Callable[[*Arguments], Awaitable[Result]],
        *arguments: *Arguments,
    ) -> Result:
        future = self._portal.start_task_soon(self._run, operation, *arguments)
        try:
            return future.result()
        finally:
            # A caller who is interrupted while waiting takes the operation along.
            future.cancel()

    async def _run(
        self,
        operation: Callable[[*Arguments], Awaitable[Result]],
        *arguments: *Arguments,
    ) -> Result:
        ended = anyio.Event()
        with anyio.CancelScope() as scope:
            self._running[scope] = ended
            try:
                return await operation(*arguments)
            finally:
                del self._running[scope]
                ended.set()
        raise StoreReadError(
            "The usage store was closed during the call.", "keep it open until all calls are done."
        )
