"""One restore session: what automatic, manual and resolving restores do around the tenants.

A session holds the restore lease and the opened store. It waits until the store can be restored,
marks it as the restore target of the open incident, restores tenants, and verifies at the end that
the store is still the same.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Protocol

from budget_recovery_dagster.domain.audits import AuditEntry, AuditTrail, LossFacts
from budget_recovery_dagster.domain.counters import BudgetWindow, Entity
from budget_recovery_dagster.domain.incident import Closing, Incident
from budget_recovery_dagster.domain.plan import (
    Action,
    RecoveryPlan,
    Room,
    StoreLimits,
    planned_amounts,
)
from budget_recovery_dagster.domain.recovery_point import Reset, TenantPoint
from budget_recovery_dagster.domain.snapshots import TenantReading
from budget_recovery_dagster.domain.store import (
    SETTLED_FOR,
    Baseline,
    ClusterView,
    objection,
    why_not_converged,
)
from budget_recovery_dagster.domain.verdict import Check, Observation, Verdict, baseline_of
from budget_recovery_dagster.domain.windows import (
    MAX_CLOCK_SKEW,
    RESTORE_CLOCK_SKEW,
    clocks_in_words,
    in_words,
)
from budget_recovery_dagster.errors import (
    DatabaseUnreachableError,
    IncidentMovedError,
    LeaseLostError,
    StoreError,
    StoreFullError,
    StoreNotReadyError,
    StorePermissionError,
    StoreWriteError,
    describe_error,
)
from budget_recovery_dagster.ports import ControlPlane, Lease, OpenStore, UsageStore
from budget_recovery_dagster.services.restore.report import Earlier, counted, left_entries
from budget_recovery_dagster.services.restore.tenants import (
    Guards,
    RunningClock,
    TenantRestored,
    failed,
    lacking_room,
    partial_error,
    plan_tenant,
    restore_tenant,
    room_for_tenant,
    with_marker,
)
from budget_recovery_dagster.services.store_watch import (
    MARKER_DELETED,
    SPARE_MARKER,
    StoreWatch,
    measure_clock_skew,
    measure_host_skew,
    watch_store,
)
from budget_recovery_dagster.stopwatch import Stopwatch

# Three polls must span the twelve seconds in which a cut-off leader may still answer.
_POLL_EVERY = timedelta(seconds=3)
_TO_SETTLE = SETTLED_FOR + _POLL_EVERY


@dataclass(frozen=True, slots=True)
class Worker:
    """The process that restores, with its run and lease; ``on_progress`` receives sentences."""

    run_id: str
    holder: str
    lease: Lease
    on_progress: Callable[[str], None]


@dataclass(slots=True)
class RestoreSession:
    """A restore or resolve under way; ``incident`` is the open one as this session knows it.

    ``open_again`` opens the store with a further connection. ``next_step`` is what to do if the
    store is lost once more. ``incident`` None: the store is HEALTHY, and the accepted store is
    restored.
    """

    plane: ControlPlane
    store: UsageStore
    open_again: OpenStore
    worker: Worker
    next_step: str
    incident: Incident | None = None
    watch: StoreWatch = field(init=False)
    running: RunningClock = field(init=False)

    def __post_init__(self) -> None:
        self.running = RunningClock(self.plane.clock)
        self.watch = watch_store(self.plane, self.store, self.open_again, self.worker.holder)

    @property
    def open_incident(self) -> Incident:
        """The open incident.

        Raises:
            IncidentMovedError: it was closed meanwhile.
        """
        if self.incident is None:
            raise IncidentMovedError(
                "No incident is open any more: another process closed it.",
                "see `budget-recovery status`.",
            )
        return self.incident

    def await_convergence(self, timeout: timedelta) -> None:
        """Return once the cluster has converged and its clock agrees with the database's.

        A store without objections gets the time that it takes to prove it, however short the
        timeout.

        Raises:
            StoreNotReadyError: it has not converged in time, or its clock is off.
            StoreError: it could not be reached, or does not exist, at the end of that time.
            LeaseLostError: the lease is no longer held.
        """
        clock = self.plane.clock
        began, since, waited = clock.now(), Stopwatch(), timedelta(0)
        views: list[ClusterView] = []
        reported = ""
        while (problem := self._not_converged(views, began + waited)) is not None:
            is_well = bool(views) and objection(views[-1]) is None
            if waited >= timeout + (_TO_SETTLE if is_well else timedelta(0)):
                raise problem
            if problem.message != reported:
                reported = problem.message
                self.worker.on_progress(f"Waiting for the store: {reported}")
            self.worker.lease.require_held()
            clock.wait(_POLL_EVERY)
            # Not by the database's clock, which may be set meanwhile.
            waited = max(waited + _POLL_EVERY, timedelta(seconds=since.seconds()))
        self._require_agreeing_clocks()

    def accept_unconverged(self) -> None:
        """Take the store as it is, because a person decided so; only its clock must agree.

        Raises:
            StoreNotReadyError: its clock is off.
            StoreError: it could not be reached, or does not exist.
        """
        problem = objection(self.store.cluster_view(self.plane.clock.now()))
        if problem is not None:
            self.worker.on_progress(f"Continuing although the store has not converged: {problem}")
        self._require_agreeing_clocks()

    def require_led(self) -> Observation:
        """Observe the store, answered by a leader that hears a majority.

        Raises:
            StoreNotReadyError: the server that answered may no longer be the leader.
            StoreError: the store could not be observed.
        """
        seen = self.store.observe(self.watch.deployment_id)
        if not seen.is_led:
            raise StoreNotReadyError(
                "The server that answered for the store may not be its leader any more.",
                "restore a quorum of the cluster's servers.",
            )
        return seen

    def adopt_target(self, incident: Incident, *, is_chosen: bool) -> StoreWriteError | None:
        """Mark the store as the restore target of an incident, from now on this session's.

        A store that was lost once more is joined to the incident. ``is_chosen``: a person decided
        to use the store that the incident is about, even if it is another one. A marker that is
        denied, has no room or is deleted does not stop a restore: fewer losses can be detected
        without it.
        Returned is why the store takes no writes at all, if so.

        Raises:
            IncidentHeldError: only a person can decide about this store; the incident is on hold.
            StoreError: the store cannot be restored now.
            PossibleLossError: two observations disagree.
            IncidentMovedError: the incident has been moved by someone else.
        """
        plane = self.plane
        losses = len(incident.losses)
        self.incident, seen = self.watch.settle_target(incident, is_chosen=is_chosen)
        for loss in self.incident.losses[losses:]:
            self.worker.on_progress(f"The store was lost once more. {loss.reason}")
        target = baseline_of(seen, plane.clock.now(), known=self.incident.target)
        target = replace(target, intended=target.intended or plane.registry.next_marker())
        self.incident = plane.incidents.adopt_target(target, judged=self.incident)
        try:
            target, _ = self.watch.renew_marker(target, seen, plane.clock.now())
        except (StorePermissionError, StoreFullError) as error:
            self.worker.on_progress(f"A further loss may go undetected: {error}")
            return None
        except StoreWriteError as error:
            return error
        self.incident = plane.incidents.adopt_target(target, judged=self.incident)
        if target.marker is None:
            self.worker.on_progress(
                f"A further loss may go undetected: {MARKER_DELETED} Try: {SPARE_MARKER}"
            )
        return None

    def require_same_store(self) -> Observation:
        """Require that the store is still the one that this session started with.

        Raises:
            StoreLostError, PossibleLossError: it is not.
            AttemptFailedError, StoreError: that could not be verified.
        """
        if self.incident is None:
            return self.watch.require_accepted()
        return self.watch.require_target(self.incident, next_step=self.next_step)

    def close(self, closing: Closing, *, reason: str, resets: Collection[Reset] = ()) -> Incident:
        """Close the incident and accept the store; ``reason`` is recorded with the check.

        ``resets`` are recorded together with it, or not at all.

        Raises:
            IncidentMovedError: the incident has been moved by someone else.
            LeaseLostError: the lease is no longer held.
        """
        plane, incident = self.plane, self.open_incident
        closed = plane.incidents.close(
            closing, judged=incident, lease=self.worker.lease, resets=resets
        )
        identity = closing.baseline.identity
        plane.registry.record_check(
            Check(
                checked_at=plane.clock.now(),
                checked_by=self.worker.holder,
                verdict=Verdict.SAME,
                reason=f"{reason}: {identity}.",
                identity=identity,
            )
        )
        return closed

    def accepted_with(self, seen: Observation) -> Baseline:
        """Return the baseline that is accepted when the incident closes.

        It has whatever marker of ours the store has.
        """
        target = self.open_incident.target
        if target is None:
            raise ValueError("an incident without a restore target cannot be closed")
        return baseline_of(seen, self.plane.clock.now(), known=target)

    def _not_converged(self, views: list[ClusterView], seen_at: datetime) -> StoreError | None:
        """Poll once more and return why the store has not converged; None if it has."""
        try:
            views.append(self.store.cluster_view(seen_at))
        except StoreError as error:
            # Earlier polls say nothing about a store that has been away since.
            views.clear()
            return error
        reason = why_not_converged(views)
        if reason is None:
            return None
        return StoreNotReadyError(
            f"The usage store has not converged: {reason}.",
            "bring back the missing servers; an automatic restore is retried, and a "
            "manual one can accept an unconverged store.",
        )

    def _require_agreeing_clocks(self) -> None:
        clock = self.plane.clock
        skew = measure_clock_skew(clock, self.store)
        if skew is not None and abs(skew) > RESTORE_CLOCK_SKEW:
            raise _unknown_windows(clocks_in_words(skew, clock.now()))
        # Both servers may share a machine whose clock is wrong.
        skew = measure_host_skew(clock)
        if abs(skew) > MAX_CLOCK_SKEW:
            raise _unknown_windows(clocks_in_words(skew, clock.now(), "this host's"))


def _unknown_windows(disagreement: str) -> StoreNotReadyError:
    return StoreNotReadyError(
        f"{disagreement}. The open windows are unknown.",
        "synchronize the clocks of PostgreSQL, NATS and the hosts of Dagster with NTP.",
    )


@dataclass(frozen=True, slots=True)
class LowerCounters:
    """Counters of one budget and window that were read as lower than the recovery point, or absent.

    ``rise`` is by how much, as one amount. ``are_all``: nothing else is known of this budget and
    window: the recovery point has no other entity, and nothing of it was unreadable or damaged.
    """

    tenant: str
    of: BudgetWindow
    entities: frozenset[Entity]
    rise: Decimal
    are_all: bool


@dataclass(frozen=True, slots=True)
class Remainder:
    """How many counters are still lower than the recovery point, and which, largest first.

    ``unreadable`` live counters are left as they are; ``corrupt`` windows have no intact record.
    ``unseen`` describes tenants that may have more.
    """

    counters: int
    unreadable: int
    corrupt: int
    unseen: tuple[str, ...]
    lower: tuple[LowerCounters, ...] = ()

    @property
    def is_nothing(self) -> bool:
        """Whether everything was read and nothing of it can be raised."""
        return not self.counters and not self.unseen

    def unknown(self) -> Iterator[str]:
        """Describe what may be missing, in sentences."""
        if self.corrupt:
            yield f"{counted(self.corrupt, 'window')} without an intact record: usage unknown."
        if self.unreadable:
            yield f"{counted(self.unreadable, 'live counter')} skipped (unreadable)."


class PointsOfTenants(Protocol):
    """The points that tenants are restored to."""

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        """Return a tenant's point; None if the tenant has nothing to restore."""
        ...


