"""Tables of tenants and hours: Parquet files in a directory that belongs to one database."""

import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from budget_recovery_dagster.domain.counters import MAX_DECIMALS, MAX_INTEGER_DIGITS, Entity
from budget_recovery_dagster.domain.snapshots import (
    USAGE_COLUMNS,
    ColumnKind,
    RemovedTables,
    StoredRecord,
    TableFile,
)
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import ForeignTablesError, TablesBusyError, TablesError

if TYPE_CHECKING:
    import pyarrow as pa

SETTING = "BUDGET_RECOVERY_TABLES_DIR"
# Rows in memory at a time; a row group in the file has one to two times as many.
ROWS_AT_ONCE = 65_536
_LONGEST_SLUG = 40
# 96 bits: finding another tenant with the same directory is infeasible.
_DIGEST_DIGITS = 24
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
DIRECTORY_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{_LONGEST_SLUG}}}-[0-9a-f]{{{_DIGEST_DIGITS}}}")
TABLE_NAME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}Z\.parquet")
# A table while it is being written; after that, its run was killed. Readers of a whole directory
# skip names that start with a dot.
UNFINISHED_NAME = re.compile(rf"\.{TABLE_NAME.pattern}\.unfinished")
# Hidden from readers of a whole directory. It contains the owner of the tables, and is locked while
# they are written.
_OWNER_FILE = ".budget-recovery"
_LOCK_RETRY_SECONDS = 0.1
# Usage is for the account of the services, whatever its umask; root's lets every account read.
_PRIVATE_DIRECTORY, _PRIVATE_FILE = 0o700, 0o600
# A run that waits here holds one of Dagster's run slots, which a restore may need. The pool of the
# asset keeps other runs in Dagster's queue, where they hold none.
_LOCK_TIMEOUT_SECONDS = 3.0
_NO_PERMISSION = (
    f"let the user of Dagster's runs write there, or set {SETTING} to another directory."
)
_NO_SPACE = f"free disk space, or set {SETTING} to a directory on a larger disk."
_FOREIGN_FILE = "move the existing file or directory away; this project did not create it."
_HINTS = {
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EROFS: _NO_PERMISSION,
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: _NO_SPACE,
    errno.ELOOP: _FOREIGN_FILE,
    errno.ENOTDIR: _FOREIGN_FILE,
    errno.EISDIR: _FOREIGN_FILE,
    errno.EEXIST: _FOREIGN_FILE,
    errno.ENOTEMPTY: _FOREIGN_FILE,
}
_OTHER = f"set {SETTING} to a directory that the user of Dagster's runs can write."
# Set explicitly, so that a new release of pyarrow does not change the files.
_FORMAT: dict[str, Any] = {
    "version": "2.6",
    "data_page_version": "1.0",
    "compression": "zstd",
    "compression_level": 3,
    "use_dictionary": True,
    "write_statistics": True,
    "store_schema": True,
}
Written = TypeVar("Written")


@dataclass(frozen=True, slots=True)
class ParquetTables:
    """The tables below one directory."""

    directory: Path
    lock_timeout_seconds: float = _LOCK_TIMEOUT_SECONDS

    @property
    def place(self) -> str:
        """The directory of the tables, for display."""
        return str(self.directory)

    @contextmanager
    def opened(self, owner: str) -> Iterator["OpenedParquetTables"]:
        """Open the tables, locked for this process; wait for the lock."""
        with (
            _opened_directory(self.directory) as root,
            _locked(
                self.directory, root, owner=owner, lock_timeout_seconds=self.lock_timeout_seconds
            ),
        ):
            yield OpenedParquetTables(self.directory, root)


@dataclass(frozen=True, slots=True)
class OpenedParquetTables:
    """The tables below an open directory, ``root``, locked for this process."""

    directory: Path
    root: int

    def write(self, tenant: str, hour: Hour, records: Iterable[StoredRecord]) -> TableFile:
        """Write a tenant's table of an hour, in the order of ``records``; replace an existing one.

        Raises:
            TablesError: the table could not be written.
        """
        of_tenant, table = directory_of(tenant), table_of(hour)
        path = self.directory / of_tenant / table
        with file_errors(path):
            with suppress(FileExistsError):
                os.mkdir(of_tenant, _PRIVATE_DIRECTORY, dir_fd=self.root)
                os.fsync(self.root)
            with _opened_subdirectory(self.root, of_tenant) as directory:
                rows, size = _write_atomically(
                    directory, table, lambda file: write_table(file, tenant, records)
                )
        return TableFile(str(path), rows, size)

    def keep_only(self, retained: Iterable[tuple[str, Collection[Hour]]]) -> RemovedTables:
        """Remove all tables except these hours of these tenants, and files of killed runs."""
        sweep = _Sweep(self.directory, self.root)
        with file_errors(self.directory), os.scandir(self.root) as entries:
            present = {
                entry.name
                for entry in entries
                if DIRECTORY_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            }
        for tenant, hours in retained:
            name = directory_of(tenant)
            if name in present:
                sweep.clear(name, keep={table_of(hour) for hour in hours})
                present.remove(name)
        for name in sorted(present):
            sweep.clear(name, keep=frozenset())
        return RemovedTables(sweep.removed, tuple(sweep.failures))


