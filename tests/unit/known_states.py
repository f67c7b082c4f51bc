"""Known states of a store for status tests, built without adapters."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import cast

from budget_recovery_dagster.domain import (
    Attempt,
    Check,
    Ended,
    Incident,
    LeaseState,
    Loss,
    Outcome,
    Recovery,
    RecoveryState,
    Restored,
    StoreIdentity,
    Verdict,
)
from budget_recovery_dagster.services import Status, read_status
from tests.fakes.control_plane import MemoryLeases
from tests.fakes.incidents import MemoryIncidents, MemoryStoreRegistry
from tests.fakes.plane import MemoryControlPlane
from tests.fakes.snapshots import MemoryCaptureReports, MemoryRecoveryPoints

NOW = datetime(2026, 11, 30, 8, 31, 2, tzinfo=UTC)
INTERVAL = timedelta(minutes=10)
# More than a double represents exactly.
LARGE = 2**53 + 1
IDENTITY = StoreIdentity(datetime(2026, 11, 1, tzinfo=UTC), LARGE)


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def check(minutes: float, verdict: Verdict = Verdict.ADVANCED, reason: str = "As it was.") -> Check:
    return Check(ago(minutes), "store_loss_sensor", verdict, reason, IDENTITY)


def unknown(minutes: float) -> Check:
    return check(minutes, Verdict.UNKNOWN, "No answer came.")


def loss(minutes: float, reason: str = "The store was recreated.") -> Loss:
    return Loss(ago(minutes), "store_loss_sensor", Verdict.RECREATED, reason, IDENTITY, None)


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


def recovering(open_one: Incident) -> Recovery:
    return Recovery(RecoveryState.RECOVERING, open_one)


def failed(open_one: Incident) -> Recovery:
    return Recovery(RecoveryState.FAILED, open_one)


@dataclass
class Known:
    """Incidents, checks, points and clock in one fake, as far as a status reads them."""

    recovered: Recovery = field(default_factory=lambda: Recovery(RecoveryState.HEALTHY, None))
    attempts: tuple[Attempt, ...] = ()
    worker: str | None = None
    incidents: tuple[Incident, ...] = ()
    checks: tuple[Check, ...] = ()
    older_good: Check | None = None
    points: Mapping[str, datetime] = field(default_factory=dict)
    damaged: Mapping[str, int] = field(default_factory=dict)
    snapshots: Mapping[str, datetime] = field(default_factory=dict)
    failing_tenants: Mapping[str, datetime | None] = field(default_factory=dict)

    def status(self) -> Status:
        plane = replace(
            MemoryControlPlane.at(NOW),
            incidents=cast(MemoryIncidents, _Incidents(self)),
            registry=cast(MemoryStoreRegistry, _Checks(self)),
            points=cast(MemoryRecoveryPoints, _Points(self)),
            reports=cast(MemoryCaptureReports, _Reports(self)),
            leases=cast(MemoryLeases, _Leases(self)),
        )
        return read_status(plane, check_interval=INTERVAL)


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

    def newest_good_check(self) -> Check | None:
        good = (each for each in self.known.checks if each.verdict.is_good)
        return next(good, self.known.older_good)


@dataclass
class _Points:
    known: Known

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        assert now == NOW
        return self.known.points

    def damaged(self, now: datetime) -> Mapping[str, int]:
        assert now == NOW
        return self.known.damaged


@dataclass
class _Reports:
    known: Known

    def newest_snapshots(self) -> Mapping[str, datetime]:
        return {**self.known.points, **self.known.snapshots}

    def failing(self) -> Mapping[str, datetime | None]:
        return self.known.failing_tenants
