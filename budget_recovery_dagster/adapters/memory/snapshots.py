"""The stored snapshots, in memory."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from datetime import datetime

from budget_recovery_dagster.adapters.memory.control_plane import (
    ControlPlane,
    NotedFailure,
    StoredSnapshot,
)
from budget_recovery_dagster.adapters.memory.leases import require_lease
from budget_recovery_dagster.adapters.memory.resets import resets_of
from budget_recovery_dagster.adapters.stored_forms import (
    MAX_NAMED,
    named_drops_of,
    storable,
    storable_failure,
    storable_id,
    summary_of,
)
from budget_recovery_dagster.domain.admission import CAPTURE_LEASE, Facts, admit, admit_prune
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.identity import Baseline, StoreIdentity
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.recovery_point import RecoveryPoint, Usages, max_merge
from budget_recovery_dagster.domain.resets import eligible
from budget_recovery_dagster.domain.retention import (
    DatedUsages,
    RetentionPolicy,
    needed_past_retention,
)
from budget_recovery_dagster.domain.snapshots import TenantSnapshot, hash_usages
from budget_recovery_dagster.ports import (
    CaptureFailure,
    CaptureSummary,
    Lease,
    NamedDrop,
    NamedOmission,
    PruneReport,
    Uncaptured,
)


class MemorySnapshots:
    """Snapshots, and the reports on them, that are forgotten with their control plane."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained snapshot."""
        return frozenset(tenant for tenant, _ in self._plane.snapshots)

    def newest_identity(self) -> StoreIdentity | None:
        """Return the identity stored with the newest snapshot of any tenant."""
        newest = max(
            (stored.summary for stored in self._plane.snapshots.values()),
            key=lambda summary: (summary.captured_at, summary.identity.last_sequence),
            default=None,
        )
        return None if newest is None else newest.identity

    def recovery_point(self, tenant: str, now: datetime) -> RecoveryPoint:
        """Return the best known usages of the windows that are current at ``now``."""
        resets = resets_of(self._plane, tenant)
        usages: defaultdict[BudgetWindow, list[Usages]] = defaultdict(list)
        for stored in self._of([tenant]):
            for of, record in stored.records.items():
                used = eligible(record.usages, stored.summary.captured_at, of, resets)
                if of.window.is_current(now) and used:
                    usages[of].append(used)
        return {of: max_merge(*each) for of, each in usages.items()}

    def commit(
        self,
        snapshot: TenantSnapshot,
        *,
        hour: Hour,
        run_id: str,
        lease: Lease,
        judged: Baseline | None,
    ) -> Baseline:
        """Store a snapshot and accept its identity as the baseline, all or nothing."""
        with self._plane.lock:
            require_lease(self._plane, lease, name=CAPTURE_LEASE)
            store = self._plane.claimed_store()
            facts = Facts(
                now=self._plane.clock.now(),
                state=store.state,
                baseline=store.baseline,
                newest=max(
                    (stored.summary.captured_at for stored in self._of([snapshot.tenant])),
                    default=None,
                ),
            )
            baseline = admit(snapshot, hour=hour, judged=judged, facts=facts)
            if not snapshot.is_empty:
                self._plane.snapshots[snapshot.tenant, snapshot.captured_at] = StoredSnapshot(
                    summary=summary_of(snapshot, run_id),
                    stored_at=facts.now,
                    drops=named_drops_of(snapshot),
                    records={record.of: record for record in snapshot.records},
                )
            self._plane.store = replace(store, baseline=baseline)
            return baseline

    def record_failures(self, failures: Collection[CaptureFailure], *, run_id: str) -> None:
        """Note what a run could not capture."""
        for failure in map(storable_failure, failures):
            noted = NotedFailure(failure, self._plane.clock.now())
            self._plane.failures[storable_id(run_id), failure.kind, failure.name] = noted

    def prune(
        self, tenants: Collection[str], *, policy: RetentionPolicy, now: datetime, lease: Lease
    ) -> PruneReport:
        """Remove what is past retention, of these tenants only, and no current recovery point."""
        cutoff = policy.cutoff(now)
        with self._plane.lock:
            require_lease(self._plane, lease, name=CAPTURE_LEASE)
            admit_prune(self._plane.claimed_store().state)
            hashes = self._hashes()
            records = sum(self._prune_records(tenant, cutoff, now) for tenant in tenants)
            captures = [
                key
                for key, stored in self._plane.snapshots.items()
                if key[0] in tenants and key[1] < cutoff and not stored.records
            ]
            for key in captures:
                del self._plane.snapshots[key]
            failed = [
                key for key, noted in self._plane.failures.items() if noted.failed_at < cutoff
            ]
            for noted_key in failed:
                del self._plane.failures[noted_key]
            contents = len(hashes - self._hashes())
            return PruneReport(records, len(captures), contents, len(failed))

    def _prune_records(self, tenant: str, cutoff: datetime, now: datetime) -> int:
        windows: defaultdict[BudgetWindow, list[StoredSnapshot]] = defaultdict(list)
        for stored in self._of([tenant]):
            for of in stored.records:
                windows[of].append(stored)
        removed = 0
        for of, snapshots in windows.items():
            expired = [each for each in snapshots if each.summary.captured_at < cutoff]
            needed: frozenset[datetime] = frozenset()
            if of.window.end is None or now < of.window.end:
                # A tenant's snapshots are in the order of their times: each is newer than the last.
                newest_first = (
                    DatedUsages(each.summary.captured_at, each.records[of].usages)
                    for each in reversed(snapshots)
                )
                needed = needed_past_retention(newest_first, cutoff)
            for stored in expired:
                if stored.summary.captured_at not in needed:
                    del stored.records[of]
                    removed += 1
        return removed

    def captured_in(self, hour: Hour) -> tuple[CaptureSummary, ...]:
        """Return the snapshots captured in an hour, by tenant and time."""
        return self._summaries(
            stored
            for stored in self._plane.snapshots.values()
            if hour.start <= stored.summary.captured_at < hour.end
        )

    def captured_by(self, run_id: str) -> tuple[CaptureSummary, ...]:
        """Return the snapshots that a run stored, by tenant."""
        return self._summaries(self._by(run_id))

    def failures_of(self, run_id: str) -> tuple[CaptureFailure, ...]:
        """Return what a run could not capture: tenants, then keys, each by name."""
        noted = (
            each.failure
            for (of_run, *_), each in self._plane.failures.items()
            if of_run == storable_id(run_id)
        )
        return tuple(sorted(noted, key=lambda each: (each.kind is Uncaptured.KEY, each.name)))

    def drops_of(self, run_id: str) -> tuple[NamedDrop, ...]:
        """Return the drops named by the snapshots of a run; long lists are cut when stored."""
        return tuple(
            drop
            for stored in sorted(self._by(run_id), key=lambda stored: _order(stored.summary))
            for drop in stored.drops
        )

    def omissions_of(self, run_id: str) -> tuple[NamedOmission, ...]:
        """Return the omissions named by a run's snapshots; long lists are cut when stored."""
        return tuple(
            NamedOmission(stored.summary.tenant, storable(omission.key), storable(omission.reason))
            for stored in sorted(self._by(run_id), key=lambda stored: _order(stored.summary))
            for of in sorted(stored.records, key=lambda of: (of.budget, of.window.token))
            for omission in stored.records[of].omitted[:MAX_NAMED]
        )

    def newest_run(self, hour: Hour) -> str | None:
        """Return the run that stored a snapshot of an hour, or noted a failure in it, last."""
        stored = (
            (each.stored_at, each.summary.run_id)
            for each in self._plane.snapshots.values()
            if Hour.containing(each.summary.captured_at) == hour
        )
        noted = (
            (each.failed_at, run_id)
            for (run_id, *_), each in self._plane.failures.items()
            if each.failure.hour == hour
        )
        newest = max([*stored, *noted], default=None)
        return None if newest is None else newest[1]

    def damaged_in(self, hour: Hour) -> tuple[str, ...]:
        """Verify the stored snapshots of an hour; name, in a sentence each, what does not hold."""
        return tuple(
            f"tenant {summary.tenant!r}, {summary.captured_at:%Y-%m-%d %H:%M:%S} UTC: {of} holds"
            " other usages than were captured."
            for summary in self.captured_in(hour)
            for of, record in self._plane.snapshots[
                summary.tenant, summary.captured_at
            ].records.items()
            if hash_usages(record.usages) != record.content_hash
        )

    def _of(self, tenants: Collection[str]) -> Iterator[StoredSnapshot]:
        for (tenant, _), stored in self._plane.snapshots.items():
            if tenant in tenants:
                yield stored

    def _by(self, run_id: str) -> Iterator[StoredSnapshot]:
        for stored in self._plane.snapshots.values():
            if stored.summary.run_id == storable_id(run_id):
                yield stored

    def _summaries(self, snapshots: Iterable[StoredSnapshot]) -> tuple[CaptureSummary, ...]:
        return tuple(sorted((stored.summary for stored in snapshots), key=_order))

    def _hashes(self) -> set[bytes]:
        return {
            record.content_hash
            for stored in self._plane.snapshots.values()
            for record in stored.records.values()
        }


def _order(summary: CaptureSummary) -> tuple[str, datetime]:
    return summary.tenant, summary.captured_at