@dataclass(slots=True)
class _Sweep:
    """Removes and counts tables; a file that cannot be removed is a failure in the result."""

    place: Path
    root: int
    removed: int = 0
    failures: list[str] = field(default_factory=list)

    def clear(self, name: str, *, keep: Collection[str]) -> None:
        """Remove a tenant's tables except ``keep``, then its directory if it is empty."""
        try:
            with file_errors(self.place / name), _opened_subdirectory(self.root, name) as directory:
                with os.scandir(directory) as entries:
                    files = [each.name for each in entries if each.is_file(follow_symlinks=False)]
                for file in sorted(files):
                    if UNFINISHED_NAME.fullmatch(file):
                        os.unlink(file, dir_fd=directory)
                    elif TABLE_NAME.fullmatch(file) and file not in keep:
                        os.unlink(file, dir_fd=directory)
                        self.removed += 1
                if _is_empty(directory):
                    os.rmdir(name, dir_fd=self.root)
        except TablesError as error:
            self.failures.append(str(error))


def directory_of(tenant: str) -> str:
    """Return the name of a tenant's directory, such as ``acme-7c6f…``: 65 characters at most."""
    # Readers of a whole directory skip names that start with an underscore.
    slug = _UNSAFE.sub("-", tenant)[:_LONGEST_SLUG].strip("-_") or "tenant"
    return f"{slug}-{hashlib.sha256(tenant.encode()).hexdigest()[:_DIGEST_DIGITS]}"


def table_of(hour: Hour) -> str:
    """Return the name of an hour's table: ``2026-11-29T14Z.parquet``."""
    return f"{hour.start:%Y-%m-%dT%HZ}.parquet"


def unfinished(table: str) -> str:
    """Return the name of a table while it is being written."""
    return f".{table}.unfinished"


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn OSErrors inside the context into a TablesError, which names the path and the setting.

    Raises:
        TablesError: the operating system returned an error.
    """
    try:
        yield
    except OSError as error:
        raise TablesError(
            f"Cannot use {path} for tables ({SETTING}): {error.strerror or error}.",
            _HINTS.get(error.errno or 0, _OTHER),
        ) from error


@contextmanager
def _opened_directory(place: Path) -> Iterator[int]:
    """Open the directory of all tables, created if missing; provide its descriptor.

    The directory itself may be a symbolic link, which is the operator's choice, and so is the mode
    of a directory that exists.

    Raises:
        TablesError: the path is relative, or the directory cannot be created or opened.
    """
    if not place.is_absolute():
        raise TablesError(
            f"Cannot use {place} for tables ({SETTING}): a relative path depends on each run's "
            "working directory.",
            f"set {SETTING} to an absolute path.",
        )
    with file_errors(place):
        for missing in reversed([each for each in (place, *place.parents) if not each.exists()]):
            missing.mkdir(_PRIVATE_DIRECTORY, exist_ok=True)
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _opened_subdirectory(parent: int, name: str) -> Iterator[int]:
    """Open a subdirectory without following a symbolic link; provide its descriptor.

    Raises:
        OSError: it does not exist, is not a directory, or cannot be opened.
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _locked(
    place: Path, descriptor: int, *, owner: str, lock_timeout_seconds: float
) -> Iterator[None]:
    """Lock an open directory for this process, and record ``owner`` if it has no owner yet.

    Raises:
        TablesError: it cannot be locked.
        TablesBusyError: another process holds the lock beyond the timeout.
        ForeignTablesError: the directory has another owner.
    """
    with file_errors(place / _OWNER_FILE):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.open(_OWNER_FILE, flags, _PRIVATE_FILE, dir_fd=descriptor)
    try:
        with file_errors(place / _OWNER_FILE):
            _wait_for_lock(lock, place, lock_timeout_seconds)
            _require_owner(lock, place, owner)
        yield
    finally:
        os.close(lock)


def _wait_for_lock(lock: int, place: Path, lock_timeout_seconds: float) -> None:
    until = time.monotonic() + lock_timeout_seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= until:
                raise TablesBusyError(
                    f"Another run is writing tables in {place} ({SETTING}).",
                    "wait for it to end, then materialize this hour again. If it hangs, terminate"
                    " it in Dagster.",
                ) from error
            time.sleep(_LOCK_RETRY_SECONDS)
        else:
            return


