"""The Parquet files: their content, and their state after errors."""

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from budget_recovery_dagster.adapters.parquet import ROWS_AT_ONCE, ParquetTables
from budget_recovery_dagster.domain import (
    USAGE_COLUMNS,
    BudgetWindow,
    CaptureSource,
    Hour,
    StoredRecord,
    TableFile,
    Usages,
    Window,
)
from budget_recovery_dagster.errors import DatabaseUnreachableError

NOON = datetime(2026, 11, 25, 12, 0, 0, 123456, tzinfo=UTC)
HOUR = Hour.containing(NOON)
NAME = "2026-11-25T12Z.parquet"
ME = "4e7a4c4e-0000-4000-8000-000000000001"
LARGEST = "99999999999999999999.999999999999999999"
SMALLEST = "0.000000000000000001"

HOSTILE = ["/etc/x", "../x", "..", ".", "/", "~", "$(id)", "-rf", "x" * 600, "A", "a", "東京"]
HOSTILE += ["a\nb", "_x", "a b", "a-b", "con", "\\\\host\\share", "é", "e\u0301", "🦀", " ", "x=1"]


def record(usages: Usages, *, window: str = "lifetime") -> StoredRecord:
    return StoredRecord(
        captured_at=NOON,
        source=CaptureSource.COUNTERS,
        of=BudgetWindow("team", Window.parse(window)),
        usages=usages,
        is_truncated=False,
        is_partial=False,
        omitted_count=0,
    )


def write(tables: ParquetTables, tenant: str, *records: StoredRecord) -> TableFile:
    with tables.opened(ME) as opened:
        return opened.write(tenant, HOUR, records)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "tables"


@pytest.fixture
def tables(place: Path) -> ParquetTables:
    return ParquetTables(place)


def test_usages_are_exact_for_every_reader(tables: ParquetTables, pandas: Any) -> None:
    usages: Usages = {
        "a": Decimal(LARGEST),
        "b": Decimal(SMALLEST),
        "c": Decimal("1E+5"),
        "d": Decimal(0),
        "e": Decimal("12345678901234567890.123456789012345678"),
    }
    file = write(tables, "acme", record(usages))
    exact = [*usages.values()]
    column = pq.read_table(file.path)["usage"]
    assert column.type == pa.decimal128(38, 18)
    assert column.to_pylist() == exact
    assert [*pandas.read_parquet(file.path)["usage"]] == exact
    rows = duckdb.execute("select usage from read_parquet(?) order by entity", [file.path])
    assert rows.fetchall() == [(usage,) for usage in exact]


def test_a_row_contains_everything_recorded_about_a_counter(tables: ParquetTables) -> None:
    board = StoredRecord(
        captured_at=NOON + timedelta(minutes=5),
        source=CaptureSource.LEADERBOARDS,
        of=BudgetWindow("users", Window.parse("2026-W48")),
        usages={"bo": Decimal(3)},
        is_truncated=True,
        is_partial=True,
        omitted_count=2,
    )
    usages = {"alice": Decimal("1.5"), None: Decimal(7), "Zoe": Decimal(2)}
    file = write(tables, "東京 / acme", record(usages), board)
    assert file.rows == 4
    assert file.size == Path(file.path).stat().st_size
    rows = pq.read_table(file.path).to_pylist()
    assert [(row["entity"], row["usage"]) for row in rows] == [
        (None, 7),
        ("Zoe", 2),
        ("alice", Decimal("1.5")),
        ("bo", 3),
    ]
    assert rows[0] == {
        "tenant": "東京 / acme",
        "captured_at": NOON,
        "budget_id": "team",
        "period": "lifetime",
        "window_token": "lifetime",
        "window_start": None,
        "window_end": None,
        "entity": None,
        "usage": Decimal(7),
        "source": "counters",
        "is_truncated": False,
        "is_partial": False,
        "omitted_count": 0,
    }
    assert rows[3] == {
        "tenant": "東京 / acme",
        "captured_at": NOON + timedelta(minutes=5),
        "budget_id": "users",
        "period": "week",
        "window_token": "2026-W48",
        "window_start": datetime(2026, 11, 23, tzinfo=UTC),
        "window_end": datetime(2026, 11, 30, tzinfo=UTC),
        "entity": "bo",
        "usage": Decimal(3),
        "source": "leaderboards",
        "is_truncated": True,
        "is_partial": True,
        "omitted_count": 2,
    }


