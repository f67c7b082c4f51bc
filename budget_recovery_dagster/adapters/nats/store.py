"""The usage store on NATS: identity, marker, readers and live tenants."""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from budget_recovery_dagster.adapters.nats.codec import (
    BOARDS,
    COUNTERS,
    NEVER,
    CounterKey,
    dropped_at,
    encode_key,
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
    count_keys,
    find_tenants,
    prefix_to_read,
    present_keys,
    read_counters,
    read_deletions,
    read_keys,
)
from budget_recovery_dagster.adapters.nats.stream import (
    NEVER_WRITTEN,
    BucketStream,
    KeysRead,
    LiveKey,
    MessageSizes,
    StreamInfo,
    check_bucket,
    write_error,
)
from budget_recovery_dagster.adapters.nats.writer import (
    WRONG_REVISION,
    BoardChange,
    WriteTerms,
    board_changes,
    conditional_headers,
    counter_changes,
    rebuild,
    room_for_changes,
    write_changes,
)
from budget_recovery_dagster.domain.counters import BudgetWindow, Entity
from budget_recovery_dagster.domain.falls import Configuration, Deletions, TenantWindow
from budget_recovery_dagster.domain.plan import (
    BoardOrder,
    BoardResult,
    IsOpen,
    RaiseOrder,
    RaiseResult,
    Room,
    StoreLimits,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource, TenantReading
from budget_recovery_dagster.domain.store import ClusterView, IntendedMarker, Marker
from budget_recovery_dagster.domain.verdict import FoundMarker, Observation
from budget_recovery_dagster.errors import MarkerConflictError, StoreFullError, StoreReadError
from budget_recovery_dagster.stopwatch import Stopwatch

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

    def deletion_of(self, of: BudgetWindow, entity: Entity) -> int | None:
        """Return the sequence of a counter's delete marker, as read; None: there is none."""
        live = self._live(of, entity)
        return live.revision if live.value is None and live.revision else None

    def dropped_at(self, of: BudgetWindow, entity: Entity) -> datetime | None:
        """Return when the store drops a counter as read, by TTL or maximum age; None: never."""
        value = self._live(of, entity).value
        return None if value is None else dropped_at(value, self._limits.max_age)

    def room_for(
        self, orders: Sequence[RaiseOrder], boards: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> Room:
        """Return the room that these orders take, without writing anything."""
        info = self._store.call(self._stream.info)
        terms, sizes = _terms(info, is_open), _sizes(self._stream, info)
        counters = counter_changes(self._tenant, orders, terms)
        room = room_for_changes(counters, self._counters.keys, sizes)
        if not boards:
            return room
        changes = [
            change
            for change in board_changes(self._tenant, boards, terms)
            if not isinstance(change, str)
        ]
        return room + room_for_changes(changes, self._read(BOARDS).keys, sizes)

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

    @cached_property
    def _limits(self) -> StoreLimits:
        return self._store.limits()

    def _live(self, of: BudgetWindow, entity: Entity) -> LiveKey:
        key = encode_key(CounterKey(self._tenant, of, entity))
        return self._counters.keys.get(key, NEVER_WRITTEN)

    def _terms(self, is_open: IsOpen) -> WriteTerms:
        return _terms(self._store.call(self._stream.info), is_open)


def _sizes(stream: BucketStream, info: StreamInfo) -> MessageSizes:
    return MessageSizes(stream.subject_prefix, info.in_memory, info.keeps_one)


def _terms(info: StreamInfo, is_open: IsOpen) -> WriteTerms:
    server_time, since = info.server_time or datetime.now(UTC), Stopwatch()

    def now() -> datetime:
        return server_time + timedelta(seconds=since.seconds())

    return WriteTerms(is_open=is_open, now=now, limits=info.limits)


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

    def write_marker(self, deployment_id: str, marker: IntendedMarker, *, after: int) -> Marker:
        """Write our marker over sequence ``after`` of its key; 0: the key must not exist."""
        return self.call(write_marker, self._stream, deployment_id, marker, after)

    def limits(self) -> StoreLimits:
        """Return the limits of the bucket and what it holds, as the stream's leader reports."""
        return self.call(self._stream.info).limits

    def cluster_view(self, seen_at: datetime) -> ClusterView:
        """Request the servers that hold the stream; ``seen_at`` is the present time."""
        return self.call(self._stream.cluster_view, seen_at)

    def configuration(self) -> Configuration:
        """Return the settings of the bucket that decide what it keeps."""
        return self.call(self._stream.configuration)

    def count_keys(
        self, wanted: Mapping[TenantWindow, int], *, within: timedelta
    ) -> Mapping[TenantWindow, int]:
        """Count the keys of counters, delete marks included; leave out what cannot be counted."""
        windows = {window_filter(*each): each for each in wanted}
        filters = {key_filter: wanted[each] for key_filter, each in windows.items()}

        async def count() -> dict[str, int]:
            return await count_keys(self._stream, filters, within=within.total_seconds())

        return {windows[key_filter]: number for key_filter, number in self.call(count).items()}

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
            find_tenants=lambda first: self.call(find_tenants, self._stream, first),
            read_keys=lambda prefix: self.call(read_keys, self._stream, prefix),
            present_keys=lambda prefix: self.call(present_keys, self._stream, prefix),
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
    """Read identity and markers from the stream's leader; raises as ``BucketStream.ask``.

    From then on, the stream's other answers must be of the same store.
    """
    stream.unpin()
    info = await stream.page(f"{GUARD}.")
    # Before the marker is read: a new connection may lead to another store.
    stream.pin(info.identity)
    live = await stream.read_key(marker_key(deployment_id))
    prefix = f"{stream.subject_prefix}{GUARD}."
    markers = {subject.removeprefix(prefix) for subject in info.subjects}
    return Observation(
        identity=info.identity,
        marker=found_marker(live),
        # If the bucket supports it, the marker never expires, whatever the maximum age.
        keeps_for=None if info.limits.supports_ttl else info.limits.max_age,
        is_led=info.is_led,
        leader_time=info.server_time,
        others=frozenset(markers - {encode_name(deployment_id)}),
        may_have_older=info.may_have_older,
    )


async def write_marker(
    stream: BucketStream, deployment_id: str, marker: IntendedMarker, after: int
) -> Marker:
    """Write a marker over the sequence ``after`` and wait until it is stored.

    If the bucket supports it, the marker never expires, whatever the maximum age.

    Raises:
        MarkerConflictError: the key has changed; nothing was overwritten.
        StoreFullError: the bucket would delete another key for it.
        StoreWriteError: the store rejected the write.
        StoreUnreachableError: no response, so the marker may have been written.
        StoreMissingError, StoreNoQuorumError, StorePermissionError: nothing was written.
    """
    info = await stream.info()
    key, value = marker_key(deployment_id), marker_value(marker)
    headers = conditional_headers(after, NEVER if info.limits.supports_ttl else None)
    if info.limits.may_evict:
        sizes = _sizes(stream, info)
        new = sizes.of(key, value, headers)
        overwritten = await stream.read_lengths(key) if info.keeps_one else None
        old = None if overwritten is None else sizes.of_lengths(key, *overwritten)
        if not info.limits.has_room_for(Room(1, new) if old is None else Room(0, new - old)):
            raise marker_does_not_fit(stream.bucket, key)
    response = await stream.connection.ask(f"{stream.subject_prefix}{key}", value, headers)
    error = stream.error_in_write(response)
    if error is None:
        return Marker(marker.nonce, stream.sequence_in(response), marker.number)
    if error.get("err_code") in WRONG_REVISION:
        raise marker_conflict(stream.bucket, key, after)
    raise write_error(stream.bucket, key, error)


def marker_key(deployment_id: str) -> str:
    """Return the key of a deployment's marker."""
    return f"{GUARD}.{encode_name(deployment_id)}"


def marker_value(marker: IntendedMarker) -> bytes:
    """Return the value of a marker."""
    content: dict[str, object] = {"nonce": marker.nonce, "written_by": _WRITTEN_BY}
    if marker.number:
        content |= {"number": marker.number, "landmark": marker.landmark}
    return json.dumps(content).encode()


def found_marker(live: LiveKey) -> FoundMarker | None:
    """Return what a marker's key contains; None: the store has never held the key."""
    if live.value is not None:
        fault = live.value.fault
        return _read_marker(live.value.data if fault is None else b"", live.revision)
    if not live.revision:
        return None
    return FoundMarker(None, live.revision, is_deleted=True, is_expired=live.is_expired)


def _read_marker(data: bytes, revision: int) -> FoundMarker:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    match content:
        case {"nonce": str(nonce), "written_by": str(by), **rest} if by == _WRITTEN_BY:
            number, landmark = rest.get("number"), rest.get("landmark")
            return FoundMarker(
                nonce,
                revision,
                number=number if isinstance(number, int) and number > 0 else 0,
                landmark=landmark if isinstance(landmark, str) else None,
            )
    return FoundMarker(None, revision)


def marker_does_not_fit(bucket: str, key: str) -> StoreFullError:
    """Return the error for a marker that would take the place of other keys."""
    return StoreFullError(
        f"The bucket {bucket} is full, and would delete another key to store the marker {key}.",
        "raise max_bytes or max_msgs of the bucket, or remove the limit.",
    )


def marker_conflict(bucket: str, key: str, after: int) -> MarkerConflictError:
    """Return the error for a marker's key that has changed since sequence ``after``."""
    change = f"has changed since sequence {after}" if after else "exists already"
    return MarkerConflictError(
        f"The marker {key} in the bucket {bucket} {change}, so it was not written.",
        "retry; if it happens again, another installation uses a copy of this database.",
    )
