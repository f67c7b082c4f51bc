"""One connection to NATS: every wait is bounded, every driver error becomes a StoreError."""

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
    connect_failed,
    connection_lost,
    credentials_expired,
    permission_denied,
    too_large,
)
from budget_recovery_dagster.errors import (
    SettingsError,
    StoreError,
    StorePermissionError,
    StoreUnreachableError,
)

INBOX_PREFIX = "_INBOX_budget_recovery"
"""The prefix of all reply subjects, to which a NATS user can be restricted."""
UNREADABLE_HEADERS = "Budget-Recovery-Unreadable-Headers"
"""The only header of a message whose headers are unreadable; no server sends it."""
# Our few headers are much shorter.
_HEADER_BYTES = 256
# After a failed TLS handshake the driver waits forever for the connection to close.
_CLOSE_SECONDS = 0.5
# Far below the driver's two minutes, so that a dead peer is detected in half a minute.
_PING_SECONDS = 10
_VIOLATION = re.compile(
    r'permissions violation for (publish|subscription)[^"]*"([^"]*)"', re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds: for a connection, a response, and the read of a whole tenant."""

    connect: float = 5.0
    answer: float = 5.0
    reading: float = 120.0


class NatsConnection:
    """Exchanges with the first reachable server; reconnects at the next call."""

    def __init__(self, access: Access, timeouts: Timeouts) -> None:
        self._access = access
        self._timeouts = timeouts
        self._link: Link | None = None
        self._connecting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def exchange(self) -> AsyncIterator["Exchange"]:
        """Start an exchange; connect first if there is no usable connection.

        Raises:
            StoreUnreachableError: no server is reachable.
            StorePermissionError: a server rejects the user, or the subscription to the inbox.
        """
        link = await self._usable_link()
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
        """Send one request and return its response; ``within`` is a timeout in seconds.

        Raises:
            StoreUnreachableError: no response in time, or the connection was lost.
            StorePermissionError: the user may not send the request.
            StoreWriteError: the request exceeds the server's limit.
        """
        seconds = self._timeouts.answer if within is None else within
        async with self.exchange() as exchange:
            try:
                with anyio.fail_after(seconds):
                    await exchange.send(subject, payload, headers)
                    return (await exchange.receive())[0]
            except TimeoutError as error:
                raise StoreUnreachableError(
                    f"No response to {subject} within {seconds:g} s.",
                    "check the NATS servers and the leader of the bucket's stream.",
                ) from error

    async def require_answers(self) -> None:
        """Check that the user may receive responses.

        Raises:
            StoreUnreachableError, StorePermissionError: as ``exchange``.
        """
        await (await self._usable_link()).require_answers()

    async def version_of(self, server: ServerAddress) -> str:
        """Connect to one server, return its version and disconnect.

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

    async def _usable_link(self) -> "Link":
        async with self._connecting:
            if self._link is not None and self._link.is_usable:
                return self._link
            await self.close()
            self._link = await self._connect()
            return self._link

    async def _connect(self) -> "Link":
        credentials = self._read_credentials()
        failures: list[StoreError] = []
        for server in self._access.servers:
            try:
                return await self._open(server, credentials)
            except StoreError as error:
                failures.append(error)
        # A rejected user is more informative than a server that is down.
        refusals = [failure for failure in failures if isinstance(failure, StorePermissionError)]
        raise (refusals or failures)[-1]

    async def _open(self, server: ServerAddress, credentials: str | None) -> "Link":
        link = Link(server, self._access.tls, self._timeouts.connect)
        try:
            await link.open(credentials)
        except StorePermissionError as error:
            expired_at = None if credentials is None else credentials_expiry(credentials)
            # The server decides about expiry, by its own clock, and does not report it as the
            # reason.
            if expired_at is None or expired_at > datetime.now(UTC):
                raise
            raise credentials_expired(server, self._access.credentials, expired_at) from error
        return link

    def _read_credentials(self) -> str | None:
        """Read the credentials for each connection, because the file may have been renewed."""
        if self._access.credentials is None:
            return None
        try:
            return read_credentials(self._access.credentials)
        except SettingsError as error:
            raise StorePermissionError(error.message, error.hint) from error


class Link:
    """A connection to one server; it does not reconnect."""

    def __init__(self, server: ServerAddress, tls: ssl.SSLContext, connect_seconds: float) -> None:
        self._server = server
        self._tls = tls
        self._connect_seconds = connect_seconds
        self._client = _Client(needs_tls=server.needs_tls)
        self._exchanges: set[Exchange] = set()
        self._last_error: Exception | None = None
        self._opening = anyio.CancelScope()
        self.failure: Failure | None = None

    @property
    def is_usable(self) -> bool:
        """Whether a new exchange can start."""
        # The driver closes shortly before it calls back.
        return self.failure is None and not self._client.is_closed

    @property
    def version(self) -> str:
        """The server's version as it reports it."""
        return self._client.server_version

    async def require_answers(self) -> None:
        """Check that the user may receive responses.

        Raises:
            StorePermissionError: the user may not subscribe to the inbox.
            StoreUnreachableError: the connection was lost.
        """
        async with self.exchange():
            try:
                await self._client.flush_all(math.ceil(self._connect_seconds))
            except (errors.Error, OSError, TimeoutError) as error:
                if self.failure is None:
                    raise connection_lost(self._server, error) from error
            if self.failure is not None:
                self.failure.throw()

    async def open(self, credentials: str | None) -> None:
        """Connect, with the content of a credentials file if there is one.

        Raises:
            StoreUnreachableError: no NATS server responds at this address.
            StorePermissionError: the server rejects the user.
        """
        try:
            with anyio.move_on_after(self._connect_seconds) as self._opening:
                await self._connect(credentials)
                # A server that rejects the user may close the connection without an error.
                await self._client.flush(math.ceil(self._connect_seconds))
            if self.failure is not None:
                self.failure.throw()
            if self._opening.cancelled_caught:
                raise connect_failed(self._server, TimeoutError())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection; waiting calls fail."""
        with (
            anyio.move_on_after(_CLOSE_SECONDS, shield=True),
            # An error here means that the server closed the connection first.
            contextlib.suppress(OSError, errors.Error),
        ):
            await self._client.close()

    @contextlib.asynccontextmanager
    async def exchange(self) -> AsyncIterator["Exchange"]:
        """Start an exchange.

        Each has its own subscription: a consumer's message has the subject that it is stored
        under, so its subject does not identify the exchange.
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
                # Only both together make the driver fail at the first error; with one alone it
                # retries forever while the server is down.
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=math.ceil(self._connect_seconds),
                ping_interval=_PING_SECONDS,
            )
        except errors.NoServersError as error:
            raise connect_failed(server, self._last_error or error) from (self._last_error or error)
        except (errors.Error, OSError, ValueError) as error:
            raise connect_failed(server, error) from error
        # Without a read task the driver receives nothing more and reports no error.
        self._client.when_read_task_ends(self._on_read_task_ended)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        violation = _VIOLATION.search(str(error))
        if violation is None:
            return
        if violation[1] == "subscription":
            self._fail(Failure(permission_denied(f"receive answers on {INBOX_PREFIX}.>"), error))
            return
        for exchange in self._exchanges:
            subject = exchange.subject_sent(violation[2])
            if subject is not None:
                exchange.fail(Failure(permission_denied(f"publish to {subject}"), error))

    async def _on_closed(self) -> None:
        cause = self._client.last_error or self._last_error
        self._fail(Failure(connection_lost(self._server, cause), cause))

    def _on_read_task_ended(self) -> None:
        cause = self._client.last_error or self._last_error
        if cause is None and not self._client.is_closed:
            cause = errors.Error("the driver stopped reading")
        self._fail(Failure(connection_lost(self._server, cause), cause))

    def _fail(self, failure: "Failure") -> None:
        if self.failure is None:
            self.failure = failure
        self._opening.cancel()
        for exchange in self._exchanges:
            exchange.fail(self.failure)


