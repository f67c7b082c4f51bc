"""Sentences and labels about results, for people."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from decimal import Decimal

from rich.console import Console

from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.domain.incident import FailureReason
from budget_recovery_dagster.domain.plan import Change, Difference
from budget_recovery_dagster.domain.resets import Everyone, Reset
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
    """Write what others may have named so that any terminal can show it, and obeys none of it."""
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
    return shown.encode(console.encoding, "backslashreplace").decode(console.encoding)


_BAR = 24


def usage_or_nothing(usage: Decimal | None) -> str:
    """Write a usage, or that there is none."""
    return "nothing" if usage is None else format_usage(usage)


def headline(preview: Preview) -> str:
    """Say what a restore would do, and what of it is not known."""
    return " ".join(_headline(preview))


def _headline(preview: Preview) -> Iterator[str]:
    windows = preview.windows
    unknown = sum(window.is_unknown for window in windows)
    unreadable = sum(window.unreadable for window in windows)
    if preview.raised:
        touched = sum(bool(window.raised) for window in windows)
        # No sum of it: one request counts in many windows.
        raised = counted(preview.raised, "counter")
        yield f"{raised} in {counted(touched, 'window')} would be raised."
    elif windows and all(window.is_closed for window in windows):
        yield "Nothing would be raised: all its windows have closed."
    elif any(window.kept for window in windows):
        low = " that can be read" if unreadable or unknown else ""
        yield f"Nothing would be raised: no counter{low} is lower than the snapshots say."
    else:
        yield "Nothing would be raised."
    if unknown:
        yield f"Nothing is known of {counted(unknown, 'window')}: no record is as captured."
    if unreadable:
        yield f"Left as unreadable: {counted(unreadable, 'live counter')}."
    if preview.failures:
        unseen = counted(len(preview.failures), "tenant")
        yield f"Nothing is known of {unseen} that could not be read."


def store_line(preview: Preview) -> str:
    """Say of which store it is, and how that stands."""
    incident = preview.recovery.incident
    is_open = "" if incident is None else f", incident {incident.short_id} is open"
    return f"{preview.recovery.state.name}{is_open}; {preview.identity}"


def tenant_line(tenant: TenantPreview, now: datetime) -> str:
    """Say of which snapshot a tenant would be restored."""
    if tenant.failure is not None:
        return "could not be read"
    if tenant.point_at is None:
        return "not in the chosen snapshot"
    return f"newest snapshot {since(tenant.point_at, now)}"


def tenant_notes(tenant: TenantPreview) -> Iterator[str]:
    """Say what else is to be known of a tenant."""
    if tenant.failure is not None:
        yield str(tenant.failure)
    if tenant.is_partial:
        yield "fewer of its live keys arrived than the store announced"
    if tenant.unreadable_count:
        keys = ", ".join(f"{each.key} ({each.reason})" for each in tenant.unreadable)
        yield f"{counted(tenant.unreadable_count, 'key')} not read in that snapshot: {keys}"


def window_lines(
    window: WindowPreview, now: datetime, point_at: datetime | None = None
) -> Iterator[str]:
    """Say what would become of a window: its figures, what it is blocked by, their sources.

    Of a window that all comes from the snapshot of ``point_at``, the source has been told.
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
    """Write the sums before and after, as far as they are known."""
    if window.is_unknown or (window.unreadable and window.unreadable == window.counters):
        return "not known"
    least = "at least " if window.unreadable else ""
    return f"{least}{format_usage(window.live)} -> {format_usage(window.result)}"


def limit_words(window: WindowPreview) -> str:
    """Say who is at the limit, now and afterwards."""
    if window.limit is None:
        return "no limit is known"
    limit = f"limit {format_usage(window.limit)}"
    if not window.is_enforced:
        return f"{limit}, which is only noted: nobody is blocked"
    least = "at least " if window.unreadable else ""
    return (
        f"{limit}: {least}{window.blocked_before:,} blocked now, "
        f"{window.blocked_after:,} afterwards"
    )


