"""The driver of NATS, corrected where foreign bytes, TLS or a hung server would stop it."""

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.protocol import parser

UNREADABLE_HEADERS = "Budget-Recovery-Unreadable-Headers"
"""The only header of a message whose headers are unreadable; no server sends it."""
# The first line of a block of headers, and the names that the driver sends.
_FIRST_LINE = "NATS/1.0"
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", re.ASCII)

HeaderLines = Sequence[tuple[str, str]]
"""Headers in their order; a name may be repeated."""


class Headers(dict[str, str]):
    """The headers of a message by name, as the driver expects them; ``lines`` has all of them.

    If a name is repeated, the first value counts, as for the server.
    """

    def __init__(self, lines: HeaderLines) -> None:
        super().__init__(reversed(lines))
        self.lines = lines

    # The driver sends what this returns.
    def items(self) -> Any:
        """Return all headers, with those of a repeated name."""
        return self.lines


def parse_headers(raw: bytes) -> Headers:
    """Parse a block of headers; one malformed line makes the whole block unreadable."""
    if not raw:
        return Headers(())
    unreadable = Headers(((UNREADABLE_HEADERS, ""),))
    try:
        first, *lines = raw.decode().split("\r\n")
    except UnicodeDecodeError:
        return unreadable
    if first != _FIRST_LINE or lines[-2:] != ["", ""]:
        return unreadable
    parts = [line.partition(":") for line in lines[:-2]]
    if not all(colon and _HEADER_NAME.fullmatch(name.strip()) for name, colon, _ in parts):
        return unreadable
    return Headers(tuple((name.strip(), value.strip()) for name, _, value in parts))


# Without values, a message has only its size as a header, and most sizes are equal.
_SHORT_HEADERS = 64
_parse_short_headers = lru_cache(maxsize=1024)(parse_headers)


def size_of(headers: HeaderLines) -> int:
    """Return the bytes of a block of headers as it is sent."""
    lines = sum(len(name) + len(value.encode()) + len(": \r\n") for name, value in headers)
    return len(_FIRST_LINE) + 2 * len("\r\n") + lines


# As the driver's, but the parts of a line are separated as for the server: not by every character
# that is white space in a regular expression. The server stores a key with such a character, whose
# message would end the driver's read task.
_MSG = re.compile(rb"\AMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)\r\n")
_HMSG = re.compile(
    rb"\AHMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)[ \t]+(\d+)\r\n"
)


class _Parser(parser.Parser):
    """The driver's parser, with other patterns."""

    # A function finds the patterns in its module.
    parse = FunctionType(
        parser.Parser.parse.__code__,
        {**vars(parser), "MSG_RE": _MSG, "HMSG_RE": _HMSG},
        argdefs=parser.Parser.parse.__defaults__,
    )


class Driver(Client):
    """One connection as the driver makes it, corrected."""

    def __init__(self, *, needs_tls: bool) -> None:
        super().__init__()
        self._ps = _Parser(self)
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
        if headers is not None and headers.startswith(f"{_FIRST_LINE}\r\n".encode()):
            is_short = len(headers) <= _SHORT_HEADERS
            return _parse_short_headers(headers) if is_short else parse_headers(headers)
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

    async def abort(self) -> None:
        """Close the socket, also if the server does not read what was sent."""
        # The driver would wait for that, and if it is interrupted then, leave the socket open.
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
            # The event loop closes the socket in its next step.
            await asyncio.sleep(0)

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
