"""One run through all tenants of a capture."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime

from budget_recovery_dagster.domain.identity import StoreIdentity
from budget_recovery_dagster.domain.moments import MAX_CLOCK_SKEW, Hour
from budget_recovery_dagster.domain.recovery_point import RecoveryPoint
from budget_recovery_dagster.domain.snapshots import (
    CaptureSource,
    TenantReading,
    TenantSnapshot,
    take_snapshot,
)
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    BudgetRecoveryError,
    CapturesPausedError,
    ClockSkewError,
    DatabaseError,
    DatabaseUnreachableError,
    HourClosedError,
    LeaseLostError,
    PossibleLossError,
    StoreError,
    StoreLostError,
)
from budget_recovery_dagster.ports import (
    Lease,
    Snapshots,
    TenantListing,
    TenantReader,
    UsageStore,
)
from budget_recovery_dagster.services.capture_outcome import (
    Captured,
    TenantAbsent,
    TenantFailed,
    TenantOutcome,
    TenantStored,
)
from budget_recovery_dagster.services.identity_watch import IdentityWatch

# Each round reads the identity again, so only a baseline that moves all the time uses them up.
_JUDGING_ROUNDS = 5

# That the store is not, or may not be, the one that was accepted.
_LOSSES = (PossibleLossError, StoreLostError, CapturesPausedError)

# What would meet every tenant that is left just as well.
_STOPS = (*_LOSSES, HourClosedError, LeaseLostError)

# One refusal may lie in a tenant's own data. So many in a row lie in the database: each may have
# waited for a time-out, and with a thousand tenants that would take longer than the hour.
_DATABASE_REFUSALS = 3


@dataclass(slots=True)
class CaptureRun:
    """Takes every tenant's snapshot under one lease, with one timestamp."""

    snapshots: Snapshots
    watch: IdentityWatch
    source: CaptureSource
    hour: Hour
    captured_at: datetime
    run_id: str
    lease: Lease
    on_outcome: Callable[[TenantOutcome], None]
    _outcomes: list[TenantOutcome] = field(default_factory=list, init=False)
    _stopped_by: BudgetRecoveryError | None = field(default=None, init=False)
    _refusals: int = field(default=0, init=False)

    def capture_all(self, open_store: Callable[[], AbstractContextManager[UsageStore]]) -> Captured:
        """Capture the tenants of the store and of earlier snapshots; no one stops another.

        Raises:
            StoreError: the store cannot be used, and no tenant is known that this could be told of.
            ClockSkewError: the same, for clocks that disagree.
            DatabaseUnreachableError: the database is gone; what is stored stays stored.
        """
        known = self.snapshots.tenants()
        identity: StoreIdentity | None = None
        listing = TenantListing(frozenset(), ())
        listing_failure: StoreError | None = None
        try:
            with open_store() as store:
                identity = self.watch.accept(store)
                self._require_agreeing_clocks(store)
                reader = store.reader(self.source)
                try:
                    listing = reader.list_tenants()
                except StoreError as error:
                    # The tenants that are known can still be captured, if the store is there.
                    self.watch.accept(store)
                    if not known:
                        raise
                    listing_failure = error
                self._capture_tenants(store, reader, sorted(known | listing.tenants))
                self._stopped_by = self._stopped_by or listing_failure
        except (StoreError, *_LOSSES, ClockSkewError) as error:
            if not known | listing.tenants:
                raise
            self._stopped_by = error
        self._fail_the_rest(known | listing.tenants)
        return Captured(
            hour=self.hour,
            captured_at=self.captured_at,
            source=self.source,
            identity=identity,
            outcomes=tuple(self._outcomes),
            unreadable=listing.unreadable,
            stopped_by=self._stopped_by,
        )

    def _capture_tenants(self, store: UsageStore, reader: TenantReader, tenants: list[str]) -> None:
        for tenant in tenants:
            started = time.monotonic()
            try:
                snapshot = self._capture_tenant(store, reader, tenant)
            except DatabaseUnreachableError:
                raise
            except Exception as error:  # noqa: BLE001 - reported by name; no tenant stops another
                self._done(TenantFailed.because(tenant, error, time.monotonic() - started))
                self._stopped_by = self._reason_to_stop(store, error)
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

    def _capture_tenant(
        self, store: UsageStore, reader: TenantReader, tenant: str
    ) -> TenantSnapshot:
        self.lease.require_held()
        reading = reader.read(tenant)
        point = self.snapshots.recovery_point(tenant, self.captured_at)
        for _ in range(_JUDGING_ROUNDS):
            try:
                return self._commit(store, reading, point)
            except BaselineMovedError:
                self.watch.read_baseline()
        raise BaselineMovedError(
            f"The accepted identity of the store moved {_JUDGING_ROUNDS} times while the snapshot "
            f"of tenant {tenant!r} was compared with it.",
            "capture the hour again; if it keeps happening, look for a second deployment that "
            "uses the same database.",
        )

    def _commit(
        self, store: UsageStore, reading: TenantReading, point: RecoveryPoint
    ) -> TenantSnapshot:
        identity = self.watch.accept(store)
        snapshot = take_snapshot(reading, self.captured_at, identity, point)
        self.watch.baseline = self.snapshots.commit(
            snapshot,
            hour=self.hour,
            run_id=self.run_id,
            lease=self.lease,
            judged=self.watch.baseline,
        )
        return snapshot

    def _require_agreeing_clocks(self, store: UsageStore) -> None:
        # Hours and windows are named by the database's clock. If that is wrong, a capture would
        # prune what is still needed.
        told = store.now()
        if told is not None and abs(told - self.captured_at) > MAX_CLOCK_SKEW:
            raise ClockSkewError(
                f"The clocks disagree: the database's says {self.captured_at:%Y-%m-%d %H:%M:%S}, "
                f"the usage store's {told:%Y-%m-%d %H:%M:%S} UTC. Nothing was captured or pruned.",
                "set the clocks of both servers by NTP, then capture the hour again.",
            )

    def _reason_to_stop(self, store: UsageStore, error: Exception) -> BudgetRecoveryError | None:
        if isinstance(error, _STOPS):
            return error
        if isinstance(error, StoreError):
            # Whether this tenant alone is refused or the store is gone: with a thousand tenants,
            # waiting for each one's time-out would take longer than the hour.
            try:
                self.watch.accept(store)
            except BudgetRecoveryError as gone:
                return gone
        self._refusals = self._refusals + 1 if isinstance(error, DatabaseError) else 0
        if isinstance(error, DatabaseError) and self._refusals == _DATABASE_REFUSALS:
            return error
        return None

    def _fail_the_rest(self, tenants: frozenset[str]) -> None:
        if self._stopped_by is None:
            return
        for tenant in sorted(tenants - {outcome.tenant for outcome in self._outcomes}):
            self._done(TenantFailed.because(tenant, self._stopped_by, seconds=0))

    def _done(self, outcome: TenantOutcome) -> None:
        self._outcomes.append(outcome)
        self.on_outcome(outcome)
