"""What the services need from the outside world; each method states its promise.

Every method may raise the errors of its adapter's kind (StoreError, DatabaseError); others are
named. All times are aware and in UTC. Whoever moves the recovery state names what it was judged
against; if that has moved, nothing is changed and the error says so.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Protocol

from budget_recovery_dagster.domain.audit import AuditTrail, MergedAudits
from budget_recovery_dagster.domain.budgets import BudgetDefinition
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    RecoveryPoint,
    UnreadableKey,
    Usages,
    ValueShape,
)
from budget_recovery_dagster.domain.incident import (
    Attempt,
    Closing,
    FailureReason,
    Incident,
    Loss,
    Recovery,
    RecoveryState,
    Restored,
)
from budget_recovery_dagster.domain.plan import KeptPreview, PlannedEntry, RestoreChoice
from budget_recovery_dagster.domain.recovery_point import TenantPoint
from budget_recovery_dagster.domain.resets import Reset
from budget_recovery_dagster.domain.snapshots import (
    CaptureFailure,
    CaptureSource,
    CaptureSummary,
    ListedSnapshot,
    NamedDrop,
    NamedOmission,
    PruneReport,
    RetentionPolicy,
    StoredRecord,
    TenantReading,
    TenantSnapshot,
)
from budget_recovery_dagster.domain.store import (
    Baseline,
    Check,
    ClusterView,
    Marker,
    Observation,
    StoreIdentity,
)
from budget_recovery_dagster.domain.windows import Hour, Window


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
class LeaseState:
    """How a lease stands: the token of its last taking, and who holds it, None if nobody does."""

    token: int
    holder: str | None


class Leases(Protocol):
    """Gives out leases that expire by the database's clock if their holder dies."""

    def state_of(self, name: str) -> LeaseState:
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
    """The row about the one store of this database: state, accepted baseline, and its checks.

    The baseline moves only while the store is HEALTHY. Checks of the last 30 days are kept.
    """

    def claim(self) -> StoreRecord:
        """Return the store's record, making it at first use.

        Raises:
            SettingsError: this database schema already belongs to another bucket.
        """
        ...

    def intend_marker(self, nonce: str, *, judged: Baseline) -> Baseline:
        """Record that a marker with this nonce may be written from now on; a new version.

        Raises:
            BaselineMovedError: the baseline is not the ``judged`` one any more.
            CapturesPausedError: the store is not HEALTHY.
        """
        ...

    def accept(self, baseline: Baseline, *, judged: Baseline | None) -> Baseline:
        """Replace the baseline; its version is one above that of the judged one.

        Raises:
            BaselineMovedError, CapturesPausedError: as ``intend_marker``.
        """
        ...

    def record_check(self, check: Check) -> None:
        """Record a check, and remove old ones, but not the newest good one."""
        ...

    def newest_checks(self, count: int) -> tuple[Check, ...]:
        """Return the newest checks, newest first."""
        ...

    def newest_good_check(self) -> Check | None:
        """Return the newest check that identified the store as the accepted one."""
        ...


