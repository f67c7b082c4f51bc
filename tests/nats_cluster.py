"""Three NATS servers, of which single ones can be killed and wiped."""

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Self

from budget_recovery_dagster.embedded import NatsServer
from tests.free_ports import unused_ports

NAMES = ("n0", "n1", "n2")

_MONITOR_SECONDS = 2.0


class Cluster:
    """Three servers, of which single ones can be killed and wiped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        count = len(NAMES)
        ports = unused_ports(3 * count)
        clients, routes, monitors = ports[:count], ports[count : 2 * count], ports[2 * count :]
        self._monitors = dict(zip(NAMES, monitors, strict=True))
        self.servers = {
            name: NatsServer(
                directory / name,
                port=clients[number],
                config=_config(name, routes[number], monitors[number], routes),
            )
            for number, name in enumerate(NAMES)
        }

    @property
    def urls(self) -> list[str]:
        """Return the URLs of all servers since their last starts."""
        return [server.url for server in self.servers.values()]

    def kill(self, name: str) -> None:
        server = self.servers[name]
        os.kill(server.pid, signal.SIGKILL)
        server.stop()

    def start_missing(self) -> None:
        """Start the servers that are not running."""
        for server in self.servers.values():
            if server._process is None:
                server.start()

    def wipe(self, name: str) -> None:
        shutil.rmtree(self._directory / name)

    def behind(self, stream: str | None = None) -> dict[str, str]:
        """Return the servers that are behind, with the reason that each reports.

        This covers all streams or one. A server without a replica of that stream is behind too.
        """
        path = "/healthz" if stream is None else f"/healthz?account=$G&stream={stream}"
        found = {name: self._monitor(name, path) for name in NAMES}
        return {name: body for name, (status, body) in found.items() if status != 200}

    def meta_leader(self) -> str | None:
        """Return the meta leader of the cluster, as the first responding server reports it."""
        for name in NAMES:
            status, body = self._monitor(name, "/jsz")
            if status == 200:
                answer: dict[str, Any] = json.loads(body)
                leader: str | None = answer.get("meta_cluster", {}).get("leader")
                return leader
        return None

    def _monitor(self, name: str, path: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self._monitors[name], timeout=_MONITOR_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[Self]:
        """Start the servers; stop them at the end."""
        cluster = cls(directory)
        with ExitStack() as stack:
            for server in cluster.servers.values():
                stack.callback(server.stop)
                server.start()
            yield cluster


def _config(name: str, port: int, monitor: int, routes: Sequence[int]) -> str:
    urls = ", ".join(f'"nats://127.0.0.1:{route}"' for route in routes)
    return f"""
        server_name: {name}
        server_tags: ["{name}"]
        http: "127.0.0.1:{monitor}"
        cluster {{ name: C, host: 127.0.0.1, port: {port}, routes: [{urls}] }}"""
