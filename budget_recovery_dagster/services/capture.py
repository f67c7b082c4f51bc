"""Captures an hour: reads, compares the store's identity, commits, tenant by tenant."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from budget_recovery_dagster.domain.admission import CAPTURE_LEASE
from budget_recovery_dagster.domain.counters import TenantUsages, UnreadableKey, budget_usage
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.domain.snapshots import (
    CaptureFailure,
    CaptureSource,
    CaptureSummary,
    PruneReport,
    RetentionPolicy,
    RunOutcome,
    RunResult,
    Stopped,
    TenantListing,
    TenantReading,
    TenantSnapshot,
    Uncaptured,
    take_snapshot,
)
from budget_recovery_dagster.domain.store import StoreIdentity
from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, Hour, clocks_in_words
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    BudgetRecoveryError,
    CapturesPausedError,
    ClockSkewError,
    DatabaseError,
    DatabaseUnreachableError,
    HourClosedError,
    HourNotCapturedError,
    HourNotReachedError,
    LeaseLostError,
    PossibleLossError,
    StoreError,
    StoreLostError,
    describe_error,
    error_code,
)
from budget_recovery_dagster.ports import (
    ControlPlane,
    Lease,
    OpenStore,
    TenantReader,
    UsageStore,
)
from budget_recovery_dagster.services.store_watch import (
    ROUNDS,
    CaptureWatch,
    measure_clock_skew,
    watch_store,
)

# A faulty gateway could write any number of them; the first ones are enough to find the cause.
MAX_NOTED_KEYS = 100


@dataclass(frozen=True, slots=True)
class TenantStored:
    """The tenant's snapshot is stored; ``seconds`` is how long the tenant took.

    ``truncated`` is how many of the records hold only the largest spenders; ``closed`` is how many
    are of windows that had closed or not begun. ``most_used`` is the usage of the other budget and
    window that used most. ``most_missing`` is the usage that the store lacks in the budget and
    window that lacks most.
    """

    tenant: str
    records: int
    truncated: int
    closed: int
    entries: int
    most_used: Decimal
    omitted: int
    unreadable: int
    drops: int
    most_missing: Decimal
    is_partial: bool
    seconds: float

    @classmethod
    def of(cls, snapshot: TenantSnapshot, seconds: float) -> "TenantStored":
        """Count what a stored snapshot holds."""
        at = snapshot.captured_at
        counting = [each for each in snapshot.records if each.of.window.is_current(at)]
        return cls(
            tenant=snapshot.tenant,
            records=len(snapshot.records),
            truncated=snapshot.truncated_count,
            closed=len(snapshot.records) - len(counting),
            entries=snapshot.entry_count,
            most_used=max((budget_usage(record.usages) for record in counting), default=Decimal(0)),
            omitted=snapshot.omitted_count,
            unreadable=len(snapshot.unreadable),
            drops=len(snapshot.drops),
            most_missing=snapshot.most_missing,
            is_partial=snapshot.is_partial,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class TenantAbsent:
    """The tenant was read: it has nothing in the store, and no open window in the snapshots."""

    tenant: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TenantFailed:
    """Nothing of the tenant is stored by this run.

    ``error`` is for the log; ``seconds`` is 0 if the tenant was not tried.
    """

    tenant: str
    reason: str
    hint: str
    seconds: float
    error: Exception

    @classmethod
    def because(cls, tenant: str, error: Exception, seconds: float) -> "TenantFailed":
        """Return the failure that an error causes."""
        return cls(tenant, *describe_error(error), seconds, error)


TenantOutcome = TenantStored | TenantAbsent | TenantFailed


@dataclass(frozen=True, slots=True)
class Captured:
    """A finished capture of one hour; ``outcomes`` has every tenant that is known or was found.

    ``stopped_by`` is the error that ended the capture before all tenants were tried, if any.
    ``unreadable`` are keys of the store that name no tenant. ``pruned`` is None if nothing was
    pruned, or if pruning failed with ``prune_failure``. ``clock_skew`` is as by
    ``measure_clock_skew``; None also if it was not measured.
    """

    hour: Hour
    captured_at: datetime
    source: CaptureSource
    identity: StoreIdentity | None
    outcomes: tuple[TenantOutcome, ...]
    unreadable: tuple[UnreadableKey, ...]
    stopped_by: BudgetRecoveryError | None
    pruned: PruneReport | None = None
    prune_failure: BudgetRecoveryError | None = None
    clock_skew: timedelta | None = None

    @property
    def result(self) -> RunResult:
        """How the capture ended, for the status; its error is the one of most failed tenants."""
        stored, failed = len(self.stored), len(self.failed)
        if failed or self.stopped_by:
            outcome = RunOutcome.STORED_IN_PART if stored else RunOutcome.FAILED
        else:
            outcome = RunOutcome.STORED if stored else RunOutcome.NOTHING_TO_STORE
        error: Exception | None = self.stopped_by
        if error is None and failed:
            reasons = Counter(tenant.reason for tenant in self.failed)
            error = max(self.failed, key=lambda tenant: reasons[tenant.reason]).error
        return RunResult(
            outcome=outcome,
            stored=stored,
            absent=len(self.outcomes) - stored - failed,
            failed=failed,
            error=None if error is None else _stopped(error),
            clock_skew=self.clock_skew,
        )

    @property
    def stored(self) -> tuple[TenantStored, ...]:
        """The tenants whose snapshot is stored."""
        return tuple(o for o in self.outcomes if isinstance(o, TenantStored))

    @property
    def truncated(self) -> int:
        """How many of the stored records hold only the largest spenders of their budget."""
        return sum(tenant.truncated for tenant in self.stored)

    @property
    def most_used(self) -> Decimal:
        """The usage of the open budget and window that used most of all."""
        return max((tenant.most_used for tenant in self.stored), default=Decimal(0))

    @property
    def most_missing(self) -> Decimal:
        """The usage that the store lacks in the budget and window that lacks most of all."""
        return max((tenant.most_missing for tenant in self.stored), default=Decimal(0))

    @property
    def failed(self) -> tuple[TenantFailed, ...]:
        """The tenants whose snapshot is not stored."""
        return tuple(o for o in self.outcomes if isinstance(o, TenantFailed))

    @property
    def may_prune(self) -> bool:
        """Whether this run may remove snapshots past retention."""
        return not isinstance(
            self.stopped_by,
            PossibleLossError
            | StoreLostError
            | CapturesPausedError
            | ClockSkewError
            | LeaseLostError,
        )

    @property
    def read(self) -> frozenset[str]:
        """The tenants that were read, whose old snapshots may be removed."""
        return frozenset(o.tenant for o in self.outcomes if not isinstance(o, TenantFailed))

    @property
    def failures(self) -> tuple[CaptureFailure, ...]:
        """The failures to store: failed tenants, and keys that name no tenant."""
        tenants = (CaptureFailure(o.tenant, self.hour, o.reason, o.hint) for o in self.failed)
        keys = (
            CaptureFailure(
                bad.key,
                self.hour,
                bad.reason,
                "find out which gateway wrote this key; the tenants are not affected.",
                Uncaptured.KEY,
            )
            for bad in self.unreadable[:MAX_NOTED_KEYS]
        )
        return (*tenants, *keys)


# The store is not, or may not be, the accepted one.
_LOSSES = (PossibleLossError, StoreLostError, CapturesPausedError)
# Errors that every remaining tenant would meet as well.
_STOPS = (*_LOSSES, HourClosedError, LeaseLostError, ClockSkewError)
# One refusal may be caused by a tenant's own data. So many in a row are caused by the database.
# Each may wait for a time-out, and with a thousand tenants that would take longer than the hour.
_DATABASE_REFUSALS = 3


@dataclass(slots=True)
class CaptureRun:
    """Takes every tenant's snapshot under one lease, with one timestamp."""

    plane: ControlPlane
    holder: str
    source: CaptureSource
    hour: Hour
    captured_at: datetime
    run_id: str
    lease: Lease
    on_outcome: Callable[[TenantOutcome], None]
    watch: CaptureWatch = field(init=False)
    _outcomes: list[TenantOutcome] = field(default_factory=list, init=False)
    _stopped_by: BudgetRecoveryError | None = field(default=None, init=False)
    _refusals: int = field(default=0, init=False)
    _clock_skew: timedelta | None = field(default=None, init=False)

    def capture_all(self, open_store: OpenStore) -> Captured:
        """Capture the tenants of the store and of earlier snapshots; each one independently.

        The tenant with the oldest snapshot is first, so that captures that take longer than the
        hour reach all tenants in turn. A tenant whose last capture failed is read again, even if
        nothing else names it: so a failure ends once nothing of the tenant is left.

        Raises:
            DatabaseUnreachableError: the database is gone; what is stored stays stored.
        """
        newest = self.plane.reports.newest_snapshots()
        known = newest.keys() | self.plane.reports.failing().keys()
        identity: StoreIdentity | None = None
        listing = TenantListing(frozenset(), ())
        listing_failure: StoreError | None = None
        try:
            with open_store() as store:
                self.watch = CaptureWatch(watch_store(self.plane, store, open_store, self.holder))
                identity = self.watch.require_accepted()
                self._require_agreeing_clocks(store)
                reader = store.reader(self.source)
                try:
                    listing = reader.list_tenants()
                except StoreError as error:
                    # The known tenants can still be captured if the store answers.
                    self.watch.require_accepted()
                    listing_failure = error
                self._capture_tenants(reader, _oldest_first(known | listing.tenants, newest))
                self._stopped_by = self._stopped_by or listing_failure
        except (StoreError, *_LOSSES, ClockSkewError) as error:
            self._stopped_by = error
        self._fail_the_rest(_oldest_first(known | listing.tenants, newest))
        return Captured(
            hour=self.hour,
            captured_at=self.captured_at,
            source=self.source,
            identity=identity,
            outcomes=tuple(self._outcomes),
            unreadable=listing.unreadable,
            stopped_by=self._stopped_by,
            clock_skew=self._clock_skew,
        )

    def _capture_tenants(self, reader: TenantReader, tenants: list[str]) -> None:
        for tenant in tenants:
            started = time.monotonic()
            try:
                snapshot = self._capture_tenant(reader, tenant)
            except DatabaseUnreachableError:
                raise
            except Exception as error:  # noqa: BLE001 - reported by name; no tenant stops another
                self._done(TenantFailed.because(tenant, error, time.monotonic() - started))
                self._stopped_by = self._reason_to_stop(error)
                if self._stopped_by:
                    return
            else:
                self._refusals = 0
                seconds = time.monotonic() - started
                self._done(
                    TenantAbsent(tenant, seconds)
                    if snapshot.is_empty
                    else TenantStored.of(snapshot, seconds)
                )

    def _capture_tenant(self, reader: TenantReader, tenant: str) -> TenantSnapshot:
        self.lease.require_held()
        reading = reader.read(tenant)
        point = self.plane.points.current_usages(tenant, self.captured_at)
        for _ in range(ROUNDS):
            try:
                return self._commit(reading, point)
            except BaselineMovedError:
                continue
        raise BaselineMovedError(
            f"The accepted identity of the store moved {ROUNDS} times while the snapshot "
            f"of tenant {tenant!r} was compared with it.",
            "capture the hour again; if this repeats, check whether a second installation uses the"
            " same database.",
        )

    def _commit(self, reading: TenantReading, point: TenantUsages) -> TenantSnapshot:
        identity = self.watch.require_accepted()
        snapshot = take_snapshot(reading, self.captured_at, identity, point)
        self.watch.baseline = self.plane.snapshots.commit(
            snapshot,
            hour=self.hour,
            run_id=self.run_id,
            lease=self.lease,
            judged=self.watch.baseline,
            first=self.watch.first,
        )
        return snapshot

    def _require_agreeing_clocks(self, store: UsageStore) -> None:
        # The database's clock decides hours and windows. If it is wrong, a capture would prune
        # snapshots that are still needed.
        skew = self._clock_skew = measure_clock_skew(self.plane.clock, store)
        if skew is not None and abs(skew) > MAX_CLOCK_SKEW:
            raise ClockSkewError(
                f"{clocks_in_words(skew, self.plane.clock.now())}. Nothing was captured or pruned.",
                "synchronize the clocks of both servers with NTP, then capture the hour again.",
            )

    def _reason_to_stop(self, error: Exception) -> BudgetRecoveryError | None:
        if isinstance(error, _STOPS):
            return error
        if isinstance(error, StoreError):
            # Find out whether only this tenant is refused or the store is gone: with a thousand
            # tenants, a time-out for each would take longer than the hour.
            try:
                self.watch.require_accepted()
            except BudgetRecoveryError as gone:
                return gone
        self._refusals = self._refusals + 1 if isinstance(error, DatabaseError) else 0
        if isinstance(error, DatabaseError) and self._refusals == _DATABASE_REFUSALS:
            return error
        return None

    def _fail_the_rest(self, tenants: list[str]) -> None:
        if self._stopped_by is None:
            return
        # Without on_outcome: all of them have the one reason that ended the capture.
        tried = {outcome.tenant for outcome in self._outcomes}
        self._outcomes.extend(
            TenantFailed.because(tenant, self._stopped_by, seconds=0)
            for tenant in tenants
            if tenant not in tried
        )

    def _done(self, outcome: TenantOutcome) -> None:
        self._outcomes.append(outcome)
        self.on_outcome(outcome)