def source_words(window: WindowPreview, now: datetime) -> str:
    """Say from which snapshots the figures come, and how old they are."""
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
    """Show a counter before and after, with a bar: ``#`` is there, ``+`` comes back."""
    live = change.live or Decimal(0)
    filled = int(_BAR * live / change.recorded) if change.recorded else _BAR
    bar = "#" * filled + "+" * (_BAR - filled)
    blocked = ", would be blocked" if change.blocks else ""
    return f"[{bar}] {usage_or_nothing(change.live)} -> {format_usage(change.recorded)}{blocked}"


def difference_line(difference: Difference) -> str:
    """Say what is not as it was previewed."""
    return (
        f"{difference.tenant}, {difference.of}, {shown_entity(difference.entity)}: "
        f"{CHANGES[difference.change]}: {usage_or_nothing(difference.previewed)} -> "
        f"{usage_or_nothing(difference.found)}"
    )


def applied_headline(applied: Applied) -> str:
    """Say in a sentence what a restore has done."""
    raised = counted(applied.raised, "counter")
    told = f"Raised {raised}, wrote {counted(applied.boards, 'leaderboard')}."
    if applied.absent:
        missing = counted(len(applied.absent), "tenant")
        told = f"{told} Nothing of {missing} is in the chosen snapshot."
    return told


def comparison(applied: Applied) -> str:
    """Say how that compares with the preview."""
    if applied.preview is None:
        return "There was no preview of just this from the last day to compare with."
    made = f"the preview of {applied.preview.at:%Y-%m-%d %H:%M:%S} UTC by {applied.preview.by}"
    unknown = ""
    if applied.uncompared:
        unknown = f"{counted(len(applied.uncompared), 'tenant')} could not be compared; else: "
    if not applied.differences:
        return f"{unknown}As in {made}, entry by entry."
    kinds = Counter(each.change for each in applied.differences)
    told = "; ".join(
        f"{CHANGES[change]}: {kinds[change]:,}" for change in Change if change in kinds
    )
    return f"{unknown}{counted(len(applied.differences), 'difference')} from {made}: {told}."


def most_telling(differences: Iterable[Difference]) -> list[Difference]:
    """Put those first that traffic alone does not bring about."""
    return sorted(differences, key=lambda each: each.change is Change.LIVE)


def end_of_incident(applied: Applied) -> str | None:
    """Say what has become of the open incident; None: none was open."""
    incident, remainder = applied.incident, applied.remainder
    if incident is None:
        return None
    if incident.ended is not None:
        return f"Incident {incident.short_id} is closed, the store is HEALTHY. " + (
            incident.ended.detail
        )
    if remainder is None:
        return f"Incident {incident.short_id} stays open: not everything was restored."
    left = []
    if remainder.counters:
        lower = counted(remainder.counters, "counter")
        left.append(f"{lower} of the whole store lower than the snapshots say.")
    left += [*remainder.unknown(), *remainder.unseen]
    next_step = "Restore every tenant from the latest, or resolve it."
    if incident.given_up is None and not incident.is_held:
        next_step = "The automatic restore goes on with the rest."
    return f"Incident {incident.short_id} stays open: {' '.join(left)} {next_step}"


def told(recorded: RecordedReset) -> tuple[str, ...]:
    """Say in paragraphs what was recorded, what it does, and what may still be wrong."""
    reset = recorded.reset
    what = (
        f"Recorded: {_whose(reset)} in {reset.window or 'all windows'} of budget {reset.budget!r}"
        f" of tenant {reset.tenant!r}, reset at {moment_in_words(reset.at)}. What snapshots of that"
        f" moment or before hold of {_it(reset)} comes back no more, unless a restore by hand is"
        " told to."
    )
    warning = (
        f"The gateway must have lowered {_it(reset)} before that moment: what a later snapshot"
        f" reads is used. If it had not, lower {_it(reset)} now and record the reset again."
    )
    doubt = (
        "A restore is under way, and may have read the older snapshots before: look at the"
        " counters when it is done, and lower again what has come back."
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
        return f"It leaves recorded usage out of these current windows: {tokens}."
    return (
        "No snapshot so far has such a usage in a current window, so it changes nothing yet: see"
        " that names and window are written as in the snapshots."
    )
