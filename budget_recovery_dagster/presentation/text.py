"""Sentences and labels about results, for people."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum

from rich.console import Console

from budget_recovery_dagster.domain.audits import AuditEntry, IncidentAmounts
from budget_recovery_dagster.domain.counters import (
    exact_difference,
    format_usage,
    shown_entity,
)
from budget_recovery_dagster.domain.incident import FailureReason, Incident
from budget_recovery_dagster.domain.plan import Change, Difference
from budget_recovery_dagster.domain.recovery_point import (
    Damage,
    Everyone,
    Reset,
)
from budget_recovery_dagster.domain.snapshots import RecordedRun
from budget_recovery_dagster.domain.windows import in_words
from budget_recovery_dagster.services.capture import Captured
from budget_recovery_dagster.services.recovery_points import VERIFY_WITHIN
from budget_recovery_dagster.services.resets import RecordedReset
from budget_recovery_dagster.services.restore.manual import (
    Acceptance,
    Applied,
    HoldResult,
    Resolved,
)
from budget_recovery_dagster.services.restore.preview import (
    EntryPreview,
    Preview,
    TenantPreview,
    WindowPreview,
)
from budget_recovery_dagster.services.restore.report import cost, counted, largest_amounts, listed
from budget_recovery_dagster.services.status import group_failures

FAILURES: Mapping[FailureReason, str] = {
    FailureReason.NO_SNAPSHOTS: "no snapshots to restore from",
    FailureReason.NOT_WRITTEN: "all attempts failed",
}
CHANGES: Mapping[Change, str] = {
    Change.RECORDED: "snapshot usage changed",
    Change.CLOSED: "window closed",
    Change.UNREADABLE: "live counter became unreadable",
    Change.READABLE: "live counter became readable",
    Change.NEW: "not in the preview",
    Change.GONE: "no longer in a snapshot",
    Change.LIVE: "live usage changed",
}
"""Labels of codes that need more than their own words; programs read the codes."""


def label(code: StrEnum) -> str:
    """Write a code for people."""
    return code.value.replace("_", " ")


def clock_time(at: datetime, now: datetime) -> str:
    """Write a time in UTC for people, without the date if it is today."""
    utc = at.astimezone(UTC)
    day = "" if utc.date() == now.astimezone(UTC).date() else f"{utc:%Y-%m-%d} "
    return f"{day}{utc:%H:%M:%S} UTC"


def full_time(at: datetime) -> str:
    """Write a time in UTC for people, with its date."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def since(at: datetime, now: datetime) -> str:
    """Write how long ago a time was, and the time."""
    return f"{in_words(now - at)} ago, at {clock_time(at, now)}"


def named(names: Sequence[str], most: int = 3) -> str:
    """Name the first ``most`` of these, and count the others."""
    first = ", ".join(map(repr, names[:most]))
    more = len(names) - most
    return f"{first} and {more} more" if more > 0 else first


def unverified_line(damage: Damage) -> str:
    """Name the tenants whose records were not all verified, and write why."""
    tenants = named(damage.unverified)
    if damage.failure is not None:
        return f"Not verified: {tenants}. {damage.failure}"
    return f"Not verified within {in_words(VERIFY_WITHIN)}: {tenants}"


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


def known_usage(usage: Decimal | None) -> str:
    """Write a usage, or ``unknown``."""
    return "unknown" if usage is None else format_usage(usage)


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


class Warned(StrEnum):
    """What a preview warns of."""

    WOULD_BE_REFUSED = "would_be_refused"
    WOULD_WAIT = "would_wait"


def warnings(preview: Preview) -> Mapping[Warned, str]:
    """Describe why a restore would be refused now, or would wait, by their codes."""
    found: dict[Warned, str] = {}
    if preview.refusal:
        found[Warned.WOULD_BE_REFUSED] = f"A restore would be refused now. {preview.refusal}"
    if preview.objection:
        found[Warned.WOULD_WAIT] = f"A restore would wait for the store: {preview.objection}."
    return found


def store_line(preview: Preview) -> str:
    """Describe the store: its state, the open incident, and its identity."""
    incident = preview.recovery.incident
    is_open = "" if incident is None else f", incident {incident.short_id} is open"
    return f"{preview.recovery.state.name}{is_open}; {preview.identity}"


