"""Automatic recovery of a lost store, from the open incident to its end.

A run first waits until the store can be restored, which spends no attempt. Then it claims an
attempt, restores every tenant, and verifies that the store is still the one it started with. The
new baseline, the healthy state and the closed incident are one transaction.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from budget_recovery_dagster.domain.admission import LONGEST_RESTORE, RESTORE_LEASE
from budget_recovery_dagster.domain.incident import (
    MAX_ATTEMPTS,
    Closing,
    FailureReason,
    Incident,
    RecoveryState,
)
from budget_recovery_dagster.domain.store import Check, Verdict
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    AttemptsUsedUpError,
    BudgetRecoveryError,
    DatabaseUnreachableError,
    IncidentHeldError,
    IncidentMovedError,
    LeaseHeldError,
    LeaseLostError,
    PossibleLossError,
    StoreError,
    StoreLostError,
    StoreWriteError,
    describe_error,
)
from budget_recovery_dagster.ports import (
    Clock,
    Incidents,
    Leases,
    OpenStore,
    RecoverableStore,
    RestoreAudits,
    RestorePoints,
    StoreChecks,
    StoreRegistry,
)
from budget_recovery_dagster.services.restore.session import (
    Readiness,
    RestoreAttempt,
    RestoreTools,
    TargetAdoption,
)
from budget_recovery_dagster.services.restore.tenants import TenantRestored, Worker
from budget_recovery_dagster.services.store_watch import Losses

# After these nothing can be noted any more, or what was noted is about another loss.
_BEYOND_NOTING = (DatabaseUnreachableError, IncidentMovedError, LeaseLostError, StoreLostError)


@dataclass(frozen=True, slots=True)
class Recovered:
    """The incident is closed; ``tenants`` is what this run did to each."""

    incident: Incident
    tenants: tuple[TenantRestored, ...]


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """The store cannot be restored yet; no attempt was spent."""

    incident: Incident
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The store is FAILED: a person has to look; ``tenants`` is what this run did to each."""

    incident: Incident
    reason: FailureReason
    detail: str
    tenants: tuple[TenantRestored, ...]


@dataclass(frozen=True, slots=True)
class NothingToDo:
    """No restore is due, another one is under way, or a person keeps it from going on."""

    reason: str


RecoveryResult = Recovered | StillWaiting | GaveUp | NothingToDo


@dataclass(frozen=True, slots=True)
class RecoveryService:
    """Recovers the one store that the control-plane database belongs to."""

    open_store: OpenStore
    registry: StoreRegistry
    incidents: Incidents
    points: RestorePoints
    audits: RestoreAudits
    checks: StoreChecks
    leases: Leases
    clock: Clock
    bucket: str
    convergence_timeout: timedelta

    def recover(self, *, run_id: str, holder: str, tell: Callable[[str], None]) -> RecoveryResult:
        """Try once to put the open incident right; ``tell`` hears in sentences how it goes on.

        Raises:
            AttemptFailedError: the attempt did not succeed, and others are left.
            StoreLostError: the store was lost once more; its attempts begin again.
            SettingsError: the database belongs to another bucket.
            DatabaseError, LeaseLostError, IncidentMovedError: the work was cut short; what was
                raised stays raised.
        """
        record = self.registry.claim(self.bucket)
        try:
            with self.leases.hold(RESTORE_LEASE, holder, at_most=LONGEST_RESTORE) as lease:
                recovery = self.incidents.recovery()
                if recovery.state is not RecoveryState.RECOVERING or recovery.incident is None:
                    return NothingToDo(f"The store is {recovery.state}; no restore is due.")
                if recovery.incident.on_hold is not None:
                    return NothingToDo(recovery.incident.on_hold)
                worker = Worker(run_id, holder, lease, tell)
                return _Run(self, worker, record.deployment_id, recovery.incident).recover()
        except LeaseHeldError as error:
            return NothingToDo(error.message)


