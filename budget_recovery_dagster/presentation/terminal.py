"""Tables and text that the commands print."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from budget_recovery_dagster.domain.audits import IncidentAmounts
from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.domain.incident import MAX_ATTEMPTS, Incident
from budget_recovery_dagster.domain.plan import timestamp
from budget_recovery_dagster.domain.recovery_point import age
from budget_recovery_dagster.domain.snapshots import ListedSnapshot
from budget_recovery_dagster.domain.verdict import Verdict
from budget_recovery_dagster.domain.windows import in_words
from budget_recovery_dagster.presentation.status import (
    changed_words,
    doubts,
    next_step,
    notices,
    restore_command,
    skew_words,
)
from budget_recovery_dagster.presentation.text import (
    FAILURES,
    applied_headline,
    at_least,
    change_figures,
    change_name,
    clock_time,
    comparison,
    difference_line,
    end_of_incident,
    escape_unprintable,
    full_time,
    headline,
    held_more,
    label,
    largest_first,
    most_relevant,
    since,
    store_line,
    tenant_line,
    tenant_notes,
    until_next_snapshot,
    unverified_line,
    warnings,
    window_lines,
    window_notes,
)
from budget_recovery_dagster.services.future_snapshots import FutureSnapshots
from budget_recovery_dagster.services.recovery_points import PointAges
from budget_recovery_dagster.services.restore.manual import Applied
from budget_recovery_dagster.services.restore.preview import Preview, TenantPreview, WindowPreview
from budget_recovery_dagster.services.restore.report import cost, counted
from budget_recovery_dagster.services.status import MOST_CHECKS, MOST_RUNS, Condition, Status

_WIDEST = 100
_NARROWEST = 20
_HANGING = 2
_UNLIMITED = 1000
Parts = str | Sequence[tuple[str, str]]
"""A text, or its parts, each with a style."""


def print_row(console: Console, parts: Parts, *, indent: int = 0) -> None:
    """Print a line, wrapped at words; continuation lines are indented more."""
    print_wrapped(console, Text(" " * indent), _text(console, parts), hanging=_HANGING)


def print_wrapped(
    console: Console, margin: Text, line: Text, *, hanging: int = 0, widest: int = _WIDEST
) -> None:
    """Print a line to the right of a margin, wrapped at words, without blanks at the ends.

    Continuation lines have an empty margin, and are indented by ``hanging`` more.
    """
    width = max(min(console.width, widest) - len(margin) - hanging, _NARROWEST)
    for row in line.wrap(console, width):
        row.rstrip()
        console.print(margin + row, soft_wrap=True)
        margin = Text(" " * (len(margin) + hanging))
        hanging = 0


_WINDOWS = 40
_DIFFERENCES = 20
_NOTES = 20


def print_preview(console: Console, preview: Preview) -> None:
    """Print what a restore would do; tenants and windows with the largest rise come first."""
    at = full_time(preview.at)
    print_row(console, [("PREVIEW", "bold"), (f" at {at}; nothing is written", "")])
    print_row(console, [("Choice  ", "bold"), (str(preview.choice), "")])
    print_row(console, [("Store   ", "bold"), (store_line(preview), "")])
    for warning in warnings(preview).values():
        print_row(console, [("Warning ", "bold yellow"), (warning, "")])
    print_row(console, [("Result  ", "bold"), (headline(preview), "")])
    left, more = _WINDOWS, 0
    for tenant in sorted(preview.tenants, key=_most_first):
        windows = _shown_windows(tenant, preview)
        if left > 0:
            _print_tenant(console, tenant, windows[:left], preview)
        more += max(len(windows) - max(left, 0), 0)
        left -= len(windows) or 1
    if left < 0:
        console.print()
        print_row(console, f"{counted(more, 'more window')}; --json lists all.")
    if preview.changes:
        console.print()
        print_row(console, [("Largest changes", "bold"), ("  # live, + restored", "")])
        for change in preview.changes:
            print_row(console, change_name(change), indent=2)
            print_row(console, change_figures(change), indent=4)


def print_how_to_apply(console: Console, preview: Preview) -> None:
    """Print the command that applies a preview, if there is something to apply."""
    if preview.raised or preview.recovery.incident is not None:
        console.print()
        print_row(console, "To apply: budget-recovery restore <same options> --reason <why>")


def _most_first(tenant: TenantPreview) -> tuple[bool, Decimal, str]:
    rise = max((window.rise for window in tenant.windows), default=Decimal(0))
    return tenant.failure is None, rise.copy_negate(), tenant.tenant


def _shown_windows(tenant: TenantPreview, preview: Preview) -> list[WindowPreview]:
    """Return all windows of a chosen tenant; of every tenant, those with a change or a note."""
    windows = sorted(tenant.windows, key=lambda window: window.rise, reverse=True)
    if preview.choice.tenant is not None:
        return windows
    return [window for window in windows if window.raised or any(window_notes(window))]


def _print_tenant(
    console: Console, tenant: TenantPreview, windows: Sequence[WindowPreview], preview: Preview
) -> None:
    console.print()
    line = f": {tenant_line(tenant, preview)}"
    print_row(console, [(tenant.tenant, "bold"), (line, "red" if tenant.failure else "")])
    for note in tenant_notes(tenant):
        print_row(console, note, indent=2)
    if quiet := len(tenant.windows) - len(_shown_windows(tenant, preview)):
        print_row(console, f"{counted(quiet, 'window')} without a change", indent=2)
    for window in windows:
        style = "bold" if window.raised else ""
        print_row(console, [(str(window.of), style)], indent=2)
        for line in window_lines(window, preview.at, tenant.point_at):
            print_row(console, line, indent=4)


def print_snapshots(console: Console, snapshots: Iterable[ListedSnapshot]) -> None:
    """Print a table of snapshots; only the remarks wrap, and in a pipe nothing does."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("captured at (UTC)", no_wrap=True, overflow="ignore")
    for count in ("tenants", "windows", "counters"):
        table.add_column(count, justify="right", no_wrap=True, overflow="ignore")
    table.add_column("remarks")
    for each in snapshots:
        table.add_row(*_snapshot_row(each))
    needed = Measurement.get(console, console.options.update_width(_UNLIMITED), table)
    if not console.is_terminal:
        table.width = needed.maximum
    elif console.width < needed.minimum:
        # The terminal wraps the lines; rich would cut them.
        table.width = needed.minimum
    console.print(table, crop=False)


