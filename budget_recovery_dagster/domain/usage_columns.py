"""The columns of a tenant's table of usages: the same in every file and every release.

Readers combine tables of several hours, so a new column goes to the end, and no column is renamed,
removed or changed in kind.
"""

from dataclasses import dataclass
from enum import StrEnum


class ColumnKind(StrEnum):
    """The type of a column, as a reader of Parquet sees it."""

    TEXT = "string"
    MOMENT = "timestamp[us, UTC]"
    USAGE = "decimal(38, 18)"
    COUNT = "int64"
    FLAG = "bool"


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and the meaning of its values."""

    name: str
    kind: ColumnKind
    description: str
    is_nullable: bool = False


USAGE_COLUMNS = (
    Column("tenant", ColumnKind.TEXT, "The tenant's real name; its directory has a file-safe name"),
    Column(
        "captured_at",
        ColumnKind.MOMENT,
        "The snapshot's timestamp. The table of an hour that was captured twice has both "
        "snapshots, with different timestamps",
    ),
    Column("budget_id", ColumnKind.TEXT, "The budget"),
    Column("period", ColumnKind.TEXT, "Length of the window: day, week, month, quarter, lifetime"),
    Column(
        "window_token",
        ColumnKind.TEXT,
        "The window as the gateway names it, such as 2026-11-29, 2026-W48, 2026-11, 2026-Q4 or "
        "lifetime",
    ),
    Column(
        "window_start",
        ColumnKind.MOMENT,
        "Start of the window; null for a lifetime",
        is_nullable=True,
    ),
    Column(
        "window_end",
        ColumnKind.MOMENT,
        "End of the window, exclusive; null for a lifetime",
        is_nullable=True,
    ),
    Column(
        "entity",
        ColumnKind.TEXT,
        "Who spent: a user, model, account, agent or metadata value; null is the aggregate of the "
        "whole budget",
        is_nullable=True,
    ),
    Column("usage", ColumnKind.USAGE, "Usage in the window at that time, exact"),
    Column(
        "source",
        ColumnKind.TEXT,
        "Keys that the snapshot was read from: counters (every entity), or leaderboards (only the "
        "largest)",
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
        "Fewer keys of the tenant arrived than the store announced, twice: rows may be missing",
    ),
    Column(
        "omitted_count",
        ColumnKind.COUNT,
        "Number of counters of this budget and window without a row, because their value could "
        "not be read",
    ),
)
"""In the order of the file."""