def _oldest_first(tenants: Set[str], newest: Mapping[str, datetime]) -> list[str]:
    """Sort tenants by the time of their newest snapshot; those without one are first."""
    never = datetime.min.replace(tzinfo=UTC)
    return sorted(tenants, key=lambda tenant: (newest.get(tenant, never), tenant))


def _stopped(error: Exception) -> Stopped:
    return Stopped(error_code(error), *describe_error(error))


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing was read: captures are paused in ``state``."""

    state: RecoveryState


@dataclass(frozen=True, slots=True)
class Verified:
    """A past hour's snapshots were checked, not rewritten; ``damage`` lists the damaged ones."""

    hour: Hour
    snapshots: tuple[CaptureSummary, ...]
    damage: tuple[str, ...]


def capture_hour(  # noqa: PLR0913 - by keyword, each the caller's own
    plane: ControlPlane,
    open_store: OpenStore,
    hour: Hour,
    *,
    source: CaptureSource,
    retention: RetentionPolicy,
    run_id: str,
    holder: str,
    on_outcome: Callable[[TenantOutcome], None],
    on_progress: Callable[[str], None] = lambda _: None,
) -> Captured | Verified | Paused:
    """Capture every tenant into the current hour, or verify a past one.

    ``holder`` identifies this capture to others; ``on_outcome`` receives the outcome of each tenant
    that is tried, as soon as it is known, and ``on_progress`` sentences during a verification.

    Raises:
        HourNotReachedError: the hour begins in more than a minute.
        HourNotCapturedError: the hour is past and has no stored snapshot.
        HourClosedError: the hour closed before anything was read.
        StoreError: the store cannot be used, and no tenant is known that could be reported.
        ClockSkewError: the clocks disagree, and no tenant is known that could be reported.
        LeaseHeldError: another capture is running.
        SettingsError: the database belongs to another bucket.
        DatabaseError: the database failed; what is stored stays stored.
    """
    now = plane.clock.now()
    record = plane.registry.claim()
    if hour.is_future(now + MAX_CLOCK_SKEW):
        raise HourNotReachedError(
            f"The hour {hour} has not begun; a snapshot holds what the store has now.",
            f"capture the current hour, {Hour.containing(now).key}.",
        )
    if hour.is_past(now):
        return _verify(plane, hour, Hour.containing(now), on_progress)
    _await_start(plane, hour, now)
    if record.state.captures_paused:
        return Paused(record.state)
    with plane.leases.hold(CAPTURE_LEASE, holder) as lease:
        # Before anything is read: usage counted until then is in the snapshot. Under the lease:
        # the order of two captures is then the order of their times.
        captured_at = plane.clock.now()
        if hour.is_future(captured_at):
            raise _not_begun(hour)
        if hour.is_past(captured_at):
            raise HourClosedError(
                f"The hour {hour} closed while this capture was starting.",
                f"capture the current hour, {Hour.containing(captured_at).key}.",
            )
        run = CaptureRun(
            plane=plane,
            holder=holder,
            source=source,
            hour=hour,
            captured_at=captured_at,
            run_id=run_id,
            lease=lease,
            on_outcome=on_outcome,
        )
        captured = _recorded(run, open_store)
        if captured.stopped_by is not None and not captured.outcomes:
            raise captured.stopped_by
        return _prune(plane, captured, retention, lease)


