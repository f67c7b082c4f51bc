"""JSON documents that the commands print."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.domain.incident import MAX_ATTEMPTS, Attempt, Incident, Loss
from budget_recovery_dagster.domain.plan import AuditEntry, Difference, RestoreChoice
from budget_recovery_dagster.domain.recovery_point import Everyone
from budget_recovery_dagster.domain.snapshots import ListedSnapshot
from budget_recovery_dagster.domain.store import Check, StoreIdentity
from budget_recovery_dagster.errors import BudgetRecoveryError, describe_error, error_code
from budget_recovery_dagster.presentation.text import (
    doubts,
    next_step,
    warnings,
    window_notes,
)
from budget_recovery_dagster.services.resets import RecordedReset
from budget_recovery_dagster.services.restore.manual import Applied, Resolved
from budget_recovery_dagster.services.restore.preview import (
    EntryPreview,
    Preview,
    TenantPreview,
    WindowPreview,
)
from budget_recovery_dagster.services.restore.session import Remainder
from budget_recovery_dagster.services.restore.tenants import TenantRestored
from budget_recovery_dagster.services.status import Condition, Status

USAGE_ERROR = "usage"
"""The code of wrong options or arguments of a command."""

SCHEMA = 1
"""The version of every document; it changes when a key or code changes its meaning."""


def dumped(**content: Any) -> str:
    """Write a document: its version, and these keys in their order."""
    return json.dumps({"schema": SCHEMA, **content}, indent=2)


def moment_or_none(moment: datetime | None) -> str | None:
    """Write a time in UTC, to the microsecond."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def usage_or_none(usage: Decimal | None) -> str | None:
    """Write a usage as text: most programs would round a number."""
    return None if usage is None else format_usage(usage)


def identity_or_none(identity: StoreIdentity | None) -> Mapping[str, str | None] | None:
    """Write an identity; its sequence is text, because it may exceed 2^53."""
    if identity is None:
        return None
    return {
        "created_at": moment_or_none(identity.created_at),
        "last_sequence": str(identity.last_sequence),
    }


def error_or_none(error: Exception | None) -> Mapping[str, str] | None:
    """Write why something was not done: a stable code, and the message and hint for people."""
    if error is None:
        return None
    message, hint = describe_error(error)
    return {"code": error_code(error), "message": message, "hint": hint}


def error_json(error: BudgetRecoveryError) -> str:
    """Write that something was not done, and why."""
    return dumped(error=error_or_none(error))


def usage_error_json(message: str) -> str:
    """Write that a command was called with wrong options, and which."""
    return dumped(error={"code": USAGE_ERROR, "message": message, "hint": "see --help."})


def held_json(incident: Incident) -> str:
    """Write the current or last hold of an incident: who, when and why."""
    held = incident.held
    return dumped(
        incident_id=incident.incident_id,
        is_held=incident.is_held,
        held=held and {"at": moment_or_none(held.at), "by": held.by, "reason": held.reason},
        released_at=moment_or_none(incident.released_at),
        error=None,
    )


def preview_json(preview: Preview) -> str:
    """Write a preview; ``entries`` has counters only if one tenant was chosen."""
    incident = preview.recovery.incident
    return dumped(
        preview_id=preview.preview_id,
        at=moment_or_none(preview.at),
        choice=_choice(preview.choice),
        state=preview.recovery.state,
        incident_id=incident.incident_id if incident else None,
        store=identity_or_none(preview.identity),
        warnings=warnings(preview),
        raised=preview.raised,
        tenants=[_tenant(each) for each in preview.tenants],
        largest_changes=[_entry(each) for each in preview.changes],
        error=None,
    )


def applied_json(applied: Applied) -> str:
    """Write what a restore did."""
    preview, incident, remainder = applied.preview, applied.incident, applied.remainder
    return dumped(
        choice=_choice(applied.choice),
        raised=applied.raised,
        boards=applied.boards,
        preview=preview
        and {
            "preview_id": preview.preview_id,
            "at": moment_or_none(preview.at),
            "by": preview.by,
        },
        differences=None if preview is None else [_difference(d) for d in applied.differences],
        uncompared=applied.uncompared,
        absent=applied.absent,
        tenants=[_restored(each) for each in applied.tenants],
        incident=incident
        and {
            "id": incident.incident_id,
            "is_closed": incident.ended is not None,
            "outcome": incident.ended.outcome if incident.ended else None,
            "detail": incident.ended.detail if incident.ended else None,
        },
        left=_left(remainder),
        error=error_or_none(applied.failure),
    )


