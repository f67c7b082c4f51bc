"""The tables of tenants as Parquet files: a directory for each tenant, a file for each hour."""

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from budget_recovery_dagster.adapters.parquet_file import write_table
from budget_recovery_dagster.adapters.table_directory import (
    directories_in,
    files_in,
    held,
    is_empty,
    make_below,
    opened_below,
    opened_place,
    told_of,
    write_whole,
)
from budget_recovery_dagster.adapters.table_names import (
    directory_of,
    is_directory_name,
    is_table_name,
    is_unfinished_name,
    table_of,
)
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.errors import TablesError
from budget_recovery_dagster.table_ports import RemovedTables, StoredRecord, TableFile

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
