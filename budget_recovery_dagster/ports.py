"""The interfaces that the services need; each method states its promise.

All times are aware and in UTC. Every method may raise the errors of its adapter (StoreError,
DatabaseError), and these, after which nothing is changed:

- ``judged`` is the baseline or the incident on which the caller decided. If the baseline has
  changed, the method raises BaselineMovedError; if the incident is closed or has another restore
  target, IncidentMovedError.
- If a ``lease`` is no longer held, the method raises LeaseLostError.

Other errors are listed.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from budget_recovery_dagster.domain.admission import LeaseState
from budget_recovery_dagster.domain.audits import (
    AuditTrail,
    IncidentAmounts,
    LossAmounts,
    ManualRestore,
    MergedAudits,
)
from budget_recovery_dagster.domain.counters import (
    BudgetDefinition,
    BudgetWindow,
    Entity,
    TenantUsages,
)
from budget_recovery_dagster.domain.falls import (
    Configuration,
    ConfigurationChange,
    Deletions,
    Fall,
    JudgedFalls,
    KeyCount,
    TenantWindow,
)
from budget_recovery_dagster.domain.incident import (
    Attempt,
    Closing,
    FailureReason,
    Incident,
    Loss,
    Recovery,
    Restored,
    StoreRecord,
    Waiting,
)
from budget_recovery_dagster.domain.plan import (
    BoardOrder,
    BoardResult,
    IsOpen,
    KeptPreview,
    PlannedEntry,
    RaiseOrder,
    RaiseResult,
    RestoreChoice,
    Room,
    StoreLimits,
)
from budget_recovery_dagster.domain.recovery_point import Damage, Reset, TenantPoint
from budget_recovery_dagster.domain.snapshots import (
    CaptureFailure,
    CaptureSource,
    CaptureSummary,
    FailingTenant,
    ListedSnapshot,
    NamedDrop,
    NamedOmission,
    PruneReport,
    RecordedRun,
    RemovedTables,
    RetentionPolicy,
    RunResult,
    StoredRecord,
    TableFile,
    TenantListing,
    TenantReading,
    TenantSnapshot,
)
from budget_recovery_dagster.domain.store import (
    Baseline,
    ClusterView,
    IntendedMarker,
    Marker,
    StoreIdentity,
)
from budget_recovery_dagster.domain.verdict import Check, FoundMarker, Memory, Observation
from budget_recovery_dagster.domain.windows import Hour


class TenantReader(Protocol):
    """Reads tenants from one source of the store, without any trace in the store."""

    def list_tenants(self) -> TenantListing:
        """List the tenants by their keys."""

    def read(self, tenant: str) -> TenantReading:
        """Read a tenant's counters from every key of the source that existed before the call.

        Values are read at different times during the call. A tenant without keys has an empty
        reading.

        Raises:
            StoreReadError: the reading could not be completed in time.
        """


class Clock(Protocol):
    """The clock that decides windows and hours."""

    def now(self) -> datetime:
        """Return the present time."""

    def host_time(self) -> datetime:
        """Return the present time by the clock of this host."""

    def wait(self, span: timedelta) -> None:
        """Return after ``span``, even if the clock is set meanwhile; at once if it is negative."""


class Lease(Protocol):
    """Exclusive permission for a kind of work, for as long as it is held."""

    @property
    def name(self) -> str:
        """The kind of work."""

    @property
    def token(self) -> int:
        """The fencing token: it rises whenever this lease is taken."""

    def require_held(self) -> None:
        """Check, without I/O, that renewal has not failed.

        Raises:
            LeaseLostError: the lease has expired or was taken over.
        """


class Leases(Protocol):
    """Leases that expire by the database's clock if their holder dies."""

    def state_of(self, name: str) -> LeaseState:
        """Return the state of a lease, without a change."""

    def hold(
        self, name: str, holder: str, *, at_most: timedelta | None = None
    ) -> AbstractContextManager[Lease]:
        """Hold a lease, renewed in the background, until the context ends.

        After ``at_most`` it is not renewed any more, so that hanging work loses it.

        Raises:
            LeaseHeldError: another holder has it, even if that is the same process.
        """


