"""Files below the place of the tables, reached by open directories.

No path is put together from names and followed: a symbolic link in the way leads nowhere.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from budget_recovery_dagster.adapters.table_names import unfinished
from budget_recovery_dagster.errors import ForeignTablesError, TablesError

SETTING = "BUDGET_RECOVERY_TABLES_DIR"

# Hidden from readers of a whole directory. It holds whose the tables are, and is locked by whoever
# writes them.
_OWNER_FILE = ".budget-recovery"
_LOOK_EVERY_SECONDS = 0.1

_NO_RIGHT = f"let the user of Dagster's runs write there, or set {SETTING} to another directory."
_NO_ROOM = f"free space there, or set {SETTING} to a directory on a larger disk."
_IN_THE_WAY = "move away what stands there under this name; it is not of this project."
_HINTS = {
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EROFS: _NO_RIGHT,
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: _NO_ROOM,
    errno.ELOOP: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.EISDIR: _IN_THE_WAY,
    errno.EEXIST: _IN_THE_WAY,
    errno.ENOTEMPTY: _IN_THE_WAY,
}
_OTHER = f"set {SETTING} to a directory that the user of Dagster's runs can write."

Written = TypeVar("Written")


@contextmanager
def told_of(path: Path) -> Iterator[None]:
    """Turn the system's refusals inside the context into ours, which name the path and setting.

    Raises:
        TablesError: the system refused.
    """
    try:
        yield
    except OSError as error:
        raise TablesError(
            f"{path} cannot be used for tables ({SETTING}): {error.strerror or error}.",
            _HINTS.get(error.errno or 0, _OTHER),
        ) from error


@contextmanager
def opened_place(place: Path) -> Iterator[int]:
    """Open the directory of all tables, made if it is missing; give its descriptor.

    It may itself be a link: where it leads is the operator's choice.

    Raises:
        TablesError: it is relative, or cannot be made or opened.
    """
    if not place.is_absolute():
        raise TablesError(
            f"{place} cannot be used for tables ({SETTING}): it is relative, and runs have other "
            "working directories than whoever set it.",
            f"set {SETTING} to an absolute path.",
        )
    with told_of(place):
        place.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_below(parent: int, name: str) -> Iterator[int]:
    """Open a directory in an open one, never through a link; give its descriptor.

    Raises:
        OSError: it is missing, no directory, or not to be opened.
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_below(parent: int, name: str) -> None:
    """Make a directory in an open one, unless something of this name is there."""
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
        os.fsync(parent)


@contextmanager
def held(place: Path, descriptor: int, *, owner: str, patience_seconds: float) -> Iterator[None]:
    """Have an open place for this process alone, as ``owner``, whose it is from then on.

    Raises:
        TablesError: it cannot be locked, or another process has it for longer than the patience.
        ForeignTablesError: it is another owner's.
    """
    with told_of(place / _OWNER_FILE):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.open(_OWNER_FILE, flags, 0o666, dir_fd=descriptor)
    try:
        with told_of(place / _OWNER_FILE):
            _take(lock, place, patience_seconds)
            _require_owner(lock, place, owner)
        yield
    finally:
        os.close(lock)


def _take(lock: int, place: Path, patience_seconds: float) -> None:
    until = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= until:
                raise TablesError(
                    f"Another run has been writing the tables in {place} ({SETTING}) for more "
                    f"than {patience_seconds:.0f} s.",
                    "look in Dagster for a run that hangs and terminate it, then try again.",
                ) from error
            time.sleep(_LOOK_EVERY_SECONDS)
        else:
            return


def _require_owner(lock: int, place: Path, owner: str) -> None:
    found = os.pread(lock, 200, 0).decode(errors="replace").strip()
    if not found:
        os.pwrite(lock, f"{owner}\n".encode(), 0)
        os.fsync(lock)
    elif found != owner:
        raise ForeignTablesError(
            f"The tables in {place} ({SETTING}) are of another database, whose id is {found}; this "
            f"one is {owner}. Nothing was written or removed.",
            f"set {SETTING} to a directory of this database's own, or, if its tables are not "
            f"needed any more, remove {place / _OWNER_FILE} and try again.",
        )


def write_whole(
    directory: int, name: str, write: Callable[[IO[bytes]], Written]
) -> tuple[Written, int]:
    """Have a file written in an open directory; return what ``write`` returns, and the size.

    At the end the file stands whole under its name, or what stood there before.

    Raises:
        OSError: it could not be written.
    """
    beside = unfinished(name)
    # Of a run that was killed: nobody else writes now.
    with suppress(FileNotFoundError):
        os.unlink(beside, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(beside, flags, 0o666, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            written = write(file)
            file.flush()
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        os.rename(beside, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside, dir_fd=directory)
        raise
    os.fsync(directory)
    return written, size


def files_in(directory: int) -> list[str]:
    """List the regular files of an open directory; links are none."""
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))


def directories_in(directory: int) -> list[str]:
    """List the directories of an open directory; links are none."""
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def is_empty(directory: int) -> bool:
    """Whether there is nothing in an open directory."""
    with os.scandir(directory) as entries:
        return next(entries, None) is None