class Snapshots(Protocol):
    """The stored snapshots of all tenants."""

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained snapshot."""
        ...

    def newest_identity(self) -> StoreIdentity | None:
        """Return the identity stored with the newest snapshot of any tenant."""
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


class SnapshotList(Protocol):
    """Which snapshots there are to restore from."""

    def all(self, tenant: str | None) -> tuple[ListedSnapshot, ...]:
        """Return a tenant's snapshots, or of None all tenants' by their moments; newest first.

        All tenants that a run captures have one moment. Of the rare one that has snapshots of two
        sources, each source is told by itself.
        """
        ...

    def budgets_of(self, tenant: str) -> tuple[str, ...]:
        """Return the budgets of a tenant that have a retained record, by name."""
        ...


class RetainedSnapshots(Protocol):
    """The snapshots that are within retention, whole.

    One of which retention has removed records and kept those that a recovery point needs is none.
    """

    def tenants_in(self, hour: Hour) -> tuple[str, ...]:
        """Return the tenants that have a retained snapshot of an hour, by name."""
        ...

    def hours_of(self, tenants: Collection[str]) -> Mapping[str, frozenset[Hour]]:
        """Return the hours of which these tenants have a retained snapshot; none: no key."""
        ...

    def records_of(
        self, tenant: str, hour: Hour
    ) -> AbstractContextManager[Iterator[StoredRecord] | None]:
        """Give the records of a tenant's retained snapshots of an hour, read as they are used.

        They come by time, budget and window token. All are of one moment of the database. None
        means that no such snapshot is retained, or not any more.
        """
        ...


class RecoveryPoints(Protocol):
    """What a restore would bring back, from intact records alone.

    A damaged record, whose usages do not match the hash of what was captured, adds nothing and
    covers no earlier one; each point names those that were met. Usages that resets exclude are left
    out. A window is current at ``now`` if usage still counts into it.
    """

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained record of any budget, intact or damaged."""
        ...

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        """Read a tenant's recovery point; None where no snapshot of the tenant is retained."""
        ...

    def snapshot_of(self, tenant: str, captured_at: datetime) -> TenantPoint | None:
        """Read the records of one snapshot of a tenant, and no others; None: there is none.

        Shape and expiry come from the newest record that has them, as in a recovery point.

        Raises:
            DatabaseError: it has a record of an invalid window.
        """
        ...

    def despite_resets(self) -> "RecoveryPoints":
        """Return the same points as if no reset had been recorded."""
        ...

    def current_usages(self, tenant: str, now: datetime) -> RecoveryPoint:
        """Read only the usages of a tenant's current windows; of a window without any, no key."""
        ...

    def newest_snapshots(self) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest snapshot, of all that have one."""
        ...

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest intact record of a window current at ``now``.

        A tenant without such a record is not in it.
        """
        ...

    def damaged(self, now: datetime) -> Mapping[str, int]:
        """Count the damaged records in the current windows of each tenant that has any.

        They are those that ``point_of`` names. Every content of a current window is verified, so
        this takes about as long as reading all points, but little memory.
        """
        ...

    def failing(self) -> Mapping[str, datetime | None]:
        """Return the tenants whose last capture failed, with the time of their newest snapshot.

        None: there is no snapshot of the tenant.
        """
        ...


@dataclass(frozen=True, slots=True)
class TableFile:
    """A table as it was written; ``path`` for people, ``size`` in bytes."""

    path: str
    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class RemovedTables:
    """Which tables were removed, and of which that failed, in a sentence each."""

    removed: int
    failures: tuple[str, ...]


class OpenedTables(Protocol):
    """The tables of tenants, while nobody else writes them."""

    def write(self, tenant: str, hour: Hour, records: Iterable[StoredRecord]) -> TableFile:
        """Write a tenant's table of an hour, in the order of ``records``; replace an earlier one.

        Either the whole table stands under its name at the end, or what stood there before. Equal
        records give an equal file.

        Raises:
            TablesError: it could not be written.
        """
        ...

    def keep_only(self, retained: Iterable[tuple[str, Collection[Hour]]]) -> RemovedTables:
        """Remove the tables of all but these hours of these tenants, and leftovers of dead runs.

        What was not written by ``write`` is left alone.
        """
        ...


class UsageTables(Protocol):
    """The place where the tables of tenants lie."""

    @property
    def place(self) -> str:
        """Where that is, for people."""
        ...

    def opened(self, owner: str) -> AbstractContextManager[OpenedTables]:
        """Have the tables for this process alone; wait for whoever has them.

        ``owner`` is the id of the installation, whose they are from then on.

        Raises:
            TablesError: the place cannot be used, or others have it for too long.
            ForeignTablesError: the tables are another installation's.
        """
        ...


