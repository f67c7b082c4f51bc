"""Dagster's own processes: code server, webserver and daemon, each a supervised child."""

import json
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from budget_recovery_dagster.sandbox.child_process import OwnedProcess, Program
from budget_recovery_dagster.sandbox.dagster_ui import DagsterUi
from budget_recovery_dagster.sandbox.socket_directory import private_socket_dir

LOCATION = "budget_recovery"
DEFINITIONS = "budget_recovery_dagster.definitions"

_READY_SECONDS = 180
_GRACE_SECONDS = 15


class DagsterServices:
    """The services with ``home`` as DAGSTER_HOME; their logs lie beside it.

    The code server is a child of its own, not of daemon and webserver, so that its end is noticed.
    ``environment`` is all that they, and the runs, know of the world.
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
        """What has been started."""
        return tuple(self._processes)

    def start_pages(self) -> None:
        """Start code server and webserver; return when the pages are served.

        Raises:
            ChildEndedError: one of them did not become ready.
            UnusableDataError: there is no place for the code server's socket.
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
        # JSON, which is YAML, too.
        self._workspace.write_text(json.dumps({"load_from": [server]}))
        code_server.wait_until_ready(lambda: _accepts(code_socket), seconds=_READY_SECONDS)
        webserver = self._start(
            "Dagster webserver",
            "webserver.log",
            *("dagster_webserver", "--workspace", self._workspace),
            *("--host", self._ui.host, "--port", self._ui.port),
        )
        webserver.wait_until_ready(self._ui.is_up, seconds=_READY_SECONDS)

    def start_daemon(self) -> None:
        """Start what runs schedules, sensors and queued runs; it needs some seconds to begin."""
        self._start(
            "Dagster daemon",
            "daemon.log",
            *("dagster._daemon", "run", "--workspace", self._workspace),
        )

    def stop(self) -> None:
        """Stop all, with the runs under way. Calling it twice is harmless."""
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
                # By module: the environment's scripts need not be in the PATH.
                [sys.executable, "-m", module, *map(str, arguments)],
                log=self._home.with_name(log),
                environment=self._environment,
                # Before its handlers stand, SIGINT would be lost in an import; SIGTERM is not.
                stop_signal=signal.SIGTERM,
                # All they know is in the database, and without it they can hang when they end.
                death_signal=signal.SIGKILL,
                grace_seconds=_GRACE_SECONDS,
                has_workers=has_workers,
            )
        )
        self._processes.append(process)
        return process


def _accepts(path: Path) -> bool | None:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return None
    return True
