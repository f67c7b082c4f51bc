"""Three NATS servers, of which single ones can be killed and wiped."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from budget_recovery_dagster.sandbox.nats_server import NatsServer
from tests.free_ports import unused_ports


class Cluster:
    """Three servers, of which single ones can be killed and wiped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        ports = unused_ports(6)
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports[3:])
        self.servers = {
            f"n{number}": NatsServer(
                directory / f"n{number}",
                port=ports[number],
                config=f"""
                    server_name: n{number}
                    cluster {{
                        name: C, host: 127.0.0.1, port: {ports[3 + number]}, routes: [{routes}]
                    }}""",
            )
            for number in range(3)
        }

    def kill(self, name: str) -> None:
        server = self.servers[name]
        os.kill(server.pid, signal.SIGKILL)
        server.stop()

    def wipe(self, name: str) -> None:
        shutil.rmtree(self._directory / name)

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[Self]:
        """Start the servers; they stop in the end."""
        cluster = cls(directory)
        with ExitStack() as stack:
            for server in cluster.servers.values():
                stack.callback(server.stop)
                server.start()
            yield cluster
