"""What is kept of restores, for whoever asks later; as in ``ports``, with promises."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Protocol

from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.incident import Restored


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


class RestoreAudits(Protocol):
    """What restores did, for as long as the database lives.

    An entry is known by run, time, tenant, budget and window. How many counters of a window were
    raised in an incident is told of its entries in the order of time: an entry that is finished
    says it. One that was begun only, because the restore was cut off, raised what the next one had
    no longer to be raised; the last one, all that was planned. Counters that were raised, lost once
    more and raised again count once: there are no more than the newest entry has.
    """

    def begin(self, trail: AuditTrail) -> None:
        """Keep what a restore is about to do, before it writes anything.

        It takes the place of what was begun before under the same run, time, tenant, budget and
        window; what is finished stays.
        """
        ...

    def finish(self, trail: AuditTrail) -> None:
        """Keep what a restore did, in place of what it began; entries not begun are added."""
        ...

    def restored_in(self, incident_id: str) -> Restored:
        """Count what was raised in an incident; leaderboards are not audited, so 0 of them."""
        ...

    def largest(self, incident_id: str, count: int) -> MergedAudits:
        """Merge what was done to each budget and window in an incident, and return the largest.

        ``before`` is that of a window's first entry; all else, but ``raised``, that of its last
        one. Those that rose most come first; of equal rises those with notes, then by tenant,
        budget and window. No more than ``count`` are returned.
        """
        ...