@dataclass(slots=True)
class _Run:
    """One run of a recovery, under its lease; ``incident`` is as this run knows it."""

    service: RecoveryService
    worker: Worker
    deployment_id: str
    incident: Incident
    _tools: RestoreTools = field(init=False)
    _tenants: tuple[TenantRestored, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        service = self.service
        self._tools = RestoreTools(
            points=service.points,
            audits=service.audits,
            checks=service.checks,
            incidents=service.incidents,
            losses=Losses(service.incidents, service.clock),
            clock=service.clock,
            next_step="The restore is tried again by itself.",
        )

    def recover(self) -> RecoveryResult:
        if not self.service.points.tenants():
            return self._give_up(
                FailureReason.NO_SNAPSHOTS,
                "No snapshot of any tenant is stored, so nothing is known that could be restored.",
            )
        with self.service.open_store() as store:
            try:
                refusal = self._adopt_target(store)
            except (StoreError, PossibleLossError) as error:
                return self._wait(error)
            attempt = RestoreAttempt(
                self._tools, self.worker, store, self.deployment_id, self.incident
            )
            try:
                self.incident = self.service.incidents.claim_attempt(
                    judged=self.incident,
                    run_id=self.worker.run_id,
                    holder=self.worker.holder,
                    lease=self.worker.lease,
                )
            except IncidentHeldError as error:
                return NothingToDo(error.message)
            except AttemptsUsedUpError:
                return self._decide(attempt)
            attempt.incident = self.incident
            return self._attempt(attempt, refusal)

    def _adopt_target(self, store: RecoverableStore) -> StoreWriteError | None:
        service = self.service
        readiness = Readiness(
            service.clock,
            service.convergence_timeout,
            self.worker.lease.require_held,
            self.worker.tell,
        )
        readiness.await_ready(store)
        taking = TargetAdoption(self._tools, self.worker, self.deployment_id)
        target = taking.take(store, self.incident)
        self.incident = target.incident
        return target.refusal

    def _attempt(self, attempt: RestoreAttempt, refusal: StoreWriteError | None) -> RecoveryResult:
        number = self.incident.attempts
        self.worker.tell(f"Attempt {number} of {MAX_ATTEMPTS}")
        try:
            if refusal is not None:
                raise refusal
            closing = attempt.restore()
            recovered = self._close(closing, tuple(attempt.restores.tenants))
        except _BEYOND_NOTING:
            raise
        except IncidentHeldError as error:
            self.service.incidents.end_attempt(
                f"Stopped. {error.message}", judged=self.incident, lease=self.worker.lease
            )
            return NothingToDo(error.message)
        except Exception as error:
            self._tenants = tuple(attempt.restores.tenants)
            message, hint = describe_error(error)
            self.service.incidents.end_attempt(
                message, judged=self.incident, lease=self.worker.lease
            )
            if number >= MAX_ATTEMPTS:
                return self._give_up(FailureReason.NOT_WRITTEN, f"{message} Try: {hint}")
            raise AttemptFailedError(
                f"Attempt {number} of {MAX_ATTEMPTS} did not succeed: {message}", hint
            ) from error
        self.service.incidents.end_attempt(
            closing.outcome.value, judged=self.incident, lease=self.worker.lease
        )
        return recovered

    def _decide(self, attempt: RestoreAttempt) -> RecoveryResult:
        """End an incident whose attempts were used up without a word, by a last look."""
        self.worker.tell("All attempts are used up; looking once more, without raising anything")
        try:
            closing = attempt.verify()
        except AttemptFailedError as error:
            return self._give_up(FailureReason.NOT_WRITTEN, str(error))
        except (StoreError, PossibleLossError) as error:
            return self._wait(error)
        return self._close(closing, ())

    def _close(self, closing: Closing, tenants: tuple[TenantRestored, ...]) -> Recovered:
        service = self.service
        incident = service.incidents.close(closing, judged=self.incident, lease=self.worker.lease)
        service.checks.record(
            Check(
                checked_at=service.clock.now(),
                checked_by=self.worker.holder,
                verdict=Verdict.ADVANCED,
                reason=f"Accepted after the recovery: {closing.baseline.identity}.",
                identity=closing.baseline.identity,
            )
        )
        return Recovered(incident, tenants)

    def _wait(self, error: BudgetRecoveryError) -> StillWaiting:
        self.incident = self.service.incidents.wait(
            error.message, judged=self.incident, lease=self.worker.lease
        )
        return StillWaiting(self.incident, error.message, error.hint)

    def _give_up(self, reason: FailureReason, detail: str) -> GaveUp:
        incident = self.service.incidents.give_up(
            reason, detail, judged=self.incident, lease=self.worker.lease
        )
        return GaveUp(incident, reason, detail, self._tenants)