class Exchange:
    """Requests and their responses, on an inbox of their own."""

    def __init__(self, client: Client, inbox: str) -> None:
        self._client = client
        self._inbox = inbox
        self._sent = 0
        self._subscription: Subscription | None = None
        self._subjects_sent: dict[str, str] = {}
        self._received: list[Msg] = []
        self._failure: Failure | None = None
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Subscribe to the inbox."""
        self._raise_failure()
        try:
            self._subscription = await self._client.subscribe(
                f"{self._inbox}.*",
                cb=self._deliver,
                # With limits the driver drops messages.
                pending_msgs_limit=0,
                pending_bytes_limit=0,
            )
        except (errors.Error, OSError) as error:
            self._raise_send_failed(error)

    async def close(self) -> None:
        """Unsubscribe."""
        if self._subscription is not None:
            # A lost connection has already ended the subscription.
            with contextlib.suppress(errors.Error, OSError):
                await self._subscription.unsubscribe()

    async def send(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> str:
        """Send a request; return the reply subject, to match its response in this exchange.

        A response has this subject; a consumer's message has the subject that it is stored under.

        Raises:
            StoreWriteError: the request exceeds the server's limit.
        """
        # The driver reports permission errors in lower case.
        self._subjects_sent[subject.lower()] = subject
        self._sent += 1
        reply_to = f"{self._inbox}.{self._sent}"
        self._raise_failure()
        self._check_size(subject, payload, headers)
        try:
            await self._client.publish(
                subject, payload, reply=reply_to, headers=None if headers is None else {**headers}
            )
        except (errors.Error, OSError) as error:
            self._raise_send_failed(error)
        return reply_to

    async def receive(self) -> list[Msg]:
        """Wait for messages and return all that have arrived, in order.

        Raises:
            StorePermissionError: the server rejected a request of this exchange.
            StoreUnreachableError: the connection was lost.
        """
        while not self._received:
            self._raise_failure()
            self._changed.clear()
            await self._changed.wait()
        received, self._received = self._received, []
        return received

    def fail(self, failure: "Failure") -> None:
        """End the exchange; waiting and later calls raise the failure."""
        self._failure = failure
        self._changed.set()

    def subject_sent(self, lower_case: str) -> str | None:
        """Return the subject of a request by its lower-case form; None if there was no request."""
        return self._subjects_sent.get(lower_case)

    async def _deliver(self, message: Msg) -> None:
        self._received.append(message)
        self._changed.set()

    def _raise_send_failed(self, error: Exception) -> NoReturn:
        self._raise_failure()
        raise StoreUnreachableError(
            f"Could not send to NATS: {error}.", "check the NATS server."
        ) from error

    def _check_size(self, subject: str, payload: bytes, headers: Mapping[str, str] | None) -> None:
        # The limit includes the headers; above it the server closes the connection.
        size = len(payload) + (_HEADER_BYTES if headers else 0)
        if size > self._client.max_payload:
            raise too_large(subject, len(payload), self._client.max_payload)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._failure.throw()


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of an exchange or a link: detected in one place, raised in every waiting call."""

    error: StoreError
    cause: Exception | None

    def throw(self) -> NoReturn:
        """Raise the error with its cause."""
        raise self.error from self.cause