class StoreRegistry(Protocol):
    """The one store of this database: its state, accepted baseline, and checks.

    The baseline moves only while the store is HEALTHY. Checks of the last 30 days are kept,
    and the newest 1,000 in any case.
    """

    def claim(self) -> StoreRecord:
        """Return the store's record; the first use creates it.

        If the record was lost, the new one is of the same installation, which the landmarks name.

        Raises:
            SettingsError: this database schema already belongs to another bucket.
        """

    def find(self) -> StoreRecord | None:
        """Return the store's record, and write nothing; None before the first use.

        Raises:
            SettingsError: as ``claim``.
        """

    def accept(self, baseline: Baseline, *, judged: Baseline | None) -> Baseline:
        """Replace the baseline; its version is one higher than that of the judged one.

        A marker is accepted as ``intended`` before it is written.

        Raises:
            CapturesPausedError: the store is not HEALTHY.
        """

    def accept_renewals(
        self, baseline: Baseline, found: FoundMarker, *, judged: Baseline | None
    ) -> Baseline:
        """Accept a store whose marker is newer than this database knows, all or nothing.

        Later markers get higher numbers than the found one. That the database had lost renewals is
        remembered.

        Raises:
            CapturesPausedError: the store is not HEALTHY.
        """

    def renewals_lost_since(self, at: datetime) -> bool:
        """Whether ``accept_renewals`` was called since then."""

    def acknowledge(self, found: FoundMarker) -> None:
        """Give later markers higher numbers than this one, and hold the landmark that it names.

        If that is a new landmark, another one follows, which later markers name.
        """

    def next_marker(self) -> IntendedMarker:
        """Return a new marker: a new nonce, the next number, and the newest landmark."""

    def newest_landmark(self) -> str | None:
        """Return the id of the newest landmark; None: there is none.

        Landmarks are kept for ever: one for each run of captures, each reset, each opened or closed
        incident, and each acceptance of a store outside of an incident.
        """

    def memory_of(self, seen: Observation | None, accepted: Baseline | None) -> Memory:
        """Return what the database remembers that judges an observation; None: the store is gone.

        ``accepted`` is the accepted baseline, which may replace one whose row was lost. Read this
        after the observation.
        """

    def record_check(self, check: Check) -> None:
        """Record a check, and remove old ones except the newest good one."""

    def newest_checks(self, count: int) -> tuple[Check, ...]:
        """Return the newest checks, newest first; last, those that are dated in the future."""

    def first_checked_at(self) -> datetime | None:
        """Return the time of the oldest retained check."""

    def newest_good_check(self) -> Check | None:
        """Return the newest check that identified the store as the accepted one.

        One that is dated in the future is returned only if there is no other.
        """


