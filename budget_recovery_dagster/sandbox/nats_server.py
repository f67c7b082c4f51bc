"""A NATS server of this process's own, with JetStream, reachable from this machine only."""

import fcntl
import json
import os
import shutil
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Self

from budget_recovery_dagster.sandbox.child_process import OwnedProcess, Program, poll
from budget_recovery_dagster.sandbox.errors import MissingProgramError, UnusableDataError

ANY_PORT = -1

_HOST = "127.0.0.1"
_PROGRAM = "nats-server"
# Recovery of the streams is part of a start.
_READY_SECONDS = 60
# A server whose parent was killed may still be shutting down.
_FORMER_SERVER_SECONDS = 10


class NatsServer:
    """An embedded NATS server whose streams are in ``data_dir``; its log lies beside that.

    ``config`` is more text for the server's configuration. With ``port`` -1 the server takes a free
    port, a new one at every start. Start it from a thread that lives as long as the server shall.
    """

    def __init__(self, data_dir: Path, *, config: str = "", port: int = ANY_PORT) -> None:
        self._data_dir = data_dir.absolute()
        self._config = config
        self._port = port
        self._url: str | None = None
        self._process: OwnedProcess | None = None

    @property
    def log(self) -> Path:
        """Where the server writes its log."""
        return self._data_dir.with_name(f"{self._data_dir.name}.log")

    @property
    def process(self) -> OwnedProcess:
        """The server's process, once started."""
        if self._process is None:
            raise RuntimeError("the NATS server has not been started")
        return self._process

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        return self.process.pid

    @property
    def url(self) -> str:
        """The URL of the server, as of its last start."""
        if self._url is None:
            raise RuntimeError("the NATS server has not been started")
        return self._url

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return when it takes connections.

        Raises:
            MissingProgramError: the server's program is not installed.
            UnusableDataError: the data directory cannot be used.
            ChildEndedError: the server did not become ready; a port in use is named so.
        """
        program = _find_program()
        try:
            self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._data_dir / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._start(program, lock)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            os.close(lock)

    def _start(self, program: Path, lock: int) -> None:
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

    def _unusable(self, error: OSError) -> UnusableDataError:
        return UnusableDataError(
            f"The data directory {self._data_dir} cannot be used: {error.strerror}.",
            "choose another data directory.",
        )

    def stop(self) -> None:
        """Shut down cleanly. Twice is harmless."""
        if self._process is not None:
            self._process.stop()
            self._process = None

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
            "pip install 'budget-recovery[sandbox]', or set BUDGET_RECOVERY_NATS_URL.",
        )
    return Path(found)
