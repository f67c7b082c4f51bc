"""JSON documents that the commands print.

One encoder writes every value: times in UTC to the microsecond, usages as text, an error as its
code with the sentences for people, and any other object by its fields, unless it is named here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import singledispatch
from typing import Any

from budget_recovery_dagster.domain.audits import (
    AuditEntry,
    IncidentAmounts,
    WindowAmounts,
    shown_bound,
)
from budget_recovery_dagster.domain.counters import OmittedCounter, format_usage
from budget_recovery_dagster.domain.falls import Fall, TenantWindow
from budget_recovery_dagster.domain.incident import MAX_ATTEMPTS, Attempt, Incident, Restored
from budget_recovery_dagster.domain.plan import Difference, KeptPreview
from budget_recovery_dagster.domain.recovery_point import Damage, Everyone
from budget_recovery_dagster.domain.snapshots import ListedSnapshot, RecordedRun
from budget_recovery_dagster.domain.store import StoreIdentity
from budget_recovery_dagster.errors import describe_error, error_code
from budget_recovery_dagster.presentation.status import (
    doubts,
    next_step,
    notices,
    restore_command,
)
from budget_recovery_dagster.presentation.text import (
    warnings,
    window_notes,
)
from budget_recovery_dagster.services.capture import Captured
from budget_recovery_dagster.services.future_snapshots import FutureSnapshots, LostUsage
from budget_recovery_dagster.services.resets import RecordedReset
from budget_recovery_dagster.services.restore.manual import Applied, Resolved
from budget_recovery_dagster.services.restore.preview import (
    EntryPreview,
    Preview,
    TenantPreview,
    WindowPreview,
)
from budget_recovery_dagster.services.restore.session import LowerCounters, Remainder
from budget_recovery_dagster.services.restore.tenants import TenantRestored
from budget_recovery_dagster.services.status import Condition, Status, group_failures

USAGE_ERROR = "usage"
"""The code of wrong options or arguments of a command."""
INTERRUPTED = "interrupted"
"""The code of a command that Ctrl-C stopped."""

STATUS_UNREAD = "status_unread"
"""The code of the doubt about a status that could not be read."""

SCHEMA = 1
"""The version of every document; it changes when a key or code changes its meaning."""


def dumped(**content: Any) -> str:
    """Write a document: its version, and these keys in their order."""
    return json.dumps({"schema": SCHEMA, **content}, indent=2, default=_encoded)


@singledispatch
def _encoded(value: Any) -> Any:
    """Encode an object by its fields; those of special types have their own encoding."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