def tenant_line(tenant: TenantPreview, preview: Preview) -> str:
    """Describe the snapshot that a tenant would be restored from: the newest, or the chosen one."""
    if tenant.failure is not None:
        return "could not be read"
    is_chosen = preview.choice.snapshot is not None
    if tenant.point_at is None:
        return "not in the chosen snapshot" if is_chosen else "no snapshot"
    what = "from the snapshot" if is_chosen else "newest snapshot"
    return f"{what} {since(tenant.point_at, preview.at)}"


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
    yield (
        f"raises {window.raised:,} of {counted(window.counters, 'counter')}: "
        f"{figures(window)}{rise_words(window)}"
    )
    if window.limit is not None and not window.is_closed:
        yield limit_words(window)
    if point_at is None or not window.newest_source == window.oldest_source == point_at:
        yield source_words(window, now)
    yield from window_notes(window)


def figures(window: WindowPreview) -> str:
    """Write the usage before and after the restore, as far as it is known."""
    if not window.is_usage_known:
        return "unknown"
    amounts = window.amounts
    least = "at least " if amounts.is_least else ""
    return f"{least}{format_usage(amounts.live)} -> {format_usage(amounts.result)}"


def rise_words(window: WindowPreview) -> str:
    """Write by how much the usage rises; empty if it does not."""
    if not window.rise:
        return ""
    amounts = window.amounts
    # Entities that were purged from under an intact aggregate leave the usage as it is.
    is_budget = window.rise == exact_difference(amounts.result, amounts.live)
    return f" ({'' if is_budget else 'entities '}+{format_usage(window.rise)})"


def limit_words(window: WindowPreview) -> str:
    """Write how many entities the limit blocks, now and after the restore."""
    if window.limit is None:
        return "limit unknown"
    limit = f"limit {format_usage(window.limit)}"
    if not window.is_enforced:
        return f"{limit}, not enforced: no entity is blocked"
    if window.is_unknown:
        return f"{limit}: unknown how many entities are blocked"
    least = "at least " if window.unreadable else ""
    return (
        f"{limit}: {least}{window.blocked_before:,} blocked now, "
        f"{window.blocked_after:,} after the restore"
    )


def window_notes(window: WindowPreview) -> Iterator[str]:
    """Describe what is skipped, unknown or not restored in a window."""
    point = window.point
    if window.is_closed:
        yield "skipped, the window has closed"
    if window.unread:
        yield f"{counted(window.unreadable, 'live counter')} skipped (unreadable): " + listed(
            f"{shown_entity(entity)} ({reason})" for entity, reason in window.unread
        )
    if window.missing:
        gone = counted(window.missing, "counter")
        yield f"{gone} missing from the store: a restore brings back only the usage field"
    for reset in point.resets:
        whose = _shown_entities(reset)
        yield (
            f"usage of {whose} recorded before the reset at {full_time(reset.at)} is excluded; "
            f"{reset.by}: {reset.reason}"
        )
    if point.is_truncated:
        yield "the newest snapshot lists only the largest spenders"
    if point.is_partial:
        yield "the newest snapshot is partial: not all keys arrived"
    if point.omitted_count:
        omitted = listed(
            f"{shown_entity(each.entity) if each.is_entity_known else each.key} ({each.reason})"
            for each in point.omitted
        )
        yield f"{counted(point.omitted_count, 'counter')} unreadable in the newest snapshot: " + (
            omitted
        )
    if point.corrupt:
        records = counted(len(point.corrupt), "record")
        times = listed(map(full_time, point.corrupt))
        yield f"{records} damaged (checksum mismatch) and not used: {times}"


def _shown_entities(reset: Reset) -> str:
    if isinstance(reset.entity, frozenset):
        return f"{len(reset.entity):,} entities"
    return "all entities" if isinstance(reset.entity, Everyone) else shown_entity(reset.entity)


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
    text = raised_headline(applied.raised, applied.boards)
    if applied.absent:
        missing = counted(len(applied.absent), "tenant")
        text = f"{text} {missing} not in the chosen snapshot."
    return text


def raised_headline(counters: int, boards: int, unfinished: Sequence[str] = ()) -> str:
    """Describe what a restore wrote; the ends of ``unfinished`` tenants are not recorded."""
    text = f"{counted(counters, 'counter')} raised, {counted(boards, 'leaderboard')} written."
    if not unfinished:
        return text
    return (
        f"At most {text} The restore of {counted(len(unfinished), 'tenant')} did not finish"
        f" ({listed(unfinished)}): the table shows what was planned there."
    )


def comparison(applied: Applied) -> str:
    """Compare a restore with its preview."""
    if applied.preview is None:
        return "No preview with these options in the last 24 hours."
    made = f"the preview of {full_time(applied.preview.at)} by {applied.preview.by}"
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


