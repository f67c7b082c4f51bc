"""One connection to one NATS server, and the conversations on it, on one event loop.

A link is never repaired: once broken it stays so, and has failed all that waited on it.
"""

import contextlib
import math
import re
import ssl
from collections.abc import AsyncIterator, Callable
from secrets import token_hex

import anyio
from nats import errors
from nats.aio.client import Client, RawCredentials
from nats.aio.msg import Msg

from budget_recovery_dagster.adapters.nats_address import ServerAddress
from budget_recovery_dagster.adapters.nats_exchange import Exchange, Failure
from budget_recovery_dagster.adapters.nats_failures import broken, denied, not_connected

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
