"""The directory that holds everything of ``budget-recovery dev``, held by one instance."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from budget_recovery_dagster.sandbox.accounts import ROOT
from budget_recovery_dagster.sandbox.child_process import poll
from budget_recovery_dagster.sandbox.errors import AlreadyRunningError, UnusableDataError

DEV_FILE = "dev.json"
"""What the instance that holds the directory tells of itself."""

_LOCK_FILE = "dev.lock"
# Whoever only looks whether it is held has the lock for a moment.
_LOOK_SECONDS = 0.5


@contextmanager
def held_data_dir(directory: Path) -> Iterator[Path]:
    """Make the directory if it is missing, and hold it, also against a start at the same time.

    Raises:
        AlreadyRunningError: another instance holds it.
        UnusableDataError: it cannot be made or written, or holds something else.
    """
    directory = directory.expanduser().absolute()
    try:
        make_reachable(directory)
        _require_ours(directory)
        lock = os.open(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UnusableDataError(
            f"The data directory {directory} cannot be used: {error.strerror}.",
            "choose another one with --data-dir.",
        ) from error
    try:
        _take(lock, directory)
        # Of one that was killed.
        (directory / DEV_FILE).unlink(missing_ok=True)
        yield directory
    finally:
        # The file stays: were it removed, two instances could hold two files of this name.
        os.close(lock)


def is_held(directory: Path) -> bool:
    """Whether an instance holds the directory; a killed one does not.

    Raises:
        OSError: this account cannot tell.
    """
    try:
        lock = os.open(directory / _LOCK_FILE, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def make_reachable(directory: Path) -> None:
    """Make a directory and its missing parents; root's may be passed through by every account.

    Modes of existing directories stay as they are.
    """
    for missing in reversed(
        [path for path in (directory, *directory.parents) if not path.exists()]
    ):
        missing.mkdir(exist_ok=True)
        # By chmod, because a umask of 077 would shut out the account of the database.
        missing.chmod(0o711 if os.geteuid() == ROOT else 0o700)


def _require_ours(directory: Path) -> None:
    # A new file system may not be quite empty.
    others = {path.name for path in directory.iterdir()} - {"lost+found"}
    if others and _LOCK_FILE not in others:
        raise UnusableDataError(
            f"The data directory {directory} holds something else, such as {min(others)}.",
            "choose an empty or a new one with --data-dir.",
        )


def _take(lock: int, directory: Path) -> None:
    if not poll(lambda: _try_to_take(lock), seconds=_LOOK_SECONDS):
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        raise AlreadyRunningError(
            f"budget-recovery dev already runs on {directory} (pid {holder}).",
            "stop it first, or choose another directory with --data-dir.",
        )
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _try_to_take(lock: int) -> bool | None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return True
