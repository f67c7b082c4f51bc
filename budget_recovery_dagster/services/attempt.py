"""One attempt: every tenant raised, the store still the same, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from budget_recovery_dagster.domain.detection import Sighting, accepted_marker, judge_sighting
from budget_recovery_dagster.domain.holds import require_not_held
from budget_recovery_dagster.domain.identity import Baseline
from budget_recovery_dagster.domain.incident import Incident, Outcome, Restored
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    DatabaseUnreachableError,
    LeaseLostError,
    StoreError,
    StoreLostError,
    StoreWriteError,
    put_into_words,
)
from budget_recovery_dagster.ports import Clock, Lease
from budget_recovery_dagster.recovery_ports import Closing, Incidents, StoreChecks
from budget_recovery_dagster.restore_ports import (
    AuditEntry,
    AuditTrail,
    RecoverableStore,
    RestoreAudits,
    RestorePoints,
    TenantPoint,
)
from budget_recovery_dagster.services.count_words import counted
from budget_recovery_dagster.services.losses import Losses, check_of, look_or_gone
from budget_recovery_dagster.services.restore_report import left_entries
from budget_recovery_dagster.services.tenant_restore import (
    Guards,
    TenantRestored,
    failed,
    plan_tenant,
    restore_tenant,
)
from budget_recovery_dagster.services.time_words import in_words


@dataclass(frozen=True, slots=True)
class Worker:
    """Who restores, in which run, under which lease, and who hears of it."""

    run_id: str
    holder: str
    lease: Lease
    tell: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RestoreTools:
    """What attempts work with."""

    points: RestorePoints
    audits: RestoreAudits
    checks: StoreChecks
    incidents: Incidents
    losses: Losses
    clock: Clock


@dataclass(slots=True)
class RestoreAttempt:
    """Works on the ground of one incident, in an opened store."""

    tools: RestoreTools
    worker: Worker
    store: RecoverableStore
    deployment_id: str
    incident: Incident
    tenants: list[TenantRestored] = field(default_factory=list, init=False)
    _has_current: bool = field(default=False, init=False)
    _unsound: int = field(default=0, init=False)

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
            self._restore(tenant)
        seen = self._require_same_store()
        undone = [tenant for tenant in self.tenants if tenant.failure is not None]
        if undone:
            raise _undone(undone)
        return self._closing(seen)

    def verify(self) -> Closing:
        """Look whether nothing is left to be raised, writing nothing, and say how it can be closed.

        Raises:
            StoreLostError: as ``restore``.
            AttemptFailedError: something is left.
            StoreError, DatabaseError, LeaseLostError: it could not be seen.
        """
        left, unseen = 0, ""
        for tenant in sorted(self.tools.points.tenants()):
            self.worker.lease.require_held()
            try:
                left += self._count_left(tenant)
            except (DatabaseUnreachableError, LeaseLostError):
                raise
            except Exception as error:  # noqa: BLE001 - reported by name; no tenant hides another
                self._require_answer(error)
                unseen = f" Tenant {tenant!r} cannot be seen: {put_into_words(error)[0]}"
        seen = self._require_same_store()
        if left or unseen:
            raise AttemptFailedError(
                "All attempts have ended, and the snapshots still say more than "
                f"{counted(left, 'counter')}.{unseen}",
                "read the logs of the runs of restore_job to see how they ended.",
            )
        return self._closing(seen)

    def _count_left(self, tenant: str) -> int:
        """Count the counters of a tenant that are lower than the snapshots say, and keep which.

        Else a restore that was cut off would count as having raised all that it had begun to.
        """
        now = self.tools.clock.now()
        point = self.tools.points.point_of(tenant, now)
        if point is None:
            return 0
        self._note_current(point, now)
        plan = plan_tenant(point, self.store.open_tenant(tenant).reading, now)
        left = left_entries(point, plan)
        if left:
            self.tools.audits.finish(self._trail(now, left))
        return sum(entry.planned for entry in left)

    def _require_not_held(self) -> None:
        incident = self.tools.incidents.recovery().incident
        # Of another incident it is not told here: the end of this one will not be accepted.
        if incident is not None and incident.incident_id == self.incident.incident_id:
            require_not_held(incident)

    def _restore(self, tenant: str) -> None:
        at = self.tools.clock.now()
        guards = Guards(
            keep_going=self.worker.lease.require_held,
            begin=lambda entries: self.tools.audits.begin(self._trail(at, entries)),
        )
        try:
            point = self.tools.points.point_of(tenant, at)
            if point is None:
                return
            self._note_current(point, at)
            restored = restore_tenant(self.store, point, self.tools.clock, guards)
        except (DatabaseUnreachableError, LeaseLostError):
            raise
        except Exception as error:  # noqa: BLE001 - reported by name; no tenant stops another
            restored = failed(tenant, error)
        self.tenants.append(restored)
        self._tell(restored)
        if restored.entries:
            self.tools.audits.finish(self._trail(at, restored.entries))
        if restored.failure is not None:
            self._require_answer(restored.failure)

    def _note_current(self, point: TenantPoint, now: datetime) -> None:
        current = [each for each in point.windows if each.of.window.is_current(now)]
        self._has_current |= bool(current)
        # Of these nobody knows what was used: every record of them is damaged.
        self._unsound += sum(bool(each.corrupt) and not each.usages for each in current)

    def _trail(self, at: datetime, entries: tuple[AuditEntry, ...]) -> AuditTrail:
        return AuditTrail(
            at=at,
            run_id=self.worker.run_id,
            who=self.worker.holder,
            why=self.incident.losses[-1].reason,
            incident_id=self.incident.incident_id,
            entries=entries,
        )

    def _require_answer(self, failure: Exception) -> None:
        """See, after a tenant's failure, whether that tenant alone is refused or the store is gone.

        Else each of a thousand tenants would wait for its time-out.
        """
        if isinstance(failure, StoreError) and not isinstance(failure, StoreWriteError):
            self.store.look(self.deployment_id)

    def _tell(self, restored: TenantRestored) -> None:
        name = f"Tenant {restored.tenant!r}"
        if restored.failure is not None:
            self.worker.tell(f"{name} is not done: {restored.failure}")
        elif restored.raised or restored.boards:
            self.worker.tell(
                f"{name}: {counted(restored.raised, 'counter')} raised, "
                f"{counted(restored.boards, 'leaderboard')} written"
            )
        for entry in restored.entries:
            for note in entry.notes:
                self.worker.tell(f"{name}, {entry.of}: {note}")

    def _require_same_store(self) -> Sighting:
        """See that the store is the one that was marked before the first reading."""
        ground = self.incident.ground
        seen = look_or_gone(self._look)
        judgement = judge_sighting(ground, seen, self.tools.clock.now())
        if judgement.verdict.is_loss:
            incident = self.tools.losses.join(
                judgement, self._look, judged=self.incident, found_by=self.worker.holder
            )
            self.tools.checks.record(check_of(incident))
            raise StoreLostError(
                f"The store was lost once more during the restore. {judgement.reason}",
                "wait: the restore begins again by itself.",
            )
        if not judgement.verdict.is_good:
            raise AttemptFailedError(
                f"The store could not be seen to be the same. {judgement.reason}",
                "wait for the cluster to settle; the restore is tried again by itself.",
            )
        if ground is None or seen is None or accepted_marker(ground, seen) != ground.marker:
            raise AttemptFailedError(
                "Our marker is no longer in the store, so it may not be the one that was restored.",
                "see who deletes keys of the gateway's bucket that begin with __guard.",
            )
        return seen

    def _look(self) -> Sighting:
        return self.store.look(self.deployment_id)

    def _closing(self, seen: Sighting) -> Closing:
        restored = self._restored()
        raised = (
            f"Raised {counted(restored.counters, 'counter')} in "
            f"{counted(restored.windows, 'window')} of {counted(restored.tenants, 'tenant')}."
        )
        if self._unsound:
            outcome = Outcome.IN_PART
            unknown = counted(self._unsound, "window")
            told = [
                raised,
                f"Nothing is known of {unknown}: no record is as captured.",
                uncovered(self.incident),
            ]
        elif restored.counters:
            outcome, told = Outcome.RESTORED, [raised, uncovered(self.incident)]
        elif self._has_current:
            outcome = Outcome.NOTHING_LOST
            told = ["No counter that can be raised is lower than the snapshots say."]
        else:
            outcome = Outcome.NOTHING_CURRENT
            told = [
                "Every window in the snapshots has closed, so there was nothing to bring back.",
                uncovered(self.incident),
            ]
        if noted := sum(bool(each.notes) for tenant in self.tenants for each in tenant.entries):
            told.append(f"Of {counted(noted, 'window')} something was left: see its notes.")
        return Closing(outcome, " ".join(told), restored, self._base(seen))

    def _base(self, seen: Sighting) -> Baseline:
        ground = self.incident.ground
        if ground is None:
            raise ValueError("an incident without a ground cannot be closed")
        return replace(ground, identity=seen.identity, intended=None)

    def _restored(self) -> Restored:
        """Sum up what all attempts of the incident have raised."""
        restored = self.tools.audits.restored_in(self.incident.incident_id)
        return replace(restored, boards=sum(tenant.boards for tenant in self.tenants))


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


def _undone(undone: list[TenantRestored]) -> AttemptFailedError:
    first = undone[0]
    message, hint = put_into_words(first.failure) if first.failure else ("", "")
    others = f" {counted(len(undone) - 1, 'other')} likewise." if len(undone) > 1 else ""
    return AttemptFailedError(f"Tenant {first.tenant!r} is not restored: {message}{others}", hint)
