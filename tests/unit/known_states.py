"""Known states of a store for status tests, built without adapters."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import cast

from budget_recovery_dagster.domain import (
    MOST_AMOUNTS,
    Attempt,
    BudgetWindow,
    CaptureFailure,
    CaptureSource,
    Check,
    ConfigurationChange,
    Damage,
    Ended,
    FailingTenant,
    Fall,
    Hour,
    Incident,
    IncidentAmounts,
    KeyCount,
    LeaseState,
    ListedSnapshot,
    Loss,
    Outcome,
    RecordedRun,
    Recovery,
    RecoveryState,
    Restored,
    RunOutcome,
    RunResult,
    Stopped,
    StoreIdentity,
    TenantUsages,
    TenantWindow,
    Verdict,
    Window,
    is_in_the_future,
)
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.services import VERIFY_WITHIN, Status, read_status
from tests.fakes.control_plane import ManualClock, MemoryLeases, MemoryRestoreAudits
from tests.fakes.falls import MemoryFalls
from tests.fakes.incidents import MemoryIncidents, MemoryStoreRegistry
from tests.fakes.plane import MemoryControlPlane
from tests.fakes.snapshots import MemoryCaptureReports, MemoryRecoveryPoints, MemorySnapshots

NOW = datetime(2026, 11, 30, 8, 31, 2, tzinfo=UTC)
INTERVAL = timedelta(minutes=10)
# More than a double represents exactly.
LARGE = 2**53 + 1
IDENTITY = StoreIdentity(datetime(2026, 11, 1, tzinfo=UTC), LARGE)


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def check(minutes: float, verdict: Verdict = Verdict.SAME, reason: str = "As it was.") -> Check:
    return Check(ago(minutes), "store_loss_sensor", verdict, reason, IDENTITY)


def unknown(minutes: float) -> Check:
    return check(minutes, Verdict.UNKNOWN, "No answer came.")


def loss(minutes: float, reason: str = "The store was recreated.") -> Loss:
    return Loss(ago(minutes), "store_loss_sensor", Verdict.LOST, reason, IDENTITY, None)


def incident(minutes: float = 9, **fields: object) -> Incident:
    """Return an incident opened so many minutes ago, 15 minutes after the last snapshot."""
    given: dict[str, object] = {
        "incident_id": f"{minutes:08.0f}-2222-4333-8444-555555555555",
        "opened_at": ago(minutes),
        "losses": (loss(minutes),),
        "target": None,
        "newest_point_at": ago(minutes + 22),
        "last_good_at": ago(minutes + 7),
        **fields,
    }
    return Incident(**given)  # type: ignore[arg-type]


def closed(minutes: float, *, lasted: float = 1) -> Incident:
    """Return an incident that ended so many minutes ago."""
    ended = Ended(ago(minutes), Outcome.RESTORED, "All is back.", Restored(3, 19, 1312, 19))
    return incident(minutes + lasted, ended=ended)


def fall(tenant: str, budget: str, counters: int, usage: str) -> Fall:
    """Return a fall that was found an hour ago, and judged again since."""
    at = TenantWindow(tenant, BudgetWindow(budget, Window.parse("2026-11")))
    return Fall(at, ago(60), ago(1), counters, Decimal(usage))


def gone(tenant: str, missing: int) -> KeyCount:
    at = TenantWindow(tenant, BudgetWindow("team", Window.parse("lifetime")))
    return KeyCount(at, 7, 100, ago(1), missing, ago(1))


def run(
    minutes: float,
    outcome: RunOutcome | None = RunOutcome.STORED,
    *,
    skew: float | None = 0,
    error: Stopped | None = None,
) -> RecordedRun:
    """Return a capture that began so many minutes ago, and ended at once if it has an outcome."""
    at = ago(minutes)
    begun = RecordedRun(f"run {minutes}", Hour.containing(at), at)
    if outcome is None:
        return begun
    counts = (3, 1, 0) if outcome is RunOutcome.STORED else (0, 0, 3)
    measured = None if skew is None else timedelta(seconds=skew)
    return replace(begun, ended_at=at, result=RunResult(outcome, *counts, error, measured))


def recovering(open_one: Incident) -> Recovery:
    return Recovery(RecoveryState.RECOVERING, open_one)


def failed(open_one: Incident) -> Recovery:
    return Recovery(RecoveryState.FAILED, open_one)


@dataclass
class Known:
    """Incidents, checks, points and clock in one fake, as far as a status reads them.

    Reading newest points and verifying records each ``takes`` a time; ``failure`` ends the latter.
    """

    recovered: Recovery = field(default_factory=lambda: Recovery(RecoveryState.HEALTHY, None))
    attempts: tuple[Attempt, ...] = ()
    worker: str | None = None
    incidents: tuple[Incident, ...] = ()
    checks: tuple[Check, ...] = ()
    older_good: Check | None = None
    points: Mapping[str, datetime] = field(default_factory=dict)
    damaged: Mapping[str, int] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()
    failure: DatabaseError | None = None
    takes: timedelta = timedelta(0)
    snapshots: Mapping[str, datetime] = field(default_factory=dict)
    failing_tenants: Mapping[str, datetime | None] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    failed_at: datetime = NOW
    absent: frozenset[str] = frozenset()
    was_reset: frozenset[str] = frozenset()
    runs: tuple[RecordedRun, ...] = ()
    failures: Mapping[str, tuple[CaptureFailure, ...]] = field(default_factory=dict)
    first_checked_at: datetime | None = None
    falls: tuple[Fall, ...] = ()
    gone: tuple[KeyCount, ...] = ()
    changes: tuple[ConfigurationChange, ...] = ()
    amounts: IncidentAmounts = field(default_factory=IncidentAmounts)

    def status(self) -> Status:
        empty = MemoryControlPlane.at(NOW)
        plane = replace(
            empty,
            incidents=cast(MemoryIncidents, _Incidents(self)),
            audits=cast(MemoryRestoreAudits, _Audits(self)),
            registry=cast(MemoryStoreRegistry, _Checks(self)),
            points=cast(MemoryRecoveryPoints, _Points(self, empty.clock)),
            reports=cast(MemoryCaptureReports, _Reports(self)),
            snapshots=cast(MemorySnapshots, _Snapshots(self)),
            leases=cast(MemoryLeases, _Leases(self)),
            falls=cast(MemoryFalls, _Falls(self)),
        )
        return read_status(plane, check_interval=INTERVAL)


@dataclass
class _Falls:
    known: Known

    def open(self) -> tuple[Fall, ...]:
        return self.known.falls

    def counts(self) -> tuple[tuple[KeyCount, ...], int | None]:
        return self.known.gone, None

    def configuration_changes(self, since: datetime) -> tuple[ConfigurationChange, ...]:
        assert since == ago(24 * 60)
        return self.known.changes


@dataclass
class _Audits:
    known: Known

    def amounts_in(self, _incident_id: str, count: int) -> IncidentAmounts:
        assert count == MOST_AMOUNTS
        return self.known.amounts


@dataclass
class _Leases:
    known: Known

    def state_of(self, name: str) -> LeaseState:
        assert name == "restore"
        return LeaseState(1, self.known.worker)


@dataclass
class _Incidents:
    """The reading half; a status that wrote anything would fail here."""

    known: Known

    def recovery(self) -> Recovery:
        return self.known.recovered

    def recent(self, count: int) -> tuple[Incident, ...]:
        open_one = self.known.recovered.incident
        return ((open_one,) if open_one else ()) + self.known.incidents[:count]

    def attempts_of(self, incident_id: str) -> tuple[Attempt, ...]:
        return tuple(each for each in self.known.attempts if each.incident_id == incident_id)


@dataclass
class _Checks:
    known: Known

    def newest_checks(self, count: int) -> tuple[Check, ...]:
        return self.known.checks[:count]

    def first_checked_at(self) -> datetime | None:
        return self.known.first_checked_at or min(
            (each.checked_at for each in self.known.checks), default=None
        )

    def newest_good_check(self) -> Check | None:
        good = (each for each in self.known.checks if each.verdict.is_good)
        return next(good, self.known.older_good)


@dataclass
class _Points:
    """Verification takes its time; at its end, a snapshot and a check are recorded."""

    known: Known
    clock: ManualClock

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        assert now == self.clock.now()
        points = self.known.points
        self._pass_time()
        return points

    def current_usages(self, tenant: str, now: datetime) -> TenantUsages:
        assert now <= self.clock.now()
        if tenant in self.known.was_reset:
            return {}
        return {BudgetWindow("team", Window.parse("lifetime")): {None: Decimal(80)}}

    def _pass_time(self) -> None:
        if self.known.takes:
            self.clock.advance(self.known.takes)
            at = self.clock.now()
            good = Check(at, "store_loss_sensor", Verdict.SAME, "As it was.", IDENTITY)
            self.known.checks = (good, *self.known.checks)
            self.known.snapshots = {**self.known.snapshots, "a": at}

    def damaged(
        self, now: datetime, *, tenant: str | None = None, within: timedelta | None = None
    ) -> Damage:
        assert (now, tenant, within) == (self.clock.now(), None, VERIFY_WITHIN)
        self._pass_time()
        if self.known.failure is not None:
            raise self.known.failure
        return Damage(self.known.damaged, self.known.unverified)


@dataclass
class _Snapshots:
    known: Known

    def in_future(self, now: datetime) -> tuple[ListedSnapshot, ...]:
        times = {**self.known.points, **self.known.snapshots}.values()
        return tuple(
            ListedSnapshot(at, CaptureSource.COUNTERS, 1, 1, 1, 0, 0, 0, None, 0, is_pruned=False)
            for at in sorted(times, reverse=True)
            if is_in_the_future(at, now)
        )


@dataclass
class _Reports:
    known: Known

    def newest_snapshots(self) -> Mapping[str, datetime]:
        return {**self.known.points, **self.known.snapshots}

    def failing(self) -> Mapping[str, FailingTenant]:
        known = self.known
        return {
            tenant: FailingTenant(
                at, known.failed_at, known.reasons.get(tenant, "Not permitted."), "grant it."
            )
            for tenant, at in known.failing_tenants.items()
        }

    def absent(self) -> frozenset[str]:
        return self.known.absent

    def newest_runs(self, count: int) -> tuple[RecordedRun, ...]:
        return self.known.runs[:count]

    def failures_of(self, run_id: str) -> tuple[CaptureFailure, ...]:
        return self.known.failures.get(run_id, ())
