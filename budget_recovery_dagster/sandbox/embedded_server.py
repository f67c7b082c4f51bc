"""What the embedded servers have in common: a directory of data, a log and one process."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from budget_recovery_dagster.sandbox.child_process import OwnedProcess
from budget_recovery_dagster.sandbox.errors import UnusableDataError


class EmbeddedServer(ABC):
    """A server of this process's own, whose files are in ``data_dir``; its log lies beside that.

    Start it from a thread that lives at least as long as the server.
    """

    def __init__(self, name: str, data_dir: Path) -> None:
        self._name = name
        self._data_dir = data_dir.absolute()
        self._process: OwnedProcess | None = None

    @property
    def log(self) -> Path:
        """Where the server writes its log."""
        return self._data_dir.with_name(f"{self._data_dir.name}.log")

    @property
    def process(self) -> OwnedProcess:
        """The server's process, once started."""
        if self._process is None:
            raise self._not_started()
        return self._process

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        return self.process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return when it takes connections.

        Raises:
            MissingProgramError: the server's programs are not installed.
            UnusableDataError: the data directory cannot be used.
            ChildEndedError: the server did not become ready; a port in use is named so.
        """
        try:
            self._start()
        except OSError as error:
            raise UnusableDataError(
                f"The data directory {self._data_dir} cannot be used: {error.strerror}.",
                "choose another data directory.",
            ) from error

    def stop(self) -> None:
        """Shut down cleanly, without waiting for clients. Calling it twice is harmless."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    @abstractmethod
    def _start(self) -> None:
        """Start the process and wait for it; an OSError is taken for one of the data directory."""

    def _not_started(self) -> RuntimeError:
        return RuntimeError(f"the {self._name} server has not been started")
