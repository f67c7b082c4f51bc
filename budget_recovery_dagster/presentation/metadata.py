"""Dagster metadata of captures, recovery points, tables and restores."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import dagster as dg

from budget_recovery_dagster.domain.counters import format_usage, shown_entity
from budget_recovery_dagster.domain.falls import KeyCount
from budget_recovery_dagster.domain.incident import Incident, Restored
from budget_recovery_dagster.domain.plan import (
    AuditEntry,
    Difference,
    ManualRestore,
    MergedAudits,
    timestamp,
)
from budget_recovery_dagster.domain.recovery_point import age
from budget_recovery_dagster.domain.snapshots import USAGE_COLUMNS, CaptureSummary, ListedSnapshot
from budget_recovery_dagster.presentation.text import (
    applied_headline,
    change_figures,
    change_name,
    comparison,
    end_of_incident,
    figures,
    headline,
    held_more,
    incident_line,
    known_usage,
    largest_first,
    most_relevant,
    raised_headline,
    store_line,
    tenant_notes,
    usage_or_nothing,
    warnings,
    window_notes,
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
from budget_recovery_dagster.services.restore.manual import Applied, Order
from budget_recovery_dagster.services.restore.preview import EntryPreview, Preview, WindowPreview
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


def _table_of(columns: Sequence[Column[Item]], items: Iterable[Item]) -> dg.TableMetadataValue:
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


_AUDIT_COLUMNS: Sequence[Column[AuditEntry]] = (
    Column("tenant", lambda entry: entry.tenant),
    Column("budget", lambda entry: entry.of.budget),
    Column("window", lambda entry: entry.of.window.token),
    Column("counters", lambda entry: entry.entries, "Counters in the snapshots", "int"),
    Column("raised", lambda entry: entry.raised, "Counters that the restore raised", "int"),
    Column(
        "before",
        lambda entry: format_usage(entry.before),
        "Usage of the budget in the store before the restore",
    ),
    Column(
        "after",
        lambda entry: format_usage(entry.after),
        "Usage of the budget in the store after the restore",
    ),
    Column("from_snapshot", lambda entry: _second(entry.point_at), "Newest source snapshot, UTC"),
    Column("notes", lambda entry: "; ".join(entry.notes), "Counters that were skipped, and why"),
)


def restored_metadata(restored: Restored, audits: MergedAudits) -> Mapping[str, Any]:
    """Show what was restored: how much of it, and a row for each of the largest amounts."""
    return {
        "counters_raised": restored.counters,
        "windows_raised": restored.windows,
        "tenants_raised": restored.tenants,
        **_before_and_after(audits.largest, audits.windows),
    }


RESTORE_ID = "restore"
"""The entry that names the run or the command of a manual restore."""


def manual_metadata(
    restore: ManualRestore, restored: Restored, audits: MergedAudits, incident: Incident | None
) -> Mapping[str, Any]:
    """Show a manual restore by what is recorded of it: ``applied_metadata`` without its preview."""
    return {
        "result": raised_headline(restored.counters, restored.boards, restore.unfinished),
        "began_at": dg.MetadataValue.timestamp(restore.at),
        **({"incident": incident_line(incident)} if incident else {}),
        **_ordered(restore.why, restore.who, restore.run_id),
        **_before_and_after(audits.largest, audits.windows),
        "counters_raised": restored.counters,
    }


def _ordered(reason: str, by: str, run_id: str) -> Mapping[str, Any]:
    return {"reason": reason, "by": by, RESTORE_ID: run_id}


def _before_and_after(largest: Sequence[AuditEntry], windows: int) -> Mapping[str, Any]:
    """Show the ``largest`` of so many budgets and windows."""
    shown = [entry for entry in largest if entry.raised or entry.notes][:MOST_ROWS]
    return {
        "before_and_after": _table_of(_AUDIT_COLUMNS, shown),
        "windows_not_shown": windows - len(shown),
    }


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
    return _table_of(_GONE_COLUMNS, gone)


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


def _blocked(window: WindowPreview) -> str:
    if window.limit is None:
        return "unknown"
    if not window.is_enforced:
        return "none"
    if window.is_unknown:
        return "unknown"
    return f"{window.blocked_before:,} -> {window.blocked_after:,}"


def _sources(window: WindowPreview) -> str:
    newest, oldest = window.newest_source, window.oldest_source
    if newest is None or oldest is None:
        return "none"
    if oldest == newest:
        return _second(newest)
    return f"{_second(oldest)} to {_second(newest)}"


# The page is narrow: with more columns, or sentences in them, it shows one word per line.
_WINDOW_COLUMNS: Sequence[Column[WindowPreview]] = (
    Column("tenant", lambda window: window.tenant),
    Column("budget", lambda window: str(window.of), "The budget and its window"),
    Column(
        "usage",
        figures,
        "Usage of the budget, now -> restored: its aggregate, or else the sum of its entities",
    ),
    Column(
        "rise",
        lambda window: format_usage(window.rise) if window.rise else "0",
        "By how much that rises, or the entities if the aggregate does not",
    ),
    Column(
        "limit",
        lambda window: "unknown" if window.limit is None else format_usage(window.limit),
        "Limit of each entity, or of the aggregate if the budget is not split",
    ),
    Column(
        "blocked",
        _blocked,
        "Entities blocked by the limit, now -> restored",
    ),
    Column(
        "raised",
        lambda window: f"{window.raised:,} of {window.counters:,}",
        "Counters that a restore would raise",
    ),
    Column("from_snapshot", _sources, "Source snapshots, UTC"),
)
_NOTE_COLUMNS: Sequence[Column[tuple[str, str, str]]] = (
    Column("tenant", lambda noted: noted[0]),
    Column("budget", lambda noted: noted[1], "The budget and its window"),
    Column("note", lambda noted: noted[2], "What is skipped, unknown or not restored"),
)
_BLOCKED = {None: "unknown", False: "no", True: "yes"}
_ENTRY_COLUMNS: Sequence[Column[EntryPreview]] = (
    Column("budget", lambda entry: str(entry.of), "The budget and its window"),
    Column("entity", lambda entry: shown_entity(entry.entity)),
    Column("live", lambda entry: usage_or_nothing(entry.live), "Usage in the store now"),
    Column("snapshot", lambda entry: format_usage(entry.recorded), "Usage in the snapshots"),
    Column("action", lambda entry: entry.action.value, "What a restore would do"),
    Column(
        "blocked",
        lambda entry: _BLOCKED[entry.blocks],
        "Whether a limit blocks the entity after the restore",
    ),
    Column(
        "from_snapshot",
        lambda entry: _second(entry.source),
        "Newest snapshot with this usage, UTC",
    ),
)
_CHOICE_COLUMNS: Sequence[Column[ListedSnapshot]] = (
    Column(
        "snapshot",
        lambda listed: timestamp(listed.captured_at),
        "Value for the config field snapshot",
    ),
    Column("tenants", lambda listed: listed.tenants, kind="int"),
    Column("windows", lambda listed: listed.records, kind="int"),
    Column("counters", lambda listed: listed.entries, kind="int"),
)
_DIFFERENCE_COLUMNS: Sequence[Column[Difference]] = (
    Column("tenant", lambda each: each.tenant),
    Column("budget", lambda each: each.of.budget),
    Column("window", lambda each: each.of.window.token),
    Column("entity", lambda each: shown_entity(each.entity)),
    Column("change", lambda each: each.change.value),
    Column("previewed", lambda each: usage_or_nothing(each.previewed)),
    Column("found", lambda each: usage_or_nothing(each.found)),
)
# The page hides a longer text behind a click.
_SHOWN_LENGTH = 999
_TO_APPLY = "open the run of this preview in the Launchpad, set mode to apply and give a reason"


def preview_metadata(preview: Preview, choices: Sequence[ListedSnapshot]) -> Mapping[str, Any]:
    """Show what would be restored, and the snapshots to choose from."""
    windows = sorted(preview.windows, key=lambda each: each.rise, reverse=True)
    entries = [entry for tenant in preview.tenants for entry in tenant.entries]
    notes = [(each.tenant, "", note) for each in preview.tenants for note in tenant_notes(each)]
    notes += [(each.tenant, str(each.of), note) for each in windows for note in window_notes(each)]
    # The page keeps this order: the decisive facts come first, the long tables last.
    metadata: dict[str, Any] = {
        "what_would_be_done": headline(preview),
        "choice": str(preview.choice),
        "store": store_line(preview),
    }
    if warned := warnings(preview):
        metadata["warnings"] = " ".join(warned.values())
    # An apply that raises nothing still closes an open incident.
    if preview.raised or preview.recovery.incident is not None:
        metadata["to_apply"] = _TO_APPLY
    if preview.changes:
        metadata["largest_changes"] = dg.MetadataValue.md(_picture(preview.changes))
    metadata["windows"] = _table_of(_WINDOW_COLUMNS, windows)
    metadata["windows_not_shown"] = max(len(windows) - MOST_ROWS, 0)
    if notes:
        metadata["notes"] = _table_of(_NOTE_COLUMNS, notes)
        metadata["notes_not_shown"] = max(len(notes) - MOST_ROWS, 0)
    if entries:
        entries.sort(key=lambda each: each.rise, reverse=True)
        metadata["counters"] = _table_of(_ENTRY_COLUMNS, entries)
        metadata["counters_not_shown"] = max(len(entries) - MOST_ROWS, 0)
    metadata["snapshots_to_choose"] = _table_of(
        _CHOICE_COLUMNS, [each for each in choices if not each.is_pruned]
    )
    metadata["counters_to_raise"] = preview.raised
    metadata["preview_id"] = preview.preview_id
    return metadata


def applied_metadata(applied: Applied, order: Order) -> Mapping[str, Any]:
    """Show what was restored, by whom and why, and what differed from the preview."""
    audits = [entry for tenant in applied.tenants for entry in tenant.entries]
    noted = [entry for entry in largest_first(audits) if entry.raised or entry.notes]
    metadata: dict[str, Any] = {"result": applied_headline(applied)}
    if text := end_of_incident(applied):
        metadata["incident"] = text
    if applied.others is not None:
        metadata["lower_than_other_snapshots"] = applied.others.counters
    if lower := list(held_more(applied)):
        metadata["other_snapshots"] = " ".join(lower)
    metadata["choice"] = str(applied.choice)
    metadata |= _ordered(order.reason, order.by, order.run_id)
    metadata["preview"] = comparison(applied)
    if applied.differences:
        metadata["differences"] = _table_of(_DIFFERENCE_COLUMNS, most_relevant(applied.differences))
        metadata["differences_not_shown"] = max(len(applied.differences) - MOST_ROWS, 0)
    return metadata | {
        **_before_and_after(noted, len(noted)),
        "counters_raised": applied.raised,
    }


def _picture(changes: Sequence[EntryPreview]) -> str:
    """Draw the largest changes, before and after, with ASCII bars."""
    shown: list[str] = []
    for each in changes:
        # A backquote in a name could end the block.
        drawn = f"{change_name(each)}\n  {change_figures(each)}\n".replace("`", "'")
        if shown and _length(_framed([*shown, drawn])) > _SHOWN_LENGTH:
            break
        shown.append(drawn)
    return _framed(shown)


def _framed(drawn: Sequence[str]) -> str:
    return f"`#` live usage, `+` restored usage\n\n```\n{''.join(drawn)}```"


def _length(text: str) -> int:
    """Count UTF-16 units, as a browser does."""
    return len(text.encode("utf-16-le")) // 2


def _second(at: datetime) -> str:
    """Write a timestamp that can be chosen, with a space at which the page can break it."""
    return f"{at:%Y-%m-%d %H:%M:%S}"


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
