"""One connection to NATS with bounded waits; every driver error becomes one of ours."""

import asyncio
import contextlib
import math
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from secrets import token_hex
from typing import NoReturn

import anyio
from nats import errors
from nats.aio.client import Client, RawCredentials
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from budget_recovery_dagster.adapters.nats.address import (
    Access,
    ServerAddress,
    credentials_expiry,
    read_credentials,
)
from budget_recovery_dagster.adapters.nats.failures import (
    broken,
    credentials_expired,
    denied,
    not_connected,
    too_large,
)
from budget_recovery_dagster.errors import (
    SettingsError,
    StoreError,
    StorePermissionError,
    StoreUnreachableError,
)

# The few that we send are far shorter.
_ROOM_FOR_HEADERS = 256


@dataclass(frozen=True, slots=True)
class Failure:
    """What ends an exchange or a link: seen in one place, raised wherever somebody waits."""

    error: StoreError
    cause: Exception | None

    def throw(self) -> NoReturn:
        """Raise the error from its cause."""
        raise self.error from self.cause


class Exchange:
    """One conversation: what is sent in it, and what arrives in answer."""

    def __init__(self, client: Client, inbox: str) -> None:
        self._client = client
        self._inbox = inbox
        self._sent = 0
        self._subscription: Subscription | None = None
        self._sent_to: dict[str, str] = {}
        self._arrived: list[Msg] = []
        self._failure: Failure | None = None
        self._news = asyncio.Event()

    async def open(self) -> None:
        """Make room for answers."""
        self._raise_failure()
        try:
            self._subscription = await self._client.subscribe(
                f"{self._inbox}.*",
                cb=self._deliver,
                # At its limits the driver drops messages.
                pending_msgs_limit=0,
                pending_bytes_limit=0,
            )
        except (errors.Error, OSError) as error:
            self._raise_unsent(error)

    async def close(self) -> None:
        """Take no more answers."""
        if self._subscription is not None:
            # A lost connection has taken the subscription along.
            with contextlib.suppress(errors.Error, OSError):
                await self._subscription.unsubscribe()

    async def send(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> str:
        """Send a request, and return its own subject for answers, which arrive in this exchange.

        An answer shows this subject; what a consumer delivers shows that under which it is stored.

        Raises:
            StoreWriteError: it is larger than the server takes.
        """
        # The server's complaint about a subject reaches us in lower case.
        self._sent_to[subject.lower()] = subject
        self._sent += 1
        answer_to = f"{self._inbox}.{self._sent}"
        self._raise_failure()
        self._require_room(subject, payload, headers)
        try:
            await self._client.publish(
                subject, payload, reply=answer_to, headers=None if headers is None else {**headers}
            )
        except (errors.Error, OSError) as error:
            self._raise_unsent(error)
        return answer_to

    async def receive(self) -> list[Msg]:
        """Wait for messages and return all that have arrived, in order.

        Raises:
            StorePermissionError: the server refused something sent in this exchange.
            StoreUnreachableError: the connection has broken.
        """
        while not self._arrived:
            self._raise_failure()
            self._news.clear()
            await self._news.wait()
        arrived, self._arrived = self._arrived, []
        return arrived

    def fail(self, failure: Failure) -> None:
        """End the exchange: nothing more will arrive."""
        self._failure = failure
        self._news.set()

    def sent_to(self, lowered: str) -> str | None:
        """Return the subject, in its own spelling, if something was sent to it."""
        return self._sent_to.get(lowered)

    async def _deliver(self, message: Msg) -> None:
        self._arrived.append(message)
        self._news.set()

    def _raise_unsent(self, error: Exception) -> NoReturn:
        self._raise_failure()
        raise StoreUnreachableError(
            f"Nothing can be sent to NATS: {error}.", "see whether the NATS server is healthy."
        ) from error

    def _require_room(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None
    ) -> None:
        # The server counts the headers in, and cuts off whoever sends more than it takes.
        size = len(payload) + (_ROOM_FOR_HEADERS if headers else 0)
        if size > self._client.max_payload:
            raise too_large(subject, len(payload), self._client.max_payload)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._failure.throw()


INBOX_PREFIX = "_INBOX_budget_recovery"
"""Answers arrive below it, so that a NATS user can be confined to it."""
UNREADABLE_HEADERS = "Budget-Recovery-Unreadable-Headers"
"""The one header of a message whose headers cannot be read; no server sends it."""
# After a TLS handshake that failed, the driver waits for ever for the end of the connection.
_CLOSE_SECONDS = 0.5
# Far below the driver's two minutes: a peer that vanished without a word is noticed in half a one.
_PING_SECONDS = 10
_VIOLATION = re.compile(
    r'permissions violation for (publish|subscription)[^"]*"([^"]*)"', re.IGNORECASE
)


class _Client(Client):
    """The driver, with three fixes."""

    def __init__(self, *, needs_tls: bool) -> None:
        super().__init__()
        self._needs_tls = needs_tls

    def _connect_command(self) -> bytes:
        # The driver speaks TLS only if the server demands it, and would send the password in clear
        # to one that does not, whatever the URL says.
        if self._needs_tls and not self._server_info.get("tls_required"):
            raise errors.SecureConnWantedError
        return super()._connect_command()

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        # The server stores any bytes as headers. Some of them, such as a bare `NATS/1.0`, would
        # silently kill the driver's read task.
        try:
            return await super()._process_headers(headers)
        except Exception:  # noqa: BLE001 - whatever a stranger's bytes make the driver raise
            return {UNREADABLE_HEADERS: ""}

    @property
    def server_version(self) -> str:
        """The version of the server, in its own words."""
        return str(self._server_info.get("version", ""))

    async def settle(self, seconds: int) -> None:
        """Wait until the server has taken what was sent, and has refused it if it does.

        Raises:
            TimeoutError, errors.Error, OSError: it did not answer in time, or not at all.
        """
        # The driver's ping goes before what it still keeps back, such as a subscription.
        await self._flush_pending(force_flush=True)
        await self.flush(seconds)

    def when_reading_ends(self, tell: Callable[[], None]) -> None:
        """Have it told when nothing more will be read, for whatever reason."""
        reading = self._reading_task
        if reading is None:
            tell()
        else:
            reading.add_done_callback(lambda _: tell())

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        # One subject that is not UTF-8 would silently kill the driver's read task.
        return self.msg_class(
            subject=subject.decode(errors="surrogateescape"),
            reply=reply.decode(errors="surrogateescape"),
            data=data,
            headers=headers,
            _client=self,
            _sid=sid,
        )


class Link:
    """A connection to one server. Once broken it stays so."""

    def __init__(self, server: ServerAddress, tls: ssl.SSLContext, connect_seconds: float) -> None:
        self._server = server
        self._tls = tls
        self._connect_seconds = connect_seconds
        self._client = _Client(needs_tls=server.needs_tls)
        self._exchanges: set[Exchange] = set()
        self._complaint: Exception | None = None
        self._opening = anyio.CancelScope()
        self.failure: Failure | None = None

    @property
    def is_sound(self) -> bool:
        """Whether a new exchange may be held on it."""
        # The driver is closed some moments before it says so.
        return self.failure is None and not self._client.is_closed

    @property
    def version(self) -> str:
        """The version of the server, as it says it."""
        return self._client.server_version

    async def require_answers(self) -> None:
        """See that the user may receive answers.

        Raises:
            StorePermissionError: it may not.
            StoreUnreachableError: the connection has broken.
        """
        async with self.exchange():
            try:
                await self._client.settle(math.ceil(self._connect_seconds))
            except (errors.Error, OSError, TimeoutError) as error:
                if self.failure is None:
                    raise broken(self._server, error) from error
            if self.failure is not None:
                self.failure.throw()

    async def open(self, credentials: str | None) -> None:
        """Connect, with the content of a credentials file if there is one.

        Raises:
            StoreUnreachableError: no NATS server answers there.
            StorePermissionError: the server refuses the user.
        """
        try:
            with anyio.move_on_after(self._connect_seconds) as self._opening:
                await self._connect(credentials)
                # A server that refused the user may have closed the connection without a word.
                await self._client.flush(math.ceil(self._connect_seconds))
            if self.failure is not None:
                self.failure.throw()
            if self._opening.cancelled_caught:
                raise not_connected(self._server, TimeoutError())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection; what still waits on it fails."""
        with (
            anyio.move_on_after(_CLOSE_SECONDS, shield=True),
            # To fail at closing is to be closed by the other side first.
            contextlib.suppress(OSError, errors.Error),
        ):
            await self._client.close()

    @contextlib.asynccontextmanager
    async def exchange(self) -> AsyncIterator[Exchange]:
        """Hold a conversation.

        Each has a subscription of its own: what a consumer delivers shows the subject under which
        it was stored, so the subject cannot tell which conversation it belongs to.
        """
        exchange = Exchange(self._client, f"{INBOX_PREFIX}.{token_hex(16)}")
        self._exchanges.add(exchange)
        if self.failure is not None:
            exchange.fail(self.failure)
        try:
            await exchange.open()
            yield exchange
        finally:
            self._exchanges.discard(exchange)
            await exchange.close()

    async def _connect(self, credentials: str | None) -> None:
        server = self._server
        try:
            await self._client.connect(
                server.url,
                name="budget-recovery",
                error_cb=self._on_error,
                closed_cb=self._on_closed,
                user=server.user,
                password=server.password,
                token=server.token,
                user_credentials=None if credentials is None else RawCredentials(credentials),
                tls=self._tls,
                inbox_prefix=INBOX_PREFIX,
                # Only both together make the driver give up at the first failure; with either
                # one alone it tries for ever when the server is down.
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=math.ceil(self._connect_seconds),
                ping_interval=_PING_SECONDS,
            )
        except errors.NoServersError as error:
            raise not_connected(server, self._complaint or error) from (self._complaint or error)
        except (errors.Error, OSError, ValueError) as error:
            raise not_connected(server, error) from error
        # The driver survives the death of its read task, deaf and without a word.
        self._client.when_reading_ends(self._on_reading_ended)

    async def _on_error(self, error: Exception) -> None:
        self._complaint = error
        violation = _VIOLATION.search(str(error))
        if violation is None:
            return
        if violation[1] == "subscription":
            self._break(Failure(denied(f"receive answers on {INBOX_PREFIX}.>"), error))
            return
        for exchange in self._exchanges:
            subject = exchange.sent_to(violation[2])
            if subject is not None:
                exchange.fail(Failure(denied(f"publish to {subject}"), error))

    async def _on_closed(self) -> None:
        cause = self._client.last_error or self._complaint
        self._break(Failure(broken(self._server, cause), cause))

    def _on_reading_ended(self) -> None:
        cause = self._client.last_error or self._complaint
        if cause is None and not self._client.is_closed:
            cause = errors.Error("the driver stopped reading")
        self._break(Failure(broken(self._server, cause), cause))

    def _break(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
        self._opening.cancel()
        for exchange in self._exchanges:
            exchange.fail(self.failure)


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