@dataclass(slots=True)
class TenantRestores:
    """Restores tenants to their points, in a session.

    ``reason`` is for the audit. ``is_latest``: the points are the recovery points, whole windows
    at a time. ``tenants`` has the result of each, in the order of their
    restoring. ``corrupt`` counts the open windows without an intact record, whose usage is unknown,
    and ``unreadable`` the live counters that could not be compared with the snapshots;
    ``unexpiring`` the windows whose keys cannot expire as recorded, and ``dropped_early`` those
    whose keys the bucket drops before the window ends.
    """

    session: RestoreSession
    points: PointsOfTenants
    reason: str
    is_latest: bool = True
    tenants: list[TenantRestored] = field(default_factory=list, init=False)
    has_current: bool = field(default=False, init=False)
    corrupt: int = field(default=0, init=False)
    unreadable: int = field(default=0, init=False)
    unexpiring: int = field(default=0, init=False)
    dropped_early: int = field(default=0, init=False)
    _limits: StoreLimits | None = field(default=None, init=False)

    @property
    def undone(self) -> list[TenantRestored]:
        """The tenants that are not restored."""
        return [tenant for tenant in self.tenants if tenant.failure is not None]

    @property
    def noted(self) -> int:
        """The number of budgets and windows with a note."""
        return sum(bool(entry.notes) for tenant in self.tenants for entry in tenant.entries)

    @property
    def missing(self) -> int:
        """How many counters were missing when they were read back."""
        return sum(tenant.missing for tenant in self.tenants)

    def degraded(self) -> Iterator[str]:
        """Describe how the restored keys differ from the lost ones, in sentences."""
        if self.missing:
            yield (
                f"{counted(self.missing, 'counter')} missing again when read back: deleted, "
                "expired, or in a closed window."
            )
        if self.unexpiring:
            yield (
                f"Keys of {counted(self.unexpiring, 'window')} do not expire: the bucket has no "
                "per-key TTLs (allow_msg_ttl)."
            )
        if self.dropped_early and self._limits is not None and self._limits.max_age is not None:
            yield (
                f"Keys of {counted(self.dropped_early, 'window')} are dropped "
                f"{in_words(self._limits.max_age)} after their last write, before the window ends "
                "(max_age)."
            )

    def require_room(self, tenants: Iterable[str]) -> None:
        """Require that a restore of these tenants makes the store delete no other keys.

        Only a store that deletes keys when it is full is read for this. A tenant that cannot be
        read is left out; its own restore then fails.

        Raises:
            StoreFullError: there is no room; the message names the setting and its value.
            StoreError: the store does not answer.
            DatabaseUnreachableError, LeaseLostError: the work was interrupted.
        """
        store = self.session.store
        if not store.limits().may_evict:
            return
        needed = Room()
        for tenant in sorted(tenants):
            self.session.worker.lease.require_held()
            try:
                needed += self._room_of(tenant)
            except (DatabaseUnreachableError, LeaseLostError):
                raise
            except Exception as error:  # noqa: BLE001 - its restore reports it by name
                self._require_answer(error)
        if refusal := lacking_room(store.limits(), with_marker(needed), "the restore"):
            raise refusal

    def restore(self, tenant: str) -> TenantRestored | None:
        """Restore a tenant; None if it has nothing to restore.

        A failure of this tenant is in the result, and so is the plan.

        Raises:
            StoreError, StoreLostError, PossibleLossError: the store does not answer any more, or
                another one does.
            IncidentHeldError, AttemptFailedError: likewise.
            DatabaseUnreachableError, LeaseLostError: the work was interrupted.
        """
        self.session.worker.lease.require_held()
        at = self._now()
        guards = Guards(
            keep_going=self.session.worker.lease.require_held,
            begin=lambda entries: self.session.plane.audits.begin(self._trail(at, entries)),
        )
        try:
            point = self.points.point_of(tenant, at)
            if point is None:
                return None
            self._note_current(point, at)
            restored = restore_tenant(
                self.session.store,
                point,
                self.session.running,
                guards,
                self._earlier(tenant),
            )
        except (DatabaseUnreachableError, LeaseLostError):
            raise
        except Exception as error:  # noqa: BLE001 - reported by name; no tenant stops another
            restored = failed(tenant, error)
        if restored.plan is not None:
            self.unreadable += _unreadable_in(restored.plan)
        # Plans are large, and only the caller of this method may need it.
        self.tenants.append(replace(restored, plan=None))
        self._report(restored)
        if restored.entries:
            self._finish(at, restored.entries)
        if restored.failure is not None:
            self._require_same_store(restored.failure)
        return restored

    def remainder(self, *, is_final: bool, tenants: Iterable[str] | None = None) -> Remainder:
        """Count, tenant by tenant, what a restore to the points would still raise, writing nothing.

        Of all tenants, or only of some.

        ``is_final``: record in the audits the counters that stay below their point. Otherwise an
        interrupted restore would count as having raised all that it had started.

        Raises:
            DatabaseUnreachableError, LeaseLostError: the work was cut short.
            StoreError, StoreLostError, PossibleLossError: the store does not answer any more, or
                another one does.
            IncidentHeldError, AttemptFailedError: likewise.
        """
        counters, unseen = 0, []
        lower: list[LowerCounters] = []
        for tenant in sorted(self.session.plane.points.tenants() if tenants is None else tenants):
            try:
                left, lower_here = self._left_of(tenant)
                if is_final and left:
                    self._finish(self._now(), left)
            except (DatabaseUnreachableError, LeaseLostError):
                raise
            except Exception as error:  # noqa: BLE001 - reported by name; no tenant hides another
                self._require_same_store(error)
                unseen.append(f"Tenant {tenant!r} cannot be read: {describe_error(error)[0]}")
            else:
                counters += sum(entry.planned for entry in left)
                lower += lower_here
        # A stable sort: equal ones stay in the order of tenants, budgets and windows.
        lower.sort(key=lambda each: each.rise, reverse=True)
        return Remainder(counters, self.unreadable, self.corrupt, tuple(unseen), tuple(lower))

    def _earlier(self, tenant: str) -> Earlier | None:
        """Return what earlier restores of the incident did to a tenant; None: none is open."""
        incident, audits = self.session.incident, self.session.plane.audits
        if incident is None:
            return None
        return Earlier(
            raised=audits.windows_begun(incident.incident_id, tenant),
            amounts=audits.amounts_of(incident.incident_id, tenant),
            facts=LossFacts(incident.began_empty, incident.lost_times, self.is_latest),
        )

    def _room_of(self, tenant: str) -> Room:
        running = self.session.running
        point = self.points.point_of(tenant, running.now())
        if point is None:
            return Room()
        live = self.session.store.open_tenant(tenant)
        plan = plan_tenant(point, live.reading, running.now())
        return room_for_tenant(live, point, plan, running)

    def _finish(self, at: datetime, entries: tuple[AuditEntry, ...]) -> None:
        """Record what was done, unless another worker may have taken over meanwhile.

        An unfinished entry is accounted for by the entries of that worker.

        Raises:
            LeaseLostError: the lease is no longer held; nothing is recorded.
        """
        self.session.worker.lease.require_held()
        self.session.plane.audits.finish(self._trail(at, entries))

    def _left_of(self, tenant: str) -> tuple[tuple[AuditEntry, ...], tuple[LowerCounters, ...]]:
        """Return the windows with counters below their point, and count the unreadable ones."""
        self.session.worker.lease.require_held()
        now = self._now()
        point = self.points.point_of(tenant, now)
        if point is None:
            return (), ()
        self._note_current(point, now)
        live = self.session.store.open_tenant(tenant).reading
        if error := partial_error(live):
            # A key that did not arrive is unknown, not absent.
            raise error
        plan = plan_tenant(point, live, now)
        self.unreadable += _unreadable_in(plan)
        return left_entries(point, plan), tuple(_lower_counters(point, plan, live))

    def _require_answer(self, failure: Exception) -> None:
        """Check after a tenant's failure whether only this tenant is refused or the store is gone.

        Otherwise each of a thousand tenants would wait for its time-out.

        Raises:
            StoreError: the store does not answer.
        """
        if _is_of_the_store(failure):
            self.session.store.observe(self.session.watch.deployment_id)

    def _require_same_store(self, failure: Exception) -> None:
        """Check as ``_require_answer`` does, and whether it is still the store that is restored.

        The connection may have been lost, and a new one may lead to another store. What answers an
        observation is trusted from then on, so it has to be judged before anything else is written.

        Raises:
            StoreError, StoreLostError, PossibleLossError: the store does not answer, or it is
                another one.
            IncidentHeldError, AttemptFailedError: likewise.
        """
        if _is_of_the_store(failure):
            self.session.require_same_store()

    def _now(self) -> datetime:
        return self.session.plane.clock.now()

    def _note_current(self, point: TenantPoint, now: datetime) -> None:
        current = [each for each in point.windows if each.of.window.is_current(now)]
        self.has_current |= bool(current)
        self.corrupt += sum(not each.has_intact_record for each in current)
        if self._limits is None:
            self._limits = self.session.store.limits()
        if not self._limits.supports_ttl:
            self.unexpiring += sum(
                any(isinstance(expiry, int) for expiry in each.expiries.values())
                for each in current
            )
        self.dropped_early += sum(
            self._limits.drops_early(each.of.window, now)
            and not (self._limits.supports_ttl and each.is_protected)
            for each in current
        )

    def _trail(self, at: datetime, entries: tuple[AuditEntry, ...]) -> AuditTrail:
        incident = self.session.incident
        return AuditTrail(
            at=at,
            run_id=self.session.worker.run_id,
            who=self.session.worker.holder,
            why=self.reason,
            incident_id=incident.incident_id if incident else None,
            entries=entries,
        )

    def _report(self, restored: TenantRestored) -> None:
        name = f"Tenant {restored.tenant!r}"
        if restored.failure is not None:
            self.session.worker.on_progress(f"{name} is not restored: {restored.failure}")
        elif restored.raised or restored.boards:
            self.session.worker.on_progress(
                f"{name}: {counted(restored.raised, 'counter')} raised, "
                f"{counted(restored.boards, 'leaderboard')} written"
            )
        for entry in restored.entries:
            for note in entry.notes:
                self.session.worker.on_progress(f"{name}, {entry.of}: {note}")


def _is_of_the_store(failure: Exception) -> bool:
    """Whether every tenant may meet a failure: it is none of a single value."""
    return isinstance(failure, StoreError) and not isinstance(failure, StoreWriteError)


def _unreadable_in(plan: RecoveryPlan) -> int:
    return sum(1 for _ in plan.that(Action.SKIP_UNREADABLE))


def _lower_counters(
    point: TenantPoint, plan: RecoveryPlan, live: TenantReading
) -> Iterator[LowerCounters]:
    planned, unreadable = plan.by_window(), {omitted.of for omitted in live.omitted}
    for window in point.windows:
        of, entries = window.of, planned[window.of]
        lower = [entry for entry in entries if entry.action is Action.RAISE]
        is_clear = not (window.corrupt or window.omitted_count or of in unreadable)
        if lower:
            yield LowerCounters(
                tenant=point.tenant,
                of=of,
                entities=frozenset(entry.entity for entry in lower),
                rise=planned_amounts(lower).rise,
                are_all=is_clear and len(lower) == len(entries),
            )
