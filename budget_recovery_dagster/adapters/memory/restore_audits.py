"""What restores did, in memory."""

from collections import defaultdict
from dataclasses import replace
from datetime import datetime
from decimal import Decimal

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane, KeptAudit
from budget_recovery_dagster.adapters.stored_recovery import storable_trail
from budget_recovery_dagster.audit_ports import (
    AuditEntry,
    AuditTrail,
    MergedAudits,
)
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.incident import Restored
from budget_recovery_dagster.domain.usage_sums import exact_sum


class MemoryRestoreAudits:
    """Audit trails that are forgotten with their control plane."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    def begin(self, trail: AuditTrail) -> None:
        """Keep what a restore is about to do; what is finished stays."""
        self._keep(trail, finished_at=None)

    def finish(self, trail: AuditTrail) -> None:
        """Keep what a restore did, in place of what it began; entries not begun are added."""
        self._keep(trail, finished_at=self._plane.clock.now())

    def restored_in(self, incident_id: str) -> Restored:
        """Count what was raised in an incident; leaderboards are not audited, so 0 of them."""
        raised = [entry for entry in self._merged(incident_id) if entry.raised]
        return Restored(
            tenants=len({entry.tenant for entry in raised}),
            windows=len(raised),
            counters=sum(entry.raised for entry in raised),
        )

    def largest(self, incident_id: str, count: int) -> MergedAudits:
        """Merge what was done to each budget and window in an incident, and return the largest."""
        merged = self._merged(incident_id)
        return MergedAudits(
            windows=len(merged),
            before=exact_sum(entry.before for entry in merged),
            after=exact_sum(entry.after for entry in merged),
            largest=tuple(sorted(merged, key=_rank)[:count]),
        )

    def _keep(self, trail: AuditTrail, *, finished_at: datetime | None) -> None:
        kept = storable_trail(trail)
        with self._plane.lock:
            for entry in kept.entries:
                key = kept.run_id, kept.at, entry.tenant, entry.of
                known = self._plane.audits.get(key)
                if finished_at is None and known is not None and known.finished_at is not None:
                    continue
                self._plane.audits[key] = KeptAudit(
                    replace(kept, entries=(entry,)), entry, finished_at
                )

    def _merged(self, incident_id: str) -> list[AuditEntry]:
        windows: defaultdict[tuple[str, BudgetWindow], list[KeptAudit]] = defaultdict(list)
        with self._plane.lock:
            for audit in self._plane.audits.values():
                if audit.trail.incident_id == incident_id:
                    windows[audit.entry.tenant, audit.entry.of].append(audit)
        return [
            _merge(sorted(audits, key=lambda audit: audit.trail.at)) for audits in windows.values()
        ]


def _merge(audits: list[KeptAudit]) -> AuditEntry:
    """Make one entry of those of a budget and window, which come in the order of time."""
    last = audits[-1].entry
    planned_next = [*(audit.entry.planned for audit in audits[1:]), 0]
    raised = sum(
        max(audit.entry.planned - planned, 0) if audit.finished_at is None else audit.entry.raised
        for audit, planned in zip(audits, planned_next, strict=True)
    )
    return replace(last, before=audits[0].entry.before, raised=min(raised, last.entries))


def _rank(entry: AuditEntry) -> tuple[Decimal, bool, str, str, str]:
    fall = exact_sum((entry.before, entry.after.copy_negate()))
    return fall, not entry.notes, entry.tenant, entry.of.budget, entry.of.window.token
