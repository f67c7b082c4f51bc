"""The control plane in memory: a clock that is set by hand, and the state that the fakes share."""

import threading
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from budget_recovery_dagster.audit_ports import (
    AuditEntry,
    AuditTrail,
)
from budget_recovery_dagster.domain.admission import Holding
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.domain.moments import require_aware
from budget_recovery_dagster.domain.resets import Reset
from budget_recovery_dagster.domain.snapshots import BudgetRecord
from budget_recovery_dagster.ports import (
    CaptureFailure,
    CaptureSummary,
    NamedDrop,
    StoreRecord,
    Uncaptured,
)
from budget_recovery_dagster.recovery_ports import Attempt, Check


class ManualClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self, moment: datetime) -> None:
        self._moment = require_aware(moment)

    def now(self) -> datetime:
        """Return the present moment."""
        return self._moment

    def wait_until(self, moment: datetime) -> None:
        """Go on to ``moment`` at once, unless it has passed."""
        self._moment = max(self._moment, require_aware(moment))

    def set(self, moment: datetime) -> None:
        """Make it another moment, also an earlier one."""
        self._moment = require_aware(moment)

    def advance(self, duration: timedelta) -> None:
        """Let time pass."""
        self._moment += duration


@dataclass(slots=True)
class StoredSnapshot:
    """A snapshot as it is kept; pruning takes records out of it."""

    summary: CaptureSummary
    stored_at: datetime
    drops: tuple[NamedDrop, ...]
    records: dict[BudgetWindow, BudgetRecord]


@dataclass(frozen=True, slots=True)
class NotedFailure:
    """A failure as it is kept, under its run, kind and name."""

    failure: CaptureFailure
    failed_at: datetime


@dataclass(frozen=True, slots=True)
class KeptAudit:
    """An entry of a restore's trail as it is kept; not finished: the restore may have been cut off.

    ``trail`` has this one entry.
    """

    trail: AuditTrail
    entry: AuditEntry
    finished_at: datetime | None


@dataclass(slots=True)
class ControlPlane:
    """What the database would hold. ``lock`` stands in for its transactions."""

    clock: ManualClock
    lock: threading.RLock = field(default_factory=threading.RLock)
    store: StoreRecord | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    holdings: dict[str, Holding] = field(default_factory=dict)
    snapshots: dict[tuple[str, datetime], StoredSnapshot] = field(default_factory=dict)
    failures: dict[tuple[str, Uncaptured, str], NotedFailure] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    incidents: dict[str, Incident] = field(default_factory=dict)
    launches_before: dict[str, int] = field(default_factory=dict)
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    audits: dict[tuple[str, datetime, str, BudgetWindow], KeptAudit] = field(default_factory=dict)
    resets: list[Reset] = field(default_factory=list)

    def claimed_store(self) -> StoreRecord:
        """Return the store's record.

        Raises:
            RuntimeError: no store has been claimed.
        """
        if self.store is None:
            raise RuntimeError("no store has been claimed")
        return self.store