class _Client(Client):
    """The driver, with three fixes."""

    def __init__(self, *, needs_tls: bool) -> None:
        super().__init__()
        self._needs_tls = needs_tls

    def _connect_command(self) -> bytes:
        # The driver uses TLS only if the server requires it. Otherwise it would send the password
        # in clear text, even with a tls:// URL.
        if self._needs_tls and not self._server_info.get("tls_required"):
            raise errors.SecureConnWantedError
        return super()._connect_command()

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        # The server stores any bytes as headers. Some, such as a bare `NATS/1.0`, would silently
        # end the driver's read task.
        try:
            return await super()._process_headers(headers)
        except Exception:  # noqa: BLE001 - foreign bytes may raise anything
            return {UNREADABLE_HEADERS: ""}

    @property
    def server_version(self) -> str:
        """The server's version as it reports it."""
        return str(self._server_info.get("version", ""))

    async def flush_all(self, seconds: int) -> None:
        """Wait until the server has processed everything sent, and reported its errors.

        Raises:
            TimeoutError, errors.Error, OSError: no response in time, or no connection.
        """
        # The driver would send its ping before buffered data such as a subscription.
        await self._flush_pending(force_flush=True)
        await self.flush(seconds)

    def when_read_task_ends(self, callback: Callable[[], None]) -> None:
        """Call back when the driver stops reading, whatever the reason."""
        read_task = self._reading_task
        if read_task is None:
            callback()
        else:
            read_task.add_done_callback(lambda _: callback())

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        # A subject that is not UTF-8 would silently end the driver's read task.
        return self.msg_class(
            subject=subject.decode(errors="surrogateescape"),
            reply=reply.decode(errors="surrogateescape"),
            data=data,
            headers=headers,
            _client=self,
            _sid=sid,
        )
