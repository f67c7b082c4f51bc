"""One restore session: what automatic, manual and resolving restores do around the tenants.

A session holds the restore lease and the opened store. It waits until the store can be restored,
marks it as the restore target of the open incident, restores tenants, and verifies at the end that
the store is still the same.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Protocol

from budget_recovery_dagster.domain.counters import BudgetWindow, Entity, exact_sum
from budget_recovery_dagster.domain.incident import Closing, Incident
from budget_recovery_dagster.domain.plan import Action, AuditEntry, AuditTrail, RecoveryPlan
from budget_recovery_dagster.domain.recovery_point import Reset, TenantPoint
from budget_recovery_dagster.domain.snapshots import TenantReading
from budget_recovery_dagster.domain.store import (
    SETTLED_FOR,
    Baseline,
    Check,
    ClusterView,
    Observation,
    Verdict,
    objection,
    why_not_converged,
)
from budget_recovery_dagster.domain.windows import RESTORE_CLOCK_SKEW, in_words
from budget_recovery_dagster.errors import (
    DatabaseUnreachableError,
    IncidentMovedError,
    LeaseLostError,
    StoreError,
    StoreNotReadyError,
    StorePermissionError,
    StoreWriteError,
    describe_error,
)
from budget_recovery_dagster.ports import ControlPlane, Lease, UsageStore
from budget_recovery_dagster.services.restore.tenants import (
    Guards,
    TenantRestored,
    counted,
    failed,
    left_entries,
    partial_error,
    plan_tenant,
    restore_tenant,
)
from budget_recovery_dagster.services.store_watch import (
    StoreWatch,
    check_of,
    new_nonce,
    watch_store,
)

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

    ``next_step`` is what to do if the store is lost once more. ``incident`` None: the store is
    HEALTHY, and the accepted store is restored.
    """

    plane: ControlPlane
    store: UsageStore
    worker: Worker
    next_step: str
    incident: Incident | None = None
    watch: StoreWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = watch_store(self.plane, self.store, self.worker.holder)

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
        give_up_at = clock.now() + timeout
        views: list[ClusterView] = []
        reported = ""
        while (problem := self._not_converged(views)) is not None:
            is_well = bool(views) and objection(views[-1]) is None
            if clock.now() >= give_up_at + (_TO_SETTLE if is_well else timedelta(0)):
                raise problem
            if problem.message != reported:
                reported = problem.message
                self.worker.on_progress(f"Waiting for the store: {reported}")
            self.worker.lease.require_held()
            clock.wait_until(clock.now() + _POLL_EVERY)
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

    def adopt_target(self, incident: Incident) -> StoreWriteError | None:
        """Mark the store as the restore target of an incident, from now on this session's.

        A store that was lost once more is joined to the incident. A marker that is denied does not
        stop a restore: fewer losses can be detected without it. Returned is why the store takes no
        writes at all, if so.

        Raises:
            StoreError: the store cannot be restored now.
            PossibleLossError: two observations disagree.
            IncidentMovedError: the incident has been moved by someone else.
        """
        plane = self.plane
        self.incident, seen = self._join_further_loss(incident)
        target = self.incident.target or Baseline(seen.identity, version=1)
        target = replace(target, identity=seen.identity, intended=target.intended or new_nonce())
        self.incident = plane.incidents.adopt_target(target, judged=self.incident)
        try:
            target = self.watch.renew_marker(target, seen, plane.clock.now())
        except StorePermissionError as error:
            self.worker.on_progress(f"A further loss may go undetected: {error}")
            return None
        except StoreWriteError as error:
            return error
        self.incident = plane.incidents.adopt_target(target, judged=self.incident)
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
                verdict=Verdict.ADVANCED,
                reason=f"{reason}: {identity}.",
                identity=identity,
            )
        )
        return closed

    def accepted_with(self, seen: Observation) -> Baseline:
        """Return the baseline that is accepted when the incident closes."""
        target = self.open_incident.target
        if target is None:
            raise ValueError("an incident without a restore target cannot be closed")
        return replace(target, identity=seen.identity, intended=None)

    def _join_further_loss(self, incident: Incident) -> tuple[Incident, Observation]:
        seen = self.require_led()
        found = self.watch.judge(incident.target, seen)
        if not found.judgement.verdict.is_loss:
            return incident, seen
        joined = self.watch.join_loss(found, incident)
        self.plane.registry.record_check(check_of(joined))
        self.worker.on_progress(f"The store was lost once more. {found.judgement.reason}")
        return joined, self.store.observe(self.watch.deployment_id)

    def _not_converged(self, views: list[ClusterView]) -> StoreError | None:
        """Poll once more and return why the store has not converged; None if it has."""
        try:
            views.append(self.store.cluster_view(self.plane.clock.now()))
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
        of_store, now = self.store.now(), self.plane.clock.now()
        if of_store is not None and abs(of_store - now) > RESTORE_CLOCK_SKEW:
            raise StoreNotReadyError(
                f"The clocks disagree: the database's says {now:%Y-%m-%d %H:%M:%S}, the usage "
                f"store's {of_store:%Y-%m-%d %H:%M:%S} UTC, so the open windows are unknown.",
                "synchronize the clocks of both servers with NTP.",
            )


