"""Manual restores, and closing an incident without one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

from budget_recovery_dagster.domain.admission import LONGEST_RESTORE, RESTORE_LEASE
from budget_recovery_dagster.domain.incident import Closing, Incident, Outcome
from budget_recovery_dagster.domain.plan import Difference, KeptPreview, RecoveryPlan, RestoreChoice
from budget_recovery_dagster.domain.store import Check, Observation, Verdict
from budget_recovery_dagster.errors import BudgetRecoveryError, IncidentMovedError, StoreWriteError
from budget_recovery_dagster.ports import (
    Clock,
    Incidents,
    Leases,
    OpenStore,
    Previews,
    RecoverableStore,
    RestoreAudits,
    RestorePoints,
    Snapshots,
    StoreChecks,
    StoreRegistry,
)
from budget_recovery_dagster.services.restore.choice import (
    Choosing,
    ChosenPoints,
    Comparison,
    Order,
    RestoreRequest,
    require_no_loss_since,
    require_same,
)
from budget_recovery_dagster.services.restore.session import (
    Readiness,
    Ready,
    Remainder,
    RestoreTools,
    TargetAdoption,
    Unconverged,
    base_of,
    find_remainder,
    require_led,
    uncovered,
)
from budget_recovery_dagster.services.restore.tenants import (
    Left,
    PointsOfTenants,
    TenantRestored,
    TenantRestores,
    Worker,
    undone_error,
)
from budget_recovery_dagster.services.store_watch import AcceptedStore, Losses
from budget_recovery_dagster.services.words import counted, listed


@dataclass(frozen=True, slots=True)
class HandTools:
    """What is worked with by hand, on the one store that the database belongs to."""

    open_store: OpenStore
    registry: StoreRegistry
    incidents: Incidents
    snapshots: Snapshots
    points: RestorePoints
    audits: RestoreAudits
    checks: StoreChecks
    leases: Leases
    clock: Clock
    bucket: str
    convergence_timeout: timedelta

    @contextmanager
    def at_work(self, order: Order) -> Iterator["HandWork"]:
        """Hold the lease of restores and the opened store.

        Raises:
            LeaseHeldError: somebody else restores; the message says who and since when.
            SettingsError: the database belongs to another bucket.
            StoreError, DatabaseError: store or database cannot be reached.
        """
        record = self.registry.claim(self.bucket)
        with (
            self.leases.hold(RESTORE_LEASE, order.by, at_most=LONGEST_RESTORE) as lease,
            self.open_store() as store,
        ):
            worker = Worker(order.run_id, order.by, lease, order.tell)
            yield HandWork(self, order, worker, store, record.deployment_id)

    def restore_tools(self) -> RestoreTools:
        """Return what an automatic restore works with."""
        return RestoreTools(
            points=self.points,
            audits=self.audits,
            checks=self.checks,
            incidents=self.incidents,
            losses=Losses(self.incidents, self.clock),
            clock=self.clock,
            next_step="See `budget-recovery status`, and preview once more.",
        )


@dataclass(slots=True)
class HandWork:
    """One piece of work under its lease; ``incident`` is the open one as this work knows it."""

    tools: HandTools
    order: Order
    worker: Worker
    store: RecoverableStore
    deployment_id: str
    incident: Incident | None = None

    def await_ready(self) -> Observation:
        """Wait until the store can be written to, and look at it.

        Raises:
            StoreNotReadyError: it has not converged in time, or its clock is not the database's.
            StoreError: it cannot be seen, or is not there.
        """
        self._ready().await_ready(self.store)
        seen = self.store.observe(self.deployment_id)
        # A person may take what has not converged, but not what may be another store by now.
        require_led(seen)
        return seen

    def adopt_target(self) -> StoreWriteError | None:
        """Stand on the store, which is ready; return why it did not take our marker, if so.

        Raises:
            PossibleLossError: no incident is open, and the store is not the accepted one.
            StoreError: it cannot be seen.
            IncidentMovedError: somebody else has moved the incident.
        """
        incident = self.tools.incidents.recovery().incident
        if incident is None:
            self.accepted().require()
            return None
        taking = TargetAdoption(self.tools.restore_tools(), self.worker, self.deployment_id)
        target = taking.take(self.store, incident)
        self.incident = target.incident
        return target.refusal

    def require_same(self) -> Observation:
        """See that the store is still the one on which the work began.

        Raises:
            StoreLostError, PossibleLossError: it is not.
            AttemptFailedError, StoreError: that cannot be seen.
        """
        if self.incident is None:
            return self.accepted().require()
        same_store = self.tools.restore_tools().same_store(self.store, self.deployment_id)
        return same_store.require(self.incident, found_by=self.worker.holder)

    def restores(self, points: PointsOfTenants) -> TenantRestores:
        """Return the restoring of tenants to these points, audited as this work."""
        return TenantRestores(
            points=points,
            audits=self.tools.audits,
            clock=self.tools.clock,
            worker=self.worker,
            store=self.store,
            deployment_id=self.deployment_id,
            why=self.order.reason,
            incident_id=self.incident.incident_id if self.incident else None,
        )

    def remainder(self) -> Remainder:
        """Tell what a restore of the whole store to its recovery point would raise.

        Raises:
            DatabaseUnreachableError, LeaseLostError, StoreError: the work was cut short.
        """
        return self._look_at_all(self.restores(self.tools.points), lambda _: None)

    def remainder_as_left(self) -> Remainder:
        """Tell the same, and keep in the audits that it is left.

        Else a restore that was cut off would count as having raised all that it had begun to.

        Raises:
            DatabaseUnreachableError, LeaseLostError, StoreError: the work was cut short.
        """
        restores = self.restores(self.tools.points)
        return self._look_at_all(restores, lambda left: restores.keep(left.entries))

    def _look_at_all(self, restores: TenantRestores, note: Callable[[Left], None]) -> Remainder:
        return find_remainder(restores, sorted(self.tools.points.tenants()), note)

    def close(
        self, outcome: Outcome, detail: str, seen: Observation, *, boards: int = 0
    ) -> Incident:
        """End the open incident, and accept the store as it was seen.

        Who ended it, why, and how much was raised in it, is told ahead of ``detail``.

        Raises:
            IncidentMovedError: somebody else has moved it.
            LeaseLostError: the lease is no longer held.
        """
        if self.incident is None:
            raise ValueError("there is no incident to be closed")
        tools, baseline = self.tools, base_of(self.incident, seen)
        restored = replace(tools.audits.restored_in(self.incident.incident_id), boards=boards)
        raised = (
            f"In all of the incident, {counted(restored.counters, 'counter')} raised in "
            f"{counted(restored.windows, 'window')} of {counted(restored.tenants, 'tenant')}."
            if restored.counters
            else "Nothing was raised."
        )
        told = f"By {self.order.by}: {self.order.reason.strip().rstrip('.')}. {raised} {detail}"
        closing = Closing(outcome, told, restored, baseline)
        closed = tools.incidents.close(closing, judged=self.incident, lease=self.worker.lease)
        tools.checks.record(
            Check(
                checked_at=tools.clock.now(),
                checked_by=self.worker.holder,
                verdict=Verdict.ADVANCED,
                reason=f"Accepted by hand: {baseline.identity}.",
                identity=baseline.identity,
            )
        )
        return closed

    def _ready(self) -> Ready:
        if self.order.accept_unconverged:
            return Unconverged(self.tools.clock, self.order.tell)
        return Readiness(
            self.tools.clock,
            self.tools.convergence_timeout,
            self.worker.lease.require_held,
            self.order.tell,
        )

    def accepted(self) -> AcceptedStore:
        """Return what compares the store with the accepted one, while no incident is open."""
        tools = self.tools
        return AcceptedStore(
            self.store,
            tools.registry,
            tools.snapshots,
            tools.incidents,
            tools.clock,
            tools.bucket,
        )


@dataclass(frozen=True, slots=True)
class Applied:
    """What a manual restore did.

    ``preview`` is the one that it was compared with, None: none of the last day was of just this
    choice; then nothing is known of ``differences``, as of those ``uncompared``. ``absent`` are the
    tenants of which the chosen snapshot holds nothing. ``failure`` is why not all is done; what was
    raised stays raised. ``incident`` is the one that was open, as it is now; ``remainder`` is what
    keeps it open, None where that was not looked at.
    """

    choice: RestoreChoice
    preview: KeptPreview | None
    differences: tuple[Difference, ...]
    uncompared: tuple[str, ...]
    absent: tuple[str, ...]
    tenants: tuple[TenantRestored, ...]
    failure: BudgetRecoveryError | None
    incident: Incident | None
    remainder: Remainder | None

    @property
    def raised(self) -> int:
        """How many counters were raised."""
        return sum(tenant.raised for tenant in self.tenants)

    @property
    def boards(self) -> int:
        """How many leaderboards were written."""
        return sum(tenant.boards for tenant in self.tenants)

    @property
    def has_ended_incident(self) -> bool:
        """Whether the store is HEALTHY by it."""
        return self.incident is not None and self.incident.ended is not None


@dataclass(frozen=True, slots=True)
class ManualRestoreService:
    """Restores by hand what was chosen."""

    tools: HandTools
    choosing: Choosing
    previews: Previews

    def apply(
        self, request: RestoreRequest, order: Order, preview_id: str | None = None
    ) -> Applied:
        """Raise the counters that are asked for, and end the incident if nothing is left.

        It is compared with the preview of this id, or else with the newest one of just this choice.
        What is raised here means that nothing was written but our marker; what goes wrong later is
        told in the result.

        Raises:
            ChoiceError: what is asked for does not exist, or no reason is given.
            LeaseHeldError: somebody else restores; the message says who and since when.
            PreviewOutdatedError: the store is another one than at the preview.
            PossibleLossError, StoreLostError: the store is lost.
            SettingsError: the database belongs to another bucket.
            StoreError, DatabaseError, IncidentMovedError: it could not begin.
        """
        order.require_reason()
        self.choosing.choose(request)
        with self.tools.at_work(order) as work:
            seen = work.await_ready()
            # Once more: retention may have taken the snapshot while the store was waited for.
            chosen = self.choosing.choose(request)
            comparison = Comparison.of(self.previews, chosen.choice, preview_id)
            if comparison.preview is None:
                order.tell("There is no preview of just this from the last day to compare with")
            else:
                require_same(comparison.preview, seen.identity)
            if refusal := work.adopt_target():
                raise refusal
            if comparison.preview is not None:
                require_no_loss_since(comparison.preview, work.incident)
            return _Run(chosen, work, comparison).restore()


@dataclass(slots=True)
class _Run:
    """One manual restore, on its restore target."""

    chosen: ChosenPoints
    work: HandWork
    comparison: Comparison
    absent: list[str] = field(default_factory=list)
    remainder: Remainder | None = None
    restores: TenantRestores = field(init=False)

    def __post_init__(self) -> None:
        self.restores = self.work.restores(self.chosen)

    def restore(self) -> Applied:
        failure: BudgetRecoveryError | None = None
        incident = self.work.incident
        try:
            for tenant in sorted({*self.chosen.tenants(), *self.comparison.tenants()}):
                self._restore(tenant)
            if self.restores.undone:
                failure = undone_error(self.restores.undone)
            incident = self._end(failure)
        except BudgetRecoveryError as error:
            # What was raised by then is to be told, whatever became of the rest.
            failure = error
        return Applied(
            choice=self.chosen.choice,
            preview=self.comparison.preview,
            differences=tuple(self.comparison.found),
            uncompared=tuple(self.comparison.uncompared),
            absent=tuple(self.absent),
            tenants=tuple(self.restores.tenants),
            failure=failure,
            incident=incident,
            remainder=self.remainder,
        )

    def _restore(self, tenant: str) -> None:
        previewed = self.comparison.previewed(tenant)
        restored = self.restores.restore(tenant)
        if restored is None:
            self.absent.append(tenant)
            self.comparison.add(tenant, previewed, RecoveryPlan(tenant, ()))
        else:
            self.comparison.add(tenant, previewed, restored.plan)

    def _end(self, failure: BudgetRecoveryError | None) -> Incident | None:
        """End the open incident if nothing of the whole store is left; return how it is now."""
        if self.work.incident is not None and failure is None:
            self.remainder = self.work.remainder()
        seen = self.work.require_same()
        incident, remainder = self.work.incident, self.remainder
        if incident is None or remainder is None or not remainder.is_nothing:
            return incident
        told = " ".join([*remainder.unknown(), uncovered(incident)])
        return self.work.close(Outcome.BY_HAND, told, seen, boards=self.restores.boards)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The incident, closed, and what the snapshots still say more."""

    incident: Incident
    remainder: Remainder


