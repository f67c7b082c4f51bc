"""The audit of restores: counters before and after, by tenant, budget and window."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from budget_recovery_dagster.domain.counters import BudgetWindow


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What one restore plans for, or did to, one budget and window of a tenant.

    ``point_at`` is the newest source snapshot. ``entries`` counts the counters, ``planned`` those
    to raise, and ``raised`` those that were raised. ``before`` and ``after`` are the sums of the
    counters that were read before and after; ``after`` is the planned sum until the restore ends.
    ``notes`` name the counters that were skipped, and why.
    """

    tenant: str
    of: BudgetWindow
    point_at: datetime
    entries: int
    planned: int
    raised: int
    kept: int
    skipped: int
    before: Decimal
    after: Decimal
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AuditTrail:
    """The entries of one restore, with who restores, why, in which run, and when.

    Each tenant, budget and window has at most one entry.
    """

    at: datetime
    run_id: str
    who: str
    why: str
    incident_id: str | None
    entries: tuple[AuditEntry, ...]


@dataclass(frozen=True, slots=True)
class MergedAudits:
    """What all restores of an incident did together, merged by budget and window.

    ``windows`` counts them, ``before`` and ``after`` are the sums over all of them, and
    ``largest`` has those that rose most.
    """

    windows: int
    before: Decimal
    after: Decimal
    largest: tuple[AuditEntry, ...]