def _await_start(plane: ControlPlane, hour: Hour, now: datetime) -> None:
    """Wait for an hour to begin: the scheduler's clock may be a little ahead of the database's."""
    waited = timedelta(0)
    while hour.is_future(now):
        # By the database's clock, it may take forever: that may be set back, or stand still.
        if waited >= 2 * MAX_CLOCK_SKEW:
            raise _not_begun(hour)
        span = min(hour.start - now, MAX_CLOCK_SKEW)
        plane.clock.wait(span)
        waited += span
        now = plane.clock.now()


def _not_begun(hour: Hour) -> HourNotReachedError:
    return HourNotReachedError(
        f"The hour {hour} has not begun, although it should have: the database's clock was set "
        "back, or stands still.",
        "synchronize the clock of the database's server with NTP, then capture the hour again.",
    )


def capture_now(  # noqa: PLR0913 - by keyword, each the caller's own
    plane: ControlPlane,
    open_store: OpenStore,
    *,
    source: CaptureSource,
    retention: RetentionPolicy,
    run_id: str,
    holder: str,
    on_outcome: Callable[[TenantOutcome], None] = lambda _: None,
) -> Captured:
    """Capture every tenant into the present hour, as a person ordered it; see ``capture_hour``.

    Raises:
        CapturesPausedError: the store is not HEALTHY.
        BudgetRecoveryError: as by ``capture_hour``, also if no tenant could be captured.
    """
    hour = Hour.containing(plane.clock.now())
    captured = capture_hour(
        plane,
        open_store,
        hour,
        source=source,
        retention=retention,
        run_id=run_id,
        holder=holder,
        on_outcome=on_outcome,
    )
    match captured:
        case Captured():
            return captured
        case Verified():
            raise HourClosedError(
                f"The hour {hour} closed before its capture could start.",
                "run `budget-recovery snapshot`, which captures the current hour.",
            )
        case Paused(state):
            raise CapturesPausedError(
                f"Captures are paused: the store is {state.name}.",
                "see `budget-recovery status`.",
            )


