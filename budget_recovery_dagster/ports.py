"""What the services need from the outside world; each method states its promise.

Every method may raise the errors of its adapter's kind (StoreError, DatabaseError); others are
named. All moments are aware and in UTC.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from budget_recovery_dagster.domain.counters import UnreadableKey
from budget_recovery_dagster.domain.detection import Sighting
from budget_recovery_dagster.domain.identity import Baseline, StoreIdentity
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.recovery_point import RecoveryPoint
from budget_recovery_dagster.domain.retention import RetentionPolicy
from budget_recovery_dagster.domain.snapshots import (
    CaptureSource,
    TenantReading,
    TenantSnapshot,
)


@dataclass(frozen=True, slots=True)
class TenantListing:
    """The tenants that have keys of a source in the store, and keys that name no tenant."""

    tenants: frozenset[str]
    unreadable: tuple[UnreadableKey, ...]


class TenantReader(Protocol):
    """Reads tenants from one source of the store; reading leaves nothing behind in it."""

    def list_tenants(self) -> TenantListing:
        """List the tenants by their keys."""
        ...

    def read(self, tenant: str) -> TenantReading:
        """Read a tenant's counters from every key of the source that existed before the call.

        Values are of different moments during the call. A tenant without keys is an empty reading.

        Raises:
            StoreReadError: the reading could not be brought to its end in time.
        """
        ...


class UsageStore(Protocol):
    """The gateway's store of counters."""

    def look(self, deployment_id: str) -> Sighting:
        """Read identity and marker from the stream's leader.

        Raises:
            StoreMissingError: the cluster says that the bucket does not exist.
            StorePermissionError: the marker may not be read.
        """
        ...

    def now(self) -> datetime | None:
        """Return the time of the stream's leader; None where its server does not tell."""
        ...

    def reader(self, source: CaptureSource) -> TenantReader:
        """Return a reader of one source, good for as long as the store is open."""
        ...


class Clock(Protocol):
    """Tells the time by which windows and hours are judged."""

    def now(self) -> datetime:
        """Return the present moment."""
        ...

    def wait_until(self, moment: datetime) -> None:
        """Return once ``now`` is not before ``moment``."""
        ...


class Lease(Protocol):
    """Work that only one may do at a time, for as long as it is held."""

    @property
    def name(self) -> str:
        """What is leased."""
        ...

    @property
    def token(self) -> int:
        """The fencing token: higher with every taking of this lease."""
        ...

    def require_held(self) -> None:
        """Check, without I/O, that renewal has not failed.

        Raises:
            LeaseLostError: the lease has expired or was taken over.
        """
        ...


@dataclass(frozen=True, slots=True)
class LeaseStanding:
    """How a lease stands: the token of its last taking, and who holds it, None if nobody does."""

    token: int
    holder: str | None


class Leases(Protocol):
    """Gives out leases that expire by the database's clock if their holder dies."""

    def look(self, name: str) -> LeaseStanding:
        """Return how a lease stands, without touching it."""
        ...

    def hold(
        self, name: str, holder: str, *, at_most: timedelta | None = None
    ) -> AbstractContextManager[Lease]:
        """Hold a lease, renewed in the background, until the context ends.

        After ``at_most`` it is not renewed any more, so that work which hangs loses it.

        Raises:
            LeaseHeldError: another holder has it, also where that is this same process.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """What the control-plane database knows of the one store that it belongs to."""

    bucket: str
    deployment_id: str
    state: RecoveryState
    baseline: Baseline | None


class StoreRegistry(Protocol):
    """The row about the store: state and baseline."""

    def claim(self, bucket: str) -> StoreRecord:
        """Return the store's record, making it at first use.

        Raises:
            SettingsError: this database schema already belongs to another bucket.
        """
        ...


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """A tenant's stored snapshot, without its records; of very many unreadable keys, the first.

    ``truncated_count`` is of the records that are still retained.
    """

    tenant: str
    captured_at: datetime
    source: CaptureSource
    identity: StoreIdentity
    run_id: str
    record_count: int
    entry_count: int
    omitted_count: int
    drop_count: int
    truncated_count: int
    unreadable_count: int
    unreadable: tuple[UnreadableKey, ...]
    is_partial: bool


@dataclass(frozen=True, slots=True)
class NamedDrop:
    """A stored drop, as text for people; usages in plain digits."""

    tenant: str
    budget: str
    window: str
    entity: str | None
    before: str
    after: str | None


@dataclass(frozen=True, slots=True)
class NamedOmission:
    """A stored omission: a counter's key, and why its value could not be read."""

    tenant: str
    key: str
    reason: str