def print_future(console: Console, future: FutureSnapshots) -> None:
    """Print the snapshots dated in the future, and what only they hold, the largest first."""
    print_row(console, "Dated in the future:")
    print_snapshots(console, future.found)
    if not future.lost:
        print_row(console, "The other snapshots hold all their usage of open windows.")
        return
    counters = counted(future.lost_counters, "counter")
    print_row(console, f"Lower or missing in the recovery points without them: {counters}")
    for each in future.lost[:_WINDOWS]:
        usage = format_usage(each.usage)
        line = f"{each.at.tenant}, {each.at.of}: {counted(each.counters, 'counter')}, {usage}"
        print_row(console, f"{line} of usage", indent=2)
    if left := future.lost[_WINDOWS:]:
        print_row(console, counted(len(left), "more window"), indent=2)
    print_row(console, "No restore brings this usage back once they are discarded.")


def print_discarded(console: Console, future: FutureSnapshots) -> None:
    """Print what was discarded, and what changed by it."""
    listed = future.found
    count = counted(len(listed), "snapshot")
    if listed:
        tenants = counted(max(each.tenants for each in listed), "tenant")
        # Which tenants several snapshots share is not known here.
        count += f" ({'' if len(listed) == 1 else 'up to '}{tenants})"
    print_row(console, f"Discarded {count}. The table discarded_capture lists them.")
    if future.lost:
        counters = counted(future.lost_counters, "counter")
        print_row(console, f"Lower or missing in the recovery points: {counters}.")
    if ended := len(future.falls.ended):
        falls = "fall whose" if ended == 1 else "falls whose"
        print_row(console, f"Ended as discarded: {ended:,} {falls} missing usage only they held.")