def resolved_json(resolved: Resolved) -> str:
    """Write how an incident was ended without restoring anything more."""
    ended = resolved.incident.ended
    return dumped(
        incident_id=resolved.incident.incident_id,
        ended_at=moment_or_none(ended.at if ended else None),
        outcome=ended.outcome if ended else None,
        detail=ended.detail if ended else None,
        left=_left(resolved.remainder),
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
        entity=None if isinstance(reset.entity, Everyone) else reset.entity,
        at=moment_or_none(reset.at),
        by=reset.by,
        reason=reset.reason,
        recorded_at=moment_or_none(reset.recorded_at),
        left_out_of=[of.window.token for of in recorded.windows],
        restore_is_under_way=recorded.is_restoring,
        error=None,
    )


def snapshots_json(
    snapshots: Sequence[ListedSnapshot], budgets: Sequence[str], damaged: Mapping[str, int]
) -> str:
    """Write the retained snapshots, the budgets of a chosen tenant, and the damaged records."""
    return dumped(
        snapshots=[_listed(each) for each in snapshots],
        budgets=budgets,
        damaged_records_by_tenant=damaged,
        error=None,
    )


def _listed(listed: ListedSnapshot) -> Mapping[str, Any]:
    return {
        "captured_at": moment_or_none(listed.captured_at),
        "source": listed.source,
        "tenants": listed.tenants,
        "windows": listed.records,
        "counters": listed.entries,
        "omitted": listed.omitted,
        "unreadable": listed.unreadable,
        "drops": listed.drops,
        "partial": listed.partial,
        "is_pruned": listed.is_pruned,
    }


def _left(remainder: Remainder | None) -> Mapping[str, Any] | None:
    """Write what keeps an incident open, or remained at its end; None: it was not checked."""
    if remainder is None:
        return None
    return {
        "counters": remainder.counters,
        "unreadable": remainder.unreadable,
        "windows_unknown": remainder.corrupt,
        "unseen": remainder.unseen,
    }


def _choice(choice: RestoreChoice) -> Mapping[str, Any]:
    return {
        "tenant": choice.tenant,
        "budget": choice.budget,
        "snapshot": moment_or_none(choice.snapshot),
        "despite_resets": choice.despite_resets,
    }


def _tenant(tenant: TenantPreview) -> Mapping[str, Any]:
    return {
        "tenant": tenant.tenant,
        "point_at": moment_or_none(tenant.point_at),
        "is_partial": tenant.is_partial,
        "unreadable_keys": [{"key": k.key, "reason": k.reason} for k in tenant.unreadable],
        "unreadable_count": tenant.unreadable_count,
        "windows": [_window(each) for each in tenant.windows],
        "entries": [_entry(each) for each in tenant.entries],
        "error": error_or_none(tenant.failure),
    }


def _window(window: WindowPreview) -> Mapping[str, Any]:
    point = window.point
    return {
        "budget": window.of.budget,
        "window": window.of.window.token,
        "counters": window.counters,
        "raised": window.raised,
        "made_anew": window.made_anew,
        "kept": window.kept,
        "skipped": window.skipped,
        "unreadable": window.unreadable,
        "is_closed": window.is_closed,
        "live": usage_or_none(window.live),
        "recorded": usage_or_none(window.recorded),
        "result": usage_or_none(window.result),
        "rise": usage_or_none(window.rise),
        "newest_source": moment_or_none(window.newest_source),
        "oldest_source": moment_or_none(window.oldest_source),
        "limit": usage_or_none(window.limit),
        "is_enforced": window.is_enforced,
        "blocked_before": window.blocked_before,
        "blocked_after": window.blocked_after,
        "is_truncated": point.is_truncated,
        "is_partial": point.is_partial,
        "omitted": [{"key": each.key, "reason": each.reason} for each in point.omitted],
        "omitted_count": point.omitted_count,
        "damaged_records": [moment_or_none(at) for at in point.corrupt],
        "notes": list(window_notes(window)),
    }


def _entry(entry: EntryPreview) -> Mapping[str, Any]:
    return {
        "tenant": entry.tenant,
        "budget": entry.of.budget,
        "window": entry.of.window.token,
        "entity": entry.entity,
        "live": usage_or_none(entry.live),
        "recorded": usage_or_none(entry.recorded),
        "result": usage_or_none(entry.result),
        "rise": usage_or_none(entry.rise),
        "action": entry.action,
        "source": moment_or_none(entry.source),
        "would_be_blocked": entry.blocks,
    }


def _difference(difference: Difference) -> Mapping[str, Any]:
    return {
        "tenant": difference.tenant,
        "budget": difference.of.budget,
        "window": difference.of.window.token,
        "entity": difference.entity,
        "change": difference.change,
        "previewed": usage_or_none(difference.previewed),
        "found": usage_or_none(difference.found),
    }


