"""Capture: copy every tenant's counters to the control-plane database, one tenant at a time.

Per tenant: read, then compare the store's identity with the accepted one, then commit. In that
order a store that is wiped during the reading cannot pass for a good one.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from budget_recovery_dagster.domain.admission import CAPTURE_LEASE
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.domain.moments import MAX_CLOCK_SKEW, Hour
from budget_recovery_dagster.domain.retention import RetentionPolicy
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    HourClosedError,
    HourNotCapturedError,
    HourNotReachedError,
)
from budget_recovery_dagster.ports import (
    CaptureReports,
    CaptureSummary,
    Clock,
    Lease,
    Leases,
    Snapshots,
    StoreRegistry,
    UsageStore,
)
from budget_recovery_dagster.recovery_ports import Incidents, StoreChecks
from budget_recovery_dagster.services.capture_outcome import Captured, TenantOutcome
from budget_recovery_dagster.services.capture_run import CaptureRun
from budget_recovery_dagster.services.identity_watch import IdentityWatch
from budget_recovery_dagster.services.losses import Losses


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing was read: captures are paused in this state."""

    state: RecoveryState


@dataclass(frozen=True, slots=True)
class Verified:
    """A past hour's snapshots were checked, not rewritten; ``damage`` names what does not hold."""

    hour: Hour
    snapshots: tuple[CaptureSummary, ...]
    damage: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CaptureService:
    """Takes the snapshots of one hour from one source."""

    open_store: Callable[[], AbstractContextManager[UsageStore]]
    snapshots: Snapshots
    reports: CaptureReports
    incidents: Incidents
    checks: StoreChecks
    registry: StoreRegistry
    leases: Leases
    clock: Clock
    bucket: str
    source: CaptureSource
    retention: RetentionPolicy

    def capture(
        self,
        hour: Hour,
        *,
        run_id: str,
        holder: str,
        on_outcome: Callable[[TenantOutcome], None],
    ) -> Captured | Verified | Paused:
        """Capture every tenant into the current hour, or verify a past one.

        ``holder`` tells other captures who this is; ``on_outcome`` hears of each tenant as soon
        as it is done.

        Raises:
            HourNotReachedError: the hour begins in more than a minute.
            HourNotCapturedError: the hour is past and has no stored snapshot.
            HourClosedError: the hour closed before anything was read.
            LeaseHeldError: another capture is under way.
            SettingsError: the database belongs to another bucket.
            DatabaseError: the database did not do what was asked; what is stored stays stored.
        """
        now = self.clock.now()
        record = self.registry.claim(self.bucket)
        if hour.is_future(now + MAX_CLOCK_SKEW):
            raise HourNotReachedError(
                f"The hour {hour} has not begun; a snapshot holds what the store has now.",
                f"capture the current hour, {Hour.containing(now).key}.",
            )
        if hour.is_past(now):
            return self._verify(hour, Hour.containing(now))
        # The scheduler's clock may be a little ahead of the database's.
        self.clock.wait_until(hour.start)
        if record.state.captures_paused:
            return Paused(record.state)
        with self.leases.hold(CAPTURE_LEASE, holder) as lease:
            # Before anything is read: whatever was counted until then is in the snapshot. Under
            # the lease: so the snapshots of two captures are in the order of their times.
            captured_at = self.clock.now()
            if hour.is_past(captured_at):
                raise HourClosedError(
                    f"The hour {hour} closed while this capture was starting.",
                    f"capture the current hour, {Hour.containing(captured_at).key}.",
                )
            run = CaptureRun(
                snapshots=self.snapshots,
                watch=IdentityWatch(
                    registry=self.registry,
                    snapshots=self.snapshots,
                    checks=self.checks,
                    losses=Losses(self.incidents, self.clock),
                    clock=self.clock,
                    bucket=self.bucket,
                    found_by=holder,
                ),
                source=self.source,
                hour=hour,
                captured_at=captured_at,
                run_id=run_id,
                lease=lease,
                on_outcome=on_outcome,
            )
            captured = run.capture_all(self.open_store)
            self.snapshots.record_failures(captured.failures, run_id=run_id)
            return self._prune(captured, lease)

    def _prune(self, captured: Captured, lease: Lease) -> Captured:
        if not captured.may_prune:
            return captured
        try:
            pruned = self.snapshots.prune(
                captured.read, policy=self.retention, now=self.clock.now(), lease=lease
            )
        except BudgetRecoveryError as error:
            # The snapshots are stored whatever becomes of the old ones; the next run prunes.
            return replace(captured, prune_failure=error)
        return replace(captured, pruned=pruned)

    def _verify(self, hour: Hour, current: Hour) -> Verified:
        stored = self.reports.captured_in(hour)
        if not stored:
            raise HourNotCapturedError(
                f"No snapshot is stored for the hour {hour}: none was taken, or it is past "
                "retention. None can be taken any more: the store holds only the present, which "
                "must not stand under a past name.",
                f"capture the current hour, {current.key}; a recovery point uses all retained "
                "snapshots, so a gap costs nothing that a later one holds.",
            )
        return Verified(hour, stored, self.reports.damaged_in(hour))
