"""One connection to NATS: every wait is bounded, every driver error becomes a StoreError.

The settings are checked before anything is sent. Parsing removes the password from the URL first,
so no message, log or traceback can contain one.
"""

import asyncio
import base64
import contextlib
import json
import math
import os
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import NoReturn
from urllib.parse import unquote, urlsplit

import anyio
import nkeys  # type: ignore[import-untyped]  # no type hints
from nats import errors
from nats.aio.client import RawCredentials
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from budget_recovery_dagster.adapters.nats.driver import Driver, HeaderLines, Headers, size_of
from budget_recovery_dagster.errors import (
    SettingsError,
    StoreError,
    StorePermissionError,
    StoreUnreachableError,
    StoreWriteError,
)

ANSWER_TIMEOUT = "BUDGET_RECOVERY_ANSWER_TIMEOUT_SECONDS"
"""The setting of the longest wait for a response."""
INBOX_PREFIX = "_INBOX_budget_recovery"
"""The prefix of all reply subjects, to which a NATS user can be restricted."""
# After a failed TLS handshake, or if the server reads nothing, the driver waits forever for the
# connection to close.
_CLOSE_SECONDS = 0.5
# Far below the driver's two minutes, so that a dead peer is detected in half a minute.
_PING_SECONDS = 10
_VIOLATION = re.compile(
    r'permissions violation for (publish|subscription)[^"]*"([^"]*)"', re.IGNORECASE
)
_AUTHENTICATION_ERROR = re.compile(
    r"authori[sz]ation violation|authentication (?:expired|revoked)", re.IGNORECASE
)
_DEFAULT_PORT = 4222
_SCHEMES = ("nats", "tls")
_URL_HINT = (
    "set BUDGET_RECOVERY_NATS_URL to a URL such as nats://host:4222 or tls://user:password@host;"
    " separate servers by commas and write special characters of the password as %XX."
)
_JWT_HEADER = "BEGIN NATS USER JWT"
_SEED_HEADER = "BEGIN USER NKEY SEED"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds: for a connection, a response, and the read of a whole tenant."""

    connect: float = 5.0
    answer: float = 5.0
    reading: float = 120.0


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One server: ``url`` contains no user or password and is safe to show."""

    url: str
    needs_tls: bool
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Access:
    """Servers, credentials and TLS of a connection; ``open_access`` checks and creates it.

    Without ``tls`` a server's certificate has to be signed by an authority that the system trusts.
    """

    servers: tuple[ServerAddress, ...]
    credentials: Path | None
    tls: ssl.SSLContext | None

    def __str__(self) -> str:
        return ", ".join(server.url for server in self.servers)


def open_access(url: str, credentials: Path | None, certificate_authority: Path | None) -> Access:
    """Check the settings of a connection.

    Raises:
        SettingsError: a setting is invalid; the message names it and contains no password.
    """
    servers = tuple(
        parse_server(part.strip(), has_authority=certificate_authority is not None)
        for part in url.split(",")
    )
    if credentials is not None:
        read_credentials(credentials)
    # The driver loads the system's authorities itself once a server requires TLS. Loading them for
    # each connection, most of which need none, would take most of the time of a short command.
    tls = None if certificate_authority is None else _tls_context(certificate_authority)
    return Access(servers, credentials, tls)


def parse_server(url: str, *, has_authority: bool = False) -> ServerAddress:
    """Parse the URL of one server.

    Raises:
        SettingsError: the URL is invalid; the message gives the reason and does not show the URL.
    """
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        host, port = parts.hostname, parts.port or _DEFAULT_PORT
    except ValueError:
        # Python's own error quotes the text that it could not parse, which may be a password.
        raise SettingsError("The NATS URL is invalid.", _URL_HINT) from None
    if parts.scheme not in _SCHEMES:
        raise SettingsError(f"The NATS URL has the unsupported scheme {parts.scheme!r}.", _URL_HINT)
    if not host:
        raise SettingsError("The NATS URL has no host.", _URL_HINT)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise SettingsError("The NATS URL has a path, query or fragment.", _URL_HINT)
    user = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    shown_host = f"[{host}]" if ":" in host else host
    return ServerAddress(
        url=f"{parts.scheme}://{shown_host}:{port}",
        # A configured authority implies TLS: a server without TLS is then not the expected one.
        needs_tls=parts.scheme == "tls" or has_authority,
        user=user if password is not None else None,
        password=password,
        token=user if password is None else None,
    )


