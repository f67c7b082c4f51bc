"""The usage store on NATS: identity, marker, readers and live tenants."""

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from budget_recovery_dagster.adapters.nats.codec import (
    BOARDS,
    COUNTERS,
    NEVER,
    encode_name,
    window_filter,
)
from budget_recovery_dagster.adapters.nats.connection import (
    Access,
    NatsConnection,
    Timeouts,
    open_access,
)
from budget_recovery_dagster.adapters.nats.reader import (
    SOURCES,
    SourceReader,
    prefix_to_read,
    read_counters,
    read_deletions,
    read_keys,
)
from budget_recovery_dagster.adapters.nats.stream import (
    BucketStream,
    KeysRead,
    LiveKey,
    check_bucket,
    write_error,
)
from budget_recovery_dagster.adapters.nats.writer import (
    WRONG_REVISION,
    BoardChange,
    WriteTerms,
    conditional_headers,
    counter_changes,
    rebuild,
    write_changes,
)
from budget_recovery_dagster.domain.falls import Configuration, Deletions, TenantWindow
from budget_recovery_dagster.domain.plan import (
    BoardOrder,
    BoardResult,
    IsOpen,
    RaiseOrder,
    RaiseResult,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource, TenantReading
from budget_recovery_dagster.domain.store import ClusterView, FoundMarker, Marker, Observation
from budget_recovery_dagster.errors import MarkerConflictError, StoreReadError

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
GUARD = "__guard"
"""The first token of every marker key."""
_WRITTEN_BY = "budget-recovery"


@contextmanager
def open_usage_store(
    url: str,
    bucket: str,
    *,
    credentials: Path | None = None,
    certificate_authority: Path | None = None,
    timeouts: Timeouts | None = None,
) -> Iterator["NatsUsageStore"]:
    """Open the usage store at ``url`` (servers separated by commas).

    The first call connects; after a lost connection the next call reconnects. The store may be used
    from several threads. Leaving the context, also by an exception, cancels running calls and
    closes everything: connection, thread and consumers.

    Raises:
        SettingsError: the URL, the bucket's name or a file is invalid; the message names it.
    """
    access = open_access(url, credentials, certificate_authority)
    check_bucket(bucket)
    with start_blocking_portal("asyncio") as portal:
        store = NatsUsageStore(portal, access, bucket, timeouts or Timeouts())
        try:
            yield store
        finally:
            portal.call(store.close)


class NatsLiveTenant:
    """A tenant's counters and leaderboards in the bucket, usable while the store is open."""

    def __init__(self, store: "NatsUsageStore", stream: BucketStream, tenant: str) -> None:
        self._store = store
        self._stream = stream
        self._tenant = tenant
        self._counters = self._read(COUNTERS)
        self._reading = read_counters(tenant, self._counters)

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
        written = self._store.call(write_changes, self._stream, changes, self._counters.keys)
        return tuple(written.all())

    def rebuild_boards(
        self, orders: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> tuple[BoardResult, ...]:
        """Update leaderboards; return the results in the order of the orders."""
        if not orders:
            return ()
        terms, boards = self._terms(is_open), self._read(BOARDS).keys

        def write(changes: Sequence[BoardChange]) -> list[BoardResult | str]:
            return self._store.call(write_changes, self._stream, changes, boards).all_or_reasons()

        return rebuild(self._tenant, orders, terms, write)

    def _read(self, first: str) -> KeysRead:
        return self._store.call(read_keys, self._stream, prefix_to_read(first, self._tenant))

    def _terms(self, is_open: IsOpen) -> WriteTerms:
        return self._store.call(_read_terms, self._stream, is_open)


async def _read_terms(stream: BucketStream, is_open: IsOpen) -> WriteTerms:
    info = await stream.info()
    server_time, since = info.server_time or datetime.now(UTC), time.monotonic()

    def now() -> datetime:
        return server_time + timedelta(seconds=time.monotonic() - since)

    return WriteTerms(is_open=is_open, now=now, supports_ttl=info.supports_ttl)


class NatsUsageStore:
    """The gateway's bucket, read and written with the permissions of one NATS user."""

    def __init__(
        self, portal: BlockingPortal, access: Access, bucket: str, timeouts: Timeouts
    ) -> None:
        self._portal = portal
        self._connection = NatsConnection(access, timeouts)
        self._stream = BucketStream(self._connection, bucket, timeouts)
        self._running: dict[anyio.CancelScope, anyio.Event] = {}

    def now(self) -> datetime | None:
        """Return the time of the stream's leader (UTC); None if its server does not report it."""
        return self.call(self._stream.info).server_time

    def observe(self, deployment_id: str) -> Observation:
        """Read identity and marker from the stream's leader."""
        return self.call(observe, self._stream, deployment_id)

    def write_marker(self, deployment_id: str, nonce: str, *, after: int) -> Marker:
        """Write our marker over sequence ``after`` of its key; 0: the key must not exist."""
        return self.call(write_marker, self._stream, deployment_id, nonce, after)

    def cluster_view(self, seen_at: datetime) -> ClusterView:
        """Request the servers that hold the stream; ``seen_at`` is the present time."""
        return self.call(self._stream.cluster_view, seen_at)

    def configuration(self) -> Configuration:
        """Return the settings of the bucket that decide what it keeps."""
        return self.call(self._stream.configuration)

    def count_keys(
        self, wanted: Sequence[TenantWindow], *, within: timedelta
    ) -> Mapping[TenantWindow, int]:
        """Count the keys of counters, delete marks included; those not in time are left out."""

        async def count() -> list[int | None]:
            filters = [window_filter(tenant, of) for tenant, of in wanted]
            return await self._stream.count_matching(filters, within=within.total_seconds())

        counts = zip(wanted, self.call(count), strict=True)
        return {each: count for each, count in counts if count is not None}

    def read_deletions(self, after: int, *, at_most: int, within: timedelta) -> Deletions:
        """Find the counters that were deleted, or have expired, after a sequence."""
        return self.call(read_deletions, self._stream, after, at_most, within.total_seconds())

    def open_tenant(self, tenant: str) -> NatsLiveTenant:
        """Read a tenant's counters in order to raise them."""
        return NatsLiveTenant(self, self._stream, tenant)

    def reader(self, source: CaptureSource) -> SourceReader:
        """Return a reader of one source, usable while the store is open."""
        return SourceReader(
            SOURCES[source],
            list_keys=lambda prefix: self.call(self._stream.keys, prefix),
            read_keys=lambda prefix: self.call(read_keys, self._stream, prefix),
        )

    async def close(self) -> None:
        """Cancel running calls, wait for their cleanup, disconnect. Call it on the event loop."""
        for scope in self._running:
            scope.cancel()
        for ended in list(self._running.values()):
            await ended.wait()
        await self._connection.close()

    def call(
        self,
        operation: Callable[[*Arguments], Awaitable[Result]],
        *arguments: *Arguments,
    ) -> Result:
        """Run an operation on the store's event loop and return its result."""
        future = self._portal.start_task_soon(self._run, operation, *arguments)
        try:
            return future.result()
        finally:
            # If the waiting caller is interrupted, the operation is cancelled too.
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
            "The usage store was closed during a call.", "keep it open until all calls end."
        )


async def observe(stream: BucketStream, deployment_id: str) -> Observation:
    """Read identity and marker from the stream's leader; raises as ``BucketStream.ask``."""
    info = await stream.info()
    live = await stream.read_key(marker_key(deployment_id))
    # If the bucket supports it, the marker never expires, whatever the maximum age.
    max_age = None if info.supports_ttl else info.max_age
    return Observation(info.identity, found_marker(live), max_age, info.is_led)


async def write_marker(stream: BucketStream, deployment_id: str, nonce: str, after: int) -> Marker:
    """Write a marker over the sequence ``after`` and wait until it is stored.

    If the bucket supports it, the marker never expires, whatever the maximum age.

    Raises:
        MarkerConflictError: the key has changed; nothing was overwritten.
        StoreWriteError: the store rejected the write.
        StoreUnreachableError: no response, so the marker may have been written.
        StoreMissingError, StoreNoQuorumError, StorePermissionError: nothing was written.
    """
    info = await stream.info()
    key = marker_key(deployment_id)
    response = await stream.connection.ask(
        f"{stream.subject_prefix}{key}",
        marker_value(nonce),
        conditional_headers(after, NEVER if info.supports_ttl else None),
    )
    error = stream.error_in_write(response)
    if error is None:
        return Marker(nonce, stream.sequence_in(response))
    if error.get("err_code") in WRONG_REVISION:
        raise marker_conflict(stream.bucket, key, after)
    raise write_error(stream.bucket, key, error)


def marker_key(deployment_id: str) -> str:
    """Return the key of a deployment's marker."""
    return f"{GUARD}.{encode_name(deployment_id)}"


def marker_value(nonce: str) -> bytes:
    """Return the value of a marker with this nonce."""
    return json.dumps({"nonce": nonce, "written_by": _WRITTEN_BY}).encode()


def found_marker(live: LiveKey) -> FoundMarker | None:
    """Return what a marker's key contains; None: the store has never held the key."""
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
    """Return the error for a marker's key that has changed since sequence ``after``."""
    change = f"has changed since sequence {after}" if after else "exists already"
    return MarkerConflictError(
        f"The marker {key} in the bucket {bucket} {change}, so it was not written.",
        "retry; if it happens again, another installation uses a copy of this database.",
    )
