"""The status as a page for people, at home in 80 columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from rich.console import Console
from rich.text import Text

from budget_recovery_dagster.cli.harmless_text import harmless
from budget_recovery_dagster.domain.identity import Verdict
from budget_recovery_dagster.domain.incident import MAX_ATTEMPTS, Incident
from budget_recovery_dagster.domain.point_age import age
from budget_recovery_dagster.services.assessment import Condition, Facts
from budget_recovery_dagster.services.count_words import counted
from budget_recovery_dagster.services.status import MOST_CHECKS, Status
from budget_recovery_dagster.services.time_words import clock_time, in_words, since

_CHECKS = 5
_FAILING = 10
_WIDEST = 100
_NARROWEST = 20
_MARGIN = 13
_HANGING = 2
_VERDICT = 13

Line = str | Sequence[tuple[str, str]]
"""A line of text, or its parts, each with a style."""

_STYLES: Mapping[Condition, str] = {
    Condition.HEALTHY: "bold green",
    Condition.RECOVERING: "bold yellow",
    Condition.FAILED: "bold red",
    Condition.UNKNOWN: "bold magenta",
}


def print_status(console: Console, status: Status) -> None:
    """Write the page, without colours where it is not for a terminal."""
    facts, assessment = status.facts, status.assessment
    condition = assessment.condition
    moment = f" at {facts.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    console.print(Text.assemble((condition.upper(), _STYLES[condition]), moment))
    for name, lines in _sections(status):
        console.print()
        _print_section(console, name, lines)


def _print_section(console: Console, name: str, lines: Iterable[Line]) -> None:
    """Set lines below each other beside a name; what runs over is indented a little more."""
    width = max(min(console.width, _WIDEST) - _MARGIN - _HANGING, _NARROWEST)
    margin = Text(f"{name:<{_MARGIN}}", "bold")
    for line in lines:
        hanging = ""
        for row in _text(console, line).wrap(console, width):
            row.rstrip()
            console.print(Text.assemble(margin, hanging, row), soft_wrap=True)
            margin, hanging = Text(" " * _MARGIN), " " * _HANGING


def _sections(status: Status) -> Iterator[tuple[str, Iterable[Line]]]:
    facts = status.facts
    if status.assessment.doubts:
        yield "Why", status.assessment.doubts
    yield "Next", [status.assessment.next_step]
    if facts.recovery.incident is not None:
        yield "Incident", _open_incident(facts.recovery.incident, facts)
    yield "Checks", _checks(facts)
    yield "Snapshots", _points(facts)
    if facts.closed is not None:
        yield "Last closed", _closed_incident(facts.closed, facts.at)


def _open_incident(incident: Incident, facts: Facts) -> Iterator[str]:
    now = facts.at
    yield f"{incident.short_id}, open for {in_words(age(incident.opened_at, now))}"
    yield from _losses(incident, now)
    launched = counted(incident.launches, "time")
    yield f"Attempts {incident.attempts} of {MAX_ATTEMPTS}, launched {launched}"
    attempt = facts.attempt
    if attempt is not None and attempt.outcome is not None:
        yield f"The newest attempt ended: {attempt.outcome}"
    waiting = incident.waiting
    if waiting is not None:
        looked = "once" if waiting.waits == 1 else f"{waiting.waits} times"
        yield f"Waiting for {in_words(age(waiting.since, now))}, looked {looked}: {waiting.reason}"
    yield from _hold(incident, now)
    if incident.given_up is not None:
        given_up = incident.given_up
        yield f"Given up {since(given_up.at, now)}: {given_up.reason}"
        yield given_up.detail
    yield _uncovered(incident, now)


def _hold(incident: Incident, now: datetime) -> Iterator[str]:
    held, released_at = incident.held, incident.released_at
    if held is None:
        return
    # With the incident a hold ends as well.
    ended_at = incident.ended.at if incident.is_held and incident.ended else released_at
    is_held = incident.is_held and incident.ended is None
    until = "" if is_held or ended_at is None else f" to {clock_time(ended_at, now)}"
    what = "On hold since" if is_held else "Was on hold from"
    yield f"{what} {clock_time(held.at, now)}{until}, by {held.by}: {held.reason}"


def _closed_incident(incident: Incident, now: datetime) -> Iterator[str]:
    yield f"{incident.short_id}, found {since(incident.opened_at, now)}"
    yield from _losses(incident, now)
    yield from _hold(incident, now)
    ended = incident.ended
    if ended is not None:
        took = in_words(ended.at - incident.opened_at)
        yield f"Closed after {took}: {ended.outcome}"
        # It tells what was raised, and what is in no snapshot.
        yield ended.detail
        if ended.restored.boards:
            yield f"Rebuilt {counted(ended.restored.boards, 'leaderboard')}"


def _losses(incident: Incident, now: datetime) -> Iterator[str]:
    for loss in incident.losses:
        yield f"{clock_time(loss.found_at, now)}  {loss.reason}"


def _uncovered(incident: Incident, now: datetime) -> str:
    """Say what no restore can bring back."""
    newest, good, missing = incident.newest_point_at, incident.last_good_at, incident.uncovered
    if newest is None:
        return "Not covered: everything, for there was no snapshot"
    if good is None or missing is None:
        return f"Not covered: what was spent after the snapshot of {clock_time(newest, now)}"
    if missing == timedelta(0):
        return "Not covered: only what was spent after the last good check"
    return (
        f"Not covered: {missing.total_seconds() / 60:.1f} min of spend, from the snapshot of"
        f" {clock_time(newest, now)} to the last good check at {clock_time(good, now)}"
    )


def _checks(facts: Facts) -> Iterator[Line]:
    if not facts.checks:
        yield "none yet"
    shown = facts.checks[:_CHECKS]
    said = ""
    for check in shown:
        verdict = check.verdict
        # A good one says no more than its verdict does, and the same need not be said again.
        reason = "" if verdict.is_good or check.reason == said else check.reason
        said = check.reason
        yield [
            (f"{clock_time(check.checked_at, facts.at)}  ", ""),
            (f"{verdict:<{_VERDICT}}", _style(verdict)),
            (reason, ""),
        ]
    if facts.unknown_in_a_row:
        many = " or more" if facts.unknown_in_a_row == MOST_CHECKS else ""
        yield f"The newest {facts.unknown_in_a_row}{many} could not tell"
    if facts.newest_good is not None and facts.newest_good not in shown:
        yield f"Last good: {since(facts.newest_good.checked_at, facts.at)}"


def _style(verdict: Verdict) -> str:
    if verdict.is_loss:
        return "red"
    return "green" if verdict.is_good else "magenta"


def _points(facts: Facts) -> Iterator[str]:
    newest = facts.newest_points
    if newest:
        tenants = counted(len(newest), "tenant")
        yield f"{tenants}, the newest {since(max(newest.values()), facts.at)}"
        oldest_of = min(newest, key=lambda tenant: (newest[tenant], tenant))
        yield f"Oldest of the tenants' newest: {oldest_of}, {since(newest[oldest_of], facts.at)}"
    elif facts.newest_snapshot is None:
        yield "none yet"
    else:
        yield f"No window is current of the newest one, {since(facts.newest_snapshot, facts.at)}"
    for tenant, at in sorted(facts.failing.items())[:_FAILING]:
        last = "without any snapshot" if at is None else f"last captured {since(at, facts.at)}"
        yield f"Failing: {tenant}, {last}"
    if len(facts.failing) > _FAILING:
        yield f"Failing: {len(facts.failing) - _FAILING} more"


def _text(console: Console, line: Line) -> Text:
    parts = [(line, "")] if isinstance(line, str) else line
    return Text.assemble(*((harmless(console, text), style) for text, style in parts))