def at_least(number: int, most: int) -> str:
    """Write a number; if it is the ``most`` that are read, there may be more."""
    return f"{number}{' or more' if number == most else ''}"


def most_relevant(differences: Iterable[Difference]) -> list[Difference]:
    """Sort the differences that normal traffic cannot cause to the front, largest first."""
    return sorted(
        differences, key=lambda each: (each.change is Change.LIVE, _amount(each).copy_negate())
    )


def _amount(difference: Difference) -> Decimal:
    """Return by how much the usage of a counter differs."""
    found, previewed = difference.found or Decimal(0), difference.previewed or Decimal(0)
    return exact_difference(found, previewed).copy_abs()


def largest_first(entries: Iterable[AuditEntry]) -> list[AuditEntry]:
    """Sort the budgets and windows of a restore by their rise, highest first."""
    return sorted(entries, key=lambda each: exact_difference(each.after, each.before), reverse=True)


def end_of_incident(applied: Applied) -> str | None:
    """Describe the state of the incident after a restore; None: none was open."""
    incident, remainder = applied.incident, applied.remainder
    if incident is None:
        return None
    if incident.ended is not None:
        return f"Incident {incident.short_id} is closed; the store is HEALTHY. " + (
            incident.ended.detail
        )
    amounts = "".join(f" {each}" for each in cost(incident, applied.amounts or IncidentAmounts()))
    if remainder is None:
        return f"Incident {incident.short_id} stays open: not everything was restored.{amounts}"
    left = []
    if remainder.counters:
        lower = counted(remainder.counters, "counter")
        left.append(f"{lower} still lower than in the snapshots.")
    left += [*remainder.unknown(), *remainder.unseen]
    next_step = (
        "Restore every tenant with `budget-recovery restore`, or accept the store with"
        " `budget-recovery resolve`."
    )
    if incident.given_up is None and not incident.is_held:
        next_step = "The automatic restore continues with the rest."
    return f"Incident {incident.short_id} stays open: {' '.join(left)}{amounts} {next_step}"


def incident_line(incident: Incident) -> str:
    """Describe the state of an incident some time after a restore."""
    if incident.ended is None:
        return f"Incident {incident.short_id} is open."
    return f"Incident {incident.short_id} is closed. {incident.ended.detail}"


_LOWER_SHOWN = 5


def held_more(applied: Applied) -> Iterator[str]:
    """Describe what other snapshots hold more than the store after a restore from one of them."""
    others = applied.others
    if others is None or not others.lower:
        return
    counters = counted(others.counters, "counter")
    windows = counted(len(others.lower), "window")
    yield (
        f"Other snapshots hold more: {counters} in {windows} still lower. To restore the highest"
        " usage, repeat the command without --snapshot."
    )
    largest = sorted(others.lower, key=lambda each: each.rise, reverse=True)
    for each in largest[:_LOWER_SHOWN]:
        entities = counted(len(each.entities), "counter")
        yield f"{each.tenant}, {each.of}: {entities}, {format_usage(each.rise)} more"
    if left := largest[_LOWER_SHOWN:]:
        yield f"{counted(len(left), 'more window')}, not shown: only --json prints 100."


def until_next_snapshot(applied: Applied) -> Iterator[str]:
    """Say what is not as it will be until the next snapshot."""
    incident = applied.incident
    if not applied.raised or (incident is not None and incident.ended is None):
        return
    yield (
        "`budget-recovery status` may still show the restored usage as missing: the next snapshot"
        " compares again."
    )
    if applied.choice.despite_resets:
        yield (
            "Capture the current hour now with `budget-recovery snapshot`: if the store is lost"
            " before the next snapshot, the resets still exclude this usage."
        )


def hold_report(held: HoldResult) -> tuple[str, ...]:
    """Describe in paragraphs what a hold did."""
    ends = "resolve" if held.incident.is_database_behind else "release"
    then = f"To continue: budget-recovery {ends}"
    if held.was_on_hold:
        return f"{held.incident.on_hold}", f"The new reason is not stored. {then}"
    return (f"Incident {held.incident.short_id} is on hold. {then}",)


def release_report(released: HoldResult) -> str:
    """Describe what a release did."""
    incident = released.incident.short_id
    if released.was_on_hold:
        return f"Released incident {incident}. The restore starts within 30 s."
    return f"Incident {incident} is not on hold. Nothing was changed."


