"""A preview and an applied restore as JSON; see ``json_values``."""

from collections.abc import Mapping
from typing import Any

from budget_recovery_dagster.audit_ports import (
    AuditEntry,
)
from budget_recovery_dagster.cli.json_values import (
    dumped,
    identity_or_none,
    moment_or_none,
    usage_or_none,
)
from budget_recovery_dagster.domain.plan_differences import Difference
from budget_recovery_dagster.domain.restore_choice import RestoreChoice
from budget_recovery_dagster.services.manual_restore import Applied
from budget_recovery_dagster.services.preview import Preview, TenantPreview
from budget_recovery_dagster.services.remainder import Remainder
from budget_recovery_dagster.services.tenant_restore import TenantRestored
from budget_recovery_dagster.services.window_preview import EntryPreview, WindowPreview


def preview_json(preview: Preview) -> str:
    """Write a preview; ``entries`` are there where one tenant was chosen."""
    incident = preview.recovery.incident
    return dumped(
        preview_id=preview.preview_id,
        at=moment_or_none(preview.at),
        choice=_choice(preview.choice),
        state=preview.recovery.state,
        incident_id=incident.incident_id if incident else None,
        store=identity_or_none(preview.identity),
        warnings=preview.warnings,
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
        left=left_of(remainder),
        error=applied.failure
        and {"message": applied.failure.message, "hint": applied.failure.hint},
    )


def left_of(remainder: Remainder | None) -> Mapping[str, Any] | None:
    """Write what keeps an incident open, or was left at its end; None: it was not looked at."""
    if remainder is None:
        return None
    return {
        "counters": remainder.counters,
        "unreadable": remainder.unreadable,
        "windows_unknown": remainder.unsound,
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
    failure = tenant.failure
    return {
        "tenant": tenant.tenant,
        "point_at": moment_or_none(tenant.point_at),
        "is_partial": tenant.is_partial,
        "unreadable_keys": [{"key": k.key, "reason": k.reason} for k in tenant.unreadable],
        "unreadable_count": tenant.unreadable_count,
        "windows": [_window(each) for each in tenant.windows],
        "entries": [_entry(each) for each in tenant.entries],
        "error": failure and {"message": failure[0], "hint": failure[1]},
    }


def _window(window: WindowPreview) -> Mapping[str, Any]:
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
        "is_truncated": window.is_truncated,
        "is_partial": window.is_partial,
        "omitted": [{"key": each.key, "reason": each.reason} for each in window.omitted],
        "omitted_count": window.omitted_count,
        "damaged_records": [moment_or_none(at) for at in window.corrupt],
        "notes": window.notes,
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
    failure = tenant.failure
    return {
        "tenant": tenant.tenant,
        "raised": tenant.raised,
        "boards": tenant.boards,
        "windows": [_audit(each) for each in tenant.entries],
        "error": failure and {"message": failure.message, "hint": failure.hint},
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
