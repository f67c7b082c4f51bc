"""One run through all tenants of a capture."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime

from budget_recovery_dagster.domain.counters import TenantReading
from budget_recovery_dagster.domain.identity import Baseline, StoreIdentity, Verdict, judge
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.recovery_point import RecoveryPoint
from budget_recovery_dagster.domain.snapshots import TenantSnapshot, take_snapshot
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    BudgetRecoveryError,
    CapturesPausedError,
    DatabaseUnreachableError,
    HourClosedError,
    LeaseLostError,
    PossibleLossError,
    StoreError,
    StoreMissingError,
)
from budget_recovery_dagster.ports import (
    Lease,
    Snapshots,
    StoreRegistry,
    TenantListing,
    UsageStore,
)
from budget_recovery_dagster.services.capture_outcome import (
    Captured,
    TenantAbsent,
    TenantFailed,
    TenantOutcome,
    TenantStored,
)

# Each round reads the identity again, so only a baseline that moves all the time uses them up.
_JUDGING_ROUNDS = 5

# What would meet every tenant that is left just as well.
_STOPS = (PossibleLossError, CapturesPausedError, HourClosedError, LeaseLostError)


@dataclass(slots=True)
class CaptureRun:
    """Takes every tenant's snapshot under one lease, with one timestamp."""

    snapshots: Snapshots
    registry: StoreRegistry
    bucket: str
    hour: Hour
    captured_at: datetime
    run_id: str
    lease: Lease
    on_outcome: Callable[[TenantOutcome], None]
    _outcomes: list[TenantOutcome] = field(default_factory=list, init=False)
    _baseline: Baseline | None = field(default=None, init=False)
    _stopped_by: BudgetRecoveryError | None = field(default=None, init=False)

    def capture_all(self, open_store: Callable[[], AbstractContextManager[UsageStore]]) -> Captured:
        """Capture the tenants of the store and of earlier snapshots; no one stops another.

        Raises:
            StoreError: the store cannot be used, and no tenant is known that this could be told of.
            DatabaseUnreachableError: the database is gone; what is stored stays stored.
        """
        known = self.snapshots.tenants()
        identity: StoreIdentity | None = None
        listing = TenantListing(frozenset(), ())
        try:
            with open_store() as store:
                identity = self._accept_identity(store)
                listing = store.list_tenants()
                self._capture_tenants(store, sorted(known | listing.tenants))
        except (StoreError, PossibleLossError) as error:
            if not known | listing.tenants:
                raise
            self._stopped_by = error
        self._fail_the_rest(known | listing.tenants)
        return Captured(
            hour=self.hour,
            captured_at=self.captured_at,
            identity=identity,
            outcomes=tuple(self._outcomes),
            unreadable=listing.unreadable,
            stopped_by=self._stopped_by,
        )

    def _capture_tenants(self, store: UsageStore, tenants: list[str]) -> None:
        for tenant in tenants:
            started = time.monotonic()
            try:
                snapshot = self._capture_tenant(store, tenant)
            except DatabaseUnreachableError:
                raise
            except Exception as error:  # noqa: BLE001 - reported by name; no tenant stops another
                self._done(TenantFailed.because(tenant, error, time.monotonic() - started))
                self._stopped_by = self._reason_to_stop(store, error)
                if self._stopped_by:
                    return
            else:
                seconds = time.monotonic() - started
                self._done(
                    TenantAbsent(tenant, seconds)
                    if snapshot.is_empty
                    else TenantStored.of(snapshot, seconds)
                )

    def _capture_tenant(self, store: UsageStore, tenant: str) -> TenantSnapshot:
        self.lease.require_held()
        reading = store.read_counters(tenant)
        point = self.snapshots.recovery_point(tenant, self.captured_at)
        for _ in range(_JUDGING_ROUNDS):
            try:
                return self._commit(store, reading, point)
            except BaselineMovedError:
                self._baseline = self.registry.claim(self.bucket).baseline
        raise BaselineMovedError(
            f"The accepted identity of the store moved {_JUDGING_ROUNDS} times while the snapshot "
            f"of tenant {tenant!r} was held against it.",
            "capture the hour again; if it keeps happening, look for a second deployment that "
            "uses the same database.",
        )

    def _commit(
        self, store: UsageStore, reading: TenantReading, point: RecoveryPoint
    ) -> TenantSnapshot:
        identity = self._accept_identity(store)
        snapshot = take_snapshot(reading, self.captured_at, identity, point)
        self._baseline = self.snapshots.commit(
            snapshot, hour=self.hour, run_id=self.run_id, lease=self.lease, judged=self._baseline
        )
        return snapshot

    def _accept_identity(self, store: UsageStore) -> StoreIdentity:
        """Read the store's identity and hold it against the accepted one."""
        if self._baseline is None:
            self._baseline = self.registry.claim(self.bucket).baseline
        # A baseline lost from the database is no first install while snapshots exist.
        accepted = self._baseline.identity if self._baseline else self.snapshots.newest_identity()
        try:
            observed = store.identity()
        except StoreMissingError as error:
            if accepted is None:
                raise
            raise _possible_loss(f"the bucket is gone; accepted was: {accepted}") from error
        verdict = judge(accepted, observed)
        if verdict.is_loss:
            raise _possible_loss(_what_changed(verdict, accepted, observed))
        return observed

    def _reason_to_stop(self, store: UsageStore, error: Exception) -> BudgetRecoveryError | None:
        if isinstance(error, _STOPS):
            return error
        if isinstance(error, StoreError):
            # Whether this tenant alone is refused or the store is gone: with a thousand tenants,
            # waiting for each one's time-out would take longer than the hour.
            try:
                self._accept_identity(store)
            except (StoreError, PossibleLossError) as gone:
                return gone
        return None

    def _fail_the_rest(self, tenants: frozenset[str]) -> None:
        if self._stopped_by is None:
            return
        for tenant in sorted(tenants - {outcome.tenant for outcome in self._outcomes}):
            self._done(TenantFailed.because(tenant, self._stopped_by, seconds=0))

    def _done(self, outcome: TenantOutcome) -> None:
        self._outcomes.append(outcome)
        self.on_outcome(outcome)


def _possible_loss(what: str) -> PossibleLossError:
    return PossibleLossError(
        f"Possible loss of the usage store: {what}. No snapshot was stored from it.",
        "check whether the store was wiped, rebuilt or restored from a copy; the last good "
        "snapshots are untouched.",
    )


def _what_changed(verdict: Verdict, accepted: StoreIdentity | None, observed: StoreIdentity) -> str:
    return f"its stream was {verdict} (accepted: {accepted}; found: {observed})"
