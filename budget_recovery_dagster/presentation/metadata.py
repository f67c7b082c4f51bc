"""Dagster metadata of captures, recovery points, tables and restores."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import dagster as dg

from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.domain.falls import KeyCount
from budget_recovery_dagster.domain.recovery_point import age
from budget_recovery_dagster.domain.snapshots import USAGE_COLUMNS, CaptureSummary
from budget_recovery_dagster.presentation.text import (
    known_usage,
)
from budget_recovery_dagster.services.capture import (
    MAX_NOTED_KEYS,
    Captured,
    TenantAbsent,
    TenantFailed,
    TenantOutcome,
    TenantStored,
)
from budget_recovery_dagster.services.recovery_points import PointSurvey, PointWindow
from budget_recovery_dagster.services.tables import TablesBuilt

MOST_ROWS = 200
"""How many rows a table shows: Dagster stores it in one event of its log; PostgreSQL has all."""
Cell = str | int | float | bool | None
Row = dict[str, Cell]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """A column of a table: its name, and what it shows of an item."""

    name: str
    show: Callable[[Item], Cell]
    description: str | None = None
    kind: str = "string"


def table_of(columns: Sequence[Column[Item]], items: Iterable[Item]) -> dg.TableMetadataValue:
    """Show the first ``MOST_ROWS`` items; another entry gives the number of the rest."""
    return dg.MetadataValue.table(
        records=[
            dg.TableRecord({column.name: column.show(item) for column in columns})
            for item in islice(items, MOST_ROWS)
        ],
        schema=dg.TableSchema(
            columns=[dg.TableColumn(each.name, each.kind, each.description) for each in columns]
        ),
    )


def table(rows: Sequence[Row]) -> dg.TableMetadataValue:
    """Show rows with the same columns: the first ``MOST_ROWS``, and how many more there are."""
    shown = [*rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        rest: Row = dict.fromkeys(rows[0], "")
        rest[next(iter(rest))] = f"and {len(rows) - MOST_ROWS} more"
        shown.append(rest)
    return dg.MetadataValue.table([dg.TableRecord(row) for row in shown])


OWNERS = ["team:budget-recovery"]
GATEWAY_OWNERS = ["team:ai-gateway"]
HOURLY_FRESHNESS = dg.FreshnessPolicy.time_window(
    # The next capture is due an hour after the last. If it fails, it is repeated within the hour.
    warn_window=timedelta(minutes=75),
    fail_window=timedelta(hours=2),
)


def required(name: str, kind: str, description: str) -> dg.TableColumn:
    """Describe a column without nulls."""
    constraints = dg.TableColumnConstraints(nullable=False)
    return dg.TableColumn(name, kind, description, constraints=constraints)


ENTRY_SCHEMA = dg.TableSchema(
    columns=[
        required("tenant", "text", "The customer of the gateway"),
        required(
            "captured_at",
            "timestamptz",
            "The snapshot's timestamp, by the database's clock: usage counted until then is in "
            "it. All tenants of a run share it",
        ),
        required("budget_id", "text", "The budget"),
        required(
            "window_token",
            "text",
            "The window, in UTC: a day 2026-11-29, an ISO week 2026-W48, a month 2026-11, a "
            "quarter 2026-Q4, or lifetime",
        ),
        dg.TableColumn(
            "entity",
            "text",
            "Who spent: a user, model, account, agent or metadata value; null is the aggregate "
            "of the whole budget",
        ),
        required(
            "usage",
            "numeric",
            "Usage in the window at that time: exact, at most 20 integer digits and 18 decimals",
        ),
    ]
)
"""Columns of the view ``budget_recovery.budget_entry``."""
USAGE_SCHEMA = dg.TableSchema(
    columns=[
        (dg.TableColumn if column.is_nullable else required)(
            column.name, column.kind.value, column.description
        )
        for column in USAGE_COLUMNS
    ]
)
"""Columns of every tenant's Parquet table."""