def _snapshot_row(listed: ListedSnapshot) -> list[str]:
    return [
        timestamp(listed.captured_at),
        f"{listed.tenants:,}",
        f"{listed.records:,}",
        f"{listed.entries:,}",
        ", ".join(_remarks(listed)),
    ]


def _remarks(listed: ListedSnapshot) -> list[str]:
    remarks = [
        f"{number:,} {what}"
        for number, what in (
            (listed.omitted, "omitted"),
            (listed.unreadable, "unreadable"),
            (listed.drops, f"missing or lower ({_most_missing(listed)})"),
            (listed.partial, "partial"),
        )
        if number
    ]
    return [*remarks, "pruned"] if listed.is_pruned else remarks


def _most_missing(listed: ListedSnapshot) -> str:
    if listed.most_missing is None:
        return "usage unknown"
    return f"up to {format_usage(listed.most_missing)} in one budget and window"


def print_applied(console: Console, applied: Applied) -> None:
    """Print what was restored, what differed from the preview, and what remains."""
    is_done = applied.failure is None
    style = "bold green" if is_done else "bold red"
    word = "DONE" if is_done else "INCOMPLETE"
    print_row(console, [(word, style), (f" {applied_headline(applied)}", "")])
    print_row(console, [("Choice  ", "bold"), (str(applied.choice), "")])
    print_row(console, [("Preview ", "bold"), (comparison(applied), "")])
    for difference in most_relevant(applied.differences)[:_DIFFERENCES]:
        print_row(console, difference_line(difference), indent=2)
    if len(applied.differences) > _DIFFERENCES:
        more = len(applied.differences) - _DIFFERENCES
        print_row(console, f"{more:,} more, not shown: only --json prints all.", indent=2)
    audits = [entry for tenant in applied.tenants for entry in tenant.entries]
    notes = [
        f"{entry.tenant}, {entry.of}: {note}"
        for entry in largest_first(audits)
        for note in entry.notes
    ]
    for note in notes[:_NOTES]:
        print_row(console, [("Note    ", "bold"), (note, "")])
    if len(notes) > _NOTES:
        print_row(
            console, f"{len(notes) - _NOTES:,} more notes, not shown: only --json prints all."
        )
    if applied.failure is not None:
        print_row(console, [("Failed  ", "bold red"), (str(applied.failure), "")])
    if text := end_of_incident(applied):
        print_row(console, [("Store   ", "bold"), (text, "")])
    for text in held_more(applied):
        print_row(console, [("Lower   ", "bold yellow"), (text, "")])
    for text in until_next_snapshot(applied):
        print_row(console, [("Then    ", "bold"), (text, "")])


_CHECKS = 5
_FAILING = 10
_FALLS = 5


_MARGIN = 13
_VERDICT = max(len(label(verdict)) for verdict in Verdict) + 2
_STYLES: Mapping[Condition, str] = {
    Condition.HEALTHY: "bold green",
    Condition.ATTENTION: "bold yellow",
    Condition.RECOVERING: "bold yellow",
    Condition.HELD: "bold red",
    Condition.FAILED: "bold red",
    Condition.UNKNOWN: "bold magenta",
}


def print_status(console: Console, status: Status) -> None:
    """Print the status; colours appear only on a terminal."""
    condition = status.condition
    at = f" at {full_time(status.at)}"
    console.print(Text.assemble((label(condition).upper(), _STYLES[condition]), at))
    for name, lines in _sections(status):
        console.print()
        _print_section(console, name, lines)


def _print_section(console: Console, name: str, lines: Iterable[Parts]) -> None:
    """Print a name and its lines in two columns; continuation lines are indented more."""
    margin = Text(f"{name:<{_MARGIN}}", "bold")
    for line in lines:
        print_wrapped(console, margin, _text(console, line), hanging=_HANGING)
        margin = Text(" " * _MARGIN)


