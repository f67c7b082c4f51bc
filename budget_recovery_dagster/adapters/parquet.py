"""Tables of tenants and hours as Parquet files in a directory of one database."""

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
from budget_recovery_dagster.domain.snapshots import StoredRecord
from budget_recovery_dagster.domain.usage_columns import USAGE_COLUMNS, ColumnKind
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import ForeignTablesError, TablesError
from budget_recovery_dagster.ports import RemovedTables, TableFile

if TYPE_CHECKING:
    import pyarrow as pa

_LONGEST_SLUG = 40
# 96 bits: nobody can find a second name to a tenant's directory.
_DIGEST_DIGITS = 24
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_DIRECTORY = re.compile(rf"[A-Za-z0-9_-]{{1,{_LONGEST_SLUG}}}-[0-9a-f]{{{_DIGEST_DIGITS}}}")
_TABLE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}Z\.parquet")
# Readers of a whole directory pass over what begins with a dot.
_UNFINISHED = re.compile(rf"\.{_TABLE.pattern}\.unfinished")


def directory_of(tenant: str) -> str:
    """Return the name of a tenant's directory, such as ``acme-7c6f…``: 65 characters at most."""
    # An underscore in front would hide it from readers of a whole directory.
    slug = _UNSAFE.sub("-", tenant)[:_LONGEST_SLUG].strip("-_") or "tenant"
    return f"{slug}-{hashlib.sha256(tenant.encode()).hexdigest()[:_DIGEST_DIGITS]}"


def table_of(hour: Hour) -> str:
    """Return the name of an hour's table: ``2026-11-29T14Z.parquet``."""
    return f"{hour.start:%Y-%m-%dT%HZ}.parquet"


def unfinished(table: str) -> str:
    """Return under which name a table is written until it is whole."""
    return f".{table}.unfinished"


def is_directory_name(name: str) -> bool:
    """Whether a tenant's directory may be called so."""
    return _DIRECTORY.fullmatch(name) is not None


def is_table_name(name: str) -> bool:
    """Whether an hour's table may be called so."""
    return _TABLE.fullmatch(name) is not None


def is_unfinished_name(name: str) -> bool:
    """Whether this is what a run has left that was killed while it wrote."""
    return _UNFINISHED.fullmatch(name) is not None


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