def _recorded(run: CaptureRun, open_store: OpenStore) -> Captured:
    """Capture all tenants, and record the run, its end and its failures for the status."""
    snapshots = run.plane.snapshots
    number = snapshots.begin_run(run.run_id, run.hour, started_at=run.captured_at, lease=run.lease)
    try:
        captured = run.capture_all(open_store)
        snapshots.record_failures(captured.failures, run_id=run.run_id)
    except Exception as error:
        failed = RunResult(RunOutcome.FAILED, 0, 0, 0, _stopped(error), None)
        # If the database is gone, the run stays without an end, which the status shows as well.
        with suppress(DatabaseError):
            snapshots.end_run(number, failed)
        raise
    snapshots.end_run(number, captured.result)
    return captured


def _prune(
    plane: ControlPlane, captured: Captured, retention: RetentionPolicy, lease: Lease
) -> Captured:
    if not captured.may_prune:
        return captured
    try:
        pruned = plane.snapshots.prune(
            captured.read, policy=retention, now=plane.clock.now(), lease=lease
        )
    except BudgetRecoveryError as error:
        # The new snapshots stay stored; the next run prunes again.
        return replace(captured, prune_failure=error)
    return replace(captured, pruned=pruned)


def _verify(
    plane: ControlPlane, hour: Hour, current: Hour, on_progress: Callable[[str], None]
) -> Verified:
    stored = plane.reports.captured_in(hour)
    if not stored:
        raise HourNotCapturedError(
            f"No snapshot is stored for the hour {hour}: none was taken, or it is past retention. "
            "The hour cannot be captured any more: the store holds only the present, which must "
            "not be stored as the past.",
            f"capture the current hour, {current.key}; a recovery point uses all retained "
            "snapshots, so a gap loses nothing that a later snapshot holds.",
        )
    return Verified(hour, stored, plane.reports.damaged_in(hour, on_progress=on_progress))
