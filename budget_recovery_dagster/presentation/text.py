"""Sentences and labels about results, for people."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from decimal import Decimal

from rich.console import Console

from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.domain.incident import FailureReason
from budget_recovery_dagster.domain.plan import Change, Difference
from budget_recovery_dagster.domain.recovery_point import Everyone, Reset
from budget_recovery_dagster.domain.store import Verdict
from budget_recovery_dagster.services.preview import (
    EntryPreview,
    Preview,
    TenantPreview,
    WindowPreview,
)
from budget_recovery_dagster.services.resets import RecordedReset, moment_in_words
from budget_recovery_dagster.services.restore.manual import Applied
from budget_recovery_dagster.services.status import Condition
from budget_recovery_dagster.services.words import (
    clock_time,
    counted,
    in_words,
    shown_entity,
    since,
)

CONDITIONS: Mapping[Condition, str] = {
    Condition.HEALTHY: "healthy",
    Condition.RECOVERING: "recovering",
    Condition.FAILED: "failed",
    Condition.UNKNOWN: "cannot tell",
}
VERDICTS: Mapping[Verdict, str] = {
    Verdict.UNKNOWN: "unknown",
    Verdict.FIRST_SEEN: "first seen",
    Verdict.UNCHANGED: "unchanged",
    Verdict.ADVANCED: "advanced",
    Verdict.RECREATED: "recreated",
    Verdict.REGRESSED: "regressed",
    Verdict.MARKER_LOST: "marker lost",
}
FAILURES: Mapping[FailureReason, str] = {
    FailureReason.NO_SNAPSHOTS: "there are no snapshots to restore from",
    FailureReason.NOT_WRITTEN: "writing back did not succeed",
}
CHANGES: Mapping[Change, str] = {
    Change.RECORDED: "the snapshots have another usage",
    Change.CLOSED: "its window has closed",
    Change.UNREADABLE: "its live counter has become unreadable",
    Change.READABLE: "its live counter has become readable",
    Change.NEW: "it was not in the preview",
    Change.GONE: "it is no longer in any snapshot",
    Change.LIVE: "its live usage has changed",
}
"""Labels of codes, for people; programs read the codes."""


def escape_unprintable(console: Console, text: str) -> str:
    """Escape what a terminal cannot print or would obey, such as control characters in names."""
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
    return shown.encode(console.encoding, "backslashreplace").decode(console.encoding)


_BAR = 24


def usage_or_nothing(usage: Decimal | None) -> str:
    """Write a usage, or ``nothing`` if there is none."""
    return "nothing" if usage is None else format_usage(usage)


def headline(preview: Preview) -> str:
    """Describe what a restore would do, and what is unknown."""
    return " ".join(_headline(preview))


def _headline(preview: Preview) -> Iterator[str]:
    windows = preview.windows
    unknown = sum(window.is_unknown for window in windows)
    unreadable = sum(window.unreadable for window in windows)
    if preview.raised:
        touched = sum(bool(window.raised) for window in windows)
        # No sum of usages: one request counts in many windows.
        raised = counted(preview.raised, "counter")
        yield f"{raised} in {counted(touched, 'window')} would be raised."
    elif windows and all(window.is_closed for window in windows):
        yield "Nothing would be raised: all windows have closed."
    elif any(window.kept for window in windows):
        readable = "readable " if unreadable or unknown else ""
        yield f"Nothing would be raised: no {readable}counter is lower than in the snapshots."
    else:
        yield "Nothing would be raised."
    if unknown:
        has = "has" if unknown == 1 else "have"
        yield f"{counted(unknown, 'window')} {has} no intact record (checksum mismatch)."
    if unreadable:
        yield f"{counted(unreadable, 'live counter')} skipped (unreadable)."
    if preview.failures:
        yield f"{counted(len(preview.failures), 'tenant')} could not be read."


def store_line(preview: Preview) -> str:
    """Describe the store: its state, the open incident, and its identity."""
    incident = preview.recovery.incident
    is_open = "" if incident is None else f", incident {incident.short_id} is open"
    return f"{preview.recovery.state.name}{is_open}; {preview.identity}"


def tenant_line(tenant: TenantPreview, now: datetime) -> str:
    """Describe the newest snapshot that a tenant would be restored from."""
    if tenant.failure is not None:
        return "could not be read"
    if tenant.point_at is None:
        return "not in the chosen snapshot"
    return f"newest snapshot {since(tenant.point_at, now)}"


def tenant_notes(tenant: TenantPreview) -> Iterator[str]:
    """Yield what an operator must know of a tenant besides its windows."""
    if tenant.failure is not None:
        yield str(tenant.failure)
    if tenant.is_partial:
        yield "fewer live keys arrived than the store announced"
    if tenant.unreadable_count:
        keys = ", ".join(f"{each.key} ({each.reason})" for each in tenant.unreadable)
        yield f"{counted(tenant.unreadable_count, 'key')} unreadable in that snapshot: {keys}"


def window_lines(
    window: WindowPreview, now: datetime, point_at: datetime | None = None
) -> Iterator[str]:
    """Describe a window: its usage, its limit, the source snapshots, and notes.

    The source is left out if all of the window comes from the snapshot of ``point_at``.
    """
    rise = f" (+{format_usage(window.rise)})" if window.rise else ""
    yield (
        f"raises {window.raised:,} of {counted(window.counters, 'counter')}: "
        f"{figures(window)}{rise}"
    )
    if window.limit is not None and not window.is_closed:
        yield limit_words(window)
    if point_at is None or not window.newest_source == window.oldest_source == point_at:
        yield source_words(window, now)
    yield from window.notes


def figures(window: WindowPreview) -> str:
    """Write the sums before and after the restore, as far as they are known."""
    if window.is_unknown or (window.unreadable and window.unreadable == window.counters):
        return "unknown"
    least = "at least " if window.unreadable else ""
    return f"{least}{format_usage(window.live)} -> {format_usage(window.result)}"


def limit_words(window: WindowPreview) -> str:
    """Write how many entities the limit blocks, now and after the restore."""
    if window.limit is None:
        return "limit unknown"
    limit = f"limit {format_usage(window.limit)}"
    if not window.is_enforced:
        return f"{limit}, not enforced: no entity is blocked"
    least = "at least " if window.unreadable else ""
    return (
        f"{limit}: {least}{window.blocked_before:,} blocked now, "
        f"{window.blocked_after:,} after the restore"
    )


def source_words(window: WindowPreview, now: datetime) -> str:
    """Write the source snapshots of the usage, and their age."""
    newest, oldest = window.newest_source, window.oldest_source
    if newest is None or oldest is None:
        return "from no snapshot"
    if newest == oldest:
        return f"from the snapshot {since(newest, now)}"
    return (
        f"from snapshots between {clock_time(oldest, now)} and {clock_time(newest, now)}, "
        f"{in_words(now - oldest)} to {in_words(now - newest)} old"
    )


def change_name(change: EntryPreview) -> str:
    """Name a counter."""
    return f"{change.tenant}, {change.of}, {shown_entity(change.entity)}"


def change_figures(change: EntryPreview) -> str:
    """Show a counter before and after, with a bar: ``#`` is live, ``+`` is restored usage."""
    live = change.live or Decimal(0)
    filled = int(_BAR * live / change.recorded) if change.recorded else _BAR
    bar = "#" * filled + "+" * (_BAR - filled)
    blocked = ", would be blocked" if change.blocks else ""
    return f"[{bar}] {usage_or_nothing(change.live)} -> {format_usage(change.recorded)}{blocked}"


