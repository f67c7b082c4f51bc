"""Dagster metadata of restores and their previews, and of what incidents cost."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import dagster as dg

from budget_recovery_dagster.domain.audits import (
    AuditEntry,
    IncidentAmounts,
    LossAmounts,
    ManualRestore,
    MergedAudits,
    shown_bound,
)
from budget_recovery_dagster.domain.counters import format_usage, shown_entity
from budget_recovery_dagster.domain.incident import Incident, Restored
from budget_recovery_dagster.domain.plan import Difference, timestamp
from budget_recovery_dagster.domain.snapshots import ListedSnapshot
from budget_recovery_dagster.presentation.metadata import MOST_ROWS, Column, table_of
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
    largest_first,
    most_relevant,
    raised_headline,
    store_line,
    tenant_notes,
    usage_or_nothing,
    warnings,
    window_notes,
)
from budget_recovery_dagster.services.restore.manual import Applied, Order
from budget_recovery_dagster.services.restore.preview import EntryPreview, Preview, WindowPreview
from budget_recovery_dagster.services.restore.report import (
    amounts_not_added,
    bounded,
    restored_amounts,
    uncovered,
)

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
    Column(
        "counted_after_loss",
        lambda entry: _not_added(entry.amounts),
        "Usage that the gateway counted after the loss and that is not added",
    ),
    Column("from_snapshot", lambda entry: _second(entry.point_at), "Newest source snapshot, UTC"),
    Column("notes", lambda entry: "; ".join(entry.notes), "Counters that were skipped, and why"),
)


def _not_added(amounts: LossAmounts | None) -> str:
    """Write what was counted after the loss and is not added; empty if no incident was open."""
    return "" if amounts is None else bounded(amounts.counted, shown_bound(amounts))


def _is_shown(entry: AuditEntry) -> bool:
    has_amount = entry.amounts is not None and entry.amounts.counted != 0
    return bool(entry.raised or entry.notes or has_amount)


def cost_metadata(incident: Incident, amounts: IncidentAmounts) -> Mapping[str, Any]:
    """Show what an incident cost: largest amounts of single budgets and windows, never a total."""
    return {
        "restored": restored_amounts(amounts) or "nothing",
        "counted_after_loss_and_not_added": amounts_not_added(amounts),
        "not_covered": uncovered(incident),
    }


def restored_metadata(
    incident: Incident, restored: Restored, audits: MergedAudits, amounts: IncidentAmounts
) -> Mapping[str, Any]:
    """Show what was restored: how much of it, and a row for each of the largest amounts."""
    return {
        **cost_metadata(incident, amounts),
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
    shown = [entry for entry in largest if _is_shown(entry)][:MOST_ROWS]
    return {
        "before_and_after": table_of(_AUDIT_COLUMNS, shown),
        "windows_not_shown": windows - len(shown),
    }


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
    metadata["windows"] = table_of(_WINDOW_COLUMNS, windows)
    metadata["windows_not_shown"] = max(len(windows) - MOST_ROWS, 0)
    if notes:
        metadata["notes"] = table_of(_NOTE_COLUMNS, notes)
        metadata["notes_not_shown"] = max(len(notes) - MOST_ROWS, 0)
    if entries:
        entries.sort(key=lambda each: each.rise, reverse=True)
        metadata["counters"] = table_of(_ENTRY_COLUMNS, entries)
        metadata["counters_not_shown"] = max(len(entries) - MOST_ROWS, 0)
    metadata["snapshots_to_choose"] = table_of(
        _CHOICE_COLUMNS, [each for each in choices if not each.is_pruned]
    )
    metadata["counters_to_raise"] = preview.raised
    metadata["preview_id"] = preview.preview_id
    return metadata


def applied_metadata(applied: Applied, order: Order) -> Mapping[str, Any]:
    """Show what was restored, by whom and why, and what differed from the preview."""
    audits = [entry for tenant in applied.tenants for entry in tenant.entries]
    shown = [entry for entry in largest_first(audits) if _is_shown(entry)]
    metadata: dict[str, Any] = {"result": applied_headline(applied)}
    if text := end_of_incident(applied):
        metadata["incident"] = text
    if applied.incident is not None and applied.amounts is not None:
        metadata |= cost_metadata(applied.incident, applied.amounts)
    if applied.others is not None:
        metadata["lower_than_other_snapshots"] = applied.others.counters
    if lower := list(held_more(applied)):
        metadata["other_snapshots"] = " ".join(lower)
    metadata["choice"] = str(applied.choice)
    metadata |= _ordered(order.reason, order.by, order.run_id)
    metadata["preview"] = comparison(applied)
    if applied.differences:
        metadata["differences"] = table_of(_DIFFERENCE_COLUMNS, most_relevant(applied.differences))
        metadata["differences_not_shown"] = max(len(applied.differences) - MOST_ROWS, 0)
    return metadata | {
        **_before_and_after(shown, len(shown)),
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
