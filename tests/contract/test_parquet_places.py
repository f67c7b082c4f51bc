"""The directory of the tables: conflicting files, killed runs, removal and locking."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from budget_recovery_dagster.adapters.parquet import ParquetTables, directory_of
from budget_recovery_dagster.domain import Hour, RemovedTables
from budget_recovery_dagster.errors import ForeignTablesError, TablesBusyError, TablesError
from tests.contract.test_parquet_tables import HOUR, ME, NAME, record, write
from tests.private_files import require_private
from tests.waiting import wait_until

SETTING = "BUDGET_RECOVERY_TABLES_DIR"
ONE = record({"alice": Decimal(1)})
NEXT = Hour(HOUR.end)
NOBODY = 65534

# Writes endless records until it is killed.
ENDLESS = """
import sys
from decimal import Decimal
from itertools import repeat
from pathlib import Path
from budget_recovery_dagster.adapters.parquet import ParquetTables
from tests.contract.test_parquet_tables import HOUR, ME, record
usages = {f"u{number}": Decimal(number) for number in range(70_000)}
with ParquetTables(Path(sys.argv[1])).opened(ME) as opened:
    opened.write("acme", HOUR, repeat(record(usages)))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "tables"


@pytest.fixture
def tables(place: Path) -> ParquetTables:
    return ParquetTables(place, lock_timeout_seconds=20)


def in_place(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir()}


def test_only_the_account_of_the_services_can_read_tables(place: Path, tmp_path: Path) -> None:
    shared, deep = tmp_path / "shared", tmp_path / "missing" / "tables"
    before = os.umask(0)
    try:
        shared.mkdir(mode=0o750)
        for each in (place, deep, shared):
            write(ParquetTables(each), "acme", ONE)
    finally:
        os.umask(before)
    assert require_private(tmp_path, allowed={shared: 0o750}) > 9


def test_a_killed_run_leaves_no_table(tables: ParquetTables, place: Path) -> None:
    directory = place / directory_of("acme")
    half = directory / f".{NAME}.unfinished"
    writer = subprocess.Popen([sys.executable, "-c", ENDLESS, str(place)])
    try:
        wait_until(lambda: half.exists() and half.stat().st_size > 0)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert [*directory.iterdir()] == [half]
    # A later run of another hour removes the file and does not wait.
    with tables.opened(ME) as opened:
        opened.write("acme", NEXT, [ONE])
        assert opened.keep_only([("acme", [HOUR, NEXT])]) == RemovedTables(0, ())
    assert [path.name for path in directory.iterdir()] == ["2026-11-25T13Z.parquet"]


def test_a_table_replaces_the_unfinished_file_of_a_killed_run(
    tables: ParquetTables, place: Path, tmp_path: Path
) -> None:
    directory = place / directory_of("acme")
    directory.mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (directory / f".{NAME}.unfinished").symlink_to(outside)
    (directory / NAME).symlink_to(outside)
    write(tables, "acme", ONE)
    assert outside.read_text() == "mine"
    assert [path.name for path in directory.iterdir()] == [NAME]
    assert not (directory / NAME).is_symlink()


def test_a_symbolic_link_in_place_of_a_tenants_directory_is_not_followed(
    tables: ParquetTables, place: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / NAME).write_text("mine")
    place.mkdir()
    (place / directory_of("acme")).symlink_to(outside)
    with tables.opened(ME) as opened:
        with pytest.raises(TablesError) as refused:
            opened.write("acme", HOUR, [ONE])
        assert SETTING in refused.value.message
        assert "move the existing file" in refused.value.hint
        opened.write("other", HOUR, [ONE])
        assert opened.keep_only([("other", [HOUR])]) == RemovedTables(0, ())
    assert (outside / NAME).read_text() == "mine"
    assert [*outside.iterdir()] == [outside / NAME]


@pytest.mark.parametrize("in_the_way", ["file for directory", "directory for file"])
def test_a_conflicting_file_is_reported_and_not_removed(
    in_the_way: str, tables: ParquetTables, place: Path
) -> None:
    directory = place / directory_of("acme")
    if in_the_way == "file for directory":
        place.mkdir()
        directory.write_text("mine")
    else:
        (directory / NAME).mkdir(parents=True)
    with pytest.raises(TablesError) as refused:
        write(tables, "acme", ONE)
    assert str(directory) in refused.value.message
    assert SETTING in refused.value.message
    assert "move the existing file" in refused.value.hint
    if in_the_way == "directory for file":
        assert [path.name for path in directory.iterdir()] == [NAME]


