"""Conversations with NATS, on a connection that is made when it is needed.

A connection that broke is not repaired behind anybody's back: it has failed what waited on it, and
the next conversation makes a new one. All of this runs on one event loop.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import anyio
from nats.aio.msg import Msg

from budget_recovery_dagster.adapters.nats_address import (
    Access,
    ServerAddress,
    credentials_expiry,
    read_credentials,
)
from budget_recovery_dagster.adapters.nats_exchange import Exchange
from budget_recovery_dagster.adapters.nats_failures import credentials_expired
from budget_recovery_dagster.adapters.nats_link import Link
from budget_recovery_dagster.errors import (
    SettingsError,
    StoreError,
    StorePermissionError,
    StoreUnreachableError,
)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How many seconds to wait: for a server, for an answer, for the end of a tenant's reading."""

    connect: float = 5.0
    answer: float = 5.0
    reading: float = 120.0


class NatsConnection:
    """Exchanges with the first of the servers that can be reached."""

    def __init__(self, access: Access, timeouts: Timeouts) -> None:
        self._access = access
        self._timeouts = timeouts
        self._link: Link | None = None
        self._connecting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def exchange(self) -> AsyncIterator[Exchange]:
        """Start a conversation, connecting first if there is no sound connection.

        Raises:
            StoreUnreachableError: no server can be reached.
            StorePermissionError: a server refuses the user, or the place for answers.
        """
        link = await self._sound_link()
        async with link.exchange() as exchange:
            yield exchange

    async def ask(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        within: float | None = None,
    ) -> Msg:
        """Send one request and return its one answer.

        Raises:
            StoreUnreachableError: no answer came in time, or the connection broke.
            StorePermissionError: the user may not send it.
            StoreWriteError: it is larger than the server takes.
        """
        seconds = self._timeouts.answer if within is None else within
        async with self.exchange() as exchange:
            try:
                with anyio.fail_after(seconds):
                    await exchange.send(subject, payload, headers)
                    return (await exchange.receive())[0]
            except TimeoutError as error:
                raise StoreUnreachableError(
                    f"No answer to {subject} within {seconds:g} s.",
                    "see whether the NATS servers and the leader of the bucket's stream are up.",
                ) from error

    async def require_answers(self) -> None:
        """See that the user may receive answers.

        Raises:
            StorePermissionError: it may not.
        """
        await (await self._sound_link()).require_answers()

    async def version_of(self, server: ServerAddress) -> str:
        """Connect to one of the servers, and return its version; the connection is not kept.

        Raises:
            StoreUnreachableError, StorePermissionError: as ``exchange``.
        """
        link = await self._open(server, self._read_credentials())
        try:
            return link.version
        finally:
            await link.close()

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()

    async def _sound_link(self) -> Link:
        async with self._connecting:
            if self._link is not None and self._link.is_sound:
                return self._link
            await self.close()
            self._link = await self._connect()
            return self._link

    async def _connect(self) -> Link:
        credentials = self._read_credentials()
        failures: list[StoreError] = []
        for server in self._access.servers:
            try:
                return await self._open(server, credentials)
            except StoreError as error:
                failures.append(error)
        # A server that refuses the user says more than others that are down.
        refusals = [failure for failure in failures if isinstance(failure, StorePermissionError)]
        raise (refusals or failures)[-1]

    async def _open(self, server: ServerAddress, credentials: str | None) -> Link:
        link = Link(server, self._access.tls, self._timeouts.connect)
        try:
            await link.open(credentials)
        except StorePermissionError as error:
            expired_at = None if credentials is None else credentials_expiry(credentials)
            # Whether they have expired is for the server to say, by its own clock; it does not
            # tell that it refuses them for it.
            if expired_at is None or expired_at > datetime.now(UTC):
                raise
            raise credentials_expired(server, self._access.credentials, expired_at) from error
        return link

    def _read_credentials(self) -> str | None:
        """Read the credentials anew for each connection: they are renewed from time to time."""
        if self._access.credentials is None:
            return None
        try:
            return read_credentials(self._access.credentials)
        except SettingsError as error:
            raise StorePermissionError(error.message, error.hint) from error