def capture_metadata(captured: Captured) -> dict[str, Any]:
    """Show a capture: numbers that plot over time, and a row per tenant, failures first."""
    stored = captured.stored
    metadata: dict[str, Any] = {
        "captured_at": dg.MetadataValue.timestamp(captured.captured_at),
        "tenants_stored": len(stored),
        "tenants_failed": len(captured.failed),
        # The rows of budget_entry, whose columns the asset shows.
        "dagster/row_count": sum(tenant.entries for tenant in stored),
        "budget_windows": sum(tenant.records for tenant in stored),
        "closed_windows": sum(tenant.closed for tenant in stored),
        # A float, so that it plots; the exact usages are in the database.
        "captured_usage": float(captured.most_used),
        "counters": sum(tenant.entries for tenant in stored),
        "source": captured.source.value,
        "truncated_windows": captured.truncated,
        "omitted": sum(tenant.omitted for tenant in stored),
        "missing_or_lower": sum(tenant.drops for tenant in stored),
        # As text, exact: an alert compares it, and a float would round it.
        "most_missing": format_usage(captured.most_missing),
        "unreadable_keys": len(captured.unreadable) + sum(t.unreadable for t in stored),
        "duration_seconds": round(sum(outcome.seconds for outcome in captured.outcomes), 3),
        "recovery_points": dg.MetadataValue.asset(dg.AssetKey("recovery_points")),
    }
    if captured.identity:
        metadata["store_created_at"] = dg.MetadataValue.timestamp(captured.identity.created_at)
        # As text: the UI's numbers end at 2**53.
        metadata["store_sequence"] = str(captured.identity.last_sequence)
    if captured.pruned:
        metadata["pruned_records"] = captured.pruned.records
        metadata["pruned_snapshots"] = captured.pruned.captures
        if captured.pruned.awaited_captures:
            metadata["captures_until_pruning"] = captured.pruned.awaited_captures
    if captured.prune_failure:
        metadata["prune_failure"] = str(captured.prune_failure)
    if captured.outcomes:
        metadata["tenants"] = table([_row(o) for o in sorted(captured.outcomes, key=_worst_first)])
    if captured.unreadable:
        metadata["keys_of_no_tenant"] = table(
            [{"key": bad.key, "reason": bad.reason} for bad in captured.unreadable[:MAX_NOTED_KEYS]]
        )
    return metadata


_GONE_COLUMNS: Sequence[Column[KeyCount]] = (
    Column("tenant", lambda count: count.at.tenant),
    Column("budget", lambda count: count.at.of.budget),
    Column("window", lambda count: count.at.of.window.token),
    Column("counters", lambda count: count.missing, "Missing since the newest snapshot", "int"),
)


def gone_table(gone: Sequence[KeyCount]) -> dg.TableMetadataValue:
    """Show the budgets and windows from which counters are missing."""
    return table_of(_GONE_COLUMNS, gone)


def verified_metadata(snapshots: Sequence[CaptureSummary]) -> dict[str, Any]:
    """Show the verified snapshots of a past hour."""
    return {
        "tenants_stored": len({snapshot.tenant for snapshot in snapshots}),
        "dagster/row_count": sum(snapshot.entry_count for snapshot in snapshots),
        "budget_windows": sum(snapshot.record_count for snapshot in snapshots),
        "counters": sum(snapshot.entry_count for snapshot in snapshots),
        "verified": True,
        "tenants": table(
            [
                {
                    "tenant": snapshot.tenant,
                    "captured_at": snapshot.captured_at.isoformat(timespec="seconds"),
                    "budget_windows": snapshot.record_count,
                    "counters": snapshot.entry_count,
                    "source": snapshot.source.value,
                    "omitted": snapshot.omitted_count,
                    "missing_or_lower": snapshot.drop_count,
                    "most_missing": known_usage(snapshot.most_missing),
                    "partial": snapshot.is_partial,
                }
                for snapshot in sorted(snapshots, key=_most_missing_first)
            ]
        ),
    }


def _most_missing_first(snapshot: CaptureSummary) -> tuple[Decimal, str, datetime]:
    missing = snapshot.most_missing or Decimal(0)
    return missing.copy_negate(), snapshot.tenant, snapshot.captured_at


