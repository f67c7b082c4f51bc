"""The Parquet form of a table: one schema, and equal bytes for equal records."""

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from budget_recovery_dagster.domain.counters import MAX_DECIMALS, MAX_INTEGER_DIGITS, Entity
from budget_recovery_dagster.domain.usage_columns import USAGE_COLUMNS, ColumnKind
from budget_recovery_dagster.table_ports import StoredRecord

_TYPES = {
    ColumnKind.TEXT: pa.string(),
    ColumnKind.MOMENT: pa.timestamp("us", tz="UTC"),
    ColumnKind.USAGE: pa.decimal128(MAX_INTEGER_DIGITS + MAX_DECIMALS, MAX_DECIMALS),
    ColumnKind.COUNT: pa.int64(),
    ColumnKind.FLAG: pa.bool_(),
}

SCHEMA = pa.schema(
    [
        pa.field(column.name, _TYPES[column.kind], nullable=column.is_nullable)
        for column in USAGE_COLUMNS
    ]
)
"""Of every table, also of one without rows."""

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
    written = 0
    rows = _Rows(tenant)
    with pq.ParquetWriter(file, SCHEMA, **_FORMAT) as writer:
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

    def take(self) -> pa.Table:
        """Return the rows as a table, and forget them."""
        columns = {**self._alike, "entity": self._entities, "usage": self._usages}
        self._entities, self._usages, self._alike = [], [], {}
        return pa.Table.from_pydict(columns, schema=SCHEMA)