@dataclass(frozen=True, slots=True)
class ResolveService:
    """Ends incidents without restoring anything."""

    tools: HandTools

    def resolve(self, order: Order) -> Resolved:
        """Accept the store as it is: captures resume, and it is compared with this from now on.

        Nothing is written into it but our marker.

        Raises:
            ChoiceError: no reason is given.
            IncidentMovedError: no incident is open, or somebody else has moved it.
            LeaseHeldError: somebody restores; the message says who and since when.
            StoreLostError, PossibleLossError, AttemptFailedError: the store became another one
                meanwhile, or cannot be seen to be the same.
            SettingsError: the database belongs to another bucket.
            StoreError, DatabaseError, LeaseLostError: it cannot be seen; nothing is changed.
        """
        order.require_reason()
        self._require_open()
        with self.tools.at_work(order) as work:
            work.await_ready()
            if refusal := work.adopt_target():
                order.tell(f"A further loss may go unnoticed: {refusal}")
            if work.incident is None:
                self._require_open()
            remainder = work.remainder_as_left()
            seen = work.require_same()
            told = " ".join(_told(remainder, work.incident)) if work.incident else ""
            return Resolved(work.close(Outcome.ACCEPTED, told, seen), remainder)

    def _require_open(self) -> None:
        recovery = self.tools.incidents.recovery()
        if recovery.incident is None:
            raise IncidentMovedError(
                f"The store is {recovery.state}, and no incident is open.",
                "there is nothing to resolve; `budget-recovery status` says how it stands.",
            )


def _told(remainder: Remainder, incident: Incident) -> Iterator[str]:
    if remainder.counters:
        yield (
            f"Lower than the snapshots say, and left so: {counted(remainder.counters, 'counter')}."
        )
    yield from remainder.unknown()
    if remainder.unseen:
        yield f"Not everything could be seen: {listed(remainder.unseen)}"
    yield uncovered(incident)