def _worst_first(outcome: TenantOutcome) -> tuple[int, Decimal, str]:
    if isinstance(outcome, TenantFailed):
        return 0, Decimal(0), outcome.tenant
    if isinstance(outcome, TenantStored) and (
        outcome.is_partial or outcome.drops or outcome.omitted or outcome.unreadable
    ):
        return 1, outcome.most_missing.copy_negate(), outcome.tenant
    return 2, Decimal(0), outcome.tenant


def _row(outcome: TenantOutcome) -> Row:
    row: Row = {
        "tenant": outcome.tenant,
        "outcome": "stored",
        "detail": "",
        "budget_windows": 0,
        "counters": 0,
        "most_used": "0",
        "omitted": 0,
        "missing_or_lower": 0,
        "most_missing": "0",
        "seconds": round(outcome.seconds, 3),
    }
    match outcome:
        case TenantStored():
            row["budget_windows"] = outcome.records
            row["counters"] = outcome.entries
            row["most_used"] = format_usage(outcome.most_used)
            row["omitted"] = outcome.omitted
            row["missing_or_lower"] = outcome.drops
            row["most_missing"] = format_usage(outcome.most_missing)
            row["detail"] = "; ".join(_remarks(outcome))
        case TenantAbsent():
            row["outcome"] = "absent"
        case TenantFailed():
            row["outcome"] = "failed"
            row["detail"] = f"{outcome.reason} Try: {outcome.hint}"
    return row


def _remarks(stored: TenantStored) -> list[str]:
    remarks = []
    if stored.drops and not stored.entries and not stored.omitted:
        remarks.append("no counter in the store any more")
    if stored.is_partial:
        remarks.append("partial: fewer keys arrived than the store announced")
    if stored.truncated:
        remarks.append(f"{stored.truncated} windows with only the 500 largest")
    if stored.unreadable:
        remarks.append(f"{stored.unreadable} unreadable keys")
    return remarks


POINT_SCHEMA = dg.TableSchema(
    columns=[
        required("tenant", "string", "The customer of the gateway"),
        required("budget", "string", "The budget; empty if the tenant has no open window"),
        required("window", "string", "The open window, by its token, in UTC"),
        required(
            "usage",
            "decimal",
            "Usage of the whole budget, in plain digits: its aggregate, or else the sum over its "
            "entities; unknown if no record is intact, or none of its counters could be read",
        ),
        required("age", "string", "Age of the newest snapshot of the window, as of this run"),
        required(
            "marks",
            "string",
            "gone, truncated, partial, omitted(n), earlier(n), damaged(n): see the description",
        ),
        required("entities", "int", "Counters that a restore would bring back"),
        required(
            "source",
            "string",
            "Keys that the snapshot was read from: counters (every entity) or leaderboards (only "
            "the largest)",
        ),
        required("captured_at", "timestamp", "Time of that snapshot, in UTC"),
    ]
)
"""Columns of the table ``points`` in the metadata."""


def points_metadata(survey: PointSurvey) -> dict[str, Any]:
    """Show what a restore would bring back: numbers that plot over time, and the oldest first."""
    rows = [
        *(_point_row(survey, window) for window in survey.windows),
        *(_row_without_window(survey, tenant) for tenant in survey.without_window),
    ]
    # The age of what the store does not have any more says nothing about captures.
    times = [
        each.point.newest_at
        for each in survey.windows
        if each.point.has_intact_record and not survey.is_gone(each)
    ]
    return {
        "as_of": dg.MetadataValue.timestamp(survey.now),
        # Without any window there is no age, and no table.
        **({"newest_point_age_seconds": _seconds(survey, max(times))} if times else {}),
        **({"oldest_point_age_seconds": _seconds(survey, min(times))} if times else {}),
        "tenants": len(survey.newest_snapshots),
        "tenants_without_window": len(survey.without_window),
        "budget_windows": len(survey.windows),
        "dagster/row_count": len(survey.windows),
        "entities": sum(window.entities for window in survey.windows),
        "marked_windows": sum(bool(_marks(survey, window)) for window in survey.windows),
        "gone_windows": sum(map(survey.is_gone, survey.windows)),
        "damaged_records": sum(len(window.point.corrupt) for window in survey.windows),
        "duration_seconds": round(survey.seconds, 3),
        "made_from": dg.MetadataValue.asset(dg.AssetKey("budget_usage_snapshots")),
        **({"points": table(rows)} if rows else {}),
    }


