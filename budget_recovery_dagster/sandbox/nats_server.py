"""A NATS server of this process's own, with JetStream, reachable from this machine only."""

import fcntl
import json
import os
import shutil
import sysconfig
from pathlib import Path

from budget_recovery_dagster.sandbox.child_process import OwnedProcess, Program, poll
from budget_recovery_dagster.sandbox.embedded_server import EmbeddedServer
from budget_recovery_dagster.sandbox.errors import MissingProgramError, UnusableDataError

ANY_PORT = -1

_HOST = "127.0.0.1"
_PROGRAM = "nats-server"
# Recovery of the streams is part of a start.
_READY_SECONDS = 60
# A server whose parent was killed may still be shutting down.
_FORMER_SERVER_SECONDS = 10


class NatsServer(EmbeddedServer):
    """An embedded NATS server whose streams are in ``data_dir``; its log lies beside that.

    ``config`` is more text for the server's configuration. With ``port`` -1 the server takes a free
    port, a new one at every start.
    """

    def __init__(self, data_dir: Path, *, config: str = "", port: int = ANY_PORT) -> None:
        super().__init__("NATS", data_dir)
        self._config = config
        self._port = port
        self._url: str | None = None

    @property
    def url(self) -> str:
        """The URL of the server, as of its last start."""
        if self._url is None:
            raise self._not_started()
        return self._url

    def _start(self) -> None:
        program = _find_program()
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._data_dir / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._start_with(program, lock)
        finally:
            os.close(lock)

    def _start_with(self, program: Path, lock: int) -> None:
        # The server keeps the lock open, so that it is held until that process is really gone:
        # two servers on one directory would spoil each other's streams.
        if not poll(lambda: _take(lock), seconds=_FORMER_SERVER_SECONDS):
            raise UnusableDataError(
                f"A NATS server already runs on {self._data_dir}.",
                "stop it first, or choose another data directory.",
            )
        for stale in self._data_dir.glob("*.ports"):
            stale.unlink()
        config_file = self._data_dir / "nats.conf"
        config_file.write_text(self._full_config(), encoding="utf-8")
        process = self._process = OwnedProcess(
            Program(
                "NATS",
                [program, "--config", config_file],
                log=self.log,
                environment={"PATH": os.defpath},
                files=[lock],
            )
        )
        self._url = process.wait_until_ready(
            lambda: self._read_url(process.pid), seconds=_READY_SECONDS
        )

    def _full_config(self) -> str:
        directory = json.dumps(str(self._data_dir), ensure_ascii=False)
        return "\n".join(
            [
                f"host: {_HOST}",
                f"port: {self._port}",
                f"ports_file_dir: {directory}",
                f"jetstream {{ store_dir: {directory} }}",
                self._config,
                "",
            ]
        )

    def _read_url(self, pid: int) -> str | None:
        # The file carries the pid in its name, so another server's is never read.
        try:
            ports = json.loads((self._data_dir / f"{_PROGRAM}_{pid}.ports").read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # not there yet, or half written
            return None
        url: str = ports["nats"][0]
        return url


def _take(lock: int) -> bool | None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return True


def _find_program() -> Path:
    # The wheel puts the program among the environment's scripts, which need not be in the PATH.
    beside_python = Path(sysconfig.get_path("scripts"), _PROGRAM)
    found = str(beside_python) if beside_python.exists() else shutil.which(_PROGRAM)
    if found is None:
        raise MissingProgramError(
            "The embedded NATS server is not installed.",
            "pip install '.[sandbox]' in the checkout, or set BUDGET_RECOVERY_NATS_URL.",
        )
    return Path(found)
