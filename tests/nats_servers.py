"""A gateway's bucket, and a network that a test can disturb."""

import base64
import contextlib
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import nats
from anyio.from_thread import BlockingPortal, start_blocking_portal
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, KeyValueConfig, StreamConfig
from nats.js.errors import NotFoundError

from budget_recovery_dagster.adapters.nats import CounterKey, Timeouts, encode_key
from budget_recovery_dagster.domain import BudgetWindow, CaptureSource, Entity, Window
from budget_recovery_dagster.errors import StoreError
from budget_recovery_dagster.ports import UsageStore
from tests.boards import board, board_key

COUNTERS = CaptureSource.COUNTERS
BOARDS = CaptureSource.LEADERBOARDS

_PUBLISHED = re.compile(rb"^H?PUB ", re.MULTILINE)
PULL = b"$JS.API.CONSUMER.MSG.NEXT."
ANSWER_SECONDS = 5.0
# Long enough that a prompt failure cannot be mistaken for a timeout.
PATIENT = Timeouts(connect=30, answer=30, reading=60)
PROMPT_SECONDS = 10.0
PASSWORD = "s3cret"


@dataclass(frozen=True)
class Stored:
    """A stored message of a bucket's stream."""

    revision: int
    data: bytes
    headers: dict[str, str]

    @property
    def ttl(self) -> str | None:
        return self.headers.get("Nats-TTL")


@dataclass(frozen=True)
class Backup:
    """A stream as the server backs it up: its settings and state, and the content in chunks."""

    description: dict[str, Any]
    chunks: tuple[bytes, ...]