def difference_line(difference: Difference) -> str:
    """Describe a difference from the preview."""
    return (
        f"{difference.tenant}, {difference.of}, {shown_entity(difference.entity)}: "
        f"{CHANGES[difference.change]}: {usage_or_nothing(difference.previewed)} -> "
        f"{usage_or_nothing(difference.found)}"
    )


def applied_headline(applied: Applied) -> str:
    """Describe in a sentence or two what a restore did."""
    raised = counted(applied.raised, "counter")
    text = f"{raised} raised, {counted(applied.boards, 'leaderboard')} written."
    if applied.absent:
        missing = counted(len(applied.absent), "tenant")
        text = f"{text} {missing} not in the chosen snapshot."
    return text


def comparison(applied: Applied) -> str:
    """Compare a restore with its preview."""
    if applied.preview is None:
        return "No preview with these options in the last 24 hours."
    made = f"the preview of {applied.preview.at:%Y-%m-%d %H:%M:%S} UTC by {applied.preview.by}"
    unknown = ""
    if applied.uncompared:
        unknown = f"{counted(len(applied.uncompared), 'tenant')} not compared. "
    if not applied.differences:
        return f"{unknown}No difference from {made}."
    kinds = Counter(each.change for each in applied.differences)
    numbers = "; ".join(
        f"{CHANGES[change]}: {kinds[change]:,}" for change in Change if change in kinds
    )
    return f"{unknown}{counted(len(applied.differences), 'difference')} from {made}: {numbers}."