@cache
def _schema() -> "pa.Schema":
    """Return the schema of every table, also of one without rows."""
    import pyarrow as pa  # noqa: PLC0415

    types = {
        ColumnKind.TEXT: pa.string(),
        ColumnKind.MOMENT: pa.timestamp("us", tz="UTC"),
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


# Said in full, so that the next release of the library changes nothing that it need not.
_FORMAT: dict[str, Any] = {
    "version": "2.6",
    "data_page_version": "1.0",
    "compression": "zstd",
    "compression_level": 3,
    "use_dictionary": True,
    "write_statistics": True,
    "store_schema": True,
}
# Rows that are in memory at a time; a group of rows in the file has this many, up to twice.
ROWS_AT_ONCE = 65_536


def write_table(file: IO[bytes], tenant: str, records: Iterable[StoredRecord]) -> int:
    """Write a table in the order of ``records``, each by entity; return the number of rows."""
    # Only who writes a table imports pyarrow: it would delay the start of each command.
    import pyarrow.parquet as pq  # noqa: PLC0415

    written = 0
    rows = _Rows(tenant)
    with pq.ParquetWriter(file, _schema(), **_FORMAT) as writer:
        for record in records:
            for entities in _in_parts(sorted(record.usages, key=_entity_order)):
                rows.add(record, entities)
                if len(rows) >= ROWS_AT_ONCE:
                    written += len(rows)
                    writer.write_table(rows.take())
        if len(rows):
            written += len(rows)
            writer.write_table(rows.take())
    return written


def _in_parts(entities: Sequence[Entity]) -> Iterator[Sequence[Entity]]:
    for first in range(0, len(entities), ROWS_AT_ONCE):
        yield entities[first : first + ROWS_AT_ONCE]


def _entity_order(entity: Entity) -> str:
    return entity or ""


class _Rows:
    """Rows that are not written yet, by column."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._entities: list[Entity] = []
        self._usages: list[Decimal] = []
        self._alike: dict[str, list[object]] = {}

    def __len__(self) -> int:
        return len(self._entities)

    def add(self, record: StoredRecord, entities: Sequence[Entity]) -> None:
        window = record.of.window
        self._entities.extend(entities)
        self._usages.extend(record.usages[entity] for entity in entities)
        alike = {
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
        for name, value in alike.items():
            self._alike.setdefault(name, []).extend([value] * len(entities))

    def take(self) -> "pa.Table":
        """Return the rows as a table, and forget them."""
        import pyarrow as pa  # noqa: PLC0415

        columns = {**self._alike, "entity": self._entities, "usage": self._usages}
        self._entities, self._usages, self._alike = [], [], {}
        return pa.Table.from_pydict(columns, schema=_schema())


# Longer than the tables of very many tenants take, and shorter than the hour until the next ones.
_PATIENCE_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class ParquetTables:
    """The tables below one directory."""

    directory: Path
    patience_seconds: float = _PATIENCE_SECONDS

    @property
    def place(self) -> str:
        """Where the tables are, for people."""
        return str(self.directory)

    @contextmanager
    def opened(self, owner: str) -> Iterator["OpenedParquetTables"]:
        """Have the tables for this process alone; wait for whoever has them."""
        with (
            opened_place(self.directory) as root,
            held(self.directory, root, owner=owner, patience_seconds=self.patience_seconds),
        ):
            yield OpenedParquetTables(self.directory, root)


@dataclass(frozen=True, slots=True)
class OpenedParquetTables:
    """The tables below an open directory, ``root``, that no one else writes meanwhile."""

    directory: Path
    root: int

    def write(self, tenant: str, hour: Hour, records: Iterable[StoredRecord]) -> TableFile:
        """Write a tenant's table of an hour, in the order of ``records``; replace an earlier one.

        Raises:
            TablesError: it could not be written.
        """
        of_tenant, table = directory_of(tenant), table_of(hour)
        path = self.directory / of_tenant / table
        with told_of(path):
            make_below(self.root, of_tenant)
            with opened_below(self.root, of_tenant) as directory:
                rows, size = write_whole(
                    directory, table, lambda file: write_table(file, tenant, records)
                )
        return TableFile(str(path), rows, size)

    def keep_only(self, retained: Iterable[tuple[str, Collection[Hour]]]) -> RemovedTables:
        """Remove the tables of all but these hours of these tenants, and leftovers of dead runs."""
        sweep = _Sweep(self.directory, self.root)
        with told_of(self.directory):
            present = {name for name in directories_in(self.root) if is_directory_name(name)}
        for tenant, hours in retained:
            name = directory_of(tenant)
            if name in present:
                sweep.clear(name, keep={table_of(hour) for hour in hours})
                present.remove(name)
        for of_nobody in sorted(present):
            sweep.clear(of_nobody, keep=frozenset())
        return RemovedTables(sweep.removed, tuple(sweep.failures))


@dataclass(slots=True)
class _Sweep:
    """Removes what is not to be kept, and counts it; what cannot be removed stops nothing."""

    place: Path
    root: int
    removed: int = 0
    failures: list[str] = field(default_factory=list)

    def clear(self, name: str, *, keep: Collection[str]) -> None:
        """Clear a tenant's directory, and remove it if nothing is left."""
        try:
            with told_of(self.place / name), opened_below(self.root, name) as directory:
                for file in files_in(directory):
                    if is_unfinished_name(file):
                        os.unlink(file, dir_fd=directory)
                    elif is_table_name(file) and file not in keep:
                        os.unlink(file, dir_fd=directory)
                        self.removed += 1
                if is_empty(directory):
                    os.rmdir(name, dir_fd=self.root)
        except TablesError as error:
            self.failures.append(str(error))
