"""A preview and an applied restore as pages for people, at home in 80 columns."""

from collections.abc import Sequence

from rich.console import Console

from budget_recovery_dagster.cli.page_rows import print_row
from budget_recovery_dagster.services.count_words import counted
from budget_recovery_dagster.services.manual_restore import Applied
from budget_recovery_dagster.services.preview import Preview, TenantPreview
from budget_recovery_dagster.services.preview_words import (
    applied_headline,
    change_figures,
    change_name,
    comparison,
    difference_line,
    end_of_incident,
    headline,
    most_telling,
    store_line,
    tenant_line,
    tenant_notes,
    window_lines,
)
from budget_recovery_dagster.services.window_preview import WindowPreview

_WINDOWS = 40
_DIFFERENCES = 20
_NOTES = 20


def print_preview(console: Console, preview: Preview) -> None:
    """Write what would be done, the tenants with the most to be raised first."""
    at = f"{preview.at:%Y-%m-%d %H:%M:%S} UTC"
    print_row(console, [("PREVIEW", "bold"), (f" at {at}; nothing is written", "")])
    print_row(console, [("Choice  ", "bold"), (str(preview.choice), "")])
    print_row(console, [("Store   ", "bold"), (store_line(preview), "")])
    for warning in preview.warnings:
        print_row(console, [("Warning ", "bold yellow"), (warning, "")])
    print_row(console, [("Result  ", "bold"), (headline(preview), "")])
    left, more = _WINDOWS, 0
    for tenant in sorted(preview.tenants, key=_most_first):
        windows = _worth_telling(tenant, preview)
        if left > 0:
            _print_tenant(console, tenant, windows[:left], preview)
        more += max(len(windows) - max(left, 0), 0)
        left -= len(windows) or 1
    if left < 0:
        console.print()
        print_row(console, f"{counted(more, 'more window')}; --json has everything.")
    if preview.changes:
        console.print()
        print_row(console, [("Largest changes", "bold"), ("  # is there, + comes back", "")])
        for change in preview.changes:
            print_row(console, change_name(change), indent=2)
            print_row(console, change_figures(change), indent=4)
    if preview.raised or preview.recovery.incident is not None:
        console.print()
        print_row(console, "To do it: budget-recovery restore of the same choice, with --reason.")


def _most_first(tenant: TenantPreview) -> tuple[bool, int, str]:
    raised = sum(window.raised for window in tenant.windows)
    return tenant.failure is None, -raised, tenant.tenant


def _worth_telling(tenant: TenantPreview, preview: Preview) -> list[WindowPreview]:
    """Return all windows of a chosen tenant; of all tenants, those of which something is to say."""
    if preview.choice.tenant is not None:
        return list(tenant.windows)
    return [window for window in tenant.windows if window.raised or window.notes]


def _print_tenant(
    console: Console, tenant: TenantPreview, windows: Sequence[WindowPreview], preview: Preview
) -> None:
    console.print()
    line = f": {tenant_line(tenant, preview.at)}"
    print_row(console, [(tenant.tenant, "bold"), (line, "red" if tenant.failure else "")])
    for note in tenant_notes(tenant):
        print_row(console, note, indent=2)
    if quiet := len(tenant.windows) - len(_worth_telling(tenant, preview)):
        print_row(console, f"{counted(quiet, 'window')} with nothing to be raised", indent=2)
    for window in windows:
        style = "bold" if window.raised else ""
        print_row(console, [(str(window.of), style)], indent=2)
        for line in window_lines(window, preview.at, tenant.point_at):
            print_row(console, line, indent=4)


def print_applied(console: Console, applied: Applied) -> None:
    """Write what was done, what was different from the preview, and what that leaves."""
    is_done = applied.failure is None
    style = "bold green" if is_done else "bold red"
    word = "DONE" if is_done else "NOT ALL DONE"
    print_row(console, [(word, style), (f" {applied_headline(applied)}", "")])
    print_row(console, [("Choice  ", "bold"), (str(applied.choice), "")])
    print_row(console, [("Preview ", "bold"), (comparison(applied), "")])
    for difference in most_telling(applied.differences)[:_DIFFERENCES]:
        print_row(console, difference_line(difference), indent=2)
    if len(applied.differences) > _DIFFERENCES:
        more = len(applied.differences) - _DIFFERENCES
        print_row(console, f"{more:,} more; --json has all of them.", indent=2)
    notes = [
        f"{tenant.tenant}, {entry.of}: {note}"
        for tenant in applied.tenants
        for entry in tenant.entries
        for note in entry.notes
    ]
    for note in notes[:_NOTES]:
        print_row(console, [("Note    ", "bold"), (note, "")])
    if len(notes) > _NOTES:
        print_row(console, f"{len(notes) - _NOTES:,} more notes; --json has all of them.")
    if applied.failure is not None:
        print_row(console, [("Failed  ", "bold red"), (str(applied.failure), "")])
    if told := end_of_incident(applied):
        print_row(console, [("Store   ", "bold"), (told, "")])