class Snapshots(Protocol):
    """The stored snapshots of all tenants.

    A snapshot is complete until retention removes records from it. Those that a restore still needs
    stay. The newest snapshot is the last commit; one that is dated in the future is newest only if
    there is no other.
    """

    def commit(  # noqa: PLR0913 - by keyword, each the caller's own
        self,
        snapshot: TenantSnapshot,
        *,
        hour: Hour,
        run_id: str,
        lease: Lease,
        judged: Baseline | None,
        first: Baseline | None = None,
    ) -> Baseline:
        """Store a snapshot and accept its identity as the baseline, all or nothing.

        Falls are judged by it, and the counts of checks start again from it. ``first`` is the store
        as a first capture observed it, which becomes the baseline if there is none. Returns the
        baseline that now holds.

        Raises:
            CapturesPausedError: the store is not HEALTHY.
            HourClosedError: the hour is past.
            ClockSkewError: its time is in the future: the clock was set back since.
            NotNewerError: the tenant has a snapshot at or after this one's time, except those that
                are dated in the future.
        """

    def begin_run(self, run_id: str, hour: Hour, *, started_at: datetime, lease: Lease) -> int:
        """Record that a capture begins, and return its number; numbers rise.

        Runs of the last 30 days are kept, and the newest 168 in any case.
        """

    def end_run(self, number: int, result: RunResult) -> None:
        """Record how a capture ended; the first result stays."""

    def record_failures(self, failures: Collection[CaptureFailure], *, run_id: str) -> None:
        """Record what a run could not capture.

        A tenant that a later run has captured meanwhile is not failing because of it.
        """

    def prune(
        self, tenants: Collection[str], *, policy: RetentionPolicy, now: datetime, lease: Lease
    ) -> PruneReport:
        """Remove records of these tenants past retention, except those that a restore needs.

        Recorded failures and outcomes of tenants are removed by age alone. After a gap between
        captures, nothing is removed until enough captures have followed (see
        ``awaited_captures``).

        Raises:
            CapturesPausedError: the store is not HEALTHY.
        """

    def in_future(self, now: datetime) -> tuple[ListedSnapshot, ...]:
        """Return the snapshots of all tenants that are dated in the future; newest first."""

    def discard_future(  # noqa: PLR0913 - by keyword, each the caller's own
        self,
        confirmed: Collection[datetime],
        *,
        falls: JudgedFalls,
        now: datetime,
        by: str,
        reason: str,
        lease: Lease,
    ) -> tuple[ListedSnapshot, ...]:
        """Discard the snapshots of these times that are in the future at ``now``; return them.

        Each is recorded. Snapshots of other times, which a person has not confirmed, are kept.
        ``falls`` are those that change, as they are without the discarded snapshots. Only captures
        change falls otherwise, so they are judged under the same lease.

        Raises:
            CapturesPausedError: the store is not HEALTHY.
        """

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained snapshot."""

    def newest_identity(self) -> StoreIdentity | None:
        """Return the identity stored with the newest snapshot of any tenant."""

    def listed(self, tenant: str | None) -> tuple[ListedSnapshot, ...]:
        """Return the snapshots of a tenant, or of all tenants by timestamp; newest first.

        All tenants of a run share a timestamp. If a timestamp has snapshots of two sources, which
        is rare, each source has its own entry.
        """

    def budgets_of(self, tenant: str) -> tuple[str, ...]:
        """Return the budgets of a tenant that have a retained record, by name."""

    def tenants_in(self, hour: Hour) -> tuple[str, ...]:
        """Return the tenants that have a complete snapshot of an hour, by name."""

    def hours_of(self, tenants: Collection[str]) -> Mapping[str, frozenset[Hour]]:
        """Return the hours in which these tenants have a complete snapshot; none: no key."""

    def records_of(
        self, tenant: str, hour: Hour
    ) -> AbstractContextManager[Iterator[StoredRecord] | None]:
        """Yield the records of a tenant's complete snapshots of an hour, read as they are used.

        They are sorted by time, budget and window token, and read in one database snapshot. None
        means that there is no such snapshot.
        """


class Falls(Protocol):
    """What is missing from the store while its identity is unchanged.

    ``Snapshots.commit`` stores, with a snapshot, the counts of the tenant's open windows, and the
    falls that are open or have ended after it. Ended falls are kept for 30 days.
    """

    def counts(self) -> tuple[tuple[KeyCount, ...], int | None]:
        """Return the counts of the open windows, and the sequence up to which deletions are known.

        None: deletions were never read.
        """

    def record_counts(self, counts: Mapping[KeyCount, KeyCount], *, until: int) -> None:
        """Replace the counts that ``counts`` returned by those of a check.

        Deletions are then known up to the sequence ``until``. If a capture or the end of an
        incident has changed any count meanwhile, nothing is replaced, and the next check reads the
        same deletions again.
        """

    def open(self) -> tuple[Fall, ...]:
        """Return the open falls whose window has not ended, the largest missing usage first."""

    def touched(self) -> Mapping[str, datetime]:
        """Return the tenants with an open fall that a restore or a reset may have ended.

        The time is that of the newest restore or recorded reset after the fall was last judged.
        """

    def record_configuration(self, found: Configuration) -> tuple[ConfigurationChange, ...]:
        """Store the configuration of the bucket, and return what changed since the last one."""

    def configuration_changes(self, since: datetime) -> tuple[ConfigurationChange, ...]:
        """Return the changes that were found after a time, newest first, then by name."""


class CaptureReports(Protocol):
    """Reports of captures, for people and checks."""

    def captured_in(self, hour: Hour) -> tuple[CaptureSummary, ...]:
        """Return the snapshots captured in an hour, by tenant and time."""

    def captured_by(self, run_id: str) -> tuple[CaptureSummary, ...]:
        """Return the snapshots that a run stored, by tenant."""

    def failures_of(self, run_id: str) -> tuple[CaptureFailure, ...]:
        """Return what a run could not capture: tenants, then keys, each by name."""

    def drops_of(self, run_id: str) -> tuple[NamedDrop, ...]:
        """Return the drops in the snapshots of a run, the largest missing usage first.

        Of each snapshot, only the largest are stored by name.
        """

    def omissions_of(self, run_id: str) -> tuple[NamedOmission, ...]:
        """Return the omissions in the snapshots of a run; long lists are cut when stored."""

    def newest_run(self, hour: Hour) -> str | None:
        """Return the newest run that stored a snapshot of an hour, or recorded a failure in it."""

    def newest_snapshots(self) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest snapshot, for all that have one."""

    def failing(self) -> Mapping[str, FailingTenant]:
        """Return the tenants whose last capture failed, by name, independently of any clock."""

    def absent(self) -> frozenset[str]:
        """Return the tenants whose last capture found nothing of them, with nothing expected."""

    def newest_runs(self, count: int) -> tuple[RecordedRun, ...]:
        """Return the newest captures, newest first, independently of any clock."""

    def damaged_in(
        self, hour: Hour, *, on_progress: Callable[[str], None] = lambda _: None
    ) -> tuple[str, ...]:
        """Verify the stored snapshots of an hour; return a sentence for each damage.

        ``on_progress`` receives a sentence for each snapshot.
        """