class Bucket:
    """A bucket of a running server, written like the gateway."""

    def __init__(self, portal: BlockingPortal, client: Client, name: str) -> None:
        self._portal = portal
        self._client = client
        self._js = client.jetstream(timeout=ANSWER_SECONDS)
        self.name = name

    @classmethod
    @contextmanager
    def connected(cls, url: str, name: str) -> Iterator[Self]:
        """Connect to a bucket, whether or not it exists."""
        with start_blocking_portal() as portal:
            client = portal.call(lambda: nats.connect(url, inbox_prefix="_INBOX_gateway"))
            try:
                yield cls(portal, client, name)
            finally:
                portal.call(client.close)

    def create(self, *, replicas: int = 1) -> None:
        config = KeyValueConfig(bucket=self.name, replicas=replicas, limit_marker_ttl=60)
        self._do(lambda js: js.create_key_value(config))

    def create_with(self, **settings: Any) -> None:
        """Create the stream of the bucket with settings that the driver does not support."""
        usual: dict[str, Any] = {
            "max_msgs_per_subject": 1,
            "discard": DiscardPolicy.NEW,
            "allow_rollup_hdrs": True,
        }
        config = StreamConfig(self.stream, subjects=[self.subject(">")], **usual | settings)
        self._do(lambda js: js.add_stream(config))

    def reconfigure(self, **settings: Any) -> None:
        """Change these settings of the stream of the bucket."""
        config = self.info().config
        for name, value in settings.items():
            setattr(config, name, value)
        self._do(lambda js: js.update_stream(config))

    def destroy(self) -> None:
        self._do(lambda js: js.delete_key_value(self.name))

    def back_up(self) -> Backup:
        """Back up the stream, as ``nats stream backup`` does."""

        async def receive() -> Backup:
            inbox = self._client.new_inbox()
            subscription = await self._client.subscribe(inbox)
            description = await self._ask(f"SNAPSHOT.{self.stream}", {"deliver_subject": inbox})
            chunks = []
            while data := (message := await subscription.next_msg(ANSWER_SECONDS)).data:
                chunks.append(data)
                # Some chunks need no acknowledgement.
                if message.reply:
                    await self._client.publish(message.reply)
            await subscription.unsubscribe()
            return Backup({name: description[name] for name in ("config", "state")}, tuple(chunks))

        return self._portal.call(receive)

    def restore(self, backup: Backup) -> None:
        """Create the stream from a backup, as ``nats stream restore`` does."""

        async def send() -> None:
            answer = await self._ask(f"RESTORE.{self.stream}", backup.description)
            for data in (*backup.chunks, b""):
                await self._client.request(answer["deliver_subject"], data, ANSWER_SECONDS)

        self._portal.call(send)

    async def _ask(self, subject: str, request: dict[str, Any]) -> dict[str, Any]:
        message = await self._client.request(
            f"$JS.API.STREAM.{subject}", json.dumps(request).encode(), ANSWER_SECONDS
        )
        answer: dict[str, Any] = json.loads(message.data)
        assert "error" not in answer, answer
        return answer

    def put(self, key: str, value: bytes, headers: dict[str, str] | None = None) -> None:
        """Write any key that the server accepts, with any value."""
        self._do(lambda js: js.publish(self.subject(key), value, headers=headers))

    def spend(self, tenant: str, budget: str, window: str, usages: Mapping[Entity, str]) -> None:
        """Set counters to these usages, in the gateway's format."""
        of = BudgetWindow(budget, Window.parse(window))
        for entity, usage in usages.items():
            value = {"usage": usage, "updated_at": "2026-11-29T14:00:00Z"}
            self.put(encode_key(CounterKey(tenant, of, entity)), json.dumps(value).encode())

    def rank(self, tenant: str, budget: str, window: str, usages: Mapping[Entity, str]) -> None:
        """Set a leaderboard to the largest of these usages, in the gateway's format."""
        self.put(board_key(tenant, budget, window), board(usages))

    def stored(self, key: str) -> Stored | None:
        """Return the last message of a key; None if the server has none."""
        try:
            message = self._do(
                lambda js: js.get_msg(self.stream, subject=self.subject(key), direct=False)
            )
        except NotFoundError:
            return None
        return Stored(message.seq, message.data or b"", dict(message.headers or {}))

    def headers_of(self, key: str) -> bytes:
        """Return the block of headers of a key's last message, as stored."""
        api, request = f"$JS.API.STREAM.MSG.GET.{self.stream}", {"last_by_subj": self.subject(key)}

        async def get() -> Any:
            return await self._client.request(api, json.dumps(request).encode(), ANSWER_SECONDS)

        message = json.loads(self._portal.call(get).data)["message"]
        return base64.b64decode(message.get("hdrs", ""))

    def put_many(self, values: dict[str, bytes]) -> None:
        """Write many keys; the last acknowledgement implies all earlier ones of the connection."""

        async def write() -> None:
            *others, (last, value) = values.items()
            for number, (key, content) in enumerate(others):
                await self._client.publish(self.subject(key), content)
                if (
                    number % 5000 == 0
                ):  # the server drops messages of a sender that is too far ahead of the stream
                    await self._js.publish(self.subject("other"), b"")
            await self._js.publish(self.subject(last), value)

        self._portal.call(write)

    def remove(self, key: str) -> None:
        """Delete a key like the gateway."""
        self.put(key, b"", {"KV-Operation": "DEL"})

    def purge(self, prefix: str) -> None:
        """Purge keys without a trace."""
        self.purge_key(f"{prefix}>")

    def purge_key(self, key: str) -> None:
        """Purge a key without a trace."""
        self._do(lambda js: js.purge_stream(self.stream, subject=self.subject(key)))

    def info(self) -> Any:
        return self._do(lambda js: js.stream_info(self.stream))

    def messages(self) -> int:
        count: int = self.info().state.messages
        return count

    def counters(self) -> int:
        """Return the number of keys of counters, deleted ones included."""
        found = self._do(
            lambda js: js.stream_info(self.stream, subjects_filter=self.subject("usage.>"))
        )
        return len(found.state.subjects or {})

    def consumers(self) -> int:
        count: int = self.info().state.consumer_count
        return count

    def delete_consumers(self) -> None:
        """Delete the consumers, as happens when their leader dies."""

        async def delete() -> None:
            for consumer in await self._js.consumers_info(self.stream):
                await self._js.delete_consumer(self.stream, consumer.name)

        self._portal.call(delete)

    @property
    def stream(self) -> str:
        return f"KV_{self.name}"

    def subject(self, key: str) -> str:
        return f"$KV.{self.name}.{key}"

    def _do(self, work: Callable[[JetStreamContext], Awaitable[Any]]) -> Any:
        async def done() -> Any:
            return await work(self._js)

        return self._portal.call(done)