class Incidents(Protocol):
    """The incidents of the store; at most one is open, exactly while it is not HEALTHY."""

    def recovery(self) -> Recovery:
        """Return the state, and the open incident."""
        ...

    def recent(self, count: int) -> tuple[Incident, ...]:
        """Return the newest incidents, newest first."""
        ...

    def open(self, loss: Loss, *, target: Baseline | None, judged: Baseline | None) -> Incident:
        """Open an incident for a loss: the store is RECOVERING, and captures are paused.

        Newest point and last good check are noted as they are then.

        Raises:
            BaselineMovedError: the baseline is not the ``judged`` one any more.
            IncidentMovedError: an incident is open already.
        """
        ...

    def join(self, loss: Loss, *, target: Baseline | None, judged: Incident) -> Incident:
        """Add a further loss to the open incident; its attempts begin again, and it waits no more.

        Raises:
            IncidentMovedError: its restore target is not that of ``judged``, or it is closed.
        """
        ...

    def adopt_target(self, target: Baseline, *, judged: Incident) -> Incident:
        """Let the recovery stand on this store from now on.

        Raises:
            IncidentMovedError: as ``join``.
        """
        ...

    def claim_launch(self, *, judged: Incident) -> Incident | None:
        """Count one more launch of a restore; None if somebody else has, or it is not RECOVERING.

        The time of the next launch is put off by the backoff for as many launches as there were
        since the last attempt was claimed.
        """
        ...

    def wait(self, reason: str, *, judged: Incident, lease: Lease) -> Incident:
        """Note that a restore waits for the store, and put the next launch off by the backoff.

        Raises:
            IncidentMovedError: as ``join``.
            LeaseLostError: the lease is no longer held.
        """
        ...

    def claim_attempt(
        self, *, judged: Incident, run_id: str, holder: str, lease: Lease
    ) -> Incident:
        """Count one more attempt, before its work begins; the incident waits no more.

        Raises:
            IncidentHeldError: it is on hold.
            AttemptsUsedUpError: the loss has had all its attempts.
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not RECOVERING.
        """
        ...

    def end_attempt(self, outcome: str, *, judged: Incident, lease: Lease) -> None:
        """Say how the newest attempt ended.

        Raises:
            LeaseLostError: the lease is no longer held.
        """
        ...

    def give_up(
        self, reason: FailureReason, detail: str, *, judged: Incident, lease: Lease
    ) -> Incident:
        """Put the store to FAILED: a person has to look.

        Raises:
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not RECOVERING.
        """
        ...

    def close(self, closing: Closing, *, judged: Incident, lease: Lease) -> Incident:
        """Accept a new baseline, close the incident and put the store to HEALTHY, all or nothing.

        The baseline's version becomes one above the present one.

        Raises:
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not
                RECOVERING, unless a person ends it.
        """
        ...

    def hold(self, reason: str, by: str, *, judged: Incident) -> Incident:
        """Keep the restore from being launched and from going on; held already: nothing changes.

        Raises:
            IncidentMovedError: it is closed, or not RECOVERING.
        """
        ...

    def release(self, by: str, *, judged: Incident) -> Incident:
        """Let the restore go on, at once and with all its attempts; not held: nothing changes.

        Raises:
            IncidentMovedError: as ``hold``.
        """
        ...

    def attempts_of(self, incident_id: str) -> tuple[Attempt, ...]:
        """Return the attempts of an incident, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class RaiseOrder:
    """A counter to be raised to ``usage``.

    Where the store has no such key, one is made in this ``shape`` and with this expiry: seconds
    after the window's end or, for a lifetime, after the writing; None means never.
    """

    of: BudgetWindow
    entity: Entity
    usage: Decimal
    shape: ValueShape
    expiry_seconds: int | None


class Written(StrEnum):
    """What became of an order."""

    RAISED = "raised"
    KEPT = "kept"
    CLOSED = "window_closed"
    UNREADABLE = "unreadable"
    EXPIRED = "expired"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class RaiseResult:
    """What became of one order.

    ``before`` is the live usage at the writing, None where there was none or none that could be
    read; ``reason`` says why an unreadable one is, or why the store refuses the value.
    """

    order: RaiseOrder
    written: Written
    before: Decimal | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BoardOrder:
    """A leaderboard to be brought in line with these usages.

    Where the store has none, one is made that expires like a counter (see RaiseOrder).
    """

    of: BudgetWindow
    usages: Usages
    expiry_seconds: int | None


@dataclass(frozen=True, slots=True)
class BoardResult:
    """Whether a leaderboard was written; ``reason`` says why one was left that is not in line."""

    of: BudgetWindow
    is_written: bool
    reason: str = ""


IsOpen = Callable[[Window], bool]
"""Tells whether usage still counts into a window, at the moment of the asking.

