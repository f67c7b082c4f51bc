"""What all runs of a recovery did together, told once for each budget and window."""

from collections.abc import Iterable
from dataclasses import replace

from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.restore_ports import AuditEntry, AuditTrail


def merged_entries(trails: Iterable[AuditTrail]) -> tuple[AuditEntry, ...]:
    """Merge trails, oldest first: from what was before the first to what was after the last.

    A counter that was raised, lost once more and raised again counts as one.
    """
    merged: dict[tuple[str, BudgetWindow], AuditEntry] = {}
    for trail in trails:
        for entry in trail.entries:
            key = entry.tenant, entry.of
            merged[key] = _after(merged[key], entry) if key in merged else entry
    return tuple(merged.values())


def _after(first: AuditEntry, last: AuditEntry) -> AuditEntry:
    raised = min(first.raised + last.raised, last.entries)
    return replace(last, before=first.before, raised=raised)
