"""What a person does to the store: under the lease of restores, on ground that is made sure of.

While an incident is open, it is the incident's ground that is stood on, as by a recovery. While
none is, the store must be the accepted one: if it is not, that is for the next check to find.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

from budget_recovery_dagster.audit_ports import (
    RestoreAudits,
)
from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.detection import Sighting, judge_sighting
from budget_recovery_dagster.domain.identity import Verdict
from budget_recovery_dagster.domain.incident import Incident, Outcome
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    ChoiceError,
    DatabaseUnreachableError,
    LeaseLostError,
    PossibleLossError,
    StoreNotReadyError,
    StoreWriteError,
    put_into_words,
)
from budget_recovery_dagster.ports import Clock, Leases, Snapshots, StoreRegistry
from budget_recovery_dagster.recovery_ports import Check, Closing, Incidents, StoreChecks
from budget_recovery_dagster.restore_ports import (
    OpenStore,
    RecoverableStore,
    RestorePoints,
)
from budget_recovery_dagster.services.attempt import RestoreTools, base_of
from budget_recovery_dagster.services.count_words import counted
from budget_recovery_dagster.services.ground import GroundTaking
from budget_recovery_dagster.services.losses import Losses, look_or_gone, stand_in
from budget_recovery_dagster.services.readiness import Readiness, Ready, Unconverged
from budget_recovery_dagster.services.tenants_restored import (
    PointsOfTenants,
    TenantRestores,
    Worker,
)

LONGEST = timedelta(hours=1)
"""How long one piece of work may take; what was written by then stays."""

# A check renews the marker in between: then what was accepted is read again.
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Order:
    """Who orders something by hand, why, in which run, and who hears how it goes on.

    ``accept_unconverged``: a store is taken as it is, though its servers have not converged.
    """

    by: str
    reason: str
    run_id: str
    tell: Callable[[str], None]
    accept_unconverged: bool = False

    def require_reason(self) -> None:
        """Refuse an order that nobody would understand afterwards.

        Raises:
            ChoiceError: no reason is given.
        """
        if not self.reason.strip():
            raise ChoiceError(
                "No reason is given.", "say why; it is kept with what is done, for whoever asks."
            )


@dataclass(frozen=True, slots=True)
class Remainder:
    """How many counters are lower than the whole store's recovery point; ``unseen`` may be more."""

    counters: int
    unseen: tuple[str, ...]

    @property
    def is_nothing(self) -> bool:
        """Whether everything was seen, and all of it is there."""
        return not self.counters and not self.unseen


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
            ChoiceError: no reason is given.
            LeaseHeldError: somebody else restores; the message says who and since when.
            SettingsError: the database belongs to another bucket.
            StoreError, DatabaseError: store or database cannot be reached.
        """
        order.require_reason()
        record = self.registry.claim(self.bucket)
        with (
            self.leases.hold(RESTORE_LEASE, order.by, at_most=LONGEST) as lease,
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

    def await_ready(self) -> Sighting:
        """Wait until the store can be written to, and look at it.

        Raises:
            StoreNotReadyError: it has not converged in time, or its clock is not the database's.
            StoreError: it cannot be seen, or is not there.
        """
        self._ready().await_ready(self.store)
        seen = self._look()
        if not seen.is_led:
            # A person may take what has not converged, but not what may be another store by now.
            raise StoreNotReadyError(
                "Whoever answered for the store may not be its leader any more.",
                "bring back so many servers that most of them hear each other.",
            )
        return seen

    def take_ground(self) -> StoreWriteError | None:
        """Stand on the store, which is ready; return why it did not take our marker, if so.

        Raises:
            PossibleLossError: no incident is open, and the store is not the accepted one.
            StoreError: it cannot be seen.
            IncidentMovedError: somebody else has moved the incident.
        """
        incident = self.tools.incidents.recovery().incident
        if incident is None:
            self._require_accepted()
            return None
        taking = GroundTaking(self.tools.restore_tools(), self.worker, self.deployment_id)
        ground = taking.take(self.store, incident)
        self.incident = ground.incident
        return ground.refusal

    def require_same(self) -> Sighting:
        """See that the store is still the one on which the work began.

        Raises:
            StoreLostError, PossibleLossError: it is not.
            AttemptFailedError, StoreError: that cannot be seen.
        """
        if self.incident is None:
            return self._require_accepted()
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
        """Count what a restore of the whole store to its recovery point would raise.

        Raises:
            DatabaseUnreachableError, LeaseLostError: the work was cut short.
        """
        left, unseen = 0, []
        restores = self.restores(self.tools.points)
        for tenant in sorted(self.tools.points.tenants()):
            try:
                left += sum(entry.planned for entry in restores.left_of(tenant))
            except (DatabaseUnreachableError, LeaseLostError):
                raise
            except BudgetRecoveryError as error:
                unseen.append(f"Tenant {tenant!r} cannot be seen: {put_into_words(error)[0]}")
        return Remainder(left, tuple(unseen))

    def close(self, outcome: Outcome, detail: str, seen: Sighting, *, boards: int = 0) -> Incident:
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
        told = (
            f"By {self.order.by}: {self.order.reason.strip().rstrip('.')}. Raised "
            f"{counted(restored.counters, 'counter')} in {counted(restored.windows, 'window')} of "
            f"{counted(restored.tenants, 'tenant')}. {detail}"
        )
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

    def _look(self) -> Sighting:
        return self.store.look(self.deployment_id)

    def _require_accepted(self) -> Sighting:
        tools = self.tools
        for _ in range(_ROUNDS):
            record = tools.registry.claim(tools.bucket)
            accepted = record.baseline or stand_in(tools.snapshots)
            seen = look_or_gone(self._look)
            judgement = judge_sighting(accepted, seen, tools.clock.now())
            if seen is not None and judgement.verdict.is_good:
                return seen
            if tools.registry.claim(tools.bucket).baseline == record.baseline:
                break
        if judgement.verdict.is_loss:
            raise PossibleLossError(
                f"The store is not the one that was accepted. {judgement.reason}",
                "wait for the next check, which opens an incident if it finds the same; then "
                "restore.",
            )
        raise StoreNotReadyError(
            f"The store could not be seen to be the accepted one. {judgement.reason}",
            "wait until the store answers for itself, then try again.",
        )
