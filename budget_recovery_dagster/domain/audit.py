"""The audit of restores: counters before and after, by tenant, budget and window."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from budget_recovery_dagster.domain.counters import BudgetWindow


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What one restore does to one budget and window of a tenant, or did.

    ``point_at`` is the newest snapshot that it is restored from. Of its ``entries``, ``planned``
    are the counters that were to be raised, and ``raised`` those that were. ``before`` and
    ``after`` are the sums of its counters that were read before and after; of a restore that has
    only begun, ``after`` is what the sum will be. ``notes`` name what was left, and why.
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
    """The entries of one restore, and who restores, why, in which run, and when.

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
    """What all restores of an incident did together, told once for each budget and window.

    ``windows`` is how many there are, ``before`` and ``after`` are the sums over all of them, and
    ``largest`` has those that rose most.
    """

    windows: int
    before: Decimal
    after: Decimal
    largest: tuple[AuditEntry, ...]