@_encoded.register
def _time(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@_encoded.register
def _usage(value: Decimal) -> str:
    # As text: most programs would round a number.
    return format_usage(value)


@_encoded.register
def _identity(value: StoreIdentity) -> Mapping[str, Any]:
    # The sequence is text, because it may exceed 2^53.
    return {"created_at": value.created_at, "last_sequence": str(value.last_sequence)}


@_encoded.register
def _error(value: Exception) -> Mapping[str, str]:
    message, hint = describe_error(value)
    return {"code": error_code(value), "message": message, "hint": hint}


def _coded(sentences: Mapping[Any, str]) -> list[Mapping[str, str]]:
    return [{"code": code, "message": message} for code, message in sentences.items()]


def error_json(error: Exception) -> str:
    """Write that something was not done, and why: a stable code, and sentences for people."""
    return dumped(error=error)


def usage_error_json(message: str) -> str:
    """Write that a command was called with wrong options, and which."""
    return dumped(error={"code": USAGE_ERROR, "message": message, "hint": "see --help."})


def interrupted_json(message: str, hint: str) -> str:
    """Write that Ctrl-C stopped a command, and what to check."""
    return dumped(error={"code": INTERRUPTED, "message": message, "hint": hint})


def held_json(incident: Incident) -> str:
    """Write the current or last hold of an incident: who, when and why."""
    return dumped(
        incident_id=incident.incident_id,
        is_held=incident.is_held,
        held=incident.held,
        released_at=incident.released_at,
        error=None,
    )


def preview_json(preview: Preview) -> str:
    """Write a preview; ``entries`` has counters only if one tenant was chosen."""
    incident = preview.recovery.incident
    return dumped(
        preview_id=preview.preview_id,
        at=preview.at,
        choice=preview.choice,
        state=preview.recovery.state,
        incident_id=incident.incident_id if incident else None,
        store=preview.identity,
        warnings=_coded(warnings(preview)),
        raised=preview.raised,
        tenants=preview.tenants,
        largest_changes=preview.changes,
        error=None,
    )


def applied_json(applied: Applied) -> str:
    """Write what a restore did."""
    incident = applied.incident
    return dumped(
        choice=applied.choice,
        raised=applied.raised,
        leaderboards=applied.boards,
        preview=applied.preview,
        differences=None if applied.preview is None else applied.differences,
        uncompared=applied.uncompared,
        absent=applied.absent,
        tenants=applied.tenants,
        incident=incident
        and {
            "id": incident.incident_id,
            "is_closed": incident.ended is not None,
            "outcome": incident.ended.outcome if incident.ended else None,
            "detail": incident.ended.detail if incident.ended else None,
            "amounts": applied.amounts,
        },
        remainder=applied.remainder,
        other_snapshots=applied.others and _held_more(applied.others),
        error=applied.failure,
    )


def _held_more(others: Remainder) -> Mapping[str, Any]:
    return {
        "windows": len(others.lower),
        "counters": others.counters,
        "unread": others.unseen,
        "largest": others.lower[:_LOWER],
    }


def resolved_json(
    resolved: Resolved, capture: RecordedRun | None, capture_error: Exception | None
) -> str:
    """Write how an incident was ended without restoring more, and the capture that followed."""
    ended = resolved.incident.ended
    return dumped(
        incident_id=resolved.incident.incident_id,
        ended_at=ended.at if ended else None,
        outcome=ended.outcome if ended else None,
        detail=ended.detail if ended else None,
        acceptance=resolved.acceptance,
        resets=len(resolved.resets),
        undo_until=resolved.undo_until,
        remainder=resolved.remainder,
        capture=capture,
        capture_error=capture_error,
        error=None,
    )


def reset_json(recorded: RecordedReset) -> str:
    """Write a recorded reset, and what it leaves out now."""
    reset = recorded.reset
    return dumped(
        tenant=reset.tenant,
        budget=reset.budget,
        window=reset.window,
        everyone=reset.is_of_everyone,
        entity=None if isinstance(reset.entity, Everyone | frozenset) else reset.entity,
        at=reset.at,
        by=reset.by,
        reason=reset.reason,
        recorded_at=reset.recorded_at,
        excluded_windows=[of.window.token for of in recorded.windows],
        restore_running=recorded.is_restoring,
        unmarked=recorded.unmarked,
        error=None,
    )


def discarded_json(future: FutureSnapshots) -> str:
    """Write the discarded snapshots, and what the recovery points and open falls lost by it."""
    return dumped(
        discarded=future.found,
        lost={
            "windows": len(future.lost),
            "counters": future.lost_counters,
            "largest": future.lost[:_LOST],
        },
        falls_ended=len(future.falls.ended),
        error=None,
    )


@_encoded.register
def _lost(lost: LostUsage) -> Mapping[str, Any]:
    return {**_place(lost.at), "counters": lost.counters, "usage": lost.usage}


def _place(at: TenantWindow) -> Mapping[str, str]:
    return {"tenant": at.tenant, "budget": at.of.budget, "window": at.of.window.token}


def captured_json(captured: Captured) -> str:
    """Write a snapshot that was taken; failed tenants are grouped by reason."""
    stored, result = captured.stored, captured.result
    return dumped(
        captured_at=captured.captured_at,
        source=captured.source,
        outcome=result.outcome,
        stored=result.stored,
        absent=result.absent,
        failed=result.failed,
        windows=sum(tenant.records for tenant in stored),
        counters=sum(tenant.entries for tenant in stored),
        drops=sum(tenant.drops for tenant in stored),
        most_missing=captured.most_missing,
        partial=sum(tenant.is_partial for tenant in stored),
        failures=group_failures({each.tenant: each for each in captured.failed}),
        error=captured.stopped_by,
    )


def snapshots_json(
    snapshots: Sequence[ListedSnapshot], budgets: Sequence[str], damage: Damage
) -> str:
    """Write the retained snapshots, the budgets of a chosen tenant, and the damaged records."""
    return dumped(
        snapshots=snapshots,
        budgets=budgets,
        damaged_records_by_tenant=damage.records,
        unverified_tenants=damage.unverified,
        error=None,
    )


_CHECKS = 10
_FALLS = 100
_LOST = 100


def status_json(status: Status, exit_code: int) -> str:
    """Write the status; every key is always present."""
    return dumped(
        condition=status.condition,
        exit_code=exit_code,
        at=status.at,
        state=status.recovery.state,
        doubts=_coded(doubts(status)),
        attention=notices(status),
        next_step=next_step(status),
        incident=_incident(status.recovery.incident, status.attempt, status.amounts),
        last_closed_incident=_incident(status.closed, None, status.closed_amounts),
        checks={
            "interval_seconds": status.check_interval.total_seconds(),
            "unknown_in_a_row": status.unknown_in_a_row,
            "newest_good": status.newest_good,
            "newest": status.checks[:_CHECKS],
        },
        captures={
            "newest_run": next(iter(status.runs), None),
            "failed_in_a_row": status.failed_runs,
            "clock_skew_seconds": _seconds(status.clock_skew),
            "failures": status.failures,
        },
        points={
            "newest_snapshot_at": status.points.newest_snapshot,
            "newest_by_tenant": {
                tenant: at
                for tenant, at in sorted(status.points.newest_points.items())
                if tenant not in status.points.emptied
            },
            "emptied_tenants": {
                tenant: status.points.read[tenant] for tenant in sorted(status.points.emptied)
            },
            "damaged_records_by_tenant": status.points.damage.records,
            "unverified_tenants": status.points.damage.unverified,
            "failing_tenants": {
                tenant: each.newest_snapshot
                for tenant, each in sorted(status.points.failing.items())
            },
        },
        missing={
            "windows": len(status.falls),
            "counters": sum(fall.counters for fall in status.falls),
            "counters_gone": sum(count.missing for count in status.gone),
            "largest": status.falls[:_FALLS],
        },
        configuration_changes=status.changes,
        error=None,
    )


def failure_json(error: Exception, exit_code: int) -> str:
    """Write that the status is unknown, with the same keys, and why."""
    message, hint = describe_error(error)
    return dumped(
        condition=Condition.UNKNOWN,
        exit_code=exit_code,
        at=None,
        state=None,
        doubts=_coded({STATUS_UNREAD: message}),
        attention=[],
        next_step=hint,
        incident=None,
        last_closed_incident=None,
        checks=None,
        captures=None,
        points=None,
        missing=None,
        configuration_changes=[],
        error=error,
    )


def _incident(
    incident: Incident | None, attempt: Attempt | None, amounts: IncidentAmounts | None
) -> Mapping[str, Any] | None:
    if incident is None:
        return None
    held, uncovered = incident.held, incident.uncovered
    released_at = None if incident.is_held else incident.released_at
    return {
        "id": incident.incident_id,
        "opened_at": incident.opened_at,
        "losses": incident.losses,
        "attempts": incident.attempts,
        "max_attempts": MAX_ATTEMPTS,
        "launches": incident.launches,
        "next_launch_at": incident.next_launch_at,
        "next_attempt_at": incident.next_attempt_at,
        "newest_attempt": attempt,
        "held": held and {**_encoded(held), "released_at": released_at},
        "waiting": incident.waiting,
        "given_up": incident.given_up,
        "ended": incident.ended,
        "newest_point_at": incident.newest_point_at,
        "last_good_at": incident.last_good_at,
        "uncovered_seconds": _seconds(uncovered),
        "began_empty": incident.began_empty,
        "amounts": amounts,
    }


def _seconds(span: timedelta | None) -> float | None:
    return None if span is None else span.total_seconds()


@_encoded.register
def _run(run: RecordedRun) -> Mapping[str, Any]:
    result = run.result
    return {
        "run_id": run.run_id,
        "hour": run.hour.start,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "outcome": result and result.outcome,
        "stored": result and result.stored,
        "absent": result and result.absent,
        "failed": result and result.failed,
        "clock_skew_seconds": None if result is None else _seconds(result.clock_skew),
        "error": result and result.error,
    }


@_encoded.register
def _fall(fall: Fall) -> Mapping[str, Any]:
    return {
        **_place(fall.at),
        "counters": fall.counters,
        "usage": fall.usage,
        "found_at": fall.found_at,
        "judged_at": fall.judged_at,
        "restore": restore_command(fall),
    }


@_encoded.register
def _restored_in_all(restored: Restored) -> Mapping[str, int]:
    return {
        "tenants": restored.tenants,
        "windows": restored.windows,
        "counters": restored.counters,
        "leaderboards": restored.boards,
    }


@_encoded.register
def _attempt(attempt: Attempt) -> Mapping[str, Any]:
    return {
        "loss": attempt.loss,
        "number": attempt.number,
        "run_id": attempt.run_id,
        "started_at": attempt.started_at,
        "ended_at": attempt.ended_at,
        "outcome": attempt.outcome,
    }


@_encoded.register
def _listed(listed: ListedSnapshot) -> Mapping[str, Any]:
    return {
        "captured_at": listed.captured_at,
        "source": listed.source,
        "tenants": listed.tenants,
        "windows": listed.records,
        "counters": listed.entries,
        "omitted": listed.omitted,
        "unreadable": listed.unreadable,
        "drops": listed.drops,
        "most_missing": listed.most_missing,
        "partial": listed.partial,
        "is_pruned": listed.is_pruned,
    }


_LOWER = 100


@_encoded.register
def _remainder(remainder: Remainder) -> Mapping[str, Any]:
    return {
        "counters": remainder.counters,
        "windows": len(remainder.lower),
        "largest": remainder.lower[:_LOWER],
        "unreadable": remainder.unreadable,
        "windows_unknown": remainder.corrupt,
        "unread": remainder.unseen,
    }


@_encoded.register
def _lower(lower: LowerCounters) -> Mapping[str, Any]:
    return {
        **_place(TenantWindow(lower.tenant, lower.of)),
        "counters": len(lower.entities),
        "usage": lower.rise,
    }


@_encoded.register
def _kept(preview: KeptPreview) -> Mapping[str, Any]:
    return {"preview_id": preview.preview_id, "at": preview.at, "by": preview.by}


@_encoded.register
def _omitted(omitted: OmittedCounter) -> Mapping[str, str]:
    return {"key": omitted.key, "reason": omitted.reason}


@_encoded.register
def _tenant(tenant: TenantPreview) -> Mapping[str, Any]:
    return {
        "tenant": tenant.tenant,
        "point_at": tenant.point_at,
        "is_partial": tenant.is_partial,
        "unreadable_keys": tenant.unreadable,
        "unreadable_count": tenant.unreadable_count,
        "windows": tenant.windows,
        "entries": tenant.entries,
        "error": tenant.failure,
    }


# Figures that are null if they are unknown: an unknown usage is not 0.
_COUNTS_OF_WINDOW = (
    "counters",
    "raised",
    "missing_in_store",
    "kept",
    "skipped",
    "unreadable",
    "recorded",
)
_USAGES_OF_WINDOW = ("live", "result", "rise")
_BLOCKS_OF_WINDOW = ("blocked_before", "blocked_after")


@_encoded.register
def _window(window: WindowPreview) -> Mapping[str, Any]:
    point = window.point
    document = {
        "budget": window.of.budget,
        "window": window.of.window.token,
        "counters": window.counters,
        "raised": window.raised,
        "missing_in_store": window.missing,
        "kept": window.kept,
        "skipped": window.skipped,
        "unreadable": window.unreadable,
        "is_closed": window.is_closed,
        "live": window.amounts.live,
        "recorded": window.amounts.recorded,
        "result": window.amounts.result,
        "rise": window.rise,
        "newest_source": window.newest_source,
        "oldest_source": window.oldest_source,
        "limit": window.limit,
        "is_enforced": window.is_enforced,
        "blocked_before": window.blocked_before,
        "blocked_after": window.blocked_after,
        "is_truncated": point.is_truncated,
        "is_partial": point.is_partial,
        "omitted": point.omitted,
        "omitted_count": point.omitted_count,
        "damaged_records": point.corrupt,
        "notes": list(window_notes(window)),
    }
    if window.is_unknown:
        document |= dict.fromkeys(_COUNTS_OF_WINDOW)
    if not window.is_usage_known:
        document |= dict.fromkeys(_USAGES_OF_WINDOW)
    if window.is_unknown or window.limit is None:
        document |= dict.fromkeys(_BLOCKS_OF_WINDOW)
    return document


@_encoded.register
def _entry(entry: EntryPreview) -> Mapping[str, Any]:
    return {
        **_place(TenantWindow(entry.tenant, entry.of)),
        "entity": entry.entity,
        "live": entry.live,
        "recorded": entry.recorded,
        "result": entry.result,
        "rise": entry.rise,
        "action": entry.action,
        "source": entry.source,
        "would_be_blocked": entry.blocks,
    }


@_encoded.register
def _difference(difference: Difference) -> Mapping[str, Any]:
    return {
        **_place(TenantWindow(difference.tenant, difference.of)),
        "entity": difference.entity,
        "change": difference.change,
        "previewed": difference.previewed,
        "found": difference.found,
    }


@_encoded.register
def _restored(tenant: TenantRestored) -> Mapping[str, Any]:
    return {
        "tenant": tenant.tenant,
        "raised": tenant.raised,
        "leaderboards": tenant.boards,
        "windows": tenant.entries,
        "error": tenant.failure,
    }


@_encoded.register
def _audit(entry: AuditEntry) -> Mapping[str, Any]:
    return {
        "budget": entry.of.budget,
        "window": entry.of.window.token,
        "counters": entry.entries,
        "planned": entry.planned,
        "raised": entry.raised,
        "before": entry.before,
        "after": entry.after,
        "leaderboard": entry.wrote_board,
        "notes": entry.notes,
        "restored": entry.amounts and entry.amounts.restored,
        "counted_after_loss": entry.amounts and entry.amounts.counted,
        "bound": entry.amounts and shown_bound(entry.amounts),
    }


@_encoded.register
def _incident_amounts(amounts: IncidentAmounts) -> Mapping[str, Any]:
    return {
        "windows_restored": amounts.restored_windows,
        "windows_counted": amounts.counted_windows,
        "windows_unknown": amounts.unknown_windows,
        "largest_restored": amounts.restored,
        "largest_counted": amounts.counted,
    }


@_encoded.register
def _window_amounts(amounts: WindowAmounts) -> Mapping[str, Any]:
    return {
        **_place(TenantWindow(amounts.tenant, amounts.of)),
        "restored": amounts.restored,
        "counted_after_loss": amounts.counted,
        "bound": amounts.bound,
    }