class DisturbedNetwork:
    """A proxy to a server with a hook before requests.

    ``before_request`` is called with the number of the request, from 1, before a request that
    contains ``watched``, such as a pull, passes. If it returns False, the request is lost.
    ``rewrite`` changes the server's responses.
    """

    def __init__(self, url: str, watched: bytes = PULL) -> None:
        self._watched = watched
        server = urlsplit(url)
        self._server = (server.hostname, server.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listener.getsockname()[1]}"
        self.before_request: Callable[[int], bool | None] | None = None
        self.rewrite: Callable[[bytes], bytes] = lambda answer: answer
        self.requests = 0
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *exception: object) -> None:
        self.cut()
        _shut(self._listener)
        for thread in self._threads:
            thread.join()

    def _next_server(self) -> tuple[str | None, int | None]:
        return self._server

    def cut(self) -> None:
        """Break the connections that exist."""
        for connection in self._sockets[1:]:
            _shut(connection)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                self._listener.close()
                return
            server = socket.create_connection(self._next_server())
            for connection in (client, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, server]
            self._start(self._forward, client, server, self._through)
            self._start(self._forward, server, client, self._back)

    def _forward(
        self, source: socket.socket, target: socket.socket, through: Callable[[bytes], bytes]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(through(data))
        _shut(target)
        source.close()

    def _through(self, data: bytes) -> bytes:
        # The client sends a request in one piece and waits for the response.
        if self._watched not in data:
            return data
        self.requests += 1
        if self.before_request is None or self.before_request(self.requests) is not False:
            return data
        # Earlier data in the same piece, such as a subscription, is not lost.
        published = _PUBLISHED.search(data)
        return b"" if published is None else data[: published.start()]

    def _back(self, data: bytes) -> bytes:
        return self.rewrite(data)


class AlternatingServers(DisturbedNetwork):
    """One address behind which several servers take turns, connection by connection."""

    def __init__(self, *urls: str, watched: bytes = PULL) -> None:
        super().__init__(urls[0], watched)
        servers = [urlsplit(url) for url in urls]
        self._turns = itertools.cycle((server.hostname, server.port) for server in servers)

    def _next_server(self) -> tuple[str | None, int | None]:
        return next(self._turns)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def publish_raw(url: str, messages: Iterable[tuple[bytes, bytes]]) -> None:
    """Publish in one write, faster than the driver, and to subjects that it would refuse."""
    _send_raw(
        url, b"".join(b"PUB %s %d\r\n%s\r\n" % (to, len(data), data) for to, data in messages)
    )


def publish_with_raw_headers(url: str, subject: str, headers: bytes, data: bytes) -> None:
    """Publish with any bytes as headers."""
    sizes = b"%d %d" % (len(headers), len(headers) + len(data))
    _send_raw(url, b"HPUB %s %s\r\n%s%s\r\n" % (subject.encode(), sizes, headers, data))


def _send_raw(url: str, content: bytes) -> None:
    server = urlsplit(url)
    with (
        socket.create_connection((server.hostname, server.port)) as connection,
        connection.makefile("rb") as answers,
    ):
        assert answers.readline().startswith(b"INFO")
        connection.sendall(b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n')
        connection.sendall(content + b"PING\r\n")
        # The server pings a client that takes longer than about two seconds before it responds.
        while (answer := answers.readline()) == b"PING\r\n":
            connection.sendall(b"PONG\r\n")
        assert answer == b"PONG\r\n"


def with_user(url: str, user: str, password: str) -> str:
    return url.replace("://", f"://{user}:{password}@")


def users(*entries: dict[str, object]) -> str:
    """Return the configuration of a server's users."""
    return "authorization { users: " + json.dumps(entries) + " }"


def failure_of(call: Callable[[], object]) -> StoreError:
    """Return the error of a call, which must fail."""
    try:
        call()
    except StoreError as error:
        return error
    raise AssertionError("it did not fail")


def prompt_failure_of(call: Callable[[], object]) -> StoreError:
    """Return the error of a call, which must fail at once, with a hint and without a password."""
    started = time.monotonic()
    failure = failure_of(call)
    assert time.monotonic() - started < PROMPT_SECONDS
    assert failure.hint
    assert PASSWORD not in str(failure)
    return failure


def usages(store: UsageStore, tenant: str) -> dict[str | None, str]:
    """Return the usages of a tenant with one budget and window, by entity."""
    return {
        counter.entity: format(counter.usage, "f")
        for counter in store.reader(COUNTERS).read(tenant).counters
    }