def test_all_tables_have_the_same_schema_and_can_be_read_together(
    tables: ParquetTables, place: Path, pandas: Any
) -> None:
    one: Usages = {"alice": Decimal(1)}
    files = [
        write(tables, "empty"),
        write(tables, "_lifetimes", record({None: Decimal(1)})),
        write(tables, "days", record(one, window="2026-11-25"), record(one, window="2026-Q4")),
        write(tables, "omitted", record({})),
    ]
    schemas = [pq.read_schema(file.path) for file in files]
    assert all(schema.equals(schemas[0], check_metadata=True) for schema in schemas)
    assert [(field.name, field.nullable) for field in schemas[0]] == [
        (column.name, column.is_nullable) for column in USAGE_COLUMNS
    ]
    assert schemas[0].field("captured_at").type == pa.timestamp("us", "UTC")
    assert schemas[0].field("usage").type == pa.decimal128(38, 18)
    # Unfinished files and the owner file are not tables.
    (place / Path(files[0].path).parent.name / f".{NAME}.unfinished").write_bytes(b"half a table")
    everything = pandas.read_parquet(place)
    assert sorted(everything["tenant"]) == ["_lifetimes", "days", "days"]
    rows = duckdb.execute(f"select tenant, usage from '{place}/*/*.parquet' order by all")
    assert rows.fetchall() == [("_lifetimes", 1), ("days", 1), ("days", 1)]


def test_the_same_records_give_the_same_bytes(tables: ParquetTables) -> None:
    usages: dict[str | None, Decimal] = {f"u{number}": Decimal(number) for number in range(999)}
    usages[None] = Decimal(LARGEST)
    other_order = dict(reversed(usages.items()))
    before = Path(write(tables, "acme", record(usages), record({"x": Decimal(1)})).path)
    digest = hashlib.sha256(before.read_bytes()).digest()
    after = write(tables, "acme", record(other_order), record({"x": Decimal(1)}))
    assert Path(after.path) == before
    assert hashlib.sha256(before.read_bytes()).digest() == digest


def test_a_table_with_more_rows_than_fit_in_memory_at_once_is_complete(
    tables: ParquetTables,
) -> None:
    many: Usages = {f"u{number:06d}": Decimal(number) for number in range(2 * ROWS_AT_ONCE + 5)}
    file = write(
        tables, "acme", record({None: Decimal(1)}), record(many), record({"z": Decimal(2)})
    )
    assert file.rows == 2 * ROWS_AT_ONCE + 7
    table = pq.read_table(file.path)
    assert table["entity"].to_pylist() == [None, *many, "z"]
    assert table["usage"].to_pylist() == [1, *many.values(), 2]
    assert pq.read_metadata(file.path).num_row_groups == 3


def test_hostile_tenant_names_get_separate_directories_inside_the_root(
    tables: ParquetTables, place: Path, tmp_path: Path
) -> None:
    with tables.opened(ME) as opened:
        paths = [
            Path(opened.write(tenant, HOUR, [record({None: Decimal(number)})]).path)
            for number, tenant in enumerate(HOSTILE)
        ]
    # This includes file systems that ignore case.
    assert len({str(path).casefold() for path in paths}) == len(HOSTILE)
    for number, (tenant, path) in enumerate(zip(HOSTILE, paths, strict=True)):
        assert path.resolve().parent.parent == place.resolve()
        (row,) = pq.read_table(path).to_pylist()
        assert (row["tenant"], row["usage"]) == (tenant, number)
    assert [*tmp_path.iterdir()] == [place]
    assert {path.parent.name for path in place.rglob(NAME)} == {path.parent.name for path in paths}


def test_an_interrupted_write_leaves_the_existing_table(tables: ParquetTables) -> None:
    file = Path(write(tables, "acme", record({"alice": Decimal(1)})).path)
    before = file.read_bytes()

    def records() -> Iterator[StoredRecord]:
        yield record({"alice": Decimal(2)})
        raise DatabaseUnreachableError("the database is gone", "wait")

    with tables.opened(ME) as opened, pytest.raises(DatabaseUnreachableError):
        opened.write("acme", HOUR, records())
    assert file.read_bytes() == before
    assert [*file.parent.iterdir()] == [file]
