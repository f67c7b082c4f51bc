"""Supervises restore runs: launches, takes over dead workers, notices terminations."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import dagster as dg
from dagster import MAX_RUNTIME_SECONDS_TAG, DagsterEventType, DagsterRunStatus

from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.domain.supervision import (
    DeclareDead,
    Launch,
    LaunchAgain,
    Phase,
    PutOnHold,
    Rest,
    RunSeen,
    Scene,
    Suspicion,
    supervise,
)
from budget_recovery_dagster.jobs.restore import restore_job
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.sensors.ticks import Deadline

INCIDENT_TAG = "budget_recovery/incident"
"""On a run: the incident that it is to put right."""
LAUNCH_TAG = "budget_recovery/launch"
"""On a run: which launch of its incident it is."""
# Whoever is terminating a run wants the restore to stop, also while that takes time.
_PHASES: Mapping[DagsterRunStatus, Phase] = {
    DagsterRunStatus.QUEUED: Phase.QUEUED,
    DagsterRunStatus.NOT_STARTED: Phase.QUEUED,
    DagsterRunStatus.STARTING: Phase.QUEUED,
    DagsterRunStatus.STARTED: Phase.STARTED,
    DagsterRunStatus.CANCELING: Phase.CANCELED,
    DagsterRunStatus.CANCELED: Phase.CANCELED,
}
_TERMINATIONS = {DagsterEventType.RUN_CANCELING, DagsterEventType.RUN_CANCELED}
# More than may be on their way at once; older ones are over.
_NEWEST_RUNS = 10


@dataclass(frozen=True, slots=True)
class Supervised:
    """What was done: a run is requested, or not, and why; what is to be remembered."""

    reason: str
    request: dg.RunRequest | None = None
    suspicion: Suspicion | None = None


def supervise_restore(
    instance: dg.DagsterInstance,
    plane: ControlPlane,
    deadline: Deadline,
    suspicion: Suspicion | None = None,
) -> Supervised:
    """Do what is to be done about the open incident now, if one is open.

    No launch is counted after the ``deadline``, when nobody would ask for its run any more.
    """
    recovery = plane.incidents.recovery()
    lease = plane.leases.state_of(RESTORE_LEASE)
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
            if deadline.is_over:
                return Supervised("The tick took too long to launch anything.")
            return _launch(plane, incident)
        case LaunchAgain(incident):
            return Supervised(
                f"Launch {incident.launches} for incident {incident.short_id} once more: its "
                "request was lost.",
                _request(incident),
            )


def _runs_of(instance: dg.DagsterInstance, incident: Incident) -> tuple[RunSeen, ...]:
    """Return the newest runs that could put an incident right, newest first.

    Those that were started by hand carry no tag; by the hosts' clocks they are of this incident.
    """
    records = instance.get_run_records(dg.RunsFilter(job_name=restore_job.name), limit=_NEWEST_RUNS)
    return tuple(
        _seen(instance, record)
        for record in records
        if record.dagster_run.tags.get(INCIDENT_TAG) == incident.incident_id
        or (
            INCIDENT_TAG not in record.dagster_run.tags
            and record.create_timestamp.astimezone(UTC) > incident.opened_at
        )
    )


def _seen(instance: dg.DagsterInstance, record: dg.RunRecord) -> RunSeen:
    run = record.dagster_run
    phase = _PHASES.get(run.status, Phase.OVER)
    terminated_at = _terminated_at(instance, run)
    if terminated_at is not None:
        # Whatever its status is: a worker that outlives its run's being marked as canceled ends it
        # as a success or a failure.
        phase = Phase.CANCELED
        if _has_outlived(record, terminated_at):
            # Dagster itself ends what takes too long, in the same words as a person.
            phase = Phase.OVER if run.is_finished else Phase.STARTED
    launch = run.tags.get(LAUNCH_TAG, "")
    return RunSeen(
        run_id=run.run_id,
        phase=phase,
        requested_at=record.create_timestamp.astimezone(UTC),
        terminated_at=terminated_at,
        # Tags can be given by hand.
        launch=int(launch) if launch.isdecimal() else None,
    )


def _terminated_at(instance: dg.DagsterInstance, run: dg.DagsterRun) -> datetime | None:
    """Return when the end of a run was first asked for, however long it took; None: it was not."""
    told = [entry.timestamp for entry in instance.all_logs(run.run_id, of_type=_TERMINATIONS)]
    return datetime.fromtimestamp(min(told), UTC) if told else None


def _has_outlived(record: dg.RunRecord, moment: datetime) -> bool:
    """Whether a run had by then taken longer than it may."""
    longest = record.dagster_run.tags.get(MAX_RUNTIME_SECONDS_TAG, "")
    if record.start_time is None or not longest.isdecimal():
        return False
    started_at = datetime.fromtimestamp(record.start_time, UTC)
    return moment - started_at > timedelta(seconds=int(longest))


def _declare_dead(instance: dg.DagsterInstance, run: RunSeen) -> None:
    found = instance.get_run_by_id(run.run_id)
    if found is not None and not found.is_finished:
        instance.report_run_failed(
            found, "Nobody works in this run any more: its host or process is gone."
        )


def _launch(plane: ControlPlane, incident: Incident) -> Supervised:
    claimed = plane.incidents.claim_launch(judged=incident)
    if claimed is None:
        return Supervised(f"A restore for incident {incident.short_id} has just been launched.")
    return Supervised(
        f"Launch {claimed.launches} for incident {claimed.short_id}.", _request(claimed)
    )


def _request(incident: Incident) -> dg.RunRequest:
    """Ask for the run of the launch that was counted last."""
    # Dagster remembers run keys for ever, those of failed runs too: each launch has its own.
    return dg.RunRequest(
        run_key=f"{incident.incident_id}/launch-{incident.launches}",
        tags={INCIDENT_TAG: incident.incident_id, LAUNCH_TAG: str(incident.launches)},
    )