class RecoveryPoints(Protocol):
    """What a restore would bring back, from intact records only.

    A damaged record, whose usages do not match the hash of the capture, adds no usage and covers no
    earlier one; each point lists its damaged records. Usages that resets exclude are left out. A
    window is open (current) at ``now`` if usage still counts into it.
    """

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained record of any budget, intact or damaged."""

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        """Read a tenant's recovery point; None if no snapshot of the tenant is retained."""

    def snapshot_of(self, tenant: str, captured_at: datetime) -> TenantPoint | None:
        """Read the records of one snapshot of a tenant, and no others; None: there is none.

        Shape and expiry come from the newest record that has them, as in a recovery point.

        Raises:
            DatabaseError: it has a record of an invalid window.
        """

    def despite_resets(self) -> "RecoveryPoints":
        """Return the same points as if no reset had been recorded."""

    def current_usages(
        self, tenant: str, now: datetime, *, without: Collection[datetime] = ()
    ) -> TenantUsages:
        """Read only the usages of a tenant's open windows; a window without usage has no key.

        ``without``: as if the snapshots of these times, which are in the future, were not stored.
        """

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest intact record of a window open at ``now``.

        A tenant without such a record has no key.
        """

    def damaged(
        self,
        now: datetime,
        *,
        tenant: str | None = None,
        within: timedelta | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> Damage:
        """Count the damaged records in the open windows of a tenant, or of each (None).

        They are those that ``point_of`` lists. Every content that it would read is verified, so
        this takes about as long as reading all points, but little memory. After the time
        ``within``, the tenants that are not completely verified are returned as such.
        ``on_progress`` receives a sentence every few hundred contents.
        """


class OpenedTables(Protocol):
    """The tables of tenants, opened exclusively."""

    def write(self, tenant: str, hour: Hour, records: Iterable[StoredRecord]) -> TableFile:
        """Write a tenant's table of an hour, in the order of ``records``; replace an earlier one.

        The write is atomic. Equal records give an equal file.

        Raises:
            TablesError: it could not be written.
        """

    def keep_only(self, retained: Iterable[tuple[str, Collection[Hour]]]) -> RemovedTables:
        """Remove all tables except these hours of these tenants, and leftovers of dead runs.

        Files that ``write`` did not write are kept.
        """


class UsageTables(Protocol):
    """The directory of the tables of tenants."""

    @property
    def place(self) -> str:
        """The directory, for people."""

    def opened(self, owner: str) -> AbstractContextManager[OpenedTables]:
        """Open the tables exclusively; wait for another process that has them open.

        ``owner`` is the id of the installation, which owns the tables from then on.

        Raises:
            TablesError: the directory cannot be used, or another process has it for too long.
            ForeignTablesError: the tables belong to another installation.
        """


class Incidents(Protocol):
    """The incidents of the store; one is open exactly while the store is not HEALTHY."""

    def recovery(self) -> Recovery:
        """Return the state, and the open incident."""

    def recent(self, count: int) -> tuple[Incident, ...]:
        """Return the newest incidents, newest first."""

    def open(
        self,
        loss: Loss,
        *,
        target: Baseline | None,
        judged: Baseline | None,
        hold: str | None = None,
        began_empty: bool = False,
    ) -> Incident:
        """Open an incident for an alarm: the store becomes RECOVERING, and captures are paused.

        With the reason of a ``hold``, the incident starts on hold, by this program.
        ``began_empty``: ``target`` was provably created empty after the loss.

        The incident records the last good check at that time, and the newest snapshot of any tenant
        that has an intact record or never had a record.

        Raises:
            IncidentMovedError: an incident is already open.
        """

    def join(
        self,
        loss: Loss,
        *,
        target: Baseline | None,
        judged: Incident,
        hold: str | None = None,
        began_empty: bool = False,
    ) -> Incident:
        """Add a further alarm to the open incident, and put it on hold if there is a reason to.

        Its attempts start again, at once, if ``target`` is another store than before.
        """

    def adopt_target(
        self, target: Baseline, *, judged: Incident, began_empty: bool = False
    ) -> Incident:
        """Make a store the restore target of the open incident.

        ``began_empty`` is as in ``open``; it counts only if it is another store than before.
        """

    def claim_launch(self, *, judged: Incident) -> Incident | None:
        """Count one more launch; None if another process counted it, or none is due.

        The next launch is delayed by the backoff for the launches since the last claimed attempt.
        It never raises IncidentMovedError.
        """

    def wait(self, reason: str, *, judged: Incident, lease: Lease) -> Incident:
        """Record that a restore waits for the store, and delay the next launch by the backoff."""

    def claim_attempt(
        self, *, judged: Incident, run_id: str, holder: str, lease: Lease
    ) -> Incident:
        """Count one more attempt, before its work starts, and end the waiting.

        The next one is delayed by the pause between attempts, also if this one dies.

        Raises:
            IncidentHeldError: it is on hold.
            AttemptsUsedUpError: the loss has had all its attempts.
            AttemptNotDueError: the next attempt is due later.
            IncidentMovedError: also if the store is not RECOVERING.
        """

    def end_attempt(self, outcome: str, *, judged: Incident, lease: Lease) -> None:
        """Record the outcome of the newest attempt, even if the incident has changed."""

    def fail_attempt(self, outcome: str, *, judged: Incident, lease: Lease) -> None:
        """End the newest attempt, and delay the next by the pause between attempts.

        If the incident has changed, its next attempt is not delayed.
        """

    def return_attempt(
        self, outcome: str, *, judged: Incident, lease: Lease, waited: Waiting | None
    ) -> Incident:
        """End the newest attempt and do not count it: the restore has to wait for the store.

        ``waited`` is the waiting that the attempt ended, which goes on; None: there was none.

        Raises:
            IncidentMovedError: also if the store is not RECOVERING.
        """

    def give_up(
        self,
        reason: FailureReason,
        detail: str,
        *,
        judged: Incident,
        lease: Lease,
        code: str | None = None,
    ) -> Incident:
        """Set the store to FAILED: an operator must act.

        ``code`` is that of the error that ended the last attempt, if one did.

        Raises:
            IncidentMovedError: also if the store is not RECOVERING.
        """

    def close(
        self, closing: Closing, *, judged: Incident, lease: Lease, resets: Collection[Reset] = ()
    ) -> Incident:
        """Accept a new baseline, close the incident and set the store to HEALTHY, all or nothing.

        The baseline's version becomes one higher than the present one. ``resets`` are recorded in
        the same transaction, as by ``Resets.record``.

        Raises:
            IncidentMovedError: also if the store is not RECOVERING, unless a person ends it.
        """

    def hold(self, reason: str, by: str, *, judged: Incident) -> Incident:
        """Stop the restore and further launches; an existing hold stays unchanged.

        Raises:
            IncidentMovedError: it is closed, or the store is not RECOVERING.
        """

    def release(self, by: str, *, judged: Incident) -> Incident:
        """Continue the restore, at once and with all its attempts; without a hold, nothing changes.

        Raises:
            IncidentHeldError: the database may be older than the store.
            IncidentMovedError: as ``hold``.
        """

    def attempts_of(self, incident_id: str) -> tuple[Attempt, ...]:
        """Return the attempts of an incident, oldest first."""


class LiveTenant(Protocol):
    """A tenant's counters in the store, read once and ready to be raised.

    Every write is conditional on the value that was read, and on the window being open. If another
    client has written meanwhile, the key is read again from the leader, and the higher usage wins.
    So a usage can only rise. A lost order is repeated.
    """

    @property
    def reading(self) -> TenantReading:
        """The counters as they were read."""

    def deletion_of(self, of: BudgetWindow, entity: Entity) -> int | None:
        """Return the sequence of a counter's delete marker, as read; None: there is none.

        The store writes one, too, when a key expires, if its bucket is configured so.
        """

    def dropped_at(self, of: BudgetWindow, entity: Entity) -> datetime | None:
        """Return when the store drops a counter as read, by TTL or maximum age.

        None: never, or there is no such counter.
        """

    def room_for(
        self, orders: Sequence[RaiseOrder], boards: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> Room:
        """Return the room that these orders take, without writing anything.

        An order that needs no write takes none. If the store keeps one value of each key, the value
        that is overwritten makes room.

        Raises:
            StoreWriteError: no key can contain a counter's name.
        """

    def raise_counters(
        self, orders: Sequence[RaiseOrder], *, is_open: IsOpen
    ) -> tuple[RaiseResult, ...]:
        """Raise counters, and return the results in the order of the orders.

        An existing key keeps its other fields, its headers and its expiry. A value that the store
        would never accept, such as one too large, is skipped, and is no failure. A store that
        evicts deletes other keys if there is no room; the caller compares ``room_for`` with
        ``limits``.

        Raises:
            StoreWriteError: the first write that the store refuses for another reason than its
                value, such as a full store. The others are tried before, until 100 in a row are
                refused; written values stay.
            StoreError: the writing could not be completed; written values stay.
        """

    def rebuild_boards(
        self, orders: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> tuple[BoardResult, ...]:
        """Update leaderboards, and return the results in the order of the orders.

        An entity gets the higher usage of the leaderboard and the order; the 500 largest stay, and
        a leaderboard gets no shorter. An entry keeps its other fields and the form of its usage; a
        leaderboard keeps its other fields, its headers and its expiry. A leaderboard without a
        higher usage, or an unreadable one, is not written; a missing one is created only if the
        order allows it. A leaderboard that the store refuses is skipped with the reason, and the
        others are tried as by ``raise_counters``; so no StoreWriteError is raised.

        Raises:
            StoreError: the writing could not be completed; written values stay.
        """


class UsageStore(Protocol):
    """The gateway's store of counters, opened."""

    def observe(self, deployment_id: str) -> Observation:
        """Read identity and marker from the stream's leader.

        Raises:
            StoreMissingError: the cluster says that the bucket does not exist.
            StorePermissionError: the marker may not be read.
        """

    def write_marker(self, deployment_id: str, marker: IntendedMarker, *, after: int) -> Marker:
        """Write our marker over what its key holds at sequence ``after``; 0: nothing.

        Raises:
            MarkerConflictError: the key holds something else; nothing is overwritten.
            StorePermissionError: the marker may not be written.
            StoreFullError: the store would delete another key for it.
            StoreWriteError: the store refuses the write.
        """

    def limits(self) -> StoreLimits:
        """Return the limits of the store and what it holds, as its leader reports them."""

    def cluster_view(self, seen_at: datetime) -> ClusterView:
        """Ask the stream's leader for the servers of the store; ``seen_at`` is the present time."""

    def now(self) -> datetime | None:
        """Return the time of the stream's leader; None if its server does not report it."""

    def configuration(self) -> Configuration:
        """Return the settings of the bucket that decide what it keeps."""

    def count_keys(
        self, wanted: Mapping[TenantWindow, int], *, within: timedelta
    ) -> Mapping[TenantWindow, int]:
        """Count the keys of counters in budgets and windows, delete marks included.

        ``wanted`` has about how many keys each has: large ones are counted in another way, which
        does not delay the gateway's writes. Those that cannot be counted, or not in time, are left
        out.

        Raises:
            StoreError: nothing was counted, or the connection leads to another store.
        """

    def read_deletions(self, after: int, *, at_most: int, within: timedelta) -> Deletions:
        """Find the counters that were deleted, or have expired, after a sequence.

        About ``at_most`` changes are read, and no more than in time; further ones are left to the
        next call.

        Raises:
            StoreReadError: nothing was read in time.
        """

    def reader(self, source: CaptureSource) -> TenantReader:
        """Return a reader of one source, valid while the store is open."""

    def open_tenant(self, tenant: str) -> LiveTenant:
        """Read a tenant's counters so that they can be raised.

        Raises:
            StoreReadError: the reading could not be completed in time.
        """