def _marks(survey: PointSurvey, window: PointWindow) -> str:
    """Return the marks of a window: the reasons to doubt its usage."""
    point = window.point
    marks = {
        "gone": survey.is_gone(window),
        "truncated": point.is_truncated,
        "partial": point.is_partial,
        f"omitted({point.omitted_count})": point.omitted_count,
        f"earlier({window.from_earlier})": window.from_earlier,
        f"damaged({len(point.corrupt)})": point.corrupt,
    }
    return ", ".join(mark for mark, is_set in marks.items() if is_set)


def _point_row(survey: PointSurvey, window: PointWindow) -> Row:
    point = window.point
    return {
        "tenant": window.tenant,
        "budget": point.of.budget,
        "window": point.of.window.token,
        "usage": "unknown" if window.is_unknown else format_usage(window.usage),
        "age": duration(age(point.newest_at, survey.now)),
        "marks": _marks(survey, window),
        "entities": window.entities,
        "source": point.source.value if point.source else "",
        "captured_at": _unbroken(point.newest_at),
    }


def _row_without_window(survey: PointSurvey, tenant: str) -> Row:
    newest = survey.newest_snapshots[tenant]
    return {
        "tenant": tenant,
        "budget": "",
        "window": "no open window",
        "usage": "",
        "age": duration(age(newest, survey.now)),
        "marks": "nothing to restore",
        "entities": 0,
        "source": "",
        "captured_at": _unbroken(newest),
    }


def _unbroken(at: datetime) -> str:
    # Without a space, at which the page would break it.
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def _seconds(survey: PointSurvey, at: datetime) -> float:
    return round(age(at, survey.now).total_seconds(), 3)


def duration(time: timedelta) -> str:
    """Write a duration for people, short enough for a narrow column: ``1h 30min``."""
    minutes, seconds = divmod(int(time.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}min"
    return f"{minutes}min" if minutes else f"{seconds}s"


def tables_metadata(built: TablesBuilt) -> dict[str, Any]:
    """Show the tables of an hour: numbers that plot over time, and a row per tenant."""
    rows: list[Row] = [
        {
            "tenant": failed.tenant,
            "outcome": "failed",
            "rows": 0,
            "bytes": 0,
            "file": f"{failed.reason} Try: {failed.hint}",
        }
        for failed in built.failed
    ]
    rows.extend(
        {
            "tenant": written.tenant,
            "outcome": "written",
            "rows": written.file.rows,
            "bytes": written.file.size,
            "file": str(Path(written.file.path).relative_to(built.place)),
        }
        for written in built.written
    )
    return {
        "directory": dg.MetadataValue.path(built.place),
        "files": len(built.written),
        "dagster/row_count": built.rows,
        "bytes": built.size,
        "tenants_failed": len(built.failed),
        "removed_files": built.pruned.removed,
        "duration_seconds": round(built.seconds, 3),
        "tenants": table(rows),
        "how_to_read": dg.MetadataValue.md(_how_to_read(built)),
        "made_from": dg.MetadataValue.asset(dg.AssetKey("budget_usage_snapshots")),
    }


def _how_to_read(built: TablesBuilt) -> str:
    of_tenant = f"{built.place}/<tenant>-<digest>"
    if built.written:
        of_tenant = str(Path(built.written[0].file.path).parent)
    everything = f"{built.place}/*/*.parquet".replace("'", "''")
    return f"""All retained hours of a tenant with pandas; usages are exact `Decimal`s:

```python
pandas.read_parquet({of_tenant!r})
```

All tenants with DuckDB, in Python `duckdb.sql("…")`:

```sql
from '{everything}' order by captured_at desc, usage desc
```
"""
