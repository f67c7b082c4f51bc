"""The state of the store in sentences: why it is so, what needs attention, and the next step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from shlex import quote

from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.domain.falls import ConfigurationChange, Fall, KeyCount
from budget_recovery_dagster.domain.incident import MAX_ATTEMPTS, Attempt, FailureReason, Incident
from budget_recovery_dagster.domain.plan import tenant_text
from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, RESTORE_CLOCK_SKEW, in_words
from budget_recovery_dagster.presentation.text import at_least, clock_time, named, since
from budget_recovery_dagster.services.capture import MAX_NOTED_KEYS
from budget_recovery_dagster.services.falls import describe_gone
from budget_recovery_dagster.services.restore.report import counted
from budget_recovery_dagster.services.status import (
    MOST_RUNS,
    Attention,
    Condition,
    Doubt,
    Status,
)

# The supervisor of restores runs twice a minute.
_LAUNCH_IS_LATE = timedelta(minutes=2)
_CLOCKS_STEP = "Synchronize the clocks of PostgreSQL and NATS with NTP."
_CHECKS_STEP = (
    "Check in Dagster that the daemon runs and store_loss_sensor is on, and read its ticks."
)
_RUNS_STEP = "See the newest run of hourly_snapshot_job in Dagster."
_SCHEDULE_STEP = "Check in Dagster that hourly_snapshot_schedule is on and its runs succeed."
# The first doubt decides what to do about all.
_STEPS: Mapping[Doubt, str] = {
    Doubt.CHECK_IN_FUTURE: _CLOCKS_STEP,
    Doubt.LOSS_FOUND: ("Wait for the next check, which opens an incident if it confirms the loss."),
    Doubt.CHECKS_UNKNOWN: (
        "Fix the cause above, which `budget-recovery doctor` shows in detail. Then wait for the"
        " next check."
    ),
    Doubt.NEVER_INTACT: _CHECKS_STEP,
    Doubt.OVERDUE: _CHECKS_STEP,
}


def doubts(status: Status) -> Mapping[Doubt, str]:
    """Describe the doubts about the store, or about its restore, by their codes."""
    return dict(_doubts(status))


def _doubts(status: Status) -> Iterator[tuple[Doubt, str]]:
    """Yield a sentence for each reason to doubt that the store is intact, with its code."""
    now, intact_at, incident = status.at, status.known_whole_at, status.recovery.incident
    newest = status.checks[0] if status.checks else None
    for doubt in status.doubts:
        match doubt:
            case Doubt.CHECK_IN_FUTURE if newest:
                at = clock_time(newest.checked_at, now)
                yield doubt, f"The newest check has a time in the future: {at}."
            case Doubt.LOSS_FOUND if newest:
                yield doubt, f"The newest check found a loss: {newest.reason}"
            case Doubt.CHECKS_UNKNOWN if newest:
                yield (
                    doubt,
                    f"The newest {status.unknown_in_a_row} checks are unknown: {newest.reason}",
                )
            case Doubt.NEVER_INTACT:
                yield doubt, "No check has found the store intact yet."
            case Doubt.OVERDUE if intact_at:
                due = f"a check is due every {in_words(status.check_interval)}"
                yield (
                    doubt,
                    f"The store was last known to be intact {since(intact_at, now)}; {due}.",
                )
            case Doubt.LONG_HOLD if incident and incident.held:
                span = in_words(now - incident.held.at)
                meanwhile = "no block is restored, captures are paused"
                yield doubt, f"The restore has been on hold for {span}: {meanwhile}."


@dataclass(frozen=True, slots=True)
class Notice:
    """What needs attention, with its facts, and what a person does about it, in sentences."""

    code: Attention
    message: str
    next_step: str


def notices(status: Status) -> tuple[Notice, ...]:
    """Describe what needs attention although the store is intact; the most important first."""
    return tuple(Notice(each, *_ATTENTIONS[each](status)) for each in status.attentions)


def _usage_missing(status: Status) -> tuple[str, str]:
    falls, worst = status.falls, status.falls[0]
    counters = counted(sum(fall.counters for fall in falls), "counter")
    tenants = counted(len({fall.at.tenant for fall in falls}), "tenant")
    return (
        (
            f"Missing from the store, or lower than in snapshots: {counters} of {tenants}. The"
            f" largest: {format_usage(worst.usage)} of tenant {worst.at.tenant!r}, {worst.at.of}."
        ),
        (
            f"Preview: `{preview_command(worst)}`. Restore: `{restore_command(worst)}`. If it was"
            " lowered on purpose, run `budget-recovery record-reset`."
        ),
    )


def preview_command(fall: Fall) -> str:
    """Write the command that shows what a restore would bring back."""
    return f"budget-recovery preview {_choice(fall)}"


def restore_command(fall: Fall) -> str:
    """Write the command that restores what is missing; a person replaces ``<why>``.

    Without quotes, a shell refuses it until then, so no restore has a placeholder as its reason.
    """
    return f"budget-recovery restore {_choice(fall)} --reason <why>"


def _choice(missing: Fall | KeyCount) -> str:
    return (
        f"--tenant {quote(tenant_text(missing.at.tenant))} --budget {quote(missing.at.of.budget)}"
    )


def _counters_gone(status: Status) -> tuple[str, str]:
    return (
        describe_gone(status.gone),
        (
            "Wait for the requested run of hourly_snapshot_job, which names them. Snapshots of"
            f" leaderboards cannot: then run `budget-recovery preview {_choice(status.gone[0])}`,"
            " and restore them or record a reset. Find out who purges or deletes keys of the"
            " bucket."
        ),
    )


def _marker_not_written(status: Status) -> tuple[str, str]:
    reason = "" if status.newest_good is None else f" {status.newest_good.reason}"
    return (
        f"The marker in the store is not renewed, so some losses are not detected.{reason}",
        "Run `budget-recovery doctor`, which tests the permission and the limits of the bucket.",
    )


def _snapshot_in_future(status: Status) -> tuple[str, str]:
    future = status.points.future
    at = clock_time(future, status.at) if future else "unknown time"
    return (
        f"A snapshot has a time in the future: {at}.",
        f"{_CLOCKS_STEP} Then discard these snapshots: `budget-recovery discard-future`.",
    )


def changed_words(change: ConfigurationChange, now: datetime) -> str:
    """Write which setting of the bucket changed, and when a check found that."""
    return f"Bucket changed: {change}, found {since(change.found_at, now)}"


def _clock_skew(status: Status) -> tuple[str, str]:
    run, skew = status.skew_run, status.clock_skew or timedelta(0)
    at = clock_time(run.started_at, status.at) if run else "unknown time"
    if abs(skew) > MAX_CLOCK_SKEW:
        effect = f"more than {in_words(MAX_CLOCK_SKEW)}, so no snapshot is taken"
    else:
        effect = f"more than {in_words(RESTORE_CLOCK_SKEW)}, so no restore could run"
    return (
        f"{skew_words(skew)} That is {effect}. Measured by the capture of {at}.",
        f"{_CLOCKS_STEP} Then run `budget-recovery snapshot`, which measures again.",
    )


def skew_words(skew: timedelta) -> str:
    """Describe how far the clocks differ; empty if that rounds to 0 s."""
    if not round(abs(skew).total_seconds()):
        return ""
    where = "ahead of" if skew > timedelta(0) else "behind"
    return f"The store's clock is {in_words(abs(skew))} {where} the database's."


def _captures_failing(status: Status) -> tuple[str, str]:
    failed, run = status.failed_runs, status.ended_runs[0]
    what = f"Each of the last {at_least(failed, MOST_RUNS)} captures failed."
    if failed == 1:
        what = "The last capture failed."
    if run.result is None:
        began = clock_time(run.started_at, status.at)
        return (
            f"{what} The newest, of {began}, has not ended: its process hangs or died.",
            f"{_RUNS_STEP} Check the memory of its host.",
        )
    error = run.result.error
    if error is None:
        return what, _RUNS_STEP
    return f"{what} The newest: {error.message}", _as_step(error.hint)


def _as_step(hint: str) -> str:
    """Write the hint of an error as a sentence."""
    return hint[:1].upper() + hint[1:]


def _no_snapshot(status: Status) -> tuple[str, str]:
    first = status.first_checked_at or status.at
    text = f"No snapshot was ever taken. The store was first checked {since(first, status.at)}."
    if not status.ended_runs:
        return f"{text} No capture has run.", _SCHEDULE_STEP
    if status.ended_runs[0].found_nothing:
        return (
            f"{text} The last capture found no counter of a tenant.",
            (
                "Check that BUDGET_RECOVERY_BUCKET names the bucket in which the gateway counts"
                " usage, and that the gateway runs."
            ),
        )
    return text, _RUNS_STEP


# More reasons than this are counted.
_SHOWN_REASONS = 3


def _tenants_failing(status: Status) -> tuple[str, str]:
    groups = status.failures
    reasons = [
        f"{counted(len(group.tenants), 'tenant')}: {group.reason}"
        for group in groups[:_SHOWN_REASONS]
    ]
    if len(groups) > _SHOWN_REASONS:
        reasons.append(f"{counted(len(groups) - _SHOWN_REASONS, 'more reason')}.")
    return (
        f"Captures of {named(sorted(status.failing))} fail. {' '.join(reasons)}",
        f"{_as_step(groups[0].hint)} {_RUNS_STEP}",
    )


def _snapshots_late(status: Status) -> tuple[str, str]:
    newest, late = status.points.newest_snapshot, status.late_tenants
    if newest is not None and status.points.is_behind:
        return f"The newest snapshot was taken {since(newest, status.at)}.", _SCHEDULE_STEP
    has = "has" if len(late) == 1 else "have"
    return f"{named(late)} {has} no recent snapshot.", _SCHEDULE_STEP


def _records_damaged(status: Status) -> tuple[str, str]:
    return (
        f"Snapshots of {named(sorted(status.points.damage.records))} have damaged records.",
        (
            "Run `budget-recovery preview` to see what a restore would bring back, and check the"
            " disk of the database."
        ),
    )


def _unreadable_keys(status: Status) -> tuple[str, str]:
    keys, first = status.stray_keys, status.stray_keys[0]
    return (
        (
            f"Keys that name no tenant: {at_least(len(keys), MAX_NOTED_KEYS)}, such as"
            f" {first.name!r}: {first.reason}. They are not captured. No tenant is affected."
        ),
        "Find the program that wrote these keys; the asset check tenant_coverage lists them.",
    )


_ATTENTIONS: Mapping[Attention, Callable[[Status], tuple[str, str]]] = {
    Attention.USAGE_MISSING: _usage_missing,
    Attention.COUNTERS_GONE: _counters_gone,
    Attention.CLOCK_SKEW: _clock_skew,
    Attention.CAPTURES_FAILING: _captures_failing,
    Attention.NO_SNAPSHOT: _no_snapshot,
    Attention.TENANTS_FAILING: _tenants_failing,
    Attention.SNAPSHOTS_LATE: _snapshots_late,
    Attention.RECORDS_DAMAGED: _records_damaged,
    Attention.UNREADABLE_KEYS: _unreadable_keys,
    Attention.SNAPSHOT_IN_FUTURE: _snapshot_in_future,
    Attention.MARKER_NOT_WRITTEN: _marker_not_written,
}
"""The facts, and the next step, of each."""


def next_step(status: Status) -> str:
    """Describe what the operator does next, in a sentence or two."""
    match status.condition:
        case Condition.RECOVERING | Condition.HELD:
            return _step_of_recovery(status)
        case Condition.FAILED:
            return _step_after_failure(status)
        case Condition.UNKNOWN:
            return _STEPS[status.doubts[0]]
        case Condition.ATTENTION:
            return notices(status)[0].next_step
        case Condition.HEALTHY:
            return f"Nothing to do. {_next_check(status)}"


def _next_check(status: Status) -> str:
    """Write when the next check is due, which would find a loss that happened by now."""
    if not status.checks:
        return "The store has not been checked yet."
    due = status.checks[0].checked_at + status.check_interval
    when = f" at {clock_time(due, status.at)}" if due > status.at else ""
    return f"The next check of the store is due{when}."


def _step_of_recovery(status: Status) -> str:
    """Return the next step while the store is RECOVERING.

    A person acts on a hold and on what is late; everything else is automatic.
    """
    incident = status.recovery.incident
    if incident is None:
        return "See the log of restore_supervisor_sensor in Dagster: no incident is open."
    if incident.held is not None and incident.is_held:
        return f"On hold: {incident.held.reason.rstrip('.')}. {_as_step(incident.hold_ends)}"
    if status.worker is not None:
        return f"Nothing to do: {status.worker} is restoring."
    due = incident.due_at or _last_step_at(incident, status.attempt)
    if status.at - due > _LAUNCH_IS_LATE:
        return (
            f"The restore was due at {clock_time(due, status.at)}: check in Dagster that the daemon"
            " runs and restore_supervisor_sensor is on."
        )
    is_due = due <= status.at
    is_next = "now" if is_due else f"at {clock_time(due, status.at)}"
    if incident.waiting is not None:
        reason = incident.waiting.reason.rstrip(".")
        return (
            f"The restore waits for the store: {reason}. Fix the cause; the restore checks the"
            f" store again {is_next}."
        )
    if incident.awaited_attempt(status.at):
        step = f"attempt {incident.attempts + 1} of {MAX_ATTEMPTS} is due {is_next}"
    elif incident.attempts >= MAX_ATTEMPTS:
        step = f"all attempts are used; the final check is due {is_next}"
    elif incident.launches and not is_due:
        step = f"a restore was launched; it is launched again {is_next} if it does not start"
    else:
        step = f"the launch of a restore is due {is_next}"
    return f"Nothing to do: {step}."


def _last_step_at(incident: Incident, attempt: Attempt | None) -> datetime:
    """Return when the restore last began, ended or was released; the next launch is due then."""
    attempted = (attempt.ended_at or attempt.started_at) if attempt else None
    return max(filter(None, (incident.opened_at, incident.released_at, attempted)))


def _step_after_failure(status: Status) -> str:
    incident = status.recovery.incident
    given_up = incident.given_up if incident else None
    if given_up is None:
        return "See the newest run of restore_job in Dagster: no reason of the failure is stored."
    if given_up.reason is FailureReason.NO_SNAPSHOTS:
        return (
            "Nothing can be restored, because no snapshot is retained: accept the store as it is"
            " with `budget-recovery resolve`, so that captures resume."
        )
    if (since_when := status.cause_gone_since) is not None:
        return (
            f"{given_up.detail} This cause is gone: checks identify the store again since"
            f" {clock_time(since_when, status.at)}. Run `budget-recovery preview`, then finish the"
            " restore with `budget-recovery restore`. Captures are paused until then."
        )
    return (
        f"{given_up.detail} Fix the cause, then run `budget-recovery preview` and"
        " `budget-recovery restore`, or accept the store as it is with `budget-recovery resolve`."
        " Captures are paused until then."
    )
