"""The common part of the embedded servers: data directory, log, sockets and one process."""

import fcntl
import hashlib
import os
import stat
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from budget_recovery_dagster.embedded.child_process import (
    ROOT,
    Account,
    CannotStartError,
    OwnedProcess,
    UnusableDataError,
)

_PRIVATE = 0o700


class MissingProgramError(CannotStartError):
    """The program of a server is not installed."""


class EmbeddedServer(ABC):
    """A server whose files are in ``data_dir``, with its log next to that directory.

    Start it from a thread that outlives the server.
    """

    def __init__(self, name: str, data_dir: Path) -> None:
        self._name = name
        self._data_dir = data_dir.absolute()
        self._process: OwnedProcess | None = None

    @property
    def log(self) -> Path:
        """The file that receives the log of the server."""
        return self._data_dir.with_name(f"{self._data_dir.name}.log")

    @property
    def process(self) -> OwnedProcess:
        """The process of the started server."""
        if self._process is None:
            raise self._not_started()
        return self._process

    @property
    def pid(self) -> int:
        """The process id of the started server."""
        return self.process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return when it accepts connections; a failed start leaves nothing.

        Raises:
            MissingProgramError: the programs of the server are not installed.
            UnusableDataError: the data directory cannot be used.
            ChildEndedError: the server did not become ready; the message names a port in use.
        """
        try:
            self._start()
        except OSError as error:
            self.stop()
            raise UnusableDataError(
                f"The data directory {self._data_dir} cannot be used: {error.strerror}.",
                "choose another data directory.",
            ) from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Shut down cleanly without waiting for clients. A second call does nothing."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    @abstractmethod
    def _start(self) -> None:
        """Start the process and wait for it; every OSError counts as one of the data directory."""

    def _not_started(self) -> RuntimeError:
        return RuntimeError(f"the {self._name} server has not been started")


def try_lock(descriptor: int) -> bool:
    """Take the exclusive lock of an open file; return False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_reachable(directory: Path) -> None:
    """Create a directory and its missing parents; every account may pass through those of root.

    Modes of existing directories stay as they are.
    """
    for missing in reversed(
        [path for path in (directory, *directory.parents) if not path.exists()]
    ):
        missing.mkdir(exist_ok=True)
        # chmod, because a umask of 077 would shut out the account of the database.
        missing.chmod(0o711 if os.geteuid() == ROOT else _PRIVATE)


def private_socket_dir(of: Path, account: Account | None = None) -> Path:
    """Create or reuse the socket directory of the server whose data are in ``of``.

    Paths of unix sockets are limited to about 100 bytes, so it is in ``/tmp``. Only ``account``
    (None: that of this process) may enter it. Its name is predictable, so an existing directory
    is accepted only with the right owner and mode.

    Raises:
        UnusableDataError: something else has this name.
    """
    uid = account.uid if account else os.geteuid()
    digest = hashlib.sha256(os.fsencode(of.resolve())).hexdigest()[:12]
    directory = Path("/tmp", f"budget-{uid}-{digest}")  # noqa: S108 - verified below
    try:
        directory.mkdir(mode=_PRIVATE)
        if account is not None:
            os.chown(directory, account.uid, account.gid)
    except FileExistsError:
        state = directory.lstat()
        if (
            not stat.S_ISDIR(state.st_mode)
            or state.st_uid != uid
            or stat.S_IMODE(state.st_mode) != _PRIVATE
        ):
            raise UnusableDataError(
                f"{directory} is not a private directory of {Account.of(uid).name}.",
                "find out who created it, and remove it.",
            ) from None
    return directory