def _sections(status: Status) -> Iterator[tuple[str, Iterable[Parts]]]:
    noticed = notices(status)
    if why := [*doubts(status).values(), *(notice.message for notice in noticed)]:
        yield "Why", why
    # The steps for all that needs attention; the first one is the next step.
    yield "Next", dict.fromkeys([next_step(status), *(notice.next_step for notice in noticed)])
    if status.recovery.incident is not None:
        yield "Incident", _open_incident(status.recovery.incident, status)
    elif status.falls:
        yield "Missing", _missing(status)
    yield "Checks", _checks(status)
    if captures := list(_captures(status)):
        yield "Captures", captures
    yield "Snapshots", _points(status.points)
    if status.closed is not None:
        yield "Last closed", _closed_incident(status.closed, status.at)


def _missing(status: Status) -> Iterator[str]:
    for fall in status.falls[:_FALLS]:
        yield (
            f"{fall.at.tenant}, {fall.at.of}: {counted(fall.counters, 'counter')},"
            f" {format_usage(fall.usage)} of usage, found {since(fall.found_at, status.at)}"
        )
        yield f"  {restore_command(fall)}"
    if left := status.falls[_FALLS:]:
        yield f"{counted(len(left), 'more window')}; --json lists 100"


def _open_incident(incident: Incident, status: Status) -> Iterator[str]:
    now = status.at
    yield f"{incident.short_id}, open for {in_words(age(incident.opened_at, now))}"
    yield from _losses(incident, now)
    launched = counted(incident.launches, "time")
    yield f"Attempts {incident.attempts} of {MAX_ATTEMPTS}, launched {launched}"
    attempt = status.attempt
    if attempt is not None and attempt.outcome is not None:
        yield f"Newest attempt: {attempt.outcome}"
    waiting = incident.waiting
    if waiting is not None:
        began = f"{clock_time(waiting.since, now)} ({in_words(age(waiting.since, now))})"
        yield f"Waiting since {began}, checked {counted(waiting.waits, 'time')}: {waiting.reason}"
    yield from _hold(incident, now)
    if incident.given_up is not None:
        given_up = incident.given_up
        yield f"Failed {since(given_up.at, now)}: {FAILURES[given_up.reason]}"
        yield given_up.detail
    yield from (sentence.rstrip(".") for sentence in cost(incident, _amounts_of(status)))
    yield _uncovered(incident, now)


def _amounts_of(status: Status) -> IncidentAmounts:
    return status.amounts or IncidentAmounts()


def _hold(incident: Incident, now: datetime) -> Iterator[str]:
    held, released_at = incident.held, incident.released_at
    if held is None:
        return
    # A hold ends with its incident.
    ended_at = incident.ended.at if incident.is_held and incident.ended else released_at
    is_held = incident.is_held and incident.ended is None
    until = "" if is_held or ended_at is None else f" to {clock_time(ended_at, now)}"
    what = "On hold since" if is_held else "On hold from"
    yield f"{what} {clock_time(held.at, now)}{until}, by {held.by}: {held.reason}"


def _closed_incident(incident: Incident, now: datetime) -> Iterator[str]:
    yield f"{incident.short_id}, found {since(incident.opened_at, now)}"
    yield from _losses(incident, now)
    yield from _hold(incident, now)
    ended = incident.ended
    if ended is not None:
        took = in_words(ended.at - incident.opened_at)
        yield f"Closed after {took}: {label(ended.outcome)}"
        # The detail has the counters that were raised, and the usage that no snapshot covers.
        yield ended.detail
        if ended.restored.boards:
            yield f"{counted(ended.restored.boards, 'leaderboard')} rebuilt"


def _losses(incident: Incident, now: datetime) -> Iterator[str]:
    for loss in incident.losses:
        yield f"{clock_time(loss.found_at, now)}  {loss.reason}"