def read_credentials(path: Path) -> str:
    """Read and check a credentials file.

    Raises:
        SettingsError: the file is unreadable or incomplete. With an incomplete file the driver
            would search for the missing part forever.
    """
    hint = "set BUDGET_RECOVERY_NATS_CREDS to the .creds file that nsc created for the NATS user."
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise SettingsError(f"Cannot read the NATS credentials {path}: {reason}.", hint) from error
    for header in (_JWT_HEADER, _SEED_HEADER):
        if not _line_after(text, header):
            raise SettingsError(f"The NATS credentials {path} contain no {header[6:]}.", hint)
    try:
        nkeys.from_seed(bytearray(_line_after(text, _SEED_HEADER).encode())).wipe()
    except nkeys.NkeysError as error:
        raise SettingsError(
            f"The NATS credentials {path} contain an invalid seed.", hint
        ) from error
    return text


def credentials_expiry(text: str) -> datetime | None:
    """Return when credentials expire (UTC); None if they never expire or the time is unknown."""
    claims = _line_after(text, _JWT_HEADER).split(".")[1:2]
    try:
        padded = "".join(claims) + "=" * (-len("".join(claims)) % 4)
        expire_at = json.loads(base64.urlsafe_b64decode(padded))["exp"]
        return datetime.fromtimestamp(expire_at, UTC) if expire_at else None
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return None


def _line_after(text: str, header: str) -> str:
    lines = text.splitlines()
    return next((following for line, following in pairwise(lines) if header in line), "")


def _tls_context(certificate_authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(certificate_authority))
    except OSError as error:  # includes SSLError
        raise SettingsError(
            f"Cannot load the certificate authority {certificate_authority}:"
            f" {error.strerror or error}.",
            "set BUDGET_RECOVERY_NATS_CA to a PEM file of trusted certificates.",
        ) from error