@pytest.mark.parametrize("unusable", ["/proc/tables", "relative", "/dev/null/tables"])
def test_the_error_names_an_unusable_directory(
    unusable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(TablesError) as refused,
        ParquetTables(Path(unusable)).opened(ME),
    ):
        pass
    assert refused.value.message.startswith(f"Cannot use {unusable} for tables ({SETTING})")
    assert SETTING in refused.value.hint or "move the existing file" in refused.value.hint


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Make a directory read-only for this process, even if it runs as root."""
    directory.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        directory.chmod(0o755)


def test_the_error_names_a_directory_without_write_permission(tmp_path: Path) -> None:
    # pytest's directories are private, so other users cannot enter them.
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    place = tmp_path / "tables"
    place.mkdir()
    with (
        read_only(place),
        pytest.raises(TablesError) as refused,
        ParquetTables(place).opened(ME),
    ):
        pass
    assert "Permission denied" in refused.value.message
    assert SETTING in refused.value.message
    assert "let the user of Dagster's runs write there" in refused.value.hint


def test_a_full_disk_is_reported_and_leaves_no_partial_table(
    tables: ParquetTables, place: Path
) -> None:
    large = record({f"user {number**7}": Decimal(number**4) for number in range(20_000)})
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tables.opened(ME) as opened:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            with pytest.raises(TablesError) as refused:
                opened.write("acme", HOUR, [large])
            opened.write("other", HOUR, [ONE])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert SETTING in refused.value.message
    assert refused.value.hint.startswith("free disk space")
    assert in_place(place) == {".budget-recovery", f"{directory_of('other')}/{NAME}"}


def test_only_tables_of_hours_without_a_snapshot_are_removed(
    tables: ParquetTables, place: Path
) -> None:
    hours = [Hour(HOUR.start + timedelta(hours=number)) for number in range(4)]
    with tables.opened(ME) as opened:
        for tenant in ("acme", "spared", "gone", "thin"):
            for hour in hours:
                opened.write(tenant, hour, [ONE])
    foreign = [
        place / "notes.txt",
        place / NAME,
        place / "reports" / NAME,
        place / directory_of("gone") / "mine.parquet",
        place / directory_of("gone") / "deeper" / NAME,
    ]
    for file in foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    with tables.opened(ME) as opened:
        removed = opened.keep_only(
            [("acme", hours[2:]), ("spared", hours), ("thin", []), ("never written", hours)]
        )
    # Two tables of acme, and all four of the tenants without retained hours.
    assert removed == RemovedTables(10, ())
    assert in_place(place) == {
        ".budget-recovery",
        *(str(file.relative_to(place)) for file in foreign),
        f"{directory_of('acme')}/2026-11-25T14Z.parquet",
        f"{directory_of('acme')}/2026-11-25T15Z.parquet",
        *(f"{directory_of('spared')}/2026-11-25T{hour}Z.parquet" for hour in (12, 13, 14, 15)),
    }
    assert not (place / directory_of("thin")).exists()


def test_tables_of_another_database_are_not_changed(tables: ParquetTables, place: Path) -> None:
    write(tables, "acme", ONE)
    with (
        pytest.raises(ForeignTablesError) as refused,
        tables.opened("4e7a4c4e-0000-4000-8000-000000000002"),
    ):
        pass
    assert ME in refused.value.message
    assert SETTING in refused.value.hint
    assert f"{directory_of('acme')}/{NAME}" in in_place(place)
    (place / ".budget-recovery").unlink()
    with tables.opened("4e7a4c4e-0000-4000-8000-000000000002"):
        pass


def test_the_tables_are_locked_for_one_process(tables: ParquetTables, place: Path) -> None:
    impatient = ParquetTables(place, lock_timeout_seconds=0)
    opened_later = threading.Event()

    def open_later() -> None:
        with tables.opened(ME):
            opened_later.set()

    waiting = threading.Thread(target=open_later)
    with tables.opened(ME):
        waiting.start()
        with (
            pytest.raises(TablesBusyError, match="Another run is writing tables"),
            impatient.opened(ME),
        ):
            pass
        assert not opened_later.is_set()
    waiting.join()
    assert opened_later.is_set()
