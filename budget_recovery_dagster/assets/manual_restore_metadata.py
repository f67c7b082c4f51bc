"""What a preview and a restore by hand show in Dagster: sentences, tables, and a picture."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import dagster as dg

from budget_recovery_dagster.assets.restored_usage import MOST_ROWS, audit_table
from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.domain.plan_differences import Difference
from budget_recovery_dagster.domain.restore_choice import moment
from budget_recovery_dagster.services.manual_restore import Applied
from budget_recovery_dagster.services.name_words import shown_entity
from budget_recovery_dagster.services.orders import Order
from budget_recovery_dagster.services.preview import Preview
from budget_recovery_dagster.services.preview_words import (
    applied_headline,
    change_figures,
    change_name,
    comparison,
    end_of_incident,
    figures,
    headline,
    most_telling,
    store_line,
    tenant_notes,
    usage_or_nothing,
)
from budget_recovery_dagster.services.window_preview import EntryPreview, WindowPreview
from budget_recovery_dagster.snapshot_ports import ListedSnapshot

# The page is narrow: of more columns, or of sentences in them, it shows one word in a line.
_WINDOW_COLUMNS = [
    dg.TableColumn("tenant", "string"),
    dg.TableColumn("budget", "string", "The budget and its window"),
    dg.TableColumn("usage", "string", "Sum of those in the snapshots, now and afterwards"),
    dg.TableColumn("rise", "string", "By how much it would rise"),
    dg.TableColumn("limit", "string", "Of each counter"),
    dg.TableColumn("blocked", "string", "How many are blocked by the limit, now and afterwards"),
    dg.TableColumn("raised", "string", "How many counters would be raised"),
    dg.TableColumn("from_snapshot", "string", "The snapshots that it comes from, UTC"),
]

_NOTE_COLUMNS = [
    dg.TableColumn("tenant", "string"),
    dg.TableColumn("budget", "string", "The budget and its window"),
    dg.TableColumn("note", "string", "What is left, unknown, or does not come back"),
]

_ENTRY_COLUMNS = [
    dg.TableColumn("budget", "string", "The budget and its window"),
    dg.TableColumn("entity", "string"),
    dg.TableColumn("live", "string", "In the store now"),
    dg.TableColumn("snapshot", "string", "In the snapshots"),
    dg.TableColumn("action", "string", "What would be done"),
    dg.TableColumn("blocked", "string", "Whether a limit blocks it afterwards"),
    dg.TableColumn("from_snapshot", "string", "The newest snapshot that holds it, UTC"),
]

_CHOICE_COLUMNS = [
    dg.TableColumn("snapshot", "string", "What to write into the config, to take this one"),
    dg.TableColumn("tenants", "int"),
    dg.TableColumn("windows", "int"),
    dg.TableColumn("counters", "int"),
]

_BLOCKED = {None: "not known", False: "no", True: "yes"}

_DIFFERENCE_COLUMNS = [
    dg.TableColumn("tenant", "string"),
    dg.TableColumn("budget", "string"),
    dg.TableColumn("window", "string"),
    dg.TableColumn("entity", "string"),
    dg.TableColumn("change", "string"),
    dg.TableColumn("previewed", "string"),
    dg.TableColumn("found", "string"),
]

# A longer text is hidden behind a click.
_AT_ONCE = 999

_TO_APPLY = "open the run of this preview in the Launchpad, set mode to apply and give a reason"


def preview_metadata(preview: Preview, choices: Sequence[ListedSnapshot]) -> Mapping[str, Any]:
    """Show what would be restored, and the snapshots that there are to choose from."""
    windows = sorted(preview.windows, key=lambda each: each.rise, reverse=True)
    entries = [entry for tenant in preview.tenants for entry in tenant.entries]
    remarks = [
        {"tenant": each.tenant, "budget": "", "note": note}
        for each in preview.tenants
        for note in tenant_notes(each)
    ]
    remarks += [
        {"tenant": each.tenant, "budget": str(each.of), "note": note}
        for each in windows
        for note in each.notes
    ]
    # The page keeps this order: what decides comes first, and what is long comes last.
    metadata: dict[str, Any] = {
        "what_would_be_done": headline(preview),
        "choice": str(preview.choice),
        "store": store_line(preview),
    }
    if preview.warnings:
        metadata["warnings"] = " ".join(preview.warnings)
    # With nothing to be raised it ends an incident.
    if preview.raised or preview.recovery.incident is not None:
        metadata["to_apply"] = _TO_APPLY
    if preview.changes:
        metadata["largest_changes"] = dg.MetadataValue.md(_picture(preview.changes))
    metadata["windows"] = _table(_WINDOW_COLUMNS, map(_window_row, windows))
    metadata["windows_not_shown"] = max(len(windows) - MOST_ROWS, 0)
    if remarks:
        metadata["notes"] = _table(_NOTE_COLUMNS, remarks)
        metadata["notes_not_shown"] = max(len(remarks) - MOST_ROWS, 0)
    if entries:
        entries.sort(key=lambda each: each.rise, reverse=True)
        metadata["counters"] = _table(_ENTRY_COLUMNS, (_entry_row(each) for each in entries))
        metadata["counters_not_shown"] = max(len(entries) - MOST_ROWS, 0)
    metadata["snapshots_to_choose"] = _table(
        _CHOICE_COLUMNS, (_choice_row(each) for each in choices if not each.is_pruned)
    )
    metadata["counters_to_raise"] = preview.raised
    metadata["preview_id"] = preview.preview_id
    return metadata


def applied_metadata(applied: Applied, order: Order) -> Mapping[str, Any]:
    """Show what was restored, by whom and why, and what was not as in the preview."""
    audits = [entry for tenant in applied.tenants for entry in tenant.entries]
    shown = [entry for entry in audits if entry.raised or entry.notes]
    metadata: dict[str, Any] = {"what_was_done": applied_headline(applied)}
    if told := end_of_incident(applied):
        metadata["incident"] = told
    metadata |= {
        "choice": str(applied.choice),
        "reason": order.reason,
        "by": order.by,
        "preview": comparison(applied),
    }
    if applied.differences:
        metadata["differences"] = _table(
            _DIFFERENCE_COLUMNS, map(_difference_row, most_telling(applied.differences))
        )
        metadata["differences_not_shown"] = max(len(applied.differences) - MOST_ROWS, 0)
    return metadata | {
        "before_and_after": audit_table(shown[:MOST_ROWS]),
        "windows_not_shown": len(shown) - len(shown[:MOST_ROWS]),
        "counters_raised": applied.raised,
    }


def _picture(changes: Sequence[EntryPreview]) -> str:
    """Draw the largest changes, before and after, in letters that any page can show."""
    shown: list[str] = []
    for each in changes:
        # Names may hold what would end the block.
        drawn = f"{change_name(each)}\n  {change_figures(each)}\n".replace("`", "'")
        if shown and _length(_framed([*shown, drawn])) > _AT_ONCE:
            break
        shown.append(drawn)
    return _framed(shown)


def _framed(drawn: Sequence[str]) -> str:
    return f"`#` is there, `+` comes back\n\n```\n{''.join(drawn)}```"


def _length(text: str) -> int:
    """Count as a browser does."""
    return len(text.encode("utf-16-le")) // 2


def _table(
    columns: Sequence[dg.TableColumn], rows: Iterable[Mapping[str, Any]]
) -> dg.TableMetadataValue:
    """Show as many rows as are shown of any table; how many there are is told beside it."""
    records = [dg.TableRecord(dict(row)) for _, row in zip(range(MOST_ROWS), rows, strict=False)]
    return dg.MetadataValue.table(records=records, schema=dg.TableSchema(columns=list(columns)))


def _window_row(window: WindowPreview) -> Mapping[str, Any]:
    return {
        "tenant": window.tenant,
        "budget": str(window.of),
        "usage": figures(window),
        "rise": format_usage(window.rise) if window.rise else "0",
        "limit": "not known" if window.limit is None else format_usage(window.limit),
        "blocked": _blocked(window),
        "raised": f"{window.raised:,} of {window.counters:,}",
        "from_snapshot": _sources(window),
    }


def _blocked(window: WindowPreview) -> str:
    if window.limit is None:
        return "not known"
    if not window.is_enforced:
        return "nobody"
    return f"{window.blocked_before:,} -> {window.blocked_after:,}"


def _sources(window: WindowPreview) -> str:
    newest, oldest = window.newest_source, window.oldest_source
    if newest is None or oldest is None:
        return "none"
    if oldest == newest:
        return _second(newest)
    return f"{_second(oldest)} to {_second(newest)}"


def _entry_row(entry: EntryPreview) -> Mapping[str, Any]:
    return {
        "budget": str(entry.of),
        "entity": shown_entity(entry.entity),
        "live": usage_or_nothing(entry.live),
        "snapshot": format_usage(entry.recorded),
        "action": entry.action.value,
        "blocked": _BLOCKED[entry.blocks],
        "from_snapshot": _second(entry.source),
    }


def _second(at: datetime) -> str:
    """Write a moment as it may be chosen, and as lines can be broken."""
    return f"{at:%Y-%m-%d %H:%M:%S}"


def _choice_row(listed: ListedSnapshot) -> Mapping[str, Any]:
    return {
        "snapshot": moment(listed.captured_at),
        "tenants": listed.tenants,
        "windows": listed.records,
        "counters": listed.entries,
    }


def _difference_row(difference: Difference) -> Mapping[str, Any]:
    return {
        "tenant": difference.tenant,
        "budget": difference.of.budget,
        "window": difference.of.window.token,
        "entity": shown_entity(difference.entity),
        "change": difference.change.value,
        "previewed": usage_or_nothing(difference.previewed),
        "found": usage_or_nothing(difference.found),
    }