def acceptance_lines(preview: Preview, chosen: Acceptance | None) -> Iterator[str]:
    """Describe what each choice, or the chosen one, means for the usage that the store lacks."""
    windows = preview.windows
    lower = counted(preview.raised, "counter")
    amounts = [(each.tenant, each.of, each.rise) for each in windows if each.raised]
    largest = f" The largest: {largest_amounts(amounts)}." if amounts else ""
    yield f"{lower} lower than in the snapshots or missing.{largest}"
    if unreadable := sum(window.unreadable for window in windows):
        yield f"{counted(unreadable, 'live counter')} unreadable: no reset is recorded for them."
    if unknown := sum(window.is_unknown for window in windows):
        has = "has" if unknown == 1 else "have"
        yield (
            f"{counted(unknown, 'window')} {has} no intact record (checksum mismatch): what the"
            " store lacks there is unknown, and no reset is recorded for it."
        )
    if unread := [each.tenant for each in preview.tenants if each.failure or each.is_partial]:
        yield (
            f"{counted(len(unread), 'tenant')} not read completely: {named(unread)}. What the store"
            " lacks there is unknown, and no reset is recorded for it."
        )
    if chosen is not Acceptance.KEEP_SNAPSHOTS:
        yield (
            f"--record-resets: the usage of {lower} was removed on purpose. Restores exclude it,"
            " and the next loss does not bring it back."
        )
    if chosen is not Acceptance.RECORD_RESETS:
        yield f"--keep-snapshots: the next loss raises {lower} to the usage in the snapshots."


def resolved_report(
    resolved: Resolved, run: RecordedRun | None, failure: Exception | None
) -> Iterator[str]:
    """Describe how an incident was closed, and the capture that followed."""
    yield f"Incident {resolved.incident.short_id} is closed; the store is HEALTHY."
    if resolved.incident.ended is not None:
        yield resolved.incident.ended.detail
    result = run.result if run else None
    if failure is None and result is not None:
        numbers = f"{counted(result.stored, 'tenant')} stored, {result.failed:,} failed"
        yield f"Captures resumed: {numbers}."
        if resolved.remainder.counters and resolved.acceptance is Acceptance.KEEP_SNAPSHOTS:
            yield (
                "`budget-recovery status` shows ATTENTION until these counters are restored, a"
                " reset is recorded, or their windows end."
            )
    elif failure is not None:
        yield (
            f"The first capture failed: {failure} The supervisor in Dagster requests another one;"
            " `budget-recovery snapshot` takes one now."
        )


def captured_report(captured: Captured) -> Iterator[str]:
    """Describe a snapshot that was taken: what is stored, missing, and failed."""
    stored, result = captured.stored, captured.result
    at = full_time(captured.captured_at)
    if stored:
        counters = counted(sum(tenant.entries for tenant in stored), "counter")
        yield f"Snapshot of {at}: {counted(result.stored, 'tenant')} stored, {counters}."
    elif not result.failed:
        yield f"No snapshot: no tenant has a counter in the usage store at {at}."
    if stored and result.absent:
        yield f"{counted(result.absent, 'tenant')} without usage."
    if drops := sum(tenant.drops for tenant in stored):
        yield (
            f"Missing from the store, or lower than in snapshots: {counted(drops, 'counter')}, up"
            f" to {format_usage(captured.most_missing)} in one budget and window. See"
            " `budget-recovery status`."
        )
    if partial := sum(tenant.is_partial for tenant in stored):
        yield f"{counted(partial, 'tenant')} not read completely: fewer keys than announced."
    for group in group_failures({each.tenant: each for each in captured.failed}):
        tenants = counted(len(group.tenants), "tenant")
        yield f"{tenants} failed: {named(group.tenants)}. {group.reason} Try: {group.hint}"
    if captured.prune_failure is not None:
        yield f"Snapshots past retention were not removed. {captured.prune_failure}"


def reset_report(recorded: RecordedReset) -> tuple[str, ...]:
    """Describe in paragraphs a recorded reset, its effect, and what to check."""
    reset = recorded.reset
    what = (
        f"Recorded: {_whose(reset)} in {reset.window or 'all windows'} of budget {reset.budget!r}"
        f" of tenant {reset.tenant!r}, reset at {full_time(reset.at)}. Usage recorded until"
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
    doubts = [doubt] if recorded.is_restoring else []
    if recorded.unmarked is not None:
        doubts.append(
            f"The marker in the store does not name the reset yet: {recorded.unmarked} Until the"
            " next good check, do not restore PostgreSQL from a backup: a later restore could bring"
            " back what was reset."
        )
    return (what, _left_out(recorded), warning, *doubts)


def _whose(reset: Reset) -> str:
    if isinstance(reset.entity, Everyone | frozenset):
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
