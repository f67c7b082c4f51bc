"""Dagster's own processes (code server, webserver and daemon) and requests to the webserver."""

import http.client
import json
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from budget_recovery_dagster.embedded import (
    CannotStartError,
    OwnedProcess,
    Program,
    private_socket_dir,
)
from budget_recovery_dagster.errors import BudgetRecoveryError

LOCATION = "budget_recovery"
DEFINITIONS = "budget_recovery_dagster.definitions"

_READY_SECONDS = 180
_GRACE_SECONDS = 15
_ANSWER_SECONDS = 30
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the address to ask instead


class PortTakenError(CannotStartError):
    """The address of the web pages is in use, or is not an address of this machine."""


class DagsterUiError(BudgetRecoveryError):
    """The Dagster webserver gave no usable answer."""


@dataclass(frozen=True, slots=True)
class DagsterUi:
    """The Dagster webserver at an address of this machine."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The URL for a browser on this machine."""
        host = self._reachable_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def _reachable_host(self) -> str:
        return _EVERY_ADDRESS.get(self.host, self.host)

    def require_free(self) -> None:
        """Check that a server could use the address now.

        Raises:
            PortTakenError: it could not.
        """
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                # As the webserver does: connections that have just ended do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise PortTakenError(
                f"The web pages cannot be served at {self.host} port {self.port}:"
                f" {error.strerror or error}.",
                "choose another --port or --host.",
            ) from error

    def is_up(self) -> bool:
        """Whether the webserver answers."""
        try:
            status, _ = self._ask("GET", "/server_info")
        except (OSError, http.client.HTTPException):
            return False
        return status == http.client.OK

    def query(self, document: str, **variables: Any) -> Mapping[str, Any]:
        """Return the data that answer a GraphQL document.

        Raises:
            DagsterUiError: there is no answer, or an error.
        """
        body = json.dumps({"query": document, "variables": variables})
        try:
            _, answer = self._ask("POST", "/graphql", body)
            content = json.loads(answer)
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise DagsterUiError(
                f"The Dagster webserver at {self.url} gave no answer: {error}.", "see its log."
            ) from error
        if content.get("errors"):
            raise DagsterUiError(
                f"The Dagster webserver refused a query: {content['errors'][0]['message']}",
                "see its log.",
            )
        data: Mapping[str, Any] = content["data"]
        return data

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(
            self._reachable_host, self.port, timeout=_ANSWER_SECONDS
        )
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


class DagsterServices:
    """The services with ``home`` as DAGSTER_HOME and their logs next to it.

    The code server is a separate child, not one of the daemon and the webserver, so that its end is
    noticed. The services and the runs get only ``environment``.
    """

    def __init__(self, home: Path, ui: DagsterUi, environment: Mapping[str, str]) -> None:
        self._home = home
        self._ui = ui
        self._environment = {**environment, "DAGSTER_HOME": str(home), "PYTHONUNBUFFERED": "1"}
        self._workspace = home / "workspace.yaml"
        self._socket_dir: Path | None = None
        self._processes: list[OwnedProcess] = []

    @property
    def processes(self) -> tuple[OwnedProcess, ...]:
        """The processes that were started."""
        return tuple(self._processes)

    def start_pages(self) -> None:
        """Start code server and webserver, and return when the pages are served.

        Raises:
            ChildEndedError: one of them did not become ready.
            UnusableDataError: there is no directory for the socket of the code server.
        """
        self._home.mkdir(mode=0o700, exist_ok=True)
        settings = files("budget_recovery_dagster.sandbox").joinpath("dagster.yaml").read_text()
        (self._home / "dagster.yaml").write_text(settings)
        self._socket_dir = private_socket_dir(self._home)
        code_socket = self._socket_dir / "code-server"
        code_socket.unlink(missing_ok=True)
        code_server = self._start(
            "Dagster code server",
            "code-server.log",
            *("dagster", "api", "grpc", "--socket", code_socket, "--module-name", DEFINITIONS),
            *("--location-name", LOCATION, "--empty-working-directory"),
            has_workers=True,  # the runs
        )
        server = {"grpc_server": {"socket": str(code_socket), "location_name": LOCATION}}
        # JSON is also YAML.
        self._workspace.write_text(json.dumps({"load_from": [server]}))
        code_server.wait_until_ready(
            lambda: _accepts_connections(code_socket), seconds=_READY_SECONDS
        )
        webserver = self._start(
            "Dagster webserver",
            "webserver.log",
            *("dagster_webserver", "--workspace", self._workspace),
            *("--host", self._ui.host, "--port", self._ui.port),
        )
        webserver.wait_until_ready(self._ui.is_up, seconds=_READY_SECONDS)

    def start_daemon(self) -> None:
        """Start the daemon for schedules, sensors and queued runs; it needs some seconds."""
        self._start(
            "Dagster daemon",
            "daemon.log",
            *("dagster._daemon", "run", "--workspace", self._workspace),
        )

    def stop(self) -> None:
        """Stop all services and their runs. A second call does nothing."""
        for process in self._processes:
            process.ask_to_end()
        for process in self._processes:
            process.stop()
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _start(
        self,
        name: str,
        log: str,
        module: str,
        *arguments: str | Path | int,
        has_workers: bool = False,
    ) -> OwnedProcess:
        process = OwnedProcess(
            Program(
                name,
                # As modules: the scripts of the environment may not be in PATH.
                [sys.executable, "-m", module, *map(str, arguments)],
                log=self._home.with_name(log),
                environment=self._environment,
                # SIGINT would be lost in an import, before their handlers exist; SIGTERM is not.
                stop_signal=signal.SIGTERM,
                # All their state is in the database; without it they can hang when they end.
                death_signal=signal.SIGKILL,
                grace_seconds=_GRACE_SECONDS,
                has_workers=has_workers,
            )
        )
        self._processes.append(process)
        return process


def _accepts_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