def _require_owner(lock: int, place: Path, owner: str) -> None:
    found = os.pread(lock, 200, 0).decode(errors="replace").strip()
    if not found:
        os.pwrite(lock, f"{owner}\n".encode(), 0)
        os.fsync(lock)
    elif found != owner:
        raise ForeignTablesError(
            f"The tables in {place} ({SETTING}) belong to the database {found}, not to this one, "
            f"{owner}. Nothing was written or removed.",
            f"set {SETTING} to another directory. If the tables of that database are no longer "
            f"needed, remove {place / _OWNER_FILE} and retry.",
        )


def _write_atomically(
    directory: int, name: str, write: Callable[[IO[bytes]], Written]
) -> tuple[Written, int]:
    """Write a file in an open directory atomically; return the result of ``write`` and the size.

    Afterwards the name has the complete file, or its previous content after an error.

    Raises:
        OSError: the file could not be written.
    """
    unfinished_name = unfinished(name)
    # Left by a killed run: this process holds the lock.
    with suppress(FileNotFoundError):
        os.unlink(unfinished_name, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(unfinished_name, flags, _PRIVATE_FILE, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            written = write(file)
            file.flush()
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        os.rename(unfinished_name, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished_name, dir_fd=directory)
        raise
    os.fsync(directory)
    return written, size


def _is_empty(directory: int) -> bool:
    """Whether an open directory is empty."""
    with os.scandir(directory) as entries:
        return next(entries, None) is None


def write_table(file: IO[bytes], tenant: str, records: Iterable[StoredRecord]) -> int:
    """Write a table in the order of ``records``, sorted by entity; return the number of rows."""
    # Imported only where a table is written: it would delay the start of every command.
    import pyarrow.parquet as pq  # noqa: PLC0415

    written = 0
    rows = _Rows(tenant)
    with pq.ParquetWriter(file, _schema(), **_FORMAT) as writer:
        for record in records:
            for entities in _chunks(sorted(record.usages, key=lambda entity: entity or "")):
                rows.add(record, entities)
                if len(rows) >= ROWS_AT_ONCE:
                    written += len(rows)
                    writer.write_table(rows.take())
        if len(rows):
            written += len(rows)
            writer.write_table(rows.take())
    return written


def _chunks(entities: Sequence[Entity]) -> Iterator[Sequence[Entity]]:
    for first in range(0, len(entities), ROWS_AT_ONCE):
        yield entities[first : first + ROWS_AT_ONCE]


@cache
def _schema() -> "pa.Schema":
    """Return the schema of every table, including empty ones."""
    import pyarrow as pa  # noqa: PLC0415

    types = {
        ColumnKind.TEXT: pa.string(),
        ColumnKind.TIME: pa.timestamp("us", tz="UTC"),
        ColumnKind.USAGE: pa.decimal128(MAX_INTEGER_DIGITS + MAX_DECIMALS, MAX_DECIMALS),
        ColumnKind.COUNT: pa.int64(),
        ColumnKind.FLAG: pa.bool_(),
    }
    return pa.schema(
        [
            pa.field(column.name, types[column.kind], nullable=column.is_nullable)
            for column in USAGE_COLUMNS
        ]
    )


class _Rows:
    """Rows that are not yet written, by column."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._entities: list[Entity] = []
        self._usages: list[Decimal] = []
        self._record_columns: dict[str, list[object]] = {}

    def __len__(self) -> int:
        return len(self._entities)

    def add(self, record: StoredRecord, entities: Sequence[Entity]) -> None:
        window = record.of.window
        self._entities.extend(entities)
        self._usages.extend(record.usages[entity] for entity in entities)
        values = {
            "tenant": self._tenant,
            "captured_at": record.captured_at,
            "budget_id": record.of.budget,
            "period": window.period.value,
            "window_token": window.token,
            "window_start": window.start,
            "window_end": window.end,
            "source": record.source.value,
            "is_truncated": record.is_truncated,
            "is_partial": record.is_partial,
            "omitted_count": record.omitted_count,
        }
        for name, value in values.items():
            self._record_columns.setdefault(name, []).extend([value] * len(entities))

    def take(self) -> "pa.Table":
        """Return the rows as a table and clear them."""
        import pyarrow as pa  # noqa: PLC0415

        columns = {**self._record_columns, "entity": self._entities, "usage": self._usages}
        self._entities, self._usages, self._record_columns = [], [], {}
        return pa.Table.from_pydict(columns, schema=_schema())