class NatsConnection:
    """Exchanges with the first reachable server; reconnects at the next call."""

    def __init__(self, access: Access, timeouts: Timeouts) -> None:
        self._access = access
        self._timeouts = timeouts
        self._link: Link | None = None
        self._connecting = asyncio.Lock()
        self.verify: Callable[[Link], Awaitable[None]] | None = None
        """Called with each new connection before it is used; an error from it closes it."""

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
        headers: HeaderLines | None = None,
        *,
        within: float | None = None,
    ) -> Msg:
        """Send one request and return its response; ``within`` is a timeout in seconds.

        Raises:
            StoreUnreachableError: no response in time, or the connection was lost.
            StorePermissionError: the user may not send the request.
            StoreWriteError: the request exceeds the server's limit.
        """
        async with self.exchange() as exchange:
            return await self._ask_in(exchange, subject, payload, headers, within)

    async def ask_on(self, link: "Link", subject: str, payload: bytes) -> Msg:
        """Send one request on this connection and return its response; raises as ``ask``."""
        async with link.exchange() as exchange:
            return await self._ask_in(exchange, subject, payload, None, None)

    async def _ask_in(
        self,
        exchange: "Exchange",
        subject: str,
        payload: bytes,
        headers: HeaderLines | None,
        within: float | None,
    ) -> Msg:
        seconds = self._timeouts.answer if within is None else within
        try:
            with anyio.fail_after(seconds):
                await exchange.send(subject, payload, headers)
                return (await exchange.receive())[0]
        except TimeoutError as error:
            raise StoreUnreachableError(
                f"No response to {subject} within {seconds:g} s.",
                "check the NATS servers and the leader of the bucket's stream. A large store may"
                f" need a longer {ANSWER_TIMEOUT}.",
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
            link = await self._connect()
            try:
                if self.verify is not None:
                    await self.verify(link)
            except BaseException:
                await link.close()
                raise
            self._link = link
            return link

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
            raise StorePermissionError(
                f"{server.url} rejected the NATS user: the credentials {self._access.credentials}"
                f" expired at {expired_at:%Y-%m-%d %H:%M:%S} UTC.",
                "renew the credentials file of BUDGET_RECOVERY_NATS_CREDS; no restart is needed.",
            ) from error
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

    def __init__(
        self, server: ServerAddress, tls: ssl.SSLContext | None, connect_seconds: float
    ) -> None:
        self._server = server
        self._tls = tls
        self._connect_seconds = connect_seconds
        self._client = Driver(needs_tls=server.needs_tls)
        self._exchanges: set[Exchange] = set()
        self._last_error: Exception | None = None
        self._opening = anyio.CancelScope()
        self.failure: StoreError | None = None
        """Why the connection ended, with its cause; every waiting and later call raises it."""

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
                raise self.failure

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
                raise self.failure
            if self._opening.cancelled_caught:
                raise connect_failed(self._server, TimeoutError())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection; waiting calls fail, and what cannot be sent at once is lost."""
        with anyio.CancelScope(shield=True):
            with (
                anyio.move_on_after(_CLOSE_SECONDS),
                # An error here means that the server closed the connection first.
                contextlib.suppress(OSError, errors.Error),
            ):
                await self._client.close()
            await self._client.abort()

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
        self._client.when_read_task_ends(self._on_end)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        violation = _VIOLATION.search(str(error))
        if violation is None:
            return
        if violation[1] == "subscription":
            self._fail(permission_denied(f"receive answers on {INBOX_PREFIX}.>", error))
            return
        for exchange in self._exchanges:
            subject = exchange.subject_sent(violation[2])
            if subject is not None:
                exchange.fail(permission_denied(f"publish to {subject}", error))

    async def _on_closed(self) -> None:
        self._on_end()

    def _on_end(self) -> None:
        cause = self._client.last_error or self._last_error
        if cause is None and not self._client.is_closed:
            cause = errors.Error("the driver stopped reading")
        self._fail(connection_lost(self._server, cause))

    def _fail(self, failure: StoreError) -> None:
        if self.failure is None:
            self.failure = failure
        self._opening.cancel()
        for exchange in self._exchanges:
            exchange.fail(self.failure)


class Exchange:
    """Requests and their responses, on an inbox of their own."""

    def __init__(self, client: Driver, inbox: str) -> None:
        self._client = client
        self._inbox = inbox
        self._sent = 0
        self._subscription: Subscription | None = None
        self._subjects_sent: dict[str, str] = {}
        self._received: list[Msg] = []
        self._failure: StoreError | None = None
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

    async def send(self, subject: str, payload: bytes, headers: HeaderLines | None = None) -> str:
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
                subject,
                payload,
                reply=reply_to,
                headers=None if headers is None else Headers(headers),
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

    def fail(self, failure: StoreError) -> None:
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

    def _check_size(self, subject: str, payload: bytes, headers: HeaderLines | None) -> None:
        # The limit includes the headers; above it the server closes the connection.
        size = len(payload) + (size_of(headers) if headers else 0)
        if size > self._client.max_payload:
            raise StoreWriteError(
                f"{len(payload)} bytes for {subject} exceed the server's max_payload:"
                f" {self._client.max_payload} with headers.",
                "raise max_payload on the NATS servers, or find out why the value is so large.",
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def connect_failed(server: ServerAddress, error: Exception) -> StoreError:
    """Return the error for a connection that could not be opened."""
    if _AUTHENTICATION_ERROR.search(str(error)):
        return user_rejected(server, error)
    if isinstance(error, errors.SecureConnWantedError):
        return StoreUnreachableError(
            f"{server.url} does not require TLS, so nothing was sent to it.",
            "configure `tls` on the NATS server, or use nats:// without a certificate authority.",
        )
    if isinstance(error, ssl.SSLError):
        return StoreUnreachableError(
            f"TLS with {server.url} failed: {error.reason or error}.",
            "set BUDGET_RECOVERY_NATS_CA to the authority that signed the server's certificate.",
        )
    return StoreUnreachableError(
        f"Cannot connect to NATS at {server.url}: {_reason(error)}.",
        "start the NATS server, or correct BUDGET_RECOVERY_NATS_URL.",
    )


def user_rejected(server: ServerAddress, error: Exception) -> StorePermissionError:
    """Return the error for a user whom a server rejects, at login or later."""
    return StorePermissionError(
        f"{server.url} rejected the NATS user: {_reason(error)}.",
        "correct the user and password in BUDGET_RECOVERY_NATS_URL, or renew the credentials file.",
    )


def permission_denied(action: str, cause: Exception) -> StoreError:
    """Return the error, with its cause, for an action that the NATS user may not do."""
    error = StorePermissionError(
        f"The NATS user may not {action}.",
        "grant it; docs/operations.md lists the permissions that the user needs.",
    )
    error.__cause__ = cause
    return error


def connection_lost(server: ServerAddress, cause: Exception | None) -> StoreError:
    """Return the error, with its cause, for an established connection that was lost."""
    error: StoreError
    if cause is not None and _AUTHENTICATION_ERROR.search(str(cause)):
        error = user_rejected(server, cause)
    else:
        error = StoreUnreachableError(
            f"Lost the connection to {server.url}: {_reason(cause) if cause else 'closed'}.",
            "check the NATS server; the next call reconnects.",
        )
    error.__cause__ = cause
    return error


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        # asyncio replaces the system's text by an address; resolver errors are negative.
        number = error.errno or 0
        return os.strerror(number) if number > 0 else error.strerror
    return str(error).removeprefix("nats: ").strip("'") or type(error).__name__