class Uncaptured(StrEnum):
    """What a run could not capture."""

    TENANT = "tenant"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class CaptureFailure:
    """A tenant of which a run stored nothing, or a key that names no tenant, and why."""

    name: str
    hour: Hour
    reason: str
    hint: str
    kind: Uncaptured = Uncaptured.TENANT


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune removed."""

    records: int
    captures: int
    contents: int
    failures: int


class Snapshots(Protocol):
    """The stored snapshots of all tenants."""

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained snapshot."""
        ...

    def newest_identity(self) -> StoreIdentity | None:
        """Return the identity stored with the newest snapshot of any tenant."""
        ...

    def recovery_point(self, tenant: str, now: datetime) -> RecoveryPoint:
        """Return the best known usages of the windows that are current at ``now``."""
        ...

    def commit(
        self,
        snapshot: TenantSnapshot,
        *,
        hour: Hour,
        run_id: str,
        lease: Lease,
        judged: Baseline | None,
    ) -> Baseline:
        """Store a snapshot and accept its identity as the baseline, all or nothing.

        Returns the baseline that now holds.

        Raises:
            LeaseLostError: the lease is no longer held.
            CapturesPausedError: the store is not Healthy.
            HourClosedError: the hour is past.
            BaselineMovedError: the baseline is not the ``judged`` one any more.
            NotNewerError: the tenant has a snapshot at or after this one's time.
        """
        ...

    def record_failures(self, failures: Collection[CaptureFailure], *, run_id: str) -> None:
        """Note what a run could not capture."""
        ...

    def prune(
        self, tenants: Collection[str], *, policy: RetentionPolicy, now: datetime, lease: Lease
    ) -> PruneReport:
        """Remove what is past retention, of these tenants only, and no current recovery point.

        Notes of failures are removed by age alone.

        Raises:
            LeaseLostError: the lease is no longer held; nothing was removed.
            CapturesPausedError: the store is not Healthy; nothing was removed.
        """
        ...


class CaptureReports(Protocol):
    """What runs have captured, for people and checks."""

    def captured_in(self, hour: Hour) -> tuple[CaptureSummary, ...]:
        """Return the snapshots captured in an hour, by tenant and time."""
        ...

    def captured_by(self, run_id: str) -> tuple[CaptureSummary, ...]:
        """Return the snapshots that a run stored, by tenant."""
        ...

    def failures_of(self, run_id: str) -> tuple[CaptureFailure, ...]:
        """Return what a run could not capture: tenants, then keys, each by name."""
        ...

    def drops_of(self, run_id: str) -> tuple[NamedDrop, ...]:
        """Return the drops named by the snapshots of a run; long lists are cut when stored."""
        ...

    def omissions_of(self, run_id: str) -> tuple[NamedOmission, ...]:
        """Return the omissions named by a run's snapshots; long lists are cut when stored."""
        ...

    def newest_run(self, hour: Hour) -> str | None:
        """Return the run that stored a snapshot of an hour, or noted a failure in it, last."""
        ...

    def damaged_in(self, hour: Hour) -> tuple[str, ...]:
        """Verify the stored snapshots of an hour; name, in a sentence each, what does not hold."""
        ...
