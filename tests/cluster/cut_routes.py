"""Servers that cannot reach each other, while clients still reach each of them."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, Self

import anyio
from anyio.abc import SocketStream
from anyio.from_thread import start_blocking_portal

from budget_recovery_dagster.embedded import NatsServer
from tests.free_ports import unused_ports
from tests.nats_cluster import NAMES, Cluster

_HOST = "127.0.0.1"
_AT_ONCE = 1 << 16

Ends = tuple[str, str]
"""The pair of servers of a connection: from, to."""


class Links:
    """The links between servers, one for each direction.

    Data on a cut link neither arrives nor is refused, without an error. Once the link is open again
    it arrives, as with a network that retransmits.
    """

    def __init__(self, ports: Mapping[str, int], entrances: Mapping[Ends, int]) -> None:
        self._ports = ports
        self.entrances = entrances
        self._open = {ends: anyio.Event() for ends in entrances}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep all links open until the context ends."""
        with start_blocking_portal() as portal:
            self._portal = portal
            portal.call(self._reopen)
            with portal.wrap_async_context_manager(self._forwarding()):
                yield

    @contextmanager
    def cut(self, server: str) -> Iterator[None]:
        """Cut all links from and to a server for a while."""
        self._portal.call(self._cut, server)
        try:
            yield
        finally:
            self._portal.call(self._reopen)

    async def _cut(self, server: str) -> None:
        self._open |= {ends: anyio.Event() for ends in self._open if server in ends}

    async def _reopen(self) -> None:
        for is_open in self._open.values():
            is_open.set()

    @asynccontextmanager
    async def _forwarding(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack, anyio.create_task_group() as group:
            for ends, port in self.entrances.items():
                entrance = await stack.enter_async_context(
                    await anyio.create_tcp_listener(local_host=_HOST, local_port=port)
                )
                group.start_soon(entrance.serve, partial(self._connect, ends))
            yield
            group.cancel_scope.cancel()

    async def _connect(self, ends: Ends, asking: SocketStream) -> None:
        async with asking:
            # The target server may be dead.
            with suppress(OSError):
                asked = await anyio.connect_tcp(_HOST, self._ports[ends[1]])
                async with asked, anyio.create_task_group() as both:
                    for way in ((asking, asked), (asked, asking)):
                        both.start_soon(self._forward, ends, *way, both.cancel_scope)

    async def _forward(
        self, ends: Ends, source: SocketStream, target: SocketStream, both: anyio.CancelScope
    ) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                data = await source.receive(_AT_ONCE)
                await self._open[ends].wait()
                await target.send(data)
        both.cancel()


class CuttableCluster(Cluster):
    """A cluster whose servers can be cut off from the others."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        count, ends = len(NAMES), list(permutations(NAMES, 2))
        # All at once, or the same port might be returned twice.
        self._nowhere, *ports = unused_ports(1 + 3 * count + len(ends))
        clients = dict(zip(NAMES, ports[:count], strict=True))
        self._routes = dict(zip(NAMES, ports[count : 2 * count], strict=True))
        self._monitors = dict(zip(NAMES, ports[2 * count : 3 * count], strict=True))
        self._links = Links(self._routes, dict(zip(ends, ports[3 * count :], strict=True)))
        self.servers = {
            name: NatsServer(directory / name, port=clients[name], config=self._config(name))
            for name in NAMES
        }

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[Self]:
        with super().started(directory) as cluster, cluster._links.opened():
            yield cluster

    @contextmanager
    def cut_off(self, name: str) -> Iterator[None]:
        """Cut a server off from the others; clients still reach all of them."""
        with self._links.cut(name):
            yield

    def leader_of(self, stream: str, *, asked: str) -> str | None:
        """Return the leader of a stream as one server reports it."""
        status, body = self._monitor(asked, "/jsz?acc=$G&streams=true")
        assert status == 200
        streams: dict[str, Any] = json.loads(body)
        (account,) = streams["account_details"]
        (found,) = (each for each in account["stream_detail"] if each["name"] == stream)
        leader: str | None = found["cluster"].get("leader")
        return leader

    def _config(self, name: str) -> str:
        others = [ends for ends in self._links.entrances if ends[0] == name]
        urls = ", ".join(f'"nats://{_HOST}:{self._links.entrances[ends]}"' for ends in others)
        # Servers advertise other addresses to each other, which would bypass the links.
        return f"""
            server_name: {name}
            server_tags: ["{name}"]
            http: "{_HOST}:{self._monitors[name]}"
            cluster {{
                name: C, host: {_HOST}, port: {self._routes[name]}
                advertise: "{_HOST}:{self._nowhere}", routes: [{urls}]
            }}"""