OpenStore = Callable[[], AbstractContextManager[UsageStore]]
"""Connects to the store; raises StoreError."""


class RestoreAudits(Protocol):
    """The audits of restores; they are never removed.

    Run, time, tenant, budget and window identify an entry. The raised counters of a window in an
    incident follow from its entries, in the order of time. A finished entry has the number. An
    interrupted one raised what the next entry no longer plans to raise; the last one, all that was
    planned. Counters that were raised, lost and raised again count once, so the number is at most
    that of the newest entry.
    """

    def begin(self, trail: AuditTrail) -> None:
        """Store what a restore is about to do, before it writes anything.

        It replaces an unfinished entry with the same run, time, tenant, budget and window; a
        finished entry stays.
        """

    def finish(self, trail: AuditTrail) -> None:
        """Store what a restore did, in place of its unfinished entries; new entries are added."""

    def restored_in(self, incident_id: str) -> Restored:
        """Count what was raised in an incident, and the leaderboards that were written.

        A leaderboard that was written several times counts once.
        """

    def windows_begun(self, incident_id: str, tenant: str) -> frozenset[BudgetWindow]:
        """Return a tenant's windows in which restores of an incident raised counters.

        Windows in which a restore was about to do so and did not finish are included.
        """

    def amounts_of(self, incident_id: str, tenant: str) -> Mapping[BudgetWindow, LossAmounts]:
        """Return the amounts of a tenant's windows by their newest entries that have amounts."""

    def amounts_in(self, incident_id: str, count: int) -> IncidentAmounts:
        """Return what an incident cost, by the newest entries of its windows that have amounts.

        At most ``count`` of each list are returned, the largest first, then by tenant, budget and
        window. A window whose entries have no amounts is unknown, unless none of them restored.
        """

    def largest(self, incident_id: str, count: int) -> MergedAudits:
        """Merge the entries of each budget and window in an incident, and return the largest.

        ``before`` is that of a window's first entry; the other facts, except ``raised``, are those
        of its last one. The order is by rise, highest first, then those with notes, then by tenant,
        budget and window. At most ``count`` are returned.
        """

    def manual_restores(self, since: datetime, count: int) -> tuple[ManualRestore, ...]:
        """Return the newest manual restores that began after a time, the last recorded first.

        Those are the ones without an attempt for an incident. Only those that raised counters are
        returned, and those that were about to do so and did not finish.
        """

    def raised_by(self, run_id: str, count: int) -> tuple[Restored, MergedAudits]:
        """Return what one run or command raised, and at most ``count`` of the largest entries.

        The same rules hold as for an incident: an unfinished entry counts as planned.
        """


