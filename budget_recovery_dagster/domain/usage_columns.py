"""The columns of a tenant's table of usages: the same in every file, and in every release.

Whoever reads tables of several hours together relies on that: a column is added at the end, and
none is renamed, removed or given another kind.
"""

from dataclasses import dataclass
from enum import StrEnum


class ColumnKind(StrEnum):
    """What a column holds, as a reader of Parquet sees it."""

    TEXT = "string"
    MOMENT = "timestamp[us, UTC]"
    USAGE = "decimal(38, 18)"
    COUNT = "int64"
    FLAG = "bool"


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and what its values mean."""

    name: str
    kind: ColumnKind
    description: str
    is_nullable: bool = False


USAGE_COLUMNS = (
    Column(
        "tenant", ColumnKind.TEXT, "The tenant's real name; that of its directory is made file-safe"
    ),
    Column(
        "captured_at",
        ColumnKind.MOMENT,
        "The moment that the snapshot stands for. An hour that was captured twice has both in its "
        "table, told apart by this",
    ),
    Column("budget_id", ColumnKind.TEXT, "The budget"),
    Column(
        "period", ColumnKind.TEXT, "How long the window lasts: day, week, month, quarter, lifetime"
    ),
    Column(
        "window_token",
        ColumnKind.TEXT,
        "The window as the gateway names it, such as 2026-11-29, 2026-W48, 2026-11, 2026-Q4 or "
        "lifetime",
    ),
    Column(
        "window_start",
        ColumnKind.MOMENT,
        "The window's first moment; null for a lifetime",
        is_nullable=True,
    ),
    Column(
        "window_end",
        ColumnKind.MOMENT,
        "The first moment after the window; null for a lifetime",
        is_nullable=True,
    ),
    Column(
        "entity",
        ColumnKind.TEXT,
        "Who spent: a user, model, account, agent or metadata value; null is the aggregate of the "
        "whole budget",
        is_nullable=True,
    ),
    Column("usage", ColumnKind.USAGE, "What it had spent in the window by then, exactly"),
    Column(
        "source",
        ColumnKind.TEXT,
        "Of which keys of the gateway's store the snapshot was taken: counters (every entity), or "
        "leaderboards (only the largest)",
    ),
    Column(
        "is_truncated",
        ColumnKind.FLAG,
        "The source lists only the largest spenders of this budget and window, and was full: "
        "there may be more",
    ),
    Column(
        "is_partial",
        ColumnKind.FLAG,
        "Fewer keys of the tenant arrived than the store had announced, twice: rows may be missing",
    ),
    Column(
        "omitted_count",
        ColumnKind.COUNT,
        "How many counters of this budget and window have no row because their value could not be "
        "read",
    ),
)
"""In the order of the file."""
