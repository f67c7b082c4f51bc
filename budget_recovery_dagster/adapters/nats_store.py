"""The usage store in NATS JetStream: the port, served from an event loop of its own.

The loop runs in a thread of its own, so that the server's pings are answered however long the
caller is busy with what it has read.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from budget_recovery_dagster.adapters.nats_address import Access, open_access
from budget_recovery_dagster.adapters.nats_connection import NatsConnection, Timeouts
from budget_recovery_dagster.adapters.nats_marker import look, write_marker
from budget_recovery_dagster.adapters.nats_reader import read_keys
from budget_recovery_dagster.adapters.nats_restoring import Arguments, NatsLiveTenant, Result
from budget_recovery_dagster.adapters.nats_sources import SOURCES, SourceReader
from budget_recovery_dagster.adapters.nats_stream import BucketStream, check_bucket
from budget_recovery_dagster.domain.convergence import ClusterView
from budget_recovery_dagster.domain.detection import Sighting
from budget_recovery_dagster.domain.identity import Marker
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.errors import StoreReadError


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

    def look(self, deployment_id: str) -> Sighting:
        """Read identity and marker from the stream's leader."""
        return self._call(look, self._stream, deployment_id)

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