@dataclass(frozen=True, slots=True)
class LowerCounters:
    """Counters of one budget and window that were read as lower than the recovery point, or absent.

    ``rise`` is by how much in all. ``are_all``: nothing else is known of this budget and window:
    the recovery point has no other entity, and nothing of it was unreadable or damaged.
    """

    tenant: str
    of: BudgetWindow
    entities: frozenset[Entity]
    rise: Decimal
    are_all: bool


@dataclass(frozen=True, slots=True)
class Remainder:
    """How many counters are still lower than the recovery point, and which.

    ``unreadable`` live counters are left as they are; ``corrupt`` windows have no intact record.
    ``unseen`` describes tenants that may have more.
    """

    counters: int
    unreadable: int
    corrupt: int
    unseen: tuple[str, ...]
    lower: tuple[LowerCounters, ...] = ()

    @property
    def rise(self) -> Decimal:
        """By how much these counters are lower in all; one request counts in many of them."""
        return exact_sum(each.rise for each in self.lower)

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

    ``reason`` is for the audit. ``tenants`` has the result of each, in the order of their
    restoring. ``corrupt`` counts the open windows without an intact record, whose usage is unknown.
    """

    session: RestoreSession
    points: PointsOfTenants
    reason: str
    tenants: list[TenantRestored] = field(default_factory=list, init=False)
    has_current: bool = field(default=False, init=False)
    corrupt: int = field(default=0, init=False)

    @property
    def undone(self) -> list[TenantRestored]:
        """The tenants that are not restored."""
        return [tenant for tenant in self.tenants if tenant.failure is not None]

    @property
    def noted(self) -> int:
        """The number of budgets and windows with a note."""
        return sum(bool(entry.notes) for tenant in self.tenants for entry in tenant.entries)

    @property
    def boards(self) -> int:
        """How many leaderboards were written."""
        return sum(tenant.boards for tenant in self.tenants)

    def restore(self, tenant: str) -> TenantRestored | None:
        """Restore a tenant; None if it has nothing to restore.

        A failure of this tenant is in the result, and so is the plan.

        Raises:
            StoreError: the store does not answer any more.
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
            restored = restore_tenant(self.session.store, point, self.session.plane.clock, guards)
        except (DatabaseUnreachableError, LeaseLostError):
            raise
        except Exception as error:  # noqa: BLE001 - reported by name; no tenant stops another
            restored = failed(tenant, error)
        # Plans are large, and only the caller of this method may need it.
        self.tenants.append(replace(restored, plan=None))
        self._report(restored)
        if restored.entries:
            self._finish(at, restored.entries)
        if restored.failure is not None:
            self._require_answer(restored.failure)
        return restored

    def remainder(self, *, is_final: bool) -> Remainder:
        """Count, tenant by tenant, what a restore to the points would still raise, writing nothing.

        ``is_final``: record in the audits the counters that stay below their point. Otherwise an
        interrupted restore would count as having raised all that it had started.

        Raises:
            DatabaseUnreachableError, LeaseLostError: the work was cut short.
            StoreError: the store does not answer any more.
        """
        counters, unreadable, unseen = 0, 0, []
        lower: list[LowerCounters] = []
        for tenant in sorted(self.session.plane.points.tenants()):
            try:
                left, unread, lower_here = self._left_of(tenant)
                if is_final and left:
                    self._finish(self._now(), left)
            except (DatabaseUnreachableError, LeaseLostError):
                raise
            except Exception as error:  # noqa: BLE001 - reported by name; no tenant hides another
                self._require_answer(error)
                unseen.append(f"Tenant {tenant!r} cannot be read: {describe_error(error)[0]}")
            else:
                counters += sum(entry.planned for entry in left)
                unreadable += unread
                lower += lower_here
        return Remainder(counters, unreadable, self.corrupt, tuple(unseen), tuple(lower))

    def _finish(self, at: datetime, entries: tuple[AuditEntry, ...]) -> None:
        """Record what was done, unless another worker may have taken over meanwhile.

        An unfinished entry is accounted for by the entries of that worker.

        Raises:
            LeaseLostError: the lease is no longer held; nothing is recorded.
        """
        self.session.worker.lease.require_held()
        self.session.plane.audits.finish(self._trail(at, entries))

    def _left_of(
        self, tenant: str
    ) -> tuple[tuple[AuditEntry, ...], int, tuple[LowerCounters, ...]]:
        """Return the windows with counters below their point, and how many are unreadable."""
        self.session.worker.lease.require_held()
        now = self._now()
        point = self.points.point_of(tenant, now)
        if point is None:
            return (), 0, ()
        self._note_current(point, now)
        live = self.session.store.open_tenant(tenant).reading
        if error := partial_error(live):
            # A key that did not arrive is unknown, not absent.
            raise error
        plan = plan_tenant(point, live, now)
        unreadable = sum(1 for _ in plan.that(Action.SKIP_UNREADABLE))
        lower = tuple(_lower_counters(point, plan, live))
        return left_entries(point, plan), unreadable, lower

    def _require_answer(self, failure: Exception) -> None:
        """Check after a tenant's failure whether only this tenant is refused or the store is gone.

        Otherwise each of a thousand tenants would wait for its time-out.

        Raises:
            StoreError: the store does not answer.
        """
        if isinstance(failure, StoreError) and not isinstance(failure, StoreWriteError):
            self.session.store.observe(self.session.watch.deployment_id)

    def _now(self) -> datetime:
        return self.session.plane.clock.now()

    def _note_current(self, point: TenantPoint, now: datetime) -> None:
        current = [each for each in point.windows if each.of.window.is_current(now)]
        self.has_current |= bool(current)
        self.corrupt += sum(not each.has_intact_record for each in current)

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
                rise=exact_sum(entry.rise for entry in lower),
                are_all=is_clear and len(lower) == len(entries),
            )


def uncovered(incident: Incident) -> str:
    """Describe the usage that no snapshot holds."""
    span, since, until = incident.uncovered, incident.newest_point_at, incident.last_good_at
    if span is None or since is None or until is None:
        return "It is unknown since when usage is missing: no check of the store is recorded."
    newest = f"{since:%Y-%m-%d %H:%M:%S} UTC"
    sentence = f"Usage between the newest snapshot ({newest}) and the loss is not restored"
    # Exact to the second, as the times are shown.
    if span >= timedelta(seconds=1):
        last = f"{until:%Y-%m-%d %H:%M:%S} UTC"
        sentence += f": at least {in_words(span)}, to the last good check ({last})"
    return f"{sentence}."