def _restored(tenant: TenantRestored) -> Mapping[str, Any]:
    return {
        "tenant": tenant.tenant,
        "raised": tenant.raised,
        "boards": tenant.boards,
        "windows": [_audit(each) for each in tenant.entries],
        "error": error_or_none(tenant.failure),
    }


def _audit(entry: AuditEntry) -> Mapping[str, Any]:
    return {
        "budget": entry.of.budget,
        "window": entry.of.window.token,
        "counters": entry.entries,
        "planned": entry.planned,
        "raised": entry.raised,
        "before": usage_or_none(entry.before),
        "after": usage_or_none(entry.after),
        "notes": entry.notes,
    }


_CHECKS = 10


def status_json(status: Status, exit_code: int) -> str:
    """Write the status; every key is always present."""
    good = status.newest_good
    return dumped(
        condition=status.condition,
        exit_code=exit_code,
        at=moment_or_none(status.at),
        state=status.recovery.state,
        doubts=list(doubts(status)),
        next_step=next_step(status),
        incident=_incident(status.recovery.incident, status.attempt),
        last_closed_incident=_incident(status.closed, None),
        checks={
            "interval_seconds": status.check_interval.total_seconds(),
            "unknown_in_a_row": status.unknown_in_a_row,
            "newest_good": _check(good) if good else None,
            "newest": [_check(each) for each in status.checks[:_CHECKS]],
        },
        points={
            "newest_snapshot_at": moment_or_none(status.newest_snapshot),
            "newest_by_tenant": _moments(status.newest_points),
            "damaged_records_by_tenant": status.damaged,
            "failing_tenants": _moments(status.failing),
        },
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
        doubts=[message],
        next_step=hint,
        incident=None,
        last_closed_incident=None,
        checks=None,
        points=None,
        error=error_or_none(error),
    )


def _incident(incident: Incident | None, attempt: Attempt | None) -> Mapping[str, Any] | None:
    if incident is None:
        return None
    waiting, held = incident.waiting, incident.held
    given_up, ended = incident.given_up, incident.ended
    uncovered = incident.uncovered
    return {
        "id": incident.incident_id,
        "opened_at": moment_or_none(incident.opened_at),
        "losses": [_loss(each) for each in incident.losses],
        "attempts": incident.attempts,
        "max_attempts": MAX_ATTEMPTS,
        "launches": incident.launches,
        "next_launch_at": moment_or_none(incident.next_launch_at),
        "newest_attempt": _attempt(attempt),
        "held": held
        and {
            "at": moment_or_none(held.at),
            "by": held.by,
            "reason": held.reason,
            "released_at": moment_or_none(incident.released_at) if not incident.is_held else None,
        },
        "waiting": waiting
        and {
            "since": moment_or_none(waiting.since),
            "reason": waiting.reason,
            "waits": waiting.waits,
        },
        "given_up": given_up
        and {
            "at": moment_or_none(given_up.at),
            "reason": given_up.reason,
            "detail": given_up.detail,
        },
        "ended": ended
        and {
            "at": moment_or_none(ended.at),
            "outcome": ended.outcome,
            "detail": ended.detail,
            "restored": asdict(ended.restored),
        },
        "newest_point_at": moment_or_none(incident.newest_point_at),
        "last_good_at": moment_or_none(incident.last_good_at),
        "uncovered_seconds": None if uncovered is None else uncovered.total_seconds(),
    }


def _loss(loss: Loss) -> Mapping[str, Any]:
    return {
        "found_at": moment_or_none(loss.found_at),
        "found_by": loss.found_by,
        "verdict": loss.verdict,
        "reason": loss.reason,
        "before": identity_or_none(loss.before),
        "after": identity_or_none(loss.after),
    }


def _attempt(attempt: Attempt | None) -> Mapping[str, Any] | None:
    if attempt is None:
        return None
    return {
        "loss": attempt.loss,
        "number": attempt.number,
        "run_id": attempt.run_id,
        "started_at": moment_or_none(attempt.started_at),
        "ended_at": moment_or_none(attempt.ended_at),
        "outcome": attempt.outcome,
    }


def _check(check: Check) -> Mapping[str, Any]:
    return {
        "checked_at": moment_or_none(check.checked_at),
        "checked_by": check.checked_by,
        "verdict": check.verdict,
        "reason": check.reason,
        "identity": identity_or_none(check.identity),
        "incident_id": check.incident_id,
    }


def _moments(by_tenant: Mapping[str, datetime | None]) -> Mapping[str, str | None]:
    return {tenant: moment_or_none(by_tenant[tenant]) for tenant in sorted(by_tenant)}
