"""Automatic recovery of a lost store, from the open incident to its end.

A run first waits until the store can be restored, which spends no attempt. Then it claims an
attempt, restores every tenant, and verifies that the store is still the one it started with. The
new baseline, the healthy state and the closed incident are one transaction.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

from budget_recovery_dagster.domain.admission import LONGEST_RESTORE, RESTORE_LEASE
from budget_recovery_dagster.domain.incident import (
    MAX_ATTEMPTS,
    Closing,
    FailureReason,
    Incident,
    Outcome,
    RecoveryState,
    Restored,
)
from budget_recovery_dagster.domain.moves import require_not_held
from budget_recovery_dagster.domain.store import Observation
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
from budget_recovery_dagster.ports import ControlPlane, OpenStore
from budget_recovery_dagster.services.restore.session import (
    RestoreSession,
    find_remainder,
    uncovered,
)
from budget_recovery_dagster.services.restore.tenants import (
    TenantRestored,
    TenantRestores,
    Worker,
    counted,
    undone_error,
)

# After these nothing can be recorded any more, or what was recorded is about another loss.
_BEYOND_RECORDING = (DatabaseUnreachableError, IncidentMovedError, LeaseLostError, StoreLostError)


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
            if recovery.state is not RecoveryState.RECOVERING or recovery.incident is None:
                return NothingToDo(f"The store is {recovery.state.name}; no restore is due.")
            if recovery.incident.on_hold is not None:
                return NothingToDo(recovery.incident.on_hold)
            run = _Run(plane, Worker(run_id, holder, lease, on_progress), recovery.incident)
            return run.recover(open_store, convergence_timeout)
    except LeaseHeldError as error:
        return NothingToDo(error.message)


@dataclass(slots=True)
class _Run:
    """One run of a recovery, under its lease; ``incident`` is as this run knows it."""

    plane: ControlPlane
    worker: Worker
    incident: Incident
    _restores: TenantRestores | None = field(default=None, init=False)

    def recover(self, open_store: OpenStore, convergence_timeout: timedelta) -> RecoveryResult:
        if not self.plane.points.tenants():
            return self._give_up(
                FailureReason.NO_SNAPSHOTS,
                "No snapshot of any tenant is stored, so there is nothing to restore from.",
            )
        with open_store() as store:
            session = RestoreSession(
                self.plane, store, self.worker, next_step="The restore is retried automatically."
            )
            try:
                session.await_convergence(convergence_timeout)
                refusal = session.adopt_target(self.incident)
            except (StoreError, PossibleLossError) as error:
                self.incident = session.incident or self.incident
                return self._wait(error)
            return self._claim_attempt(session, refusal)

    def _claim_attempt(
        self, session: RestoreSession, refusal: StoreWriteError | None
    ) -> RecoveryResult:
        try:
            session.incident = self.plane.incidents.claim_attempt(
                judged=session.incident or self.incident,
                run_id=self.worker.run_id,
                holder=self.worker.holder,
                lease=self.worker.lease,
            )
        except IncidentHeldError as error:
            return NothingToDo(error.message)
        except AttemptsUsedUpError:
            self.incident = session.incident or self.incident
            return self._decide(session)
        self.incident = session.incident
        return self._attempt(session, refusal)

    def _attempt(self, session: RestoreSession, refusal: StoreWriteError | None) -> RecoveryResult:
        number = self.incident.attempts
        self.worker.on_progress(f"Attempt {number} of {MAX_ATTEMPTS}")
        try:
            if refusal is not None:
                raise refusal
            closing = self._restore(session)
            recovered = self._close(session, closing)
        except _BEYOND_RECORDING:
            raise
        except IncidentHeldError as error:
            self._end_attempt(f"Stopped. {error.message}")
            return NothingToDo(error.message)
        except Exception as error:
            message, hint = describe_error(error)
            self._end_attempt(message)
            if number >= MAX_ATTEMPTS:
                return self._give_up(FailureReason.NOT_WRITTEN, f"{message} Try: {hint}")
            raise AttemptFailedError(
                f"Attempt {number} of {MAX_ATTEMPTS} failed: {message}", hint
            ) from error
        self._end_attempt(closing.outcome.value.replace("_", " "))
        return recovered

    def _restore(self, session: RestoreSession) -> Closing:
        """Raise every tenant's counters, and return how the incident can be closed.

        Raises:
            StoreLostError: the store was lost once more; the incident records that.
            IncidentHeldError: a person has put it on hold; what was raised stays raised.
            AttemptFailedError: some tenants are not restored; what was raised stays raised.
            StoreError, DatabaseError, LeaseLostError: the work was cut short; likewise.
        """
        restores = self._restores = self._tenant_restores(session)
        for tenant in sorted(self.plane.points.tenants()):
            self.worker.lease.require_held()
            self._require_not_held()
            restores.restore(tenant)
        seen = session.require_same_store()
        if undone := restores.undone:
            raise undone_error(undone)
        return self._closing(session, restores, seen)

    def _decide(self, session: RestoreSession) -> RecoveryResult:
        """End an incident whose attempts are used up, after a verification that writes nothing."""
        self.worker.on_progress("All attempts are used up; verifying without raising anything")
        try:
            closing = self._verify(session)
        except AttemptFailedError as error:
            return self._give_up(FailureReason.NOT_WRITTEN, str(error))
        except (StoreError, PossibleLossError) as error:
            return self._wait(error)
        return self._close(session, closing)

    def _verify(self, session: RestoreSession) -> Closing:
        restores = self._tenant_restores(session)
        remainder = find_remainder(session, restores, restores.record_left)
        seen = session.require_same_store()
        if not remainder.is_nothing:
            unseen = "".join(f" {sentence}" for sentence in remainder.unseen[-1:])
            raise AttemptFailedError(
                f"All attempts have ended, and {counted(remainder.counters, 'counter')} are still "
                f"lower than in the snapshots.{unseen}",
                "read the logs of the runs of restore_job to see how they ended.",
            )
        return self._closing(session, restores, seen)

    def _tenant_restores(self, session: RestoreSession) -> TenantRestores:
        return session.restores(self.plane.points, self.incident.losses[-1].reason)

    def _require_not_held(self) -> None:
        incident = self.plane.incidents.recovery().incident
        # Another incident is not judged here: the end of this one will not be accepted.
        if incident is not None and incident.incident_id == self.incident.incident_id:
            require_not_held(incident)

    def _closing(
        self, session: RestoreSession, restores: TenantRestores, seen: Observation
    ) -> Closing:
        restored = self._restored(restores)
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
                uncovered(self.incident),
            ]
        elif restored.counters:
            outcome, sentences = Outcome.RESTORED, [raised, uncovered(self.incident)]
        elif restores.has_current:
            outcome = Outcome.NOTHING_LOST
            sentences = ["No counter that can be raised is lower than in the snapshots."]
        else:
            outcome = Outcome.NOTHING_CURRENT
            sentences = [
                "Every window in the snapshots has closed, so there was nothing to restore.",
                uncovered(self.incident),
            ]
        if noted := restores.noted:
            sentences.append(f"{counted(noted, 'window')} with notes on what was left.")
        return Closing(outcome, " ".join(sentences), restored, session.accepted_with(seen))

    def _restored(self, restores: TenantRestores) -> Restored:
        """Sum up what all attempts of the incident raised."""
        restored = self.plane.audits.restored_in(self.incident.incident_id)
        return replace(restored, boards=restores.boards)

    def _close(self, session: RestoreSession, closing: Closing) -> Recovered:
        return Recovered(
            session.close(closing, reason="Accepted after the recovery"), self._tenants
        )

    @property
    def _tenants(self) -> tuple[TenantRestored, ...]:
        return tuple(self._restores.tenants) if self._restores else ()

    def _end_attempt(self, outcome: str) -> None:
        self.plane.incidents.end_attempt(outcome, judged=self.incident, lease=self.worker.lease)

    def _wait(self, error: BudgetRecoveryError) -> StillWaiting:
        self.incident = self.plane.incidents.wait(
            error.message, judged=self.incident, lease=self.worker.lease
        )
        return StillWaiting(self.incident, error.message, error.hint)

    def _give_up(self, reason: FailureReason, detail: str) -> GaveUp:
        incident = self.plane.incidents.give_up(
            reason, detail, judged=self.incident, lease=self.worker.lease
        )
        return GaveUp(incident, reason, detail, self._tenants)