class BudgetDefinitions(Protocol):
    """The limits of budgets, if they are known."""

    def of_tenant(self, tenant: str) -> tuple[BudgetDefinition, ...]:
        """Return the definitions of a tenant's budgets, by budget and period; empty: unknown."""


class Previews(Protocol):
    """The previews of the last day, for comparison with restores."""

    def begin(self, preview: KeptPreview) -> None:
        """Start to store a preview, and remove those that are too old."""

    def add(self, preview_id: str, tenant: str, entries: Sequence[PlannedEntry]) -> None:
        """Store the plan of a tenant."""

    def complete(self, preview_id: str) -> None:
        """Complete a preview once all its tenants are stored; until then it is not used.

        Earlier ones with the same choice are removed, except those of the last hour: a running
        restore may be compared with them.
        """

    def get(self, preview_id: str) -> KeptPreview | None:
        """Return a complete preview; None: there is none with this id."""

    def newest(self, choice: RestoreChoice) -> KeptPreview | None:
        """Return the newest complete preview with exactly this choice; None: there is none."""

    def tenants_of(self, preview_id: str) -> frozenset[str]:
        """Return the tenants with a stored plan."""

    def entries_of(self, preview_id: str, tenant: str) -> tuple[PlannedEntry, ...]:
        """Return the plan of a tenant, by budget, window and entity."""


class Resets(Protocol):
    """The recorded resets; none is ever changed or removed."""

    def record(self, reset: Reset) -> Reset:
        """Store a reset permanently, and return it as it is stored, with ``last_excluded``.

        Characters that the database cannot store are replaced in texts for people. Once this
        returns, no new reading of a recovery point uses the excluded usages.
        """


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The opened control-plane database of one store; each part sees the commits of the others."""

    clock: Clock
    registry: StoreRegistry
    leases: Leases
    snapshots: Snapshots
    reports: CaptureReports
    points: RecoveryPoints
    falls: Falls
    incidents: Incidents
    audits: RestoreAudits
    resets: Resets
    budgets: BudgetDefinitions
    previews: Previews
