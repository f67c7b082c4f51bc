"""Acting on an open incident: the one way for both sensors, so that it has one run at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC

import dagster as dg
from dagster import DagsterRunStatus

from budget_recovery_dagster.bootstrap import OpenedDatabase
from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.domain.supervision import (
    DeclareDead,
    Launch,
    Phase,
    PutOnHold,
    Rest,
    RunSeen,
    Scene,
    Suspicion,
    supervise,
)

INCIDENT_TAG = "budget_recovery/incident"
"""On a run: the incident that it is to put right."""

# Whoever is terminating a run wants the restore to stop, also while that takes time.
_PHASES: Mapping[DagsterRunStatus, Phase] = {
    DagsterRunStatus.QUEUED: Phase.QUEUED,
    DagsterRunStatus.NOT_STARTED: Phase.QUEUED,
    DagsterRunStatus.STARTING: Phase.QUEUED,
    DagsterRunStatus.STARTED: Phase.STARTED,
    DagsterRunStatus.CANCELING: Phase.CANCELED,
    DagsterRunStatus.CANCELED: Phase.CANCELED,
}

# More than may be on their way at once; older ones are over.
_NEWEST_RUNS = 10


@dataclass(frozen=True, slots=True)
class Supervised:
    """What was done: a run is requested, or not, and why; what is to be remembered."""

    reason: str
    request: dg.RunRequest | None = None
    suspicion: Suspicion | None = None


def supervise_restore(
    instance: dg.DagsterInstance, plane: OpenedDatabase, suspicion: Suspicion | None = None
) -> Supervised:
    """Do what is to be done about the open incident now, if one is open."""
    recovery = plane.incidents.recovery()
    lease = plane.leases.look(RESTORE_LEASE)
    scene = Scene(
        recovery=recovery,
        runs=_runs_of(instance, recovery.incident) if recovery.incident else (),
        worker=lease.holder,
        token=lease.token,
        suspicion=suspicion,
    )
    match supervise(scene, plane.clock.now()):
        case Rest() as rest:
            return Supervised(rest.reason, suspicion=rest.suspicion)
        case DeclareDead(run):
            _declare_dead(instance, run)
            return Supervised(
                f"Run {run.short_id} was called started, and nobody works in it: it is declared "
                "failed, and the restore is launched again at the next look."
            )
        case PutOnHold(incident, run):
            plane.incidents.hold(
                f"its run {run.short_id} was terminated.", "whoever terminated it", judged=incident
            )
            return Supervised(
                f"Run {run.short_id} was terminated, so incident {incident.short_id} is on hold "
                "until `budget-recovery release`."
            )
        case Launch(incident):
            return _launch(plane, incident)


def _runs_of(instance: dg.DagsterInstance, incident: Incident) -> tuple[RunSeen, ...]:
    """Return the newest runs that were requested for an incident, newest first."""
    records = instance.get_run_records(
        dg.RunsFilter(tags={INCIDENT_TAG: incident.incident_id}), limit=_NEWEST_RUNS
    )
    return tuple(
        RunSeen(
            run_id=record.dagster_run.run_id,
            phase=_PHASES.get(record.dagster_run.status, Phase.OVER),
            requested_at=record.create_timestamp.astimezone(UTC),
        )
        for record in records
    )


def _declare_dead(instance: dg.DagsterInstance, run: RunSeen) -> None:
    found = instance.get_run_by_id(run.run_id)
    if found is not None and not found.is_finished:
        instance.report_run_failed(
            found, "Nobody works in this run any more: its host or process is gone."
        )


def _launch(plane: OpenedDatabase, incident: Incident) -> Supervised:
    claimed = plane.incidents.claim_launch(judged=incident)
    if claimed is None:
        return Supervised(f"A restore for incident {incident.short_id} has just been launched.")
    # Dagster remembers run keys for ever, those of failed runs too: each launch has its own.
    request = dg.RunRequest(
        run_key=f"{claimed.incident_id}/launch-{claimed.launches}",
        tags={INCIDENT_TAG: claimed.incident_id},
    )
    return Supervised(f"Launch {claimed.launches} for incident {claimed.short_id}.", request)
