"""The data directory of ``budget-recovery dev``, which holds its lock and its servers' addresses.

One instance holds a data directory and publishes its servers in it. Other commands find the servers
of a running dev there, without any setting.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from budget_recovery_dagster.embedded.child_process import (
    CannotStartError,
    UnusableDataError,
    make_reachable,
    poll,
    private_files,
    try_lock,
)
from budget_recovery_dagster.errors import BudgetRecoveryError

DEV_FILE = "dev.json"
"""The file in which the running instance publishes its servers."""

_LOCK_FILE = "dev.lock"
# `_is_held` takes the lock for a short time.
_LOCK_SECONDS = 0.5
_PRIVATE = 0o600
# What earlier versions let every account read. PostgreSQL keeps its own directory private, and its
# account must reach a copy of its programs.
_DIRECTORIES = ("dagster", "nats", "tables")


class AlreadyRunningError(CannotStartError):
    """Another instance holds the data directory; the message names its pid."""


class NoRunningDevError(BudgetRecoveryError):
    """No ``budget-recovery dev`` runs on a data directory."""


@dataclass(frozen=True, slots=True)
class RunningDev:
    """The servers of a running dev; None for the URL of a server that a setting names.

    That URL may hold a password, so it stays in the environment of the instance.
    """

    ui_url: str
    bucket: str
    check_interval_seconds: int
    nats_url: str | None
    postgres_url: str | None


@contextmanager
def held_data_dir(directory: Path) -> Iterator[Path]:
    """Create the directory if it is missing, and hold it against every other instance.

    Only this account may read what is in it, and what this process creates meanwhile.

    Raises:
        AlreadyRunningError: another instance holds it.
        UnusableDataError: it cannot be created or written, or holds other files.
    """
    directory = directory.expanduser().absolute()
    try:
        make_reachable(directory)
        _require_ours(directory)
        lock = os.open(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT, _PRIVATE)
    except OSError as error:
        raise UnusableDataError(
            f"The data directory {directory} cannot be used: {error.strerror}.",
            "choose another one with --data-dir.",
        ) from error
    try:
        if not poll(lambda: try_lock(lock), seconds=_LOCK_SECONDS):
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise AlreadyRunningError(
                f"budget-recovery dev already runs on {directory} (pid {holder}).",
                "stop it first, or choose another directory with --data-dir.",
            )
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        # A killed instance leaves its file.
        (directory / DEV_FILE).unlink(missing_ok=True)
        _make_private(directory)
        with private_files():
            yield directory
    finally:
        # The lock file stays: if it were removed, two instances could lock two files of this name.
        os.close(lock)


def _require_ours(directory: Path) -> None:
    # A new file system contains lost+found.
    others = {path.name for path in directory.iterdir()} - {"lost+found"}
    if others and _LOCK_FILE not in others:
        raise UnusableDataError(
            f"The data directory {directory} holds other files, such as {min(others)}.",
            "choose an empty or a new one with --data-dir.",
        )


def _make_private(directory: Path) -> None:
    for path in directory.iterdir():
        # A link is the operator's choice, and so is what another account owns.
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            continue
        if path.is_file():
            path.chmod(_PRIVATE)
        elif path.name in _DIRECTORIES:
            path.chmod(0o700)


@contextmanager
def announced(data_dir: Path, running: RunningDev) -> Iterator[None]:
    """Publish the servers in the held directory, readable by its owner only, until the end."""
    file = data_dir / DEV_FILE
    unfinished = file.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as written:
        json.dump(asdict(running), written)
    # Readers never see a partial file.
    unfinished.replace(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def find_running_dev(data_dir: Path) -> RunningDev:
    """Return the servers of the dev that runs on a data directory.

    Raises:
        NoRunningDevError: none runs there, or it is still starting.
        UnusableDataError: this account may not read it, or another version published it.
    """
    directory = data_dir.expanduser().absolute()
    try:
        if not _is_held(directory):
            raise NoRunningDevError(
                f"No budget-recovery dev runs on {directory}.",
                "load the environment of the services, which sets BUDGET_RECOVERY_POSTGRES_URL. Or "
                "start `budget-recovery dev`. If it runs on another directory, set --data-dir.",
            )
        return RunningDev(**json.loads((directory / DEV_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise NoRunningDevError(
            f"The budget-recovery dev on {directory} is starting or stopping.",
            "wait until it prints its addresses, and try again.",
        ) from error
    except OSError as error:
        raise UnusableDataError(
            f"The data directory {directory} cannot be used: {error.strerror}.",
            "use the account that runs `budget-recovery dev`, or another --data-dir.",
        ) from error
    except (TypeError, ValueError) as error:
        raise UnusableDataError(
            f"{directory / DEV_FILE} does not describe a running dev: {error}.",
            "restart `budget-recovery dev`; its version may differ from that of this command.",
        ) from error


def _is_held(directory: Path) -> bool:
    """Whether a live instance holds the directory: the kernel releases the lock of a killed one."""
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