Asked before each write; what it raises breaks the writing off. It must not wait for anything.
"""


class LiveTenant(Protocol):
    """A tenant's counters in the store, read once and ready to be raised.

    Every write is conditional on what was read before it, and on the window being open then. Where
    somebody else has written meanwhile, the key is read again from the leader, and the higher usage
    stands. So a usage can only go up. An order that is lost on the way is done again.
    """

    @property
    def reading(self) -> TenantReading:
        """The counters as they were read."""
        ...

    def raise_counters(
        self, orders: Sequence[RaiseOrder], *, is_open: IsOpen
    ) -> tuple[RaiseResult, ...]:
        """Raise counters, and give the results in the order of the orders.

        A key that exists keeps its other fields and the time at which it expires. A value that the
        store would never take, such as one too large, is left, and fails nothing.

        Raises:
            StoreWriteError: the first write that the store refuses for anything but its value, such
                as that it is full. All others were tried before, until 100 were refused in a row;
                what was written stays.
            StoreError: the writing could not be brought to its end; what was written stays.
        """
        ...

    def rebuild_boards(
        self, orders: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> tuple[BoardResult, ...]:
        """Bring leaderboards in line, and give the results in the order of the orders.

        An entity gets the higher of what the leaderboard and the usages say; the 500 largest stay.
        A leaderboard that is right already is not written, one that cannot be read is left alone.
        One that the store refuses, for whatever reason, is left with that reason, and the others
        are tried as by ``raise_counters``; so no StoreWriteError is raised.

        Raises:
            StoreError: the writing could not be brought to its end; what was written stays.
        """
        ...


class UsageStore(Protocol):
    """The gateway's store of counters, opened."""

    def observe(self, deployment_id: str) -> Observation:
        """Read identity and marker from the stream's leader.

        Raises:
            StoreMissingError: the cluster says that the bucket does not exist.
            StorePermissionError: the marker may not be read.
        """
        ...

    def write_marker(self, deployment_id: str, nonce: str, *, after: int) -> Marker:
        """Write our marker over what its key holds at sequence ``after``; 0: nothing.

        Raises:
            MarkerConflictError: the key holds something else; nothing is overwritten.
            StorePermissionError: the marker may not be written.
            StoreWriteError: the store refuses the write.
        """
        ...

    def cluster_view(self, seen_at: datetime) -> ClusterView:
        """Ask the stream's leader for the servers that hold it; ``seen_at`` is the time of now."""
        ...

    def now(self) -> datetime | None:
        """Return the time of the stream's leader; None if its server does not report it."""
        ...

    def reader(self, source: CaptureSource) -> TenantReader:
        """Return a reader of one source, valid while the store is open."""
        ...

    def open_tenant(self, tenant: str) -> LiveTenant:
        """Read a tenant's counters so that they can be raised.

        Raises:
            StoreReadError: the reading could not be completed in time.
        """
        ...


OpenStore = Callable[[], AbstractContextManager[UsageStore]]
"""Connects to the store; raises StoreError."""


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


class BudgetDefinitions(Protocol):
    """What may be spent, where that is known."""

    def of_tenant(self, tenant: str) -> tuple[BudgetDefinition, ...]:
        """Return the definitions of a tenant's budgets, by budget and period; none: not known."""
        ...


class Previews(Protocol):
    """The previews of the last day, so that what is applied can be compared with them."""

    def begin(self, preview: KeptPreview) -> None:
        """Begin to keep a preview, and drop those that are too old."""
        ...

    def add(self, preview_id: str, tenant: str, entries: Sequence[PlannedEntry]) -> None:
        """Keep what is planned for a tenant."""
        ...

    def complete(self, preview_id: str) -> None:
        """Say that all tenants of a preview are kept; until then it counts for nothing.

        Earlier ones of the same choice are dropped, but not those of the last hour, with which
        somebody may just be comparing.
        """
        ...

    def get(self, preview_id: str) -> KeptPreview | None:
        """Return a complete preview; None: there is none of this id, or not any more."""
        ...

    def newest(self, choice: RestoreChoice) -> KeptPreview | None:
        """Return the newest complete preview of just this choice; None: there is none any more."""
        ...

    def tenants_of(self, preview_id: str) -> frozenset[str]:
        """Return the tenants of whom something was planned."""
        ...

    def entries_of(self, preview_id: str, tenant: str) -> tuple[PlannedEntry, ...]:
        """Return what was planned for a tenant, by budget, window and entity."""
        ...


class Resets(Protocol):
    """The resets that were recorded: none is ever changed or removed."""

    def record(self, reset: Reset) -> Reset:
        """Keep a reset for as long as the database lives, and return it as it is kept.

        Texts for people are kept in a form that the database holds. Once this returns, no reading
        of a recovery point that begins uses what the reset makes ineligible.
        """
        ...

    def of_tenant(self, tenant: str) -> tuple[Reset, ...]:
        """Return the resets of a tenant, in the order of their recording."""
        ...

    def recent(self, count: int) -> tuple[Reset, ...]:
        """Return the resets of any tenant that were recorded last, the newest first."""
        ...


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The control-plane database of one store, opened, in parts that see each other's commits."""

    clock: Clock
    registry: StoreRegistry
    leases: Leases
    snapshots: Snapshots
    reports: CaptureReports
    snapshot_list: SnapshotList
    retained: RetainedSnapshots
    points: RecoveryPoints
    incidents: Incidents
    audits: RestoreAudits
    resets: Resets
    budgets: BudgetDefinitions
    previews: Previews
