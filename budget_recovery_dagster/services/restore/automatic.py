"""Automatic recovery of a lost store, from the open incident to its end.

A run first waits until the store can be restored, which spends no attempt. Then it claims an
attempt, restores every tenant, and verifies that the store is still the one it started with. The
new baseline, the healthy state and the closed incident are one transaction.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from budget_recovery_dagster.domain.admission import LONGEST_RESTORE, RESTORE_LEASE
from budget_recovery_dagster.domain.audits import MOST_AMOUNTS
from budget_recovery_dagster.domain.incident import (
    MAX_ATTEMPTS,
    Closing,
    FailureReason,
    Incident,
    Outcome,
    RecoveryState,
    Waiting,
)
from budget_recovery_dagster.domain.moves import require_not_held
from budget_recovery_dagster.domain.verdict import Observation
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    AttemptNotDueError,
    AttemptsUsedUpError,
    BudgetRecoveryError,
    DatabaseUnreachableError,
    IncidentHeldError,
    IncidentMovedError,
    LeaseHeldError,
    LeaseLostError,
    PossibleLossError,
    StoreError,
    StoreFullError,
    StoreLostError,
    StorePermissionError,
    StoreRefusedError,
    StoreWriteError,
    describe_error,
    error_code,
)
from budget_recovery_dagster.ports import ControlPlane, OpenStore
from budget_recovery_dagster.services.restore.report import cost, counted, uncovered
from budget_recovery_dagster.services.restore.session import (
    RestoreSession,
    TenantRestores,
    Worker,
)
from budget_recovery_dagster.services.restore.tenants import TenantRestored, undone_error

_NEXT_STEP = "The restore is retried automatically."
# After these nothing can be recorded any more, or what was recorded is about another loss.
_BEYOND_RECORDING = (DatabaseUnreachableError, IncidentMovedError, LeaseLostError, StoreLostError)
# The store has answered that it wrote nothing, so an attempt that ends with one may be repeated.
_REFUSALS = (StoreFullError, StorePermissionError, StoreRefusedError)


@dataclass(frozen=True, slots=True)
class Recovered:
    """The incident is closed; ``tenants`` has what this run did to each."""

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
    """The store is FAILED: a person has to act; ``tenants`` has what this run did to each."""

    incident: Incident
    reason: FailureReason
    detail: str
    tenants: tuple[TenantRestored, ...]


@dataclass(frozen=True, slots=True)
class NothingToDo:
    """No restore is due, another one is running, or a person put it on hold."""

    reason: str


RecoveryResult = Recovered | StillWaiting | GaveUp | NothingToDo


def recover_store(  # noqa: PLR0913 - by keyword, each the caller's own
    plane: ControlPlane,
    open_store: OpenStore,
    *,
    run_id: str,
    holder: str,
    convergence_timeout: timedelta,
    on_progress: Callable[[str], None],
) -> RecoveryResult:
    """Try once to recover the store of the open incident; ``on_progress`` receives sentences.

    Raises:
        AttemptFailedError: the attempt failed, and others are left.
        StoreLostError: the store was lost once more; its attempts start again.
        SettingsError: the database belongs to another bucket.
        DatabaseError, LeaseLostError, IncidentMovedError: the work was cut short; what was raised
            stays raised.
    """
    plane.registry.claim()
    try:
        with plane.leases.hold(RESTORE_LEASE, holder, at_most=LONGEST_RESTORE) as lease:
            recovery = plane.incidents.recovery()
            incident = recovery.incident
            if recovery.state is not RecoveryState.RECOVERING or incident is None:
                return NothingToDo(f"The store is {recovery.state.name}; no restore is due.")
            if incident.on_hold is not None:
                return NothingToDo(f"{incident.on_hold} Try: {incident.hold_ends}")
            if awaited := incident.awaited_attempt(plane.clock.now()):
                return NothingToDo(awaited)
            if not plane.points.tenants():
                detail = "No snapshot of any tenant is stored, so there is nothing to restore from."
                reason = FailureReason.NO_SNAPSHOTS
                incident = plane.incidents.give_up(reason, detail, judged=incident, lease=lease)
                return GaveUp(incident, reason, detail, ())
            worker = Worker(run_id, holder, lease, on_progress)
            with open_store() as store:
                session = RestoreSession(plane, store, open_store, worker, _NEXT_STEP, incident)
                return _Run(session).recover(convergence_timeout)
    except LeaseHeldError as error:
        return NothingToDo(error.message)


@dataclass(slots=True)
class _Run:
    """One run of a recovery, in its session."""

    session: RestoreSession
    _restores: TenantRestores | None = field(default=None, init=False)

    def recover(self, convergence_timeout: timedelta) -> RecoveryResult:
        try:
            self.session.await_convergence(convergence_timeout)
            if self._incident.attempts < MAX_ATTEMPTS:
                self._tenant_restores().require_room(self._plane.points.tenants())
            refusal = self.session.adopt_target(self._incident, is_chosen=False)
            if refusal is not None and (closing := self._nothing_lost()) is not None:
                return self._close(closing)
        except IncidentHeldError as error:
            return NothingToDo(str(error))
        except (AttemptFailedError, StoreError, PossibleLossError) as error:
            return self._wait(error)
        worker, waited = self.session.worker, self._incident.waiting
        try:
            self.session.incident = self._plane.incidents.claim_attempt(
                judged=self._incident,
                run_id=worker.run_id,
                holder=worker.holder,
                lease=worker.lease,
            )
        except (IncidentHeldError, AttemptNotDueError) as error:
            return NothingToDo(str(error))
        except AttemptsUsedUpError:
            return self._decide()
        return self._attempt(refusal, waited)

    @property
    def _plane(self) -> ControlPlane:
        return self.session.plane

    @property
    def _incident(self) -> Incident:
        return self.session.open_incident

    def _attempt(self, refusal: StoreWriteError | None, waited: Waiting | None) -> RecoveryResult:
        """Restore once, and record how it ended; ``refusal`` is what already failed.

        ``waited`` is the waiting that the attempt has ended.

        Raises:
            AttemptFailedError: it failed, and another attempt is left.
        """
        number = self._incident.attempts
        self.session.worker.on_progress(f"Attempt {number} of {MAX_ATTEMPTS}")
        try:
            if refusal is not None:
                raise refusal
            closing = self._restore()
            recovered = self._close(closing)
        except _BEYOND_RECORDING:
            raise
        except IncidentHeldError as error:
            self._end_attempt(f"Stopped. {error.message}")
            return NothingToDo(str(error))
        except _REFUSALS as error:
            return self._return_attempt(error, waited)
        except Exception as error:
            message, hint = describe_error(error)
            self._fail_attempt(message)
            if number >= MAX_ATTEMPTS:
                return self._give_up(f"{message} Try: {hint}", _cause_of(error))
            raise AttemptFailedError(
                f"Attempt {number} of {MAX_ATTEMPTS} failed: {message}", hint
            ) from error
        self._end_attempt(closing.outcome.words)
        return recovered

    def _restore(self) -> Closing:
        """Raise every tenant's counters, and return how the incident can be closed.

        Raises:
            StoreLostError: the store was lost once more; the incident records that.
            IncidentHeldError: a person has put it on hold; what was raised stays raised.
            StoreFullError, StorePermissionError, StoreRefusedError: the store definitely refused
                some tenants, and the others are restored.
            AttemptFailedError: some tenants are not restored; what was raised stays raised.
            StoreError, DatabaseError, LeaseLostError: the work was cut short; likewise.
        """
        restores = self._restores = self._tenant_restores()
        for tenant in sorted(self._plane.points.tenants()):
            self.session.worker.lease.require_held()
            self._require_not_held()
            restores.restore(tenant)
        seen = self.session.require_same_store()
        if undone := restores.undone:
            refused = [each.failure for each in undone if isinstance(each.failure, _REFUSALS)]
            if len(refused) == len(undone):
                raise refused[0]
            raise undone_error(undone) from undone[0].failure
        return self._closing(restores, seen)

    def _nothing_lost(self) -> Closing | None:
        """Return how to end an incident of a store that takes no writes but lacks nothing.

        None: some counters have to be raised.

        Raises:
            AttemptFailedError: some live counters are unreadable.
            StoreError, PossibleLossError: the store could not be read or identified.
        """
        restores = self._tenant_restores()
        if not restores.remainder(is_final=False).is_nothing:
            return None
        return self._closing(restores, self.session.require_same_store())

    def _decide(self) -> RecoveryResult:
        """End an incident whose attempts are used up, after a verification that writes nothing."""
        self.session.worker.on_progress(
            "All attempts are used up; verifying without raising anything"
        )
        try:
            closing = self._verify()
        except AttemptFailedError as error:
            return self._give_up(str(error), None)
        except (StoreError, PossibleLossError) as error:
            return self._wait(error)
        return self._close(closing)

    def _verify(self) -> Closing:
        restores = self._tenant_restores()
        remainder = restores.remainder(is_final=True)
        seen = self.session.require_same_store()
        if not remainder.is_nothing:
            unseen = "".join(f" {sentence}" for sentence in remainder.unseen[-1:])
            raise AttemptFailedError(
                f"All attempts have ended, and {counted(remainder.counters, 'counter')} are still "
                f"lower than in the snapshots.{unseen}",
                "read the logs of the runs of restore_job to see how they ended.",
            )
        return self._closing(restores, seen)

    def _tenant_restores(self) -> TenantRestores:
        reason = self._incident.losses[-1].reason
        return TenantRestores(self.session, self._plane.points, reason)

    def _require_not_held(self) -> None:
        incident = self._plane.incidents.recovery().incident
        # Another incident is not judged here: the end of this one will not be accepted.
        if incident is not None and incident.incident_id == self._incident.incident_id:
            require_not_held(incident)

    def _closing(self, restores: TenantRestores, seen: Observation) -> Closing:
        # What all attempts of the incident raised.
        incident, audits = self._incident, self._plane.audits
        restored = audits.restored_in(incident.incident_id)
        amounts = list(cost(incident, audits.amounts_in(incident.incident_id, MOST_AMOUNTS)))
        raised = (
            f"Raised {counted(restored.counters, 'counter')} in "
            f"{counted(restored.windows, 'window')} of {counted(restored.tenants, 'tenant')}."
        )
        if restores.corrupt:
            outcome = Outcome.RESTORED_IN_PART
            unknown = counted(restores.corrupt, "window")
            sentences = [
                raised,
                f"{unknown} without an intact record: usage unknown.",
                *amounts,
                uncovered(incident),
            ]
        elif restored.counters or restores.missing:
            outcome, sentences = Outcome.RESTORED, [raised, *amounts, uncovered(incident)]
        elif restores.unreadable:
            raise AttemptFailedError(
                f"{counted(restores.unreadable, 'live counter')} cannot be read, so it is unknown"
                " whether something was lost.",
                "correct the values in the gateway, or accept them with `budget-recovery resolve`.",
            )
        elif restores.has_current:
            outcome = Outcome.NOTHING_LOST
            sentences = ["No counter that can be raised is lower than in the snapshots.", *amounts]
        else:
            outcome = Outcome.NOTHING_CURRENT
            sentences = [
                "Every window in the snapshots has closed, so there was nothing to restore.",
                uncovered(incident),
            ]
        if restored.counters or restores.missing:
            sentences += restores.degraded()
        if noted := restores.noted:
            sentences.append(f"{counted(noted, 'window')} with notes.")
        return Closing(outcome, " ".join(sentences), restored, self.session.accepted_with(seen))

    def _close(self, closing: Closing) -> Recovered:
        closed = self.session.close(closing, reason="Accepted after the recovery")
        return Recovered(closed, self._tenants)

    @property
    def _tenants(self) -> tuple[TenantRestored, ...]:
        return tuple(self._restores.tenants) if self._restores else ()

    def _end_attempt(self, outcome: str) -> None:
        lease = self.session.worker.lease
        self._plane.incidents.end_attempt(outcome, judged=self._incident, lease=lease)

    def _fail_attempt(self, outcome: str) -> None:
        lease = self.session.worker.lease
        self._plane.incidents.fail_attempt(outcome, judged=self._incident, lease=lease)

    def _return_attempt(self, error: BudgetRecoveryError, waited: Waiting | None) -> StillWaiting:
        """Wait, and do not count the attempt: what the store did not take, it definitely refused.

        So nothing is in doubt, and a cause such as a missing permission may end at any time.
        """
        lease = self.session.worker.lease
        self.session.incident = self._plane.incidents.return_attempt(
            f"Stopped, and not counted. {error.message}",
            judged=self._incident,
            lease=lease,
            waited=waited,
        )
        return self._wait(error)

    def _wait(self, error: BudgetRecoveryError) -> StillWaiting:
        lease = self.session.worker.lease
        incident = self._plane.incidents.wait(error.message, judged=self._incident, lease=lease)
        return StillWaiting(incident, error.message, error.hint)

    def _give_up(self, detail: str, code: str | None) -> GaveUp:
        reason, lease = FailureReason.NOT_WRITTEN, self.session.worker.lease
        incident = self._plane.incidents.give_up(
            reason, detail, judged=self._incident, lease=lease, code=code
        )
        return GaveUp(incident, reason, detail, self._tenants)


def _cause_of(error: Exception) -> str:
    """Return the code of an error, or of the first tenant's failure that it reports."""
    cause = error.__cause__
    return error_code(cause if isinstance(cause, BudgetRecoveryError) else error)