def most_relevant(differences: Iterable[Difference]) -> list[Difference]:
    """Sort the differences that normal traffic cannot cause to the front."""
    return sorted(differences, key=lambda each: each.change is Change.LIVE)


def end_of_incident(applied: Applied) -> str | None:
    """Describe the state of the incident after a restore; None: none was open."""
    incident, remainder = applied.incident, applied.remainder
    if incident is None:
        return None
    if incident.ended is not None:
        return f"Incident {incident.short_id} is closed; the store is HEALTHY. " + (
            incident.ended.detail
        )
    if remainder is None:
        return f"Incident {incident.short_id} stays open: not everything was restored."
    left = []
    if remainder.counters:
        lower = counted(remainder.counters, "counter")
        left.append(f"{lower} of the store lower than in the snapshots.")
    left += [*remainder.unknown(), *remainder.unseen]
    next_step = "Restore every tenant from the latest snapshots, or resolve the incident."
    if incident.given_up is None and not incident.is_held:
        next_step = "The automatic restore continues with the rest."
    return f"Incident {incident.short_id} stays open: {' '.join(left)} {next_step}"


def reset_report(recorded: RecordedReset) -> tuple[str, ...]:
    """Describe in paragraphs a recorded reset, its effect, and what to check."""
    reset = recorded.reset
    what = (
        f"Recorded: {_whose(reset)} in {reset.window or 'all windows'} of budget {reset.budget!r}"
        f" of tenant {reset.tenant!r}, reset at {moment_in_words(reset.at)}. Usage recorded until"
        " then is excluded from every restore without --despite-resets."
    )
    warning = (
        "Usage in later snapshots is restored, so the gateway must have lowered"
        f" {_it(reset)} before that time. If it had not, lower {_it(reset)} now and record the"
        " reset again."
    )
    doubt = (
        "A restore is running and may have read the older snapshots already. Check the counters"
        " after the restore, and lower again what it raised."
    )
    return (what, _left_out(recorded), warning, *((doubt,) if recorded.is_restoring else ()))


def _whose(reset: Reset) -> str:
    if isinstance(reset.entity, Everyone):
        return "every entity and the aggregate"
    return "the aggregate" if reset.entity is None else f"entity {reset.entity!r}"


def _it(reset: Reset) -> str:
    return "them" if reset.is_of_everyone else "it"


def _left_out(recorded: RecordedReset) -> str:
    if recorded.windows:
        tokens = ", ".join(of.window.token for of in recorded.windows)
        return f"The reset excludes recorded usage in these open windows: {tokens}."
    return (
        "The reset excludes nothing yet: no snapshot has such usage in an open window. Check that"
        " the names and the window are those of the snapshots."
    )
