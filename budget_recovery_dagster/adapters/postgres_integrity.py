"""Verifying stored snapshots: whether what was captured is still there, as it was captured."""

from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.recovery_point import Usages
from budget_recovery_dagster.domain.snapshots import hash_usages
from budget_recovery_dagster.domain.windows import InvalidWindowError, Window

_CAPTURES = """
select tenant, captured_at, pruned_at is not null, record_count, entry_count, omitted_count
from budget_recovery.capture
where captured_at >= %s and captured_at < %s
order by tenant, captured_at
"""

# The edges as text: a damaged one may be a moment that Python does not know, such as infinity.
_RECORDS = """
select r.budget_id, r.window_token, r.window_start::text, r.window_end::text, r.omitted_count,
       c.content_hash, c.entities, c.usages
from budget_recovery.budget_record r
left join budget_recovery.budget_content c using (content_id)
where r.tenant = %s and r.captured_at = %s
order by r.budget_id, r.window_token
"""

_Counts = tuple[int, int, int]
_COUNTED = ("records", "counters", "omitted counters")


def find_damage(connection: Connection, hour: Hour) -> Iterator[str]:
    """Say in a sentence each what does not hold of the snapshots of an hour."""
    for tenant, captured_at, is_pruned, *captured in connection.execute(
        _CAPTURES, (hour.start, hour.end)
    ).fetchall():
        name = f"tenant {tenant!r}, {captured_at:%Y-%m-%d %H:%M:%S} UTC"
        for sentence in _damage(connection, tenant, captured_at, is_pruned, tuple(captured)):
            yield f"{name}: {sentence}."


def _damage(
    connection: Connection,
    tenant: str,
    captured_at: datetime,
    is_pruned: bool,  # noqa: FBT001 - a column of the row
    captured: _Counts,
) -> Iterator[str]:
    records = entry_count = omitted_count = 0
    rows = connection.execute(_RECORDS, (tenant, captured_at))
    for budget, token, start, end, omitted, content_hash, entities, usages in rows:
        records += 1
        omitted_count += omitted
        entry_count += len(entities or ())
        name = f"budget {budget!r}, window {token}"
        if (damage := _window_damage(token, start, end)) is not None:
            yield f"{name}, {damage}"
        if as_captured(content_hash, entities, usages) is None:
            yield f"{name}, holds other usages than were captured"
    stored = (records, entry_count, omitted_count)
    for what, count, expected in zip(_COUNTED, stored, captured, strict=True):
        # Retention takes whole records out of an old snapshot, and says so.
        if count > expected or (count < expected and not is_pruned):
            yield f"{count} {what} are stored and {expected} were captured"


def _window_damage(token: str, start: str | None, end: str | None) -> str | None:
    try:
        window = Window.parse(token)
    except InvalidWindowError:
        return "is no window that a budget can have"
    if (_as_text(window.start), _as_text(window.end)) != (start, end):
        return "is stored with the edges of another window"
    return None


def _as_text(moment: datetime | None) -> str | None:
    """Write a moment in UTC as the server does in a session of ours."""
    return None if moment is None else f"{moment.replace(tzinfo=None).isoformat(sep=' ')}+00"


def as_captured(
    content_hash: bytes | None, entities: list[Any] | None, usages: list[Any] | None
) -> Usages | None:
    """Return the usages of a stored content; None where they are not what was captured."""
    # Nothing is taken for granted of what is being verified: lists of another length, shape or
    # kind are damage like any other.
    if content_hash is None or entities is None or usages is None:
        return None
    if not all(isinstance(entity, str) for entity in entities):
        return None
    if not all(isinstance(usage, Decimal) and usage.is_finite() for usage in usages):
        return None
    content = {entity or None: usage for entity, usage in zip(entities, usages, strict=False)}
    is_whole = len(content) == len(entities) == len(usages)
    return content if is_whole and hash_usages(content) == content_hash else None
