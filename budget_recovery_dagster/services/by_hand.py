"""What a person does to the store: under the lease of restores, on ground that is made sure of.

While an incident is open, it is the incident's ground that is stood on, as by a recovery. While
none is, the store must be the accepted one: if it is not, that is for the next check to find.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

from budget_recovery_dagster.audit_ports import RestoreAudits
from budget_recovery_dagster.domain.admission import LONGEST_RESTORE, RESTORE_LEASE
from budget_recovery_dagster.domain.detection import Sighting
from budget_recovery_dagster.domain.identity import Verdict
from budget_recovery_dagster.domain.incident import Incident, Outcome
from budget_recovery_dagster.errors import StoreWriteError
from budget_recovery_dagster.ports import Clock, Leases, Snapshots, StoreRegistry
from budget_recovery_dagster.recovery_ports import Check, Closing, Incidents, StoreChecks
from budget_recovery_dagster.restore_ports import OpenStore, RecoverableStore, RestorePoints
from budget_recovery_dagster.services.accepted_store import AcceptedStore
from budget_recovery_dagster.services.attempt import RestoreTools, base_of
from budget_recovery_dagster.services.count_words import counted
from budget_recovery_dagster.services.ground import GroundTaking, require_led
from budget_recovery_dagster.services.losses import Losses
from budget_recovery_dagster.services.orders import Order
from budget_recovery_dagster.services.readiness import Readiness, Ready, Unconverged
from budget_recovery_dagster.services.remainder import Remainder, look_for_remainder
from budget_recovery_dagster.services.tenants_restored import (
    Left,
    PointsOfTenants,
    TenantRestores,
    Worker,
)


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

    def await_ready(self) -> Sighting:
        """Wait until the store can be written to, and look at it.

        Raises:
            StoreNotReadyError: it has not converged in time, or its clock is not the database's.
            StoreError: it cannot be seen, or is not there.
        """
        self._ready().await_ready(self.store)
        seen = self.store.look(self.deployment_id)
        # A person may take what has not converged, but not what may be another store by now.
        require_led(seen)
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
            self.accepted().require()
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
        return look_for_remainder(restores, sorted(self.tools.points.tenants()), note)

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
