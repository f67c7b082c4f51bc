"""Writing a tenant's snapshot to PostgreSQL."""

from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal

from psycopg.types.json import Jsonb

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.adapters.stored_forms import (
    named_drops_of,
    named_omissions,
    summary_of,
)
from budget_recovery_dagster.domain.recovery_point import Usages
from budget_recovery_dagster.domain.snapshots import BudgetRecord, TenantSnapshot

_NEWEST = "select max(captured_at) from budget_recovery.capture where tenant = %s"

_INSERT_CAPTURE = """
insert into budget_recovery.capture (
    tenant, captured_at, stored_at, run_id, source, store_created_at, store_last_sequence,
    record_count, entry_count, omitted_count, unreadable_count, unreadable, drop_count, drops,
    is_partial
) values (
    %(tenant)s, %(captured_at)s, %(stored_at)s, %(run_id)s, %(source)s, %(store_created_at)s,
    %(store_last_sequence)s, %(record_count)s, %(entry_count)s, %(omitted_count)s,
    %(unreadable_count)s, %(unreadable)s, %(drop_count)s, %(drops)s, %(is_partial)s
)
"""

# Contents are few per statement and known by their hash: what is there already is shared.
_FIND_CONTENTS = """
select content_hash, content_id from budget_recovery.budget_content where content_hash = any(%s)
"""

_COPY_CONTENTS = """
copy budget_recovery.budget_content (content_hash, entities, usages) from stdin
"""

_COPY_RECORDS = """
copy budget_recovery.budget_record (
    tenant, captured_at, budget_id, window_token, window_start, window_end, content_id,
    omitted_count, omitted, is_truncated, value_shape, expiry_seconds, covers_earlier
) from stdin
"""


def read_newest(connection: Connection, tenant: str) -> datetime | None:
    """Return the time of a tenant's last snapshot."""
    row = connection.execute(_NEWEST, (tenant,)).fetchone()
    return None if row is None else row[0]


def insert_snapshot(
    connection: Connection, snapshot: TenantSnapshot, *, run_id: str, stored_at: datetime
) -> None:
    """Write a snapshot within a transaction that holds the store's row."""
    _insert_capture(connection, snapshot, run_id, stored_at)
    _copy_records(connection, snapshot, _content_ids(connection, snapshot.records))


def _insert_capture(
    connection: Connection, snapshot: TenantSnapshot, run_id: str, stored_at: datetime
) -> None:
    summary = summary_of(snapshot, run_id)
    values = {
        "tenant": summary.tenant,
        "captured_at": summary.captured_at,
        "stored_at": stored_at,
        "run_id": summary.run_id,
        "source": summary.source.value,
        "store_created_at": summary.identity.created_at,
        "store_last_sequence": summary.identity.last_sequence,
        "record_count": summary.record_count,
        "entry_count": summary.entry_count,
        "omitted_count": summary.omitted_count,
        "unreadable_count": summary.unreadable_count,
        "unreadable": Jsonb(
            [{"key": each.key, "reason": each.reason} for each in summary.unreadable]
        ),
        "drop_count": summary.drop_count,
        "drops": Jsonb(
            [
                {
                    "budget": drop.budget,
                    "window": drop.window,
                    "entity": drop.entity,
                    "before": drop.before,
                    "after": drop.after,
                }
                for drop in named_drops_of(snapshot)
            ]
        ),
        "is_partial": summary.is_partial,
    }
    connection.execute(_INSERT_CAPTURE, values)


def _content_ids(connection: Connection, records: tuple[BudgetRecord, ...]) -> dict[bytes, int]:
    """Return the ids of the records' contents by hash, adding the contents that are new.

    The lock on the store's row keeps others from adding the same ones, or removing those found.
    """
    contents = {record.content_hash: record.usages for record in records}
    known = _find_contents(connection, list(contents))
    new = [content_hash for content_hash in contents if content_hash not in known]
    if not new:
        return known
    with connection.cursor() as cursor, cursor.copy(_COPY_CONTENTS) as copy:
        for content_hash in new:
            copy.write_row((content_hash, *_columns(contents[content_hash])))
    return known | _find_contents(connection, new)


def _find_contents(connection: Connection, hashes: list[bytes]) -> dict[bytes, int]:
    return dict(connection.execute(_FIND_CONTENTS, (hashes,)).fetchall())


def _columns(usages: Usages) -> tuple[list[str], list[Decimal]]:
    entries = sorted((entity or "", usage) for entity, usage in usages.items())
    return [entity for entity, _ in entries], [usage for _, usage in entries]


def _copy_records(
    connection: Connection, snapshot: TenantSnapshot, content_ids: dict[bytes, int]
) -> None:
    with connection.cursor() as cursor, cursor.copy(_COPY_RECORDS) as copy:
        for row in _rows(snapshot, content_ids):
            copy.write_row(row)


def _rows(snapshot: TenantSnapshot, content_ids: dict[bytes, int]) -> Iterator[tuple[object, ...]]:
    for record in snapshot.records:
        window = record.of.window
        yield (
            snapshot.tenant,
            snapshot.captured_at,
            record.of.budget,
            window.token,
            window.start,
            window.end,
            content_ids[record.content_hash],
            len(record.omitted),
            Jsonb(named_omissions(record.omitted)) if record.omitted else None,
            record.is_truncated,
            None if record.shape is None else record.shape.value,
            record.expiry_seconds,
            record.covers_earlier,
        )
