"""One attempt: every tenant raised, the store still the same, and what came of it."""

from dataclasses import dataclass, field, replace
from datetime import timedelta

from budget_recovery_dagster.audit_ports import (
    RestoreAudits,
)
from budget_recovery_dagster.domain.detection import Sighting
from budget_recovery_dagster.domain.holds import require_not_held
from budget_recovery_dagster.domain.identity import Baseline
from budget_recovery_dagster.domain.incident import Incident, Outcome, Restored
from budget_recovery_dagster.errors import (
    AttemptFailedError,
)
from budget_recovery_dagster.ports import Clock
from budget_recovery_dagster.recovery_ports import Closing, Incidents, StoreChecks
from budget_recovery_dagster.restore_ports import (
    RecoverableStore,
    RestorePoints,
)
from budget_recovery_dagster.services.count_words import counted
from budget_recovery_dagster.services.losses import Losses
from budget_recovery_dagster.services.remainder import look_for_remainder
from budget_recovery_dagster.services.same_store import SameStore
from budget_recovery_dagster.services.tenants_restored import (
    TenantRestores,
    Worker,
    undone_error,
)
from budget_recovery_dagster.services.time_words import in_words


@dataclass(frozen=True, slots=True)
class RestoreTools:
    """What attempts work with; ``next_step`` is what to do where the store became another one."""

    points: RestorePoints
    audits: RestoreAudits
    checks: StoreChecks
    incidents: Incidents
    losses: Losses
    clock: Clock
    next_step: str

    def same_store(self, store: RecoverableStore, deployment_id: str) -> SameStore:
        """Return what compares an opened store with the ground of an incident."""
        return SameStore(store, deployment_id, self.losses, self.checks, self.clock, self.next_step)


@dataclass(slots=True)
class RestoreAttempt:
    """Works on the ground of one incident, in an opened store."""

    tools: RestoreTools
    worker: Worker
    store: RecoverableStore
    deployment_id: str
    incident: Incident
    restores: TenantRestores = field(init=False)

    def __post_init__(self) -> None:
        self.restores = TenantRestores(
            points=self.tools.points,
            audits=self.tools.audits,
            clock=self.tools.clock,
            worker=self.worker,
            store=self.store,
            deployment_id=self.deployment_id,
            why=self.incident.losses[-1].reason,
            incident_id=self.incident.incident_id,
        )

    def restore(self) -> Closing:
        """Raise every tenant's counters, and say how the incident can be closed.

        Raises:
            StoreLostError: the store was lost once more; the incident says so.
            IncidentHeldError: a person has put it on hold; what was raised stays raised.
            AttemptFailedError: some tenants are not done; what was raised stays raised.
            StoreError, DatabaseError, LeaseLostError: the work was cut short; likewise.
        """
        for tenant in sorted(self.tools.points.tenants()):
            self.worker.lease.require_held()
            self._require_not_held()
            self.restores.restore(tenant)
        seen = self._require_same_store()
        if undone := self.restores.undone:
            raise undone_error(undone)
        return self._closing(seen)

    def verify(self) -> Closing:
        """Look whether nothing is left to be raised, writing nothing, and say how it can be closed.

        Raises:
            StoreLostError: as ``restore``.
            AttemptFailedError: something is left.
            StoreError, DatabaseError, LeaseLostError: it could not be seen.
        """
        remainder = look_for_remainder(
            self.restores,
            sorted(self.tools.points.tenants()),
            lambda left: self.restores.keep(left.entries),
        )
        seen = self._require_same_store()
        if not remainder.is_nothing:
            unseen = "".join(f" {sentence}" for sentence in remainder.unseen[-1:])
            raise AttemptFailedError(
                "All attempts have ended, and the snapshots still say more than "
                f"{counted(remainder.counters, 'counter')}.{unseen}",
                "read the logs of the runs of restore_job to see how they ended.",
            )
        return self._closing(seen)

    def _require_not_held(self) -> None:
        incident = self.tools.incidents.recovery().incident
        # Of another incident it is not told here: the end of this one will not be accepted.
        if incident is not None and incident.incident_id == self.incident.incident_id:
            require_not_held(incident)

    def _require_same_store(self) -> Sighting:
        same_store = self.tools.same_store(self.store, self.deployment_id)
        return same_store.require(self.incident, found_by=self.worker.holder)

    def _closing(self, seen: Sighting) -> Closing:
        restored = self._restored()
        raised = (
            f"Raised {counted(restored.counters, 'counter')} in "
            f"{counted(restored.windows, 'window')} of {counted(restored.tenants, 'tenant')}."
        )
        if self.restores.unsound:
            outcome = Outcome.IN_PART
            unknown = counted(self.restores.unsound, "window")
            told = [
                raised,
                f"Nothing is known of {unknown}: no record is as captured.",
                uncovered(self.incident),
            ]
        elif restored.counters:
            outcome, told = Outcome.RESTORED, [raised, uncovered(self.incident)]
        elif self.restores.has_current:
            outcome = Outcome.NOTHING_LOST
            told = ["No counter that can be raised is lower than the snapshots say."]
        else:
            outcome = Outcome.NOTHING_CURRENT
            told = [
                "Every window in the snapshots has closed, so there was nothing to bring back.",
                uncovered(self.incident),
            ]
        if noted := self.restores.noted:
            told.append(f"Of {counted(noted, 'window')} something was left: see its notes.")
        return Closing(outcome, " ".join(told), restored, base_of(self.incident, seen))

    def _restored(self) -> Restored:
        """Sum up what all attempts of the incident have raised."""
        restored = self.tools.audits.restored_in(self.incident.incident_id)
        return replace(restored, boards=self.restores.boards)


def base_of(incident: Incident, seen: Sighting) -> Baseline:
    """Return the baseline that is accepted with the end of an incident."""
    ground = incident.ground
    if ground is None:
        raise ValueError("an incident without a ground cannot be closed")
    return replace(ground, identity=seen.identity, intended=None)


def uncovered(incident: Incident) -> str:
    """Say which usage no snapshot holds."""
    span, since, until = incident.uncovered, incident.newest_point_at, incident.last_good_at
    if span is None or since is None or until is None:
        return "Since when usage is missing cannot be told: no check of the store is known."
    told = f"What was counted from {since:%Y-%m-%d %H:%M:%S} UTC until the loss"
    # To the second, or nobody would believe it.
    if span >= timedelta(seconds=1):
        told = f"{told}, at least until {until:%Y-%m-%d %H:%M:%S} UTC ({in_words(span)}),"
    return f"{told} is in no snapshot and did not come back."