def _uncovered(incident: Incident, now: datetime) -> str:
    """Describe the usage that no restore can bring back."""
    newest, missing = incident.newest_point_at, incident.uncovered
    if newest is None or missing is None:
        return "Not covered: all usage, because no intact snapshot existed"
    return (
        f"Not covered: at most {in_words(missing)} of usage, from the snapshot of"
        f" {clock_time(newest, now)} to the loss, found at"
        f" {clock_time(incident.lost_at, now)}"
    )


def _checks(status: Status) -> Iterator[Parts]:
    if not status.checks:
        yield "none yet"
    shown = status.checks[:_CHECKS]
    shown_reason = ""
    for check in shown:
        verdict = check.verdict
        # The reason of a good check adds nothing, and neither does a repeated reason.
        reason = "" if verdict.is_good or check.reason == shown_reason else check.reason
        shown_reason = check.reason
        yield [
            (f"{clock_time(check.checked_at, status.at)}  ", ""),
            (f"{label(verdict):<{_VERDICT}}", _style(verdict)),
            (reason, ""),
        ]
    if status.unknown_in_a_row:
        yield f"Unknown in a row: {at_least(status.unknown_in_a_row, MOST_CHECKS)}"
    for change in status.changes:
        yield changed_words(change, status.at)
    if status.newest_good is not None and status.newest_good not in shown:
        yield f"Last good: {since(status.newest_good.checked_at, status.at)}"


def _captures(status: Status) -> Iterator[str]:
    for run in status.ended_runs[:1]:
        at, result = clock_time(run.started_at, status.at), run.result
        if result is None:
            yield f"{at}  not ended"
            continue
        numbers = (
            f"{result.stored:,} stored, {result.absent:,} without usage, {result.failed:,} failed"
        )
        yield f"{at}  {label(result.outcome)}: {numbers}"
    if status.failed_runs:
        yield f"Failed in a row: {at_least(status.failed_runs, MOST_RUNS)}"
    if status.clock_skew is not None and (words := skew_words(status.clock_skew)):
        yield words


def _style(verdict: Verdict) -> str:
    if verdict.is_alarm:
        return "red"
    return "green" if verdict.is_good else "magenta"


def _points(points: PointAges) -> Iterator[str]:
    now = points.now
    newest = {each: at for each, at in points.newest_points.items() if each not in points.emptied}
    if newest:
        tenants = counted(len(newest), "tenant")
        yield f"{tenants}, newest snapshot {since(max(newest.values()), now)}"
        oldest_of = min(newest, key=lambda tenant: (newest[tenant], tenant))
        yield f"Furthest behind: {oldest_of}, newest snapshot {since(newest[oldest_of], now)}"
    elif points.newest_snapshot is None:
        yield "none yet"
    elif not points.emptied:
        yield f"The newest snapshot has no open windows, {since(points.newest_snapshot, now)}"
    for tenant in sorted(points.emptied)[:_FAILING]:
        usage_at = clock_time(points.newest_points[tenant], now)
        read = since(points.read[tenant], now)
        yield f"Holds nothing: {tenant}, read {read}; its newest usage is of {usage_at}"
    if len(points.emptied) > _FAILING:
        yield f"Holds nothing: {len(points.emptied) - _FAILING} more"
    damaged = points.damage.records
    if damaged:
        records = counted(sum(damaged.values()), "record")
        yield f"Damaged: {records} of {counted(len(damaged), 'tenant')} (checksum mismatch)"
    if points.damage.unverified:
        yield unverified_line(points.damage)
    for tenant, each in sorted(points.failing.items())[:_FAILING]:
        at = each.newest_snapshot
        last = "without any snapshot" if at is None else f"last captured {since(at, now)}"
        yield f"Failing: {tenant}, {last}"
    if len(points.failing) > _FAILING:
        yield f"Failing: {len(points.failing) - _FAILING} more"


def _text(console: Console, line: Parts) -> Text:
    parts = [(line, "")] if isinstance(line, str) else line
    return Text.assemble(*((escape_unprintable(console, text), style) for text, style in parts))
