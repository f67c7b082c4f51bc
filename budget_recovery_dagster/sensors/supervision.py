"""Supervises restore runs: launches, dead workers, terminations."""

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
"""Tag of a run: the incident that it restores."""
LAUNCH_TAG = "budget_recovery/launch"
"""Tag of a run: the number of the launch of its incident."""
# A person who terminates a run wants the restore to stop, even while the termination takes time.
_PHASES: Mapping[DagsterRunStatus, Phase] = {
    DagsterRunStatus.QUEUED: Phase.QUEUED,
    DagsterRunStatus.NOT_STARTED: Phase.QUEUED,
    DagsterRunStatus.STARTING: Phase.QUEUED,
    DagsterRunStatus.STARTED: Phase.STARTED,
    DagsterRunStatus.CANCELING: Phase.CANCELED,
    DagsterRunStatus.CANCELED: Phase.CANCELED,
}
_TERMINATIONS = {DagsterEventType.RUN_CANCELING, DagsterEventType.RUN_CANCELED}
# More than can be active at once; older runs are over.
_NEWEST_RUNS = 10


@dataclass(frozen=True, slots=True)
class Supervised:
    """The result of a tick: the reason, the requested run if any, and the suspicion to store."""

    reason: str
    request: dg.RunRequest | None = None
    suspicion: Suspicion | None = None


def supervise_restore(
    instance: dg.DagsterInstance,
    plane: ControlPlane,
    deadline: Deadline,
    suspicion: Suspicion | None = None,
) -> Supervised:
    """Supervise the restore of the open incident, if one is open.

    No launch is counted after the ``deadline``: its run would not be requested any more.
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
                f"Run {run.short_id} is started but has no worker: it is marked as failed. The "
                "next tick launches the restore again."
            )
        case PutOnHold(incident, run):
            plane.incidents.hold(
                f"its run {run.short_id} was terminated.", "the person who did", judged=incident
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
                f"Launch {incident.launches} for incident {incident.short_id} is requested again: "
                "the first request was lost.",
                _request(incident),
            )


def _runs_of(instance: dg.DagsterInstance, incident: Incident) -> tuple[RunSeen, ...]:
    """Return the newest runs that can restore an incident, newest first.

    Runs that were started manually have no tag; those created after the incident belong to it.
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
        # Independent of its status: a worker that survives the cancellation of its run ends it as
        # a success or a failure.
        phase = Phase.CANCELED
        if _has_outlived(record, terminated_at):
            # Dagster terminates a run that takes too long with the same events as a person.
            phase = Phase.OVER if run.is_finished else Phase.STARTED
    launch = run.tags.get(LAUNCH_TAG, "")
    return RunSeen(
        run_id=run.run_id,
        phase=phase,
        requested_at=record.create_timestamp.astimezone(UTC),
        terminated_at=terminated_at,
        # Tags can be set manually.
        launch=int(launch) if launch.isdecimal() else None,
    )


def _terminated_at(instance: dg.DagsterInstance, run: dg.DagsterRun) -> datetime | None:
    """Return when the termination of a run was first requested; None: it was not."""
    times = [entry.timestamp for entry in instance.all_logs(run.run_id, of_type=_TERMINATIONS)]
    return datetime.fromtimestamp(min(times), UTC) if times else None


def _has_outlived(record: dg.RunRecord, moment: datetime) -> bool:
    """Whether a run had exceeded its maximum runtime by then."""
    longest = record.dagster_run.tags.get(MAX_RUNTIME_SECONDS_TAG, "")
    if record.start_time is None or not longest.isdecimal():
        return False
    started_at = datetime.fromtimestamp(record.start_time, UTC)
    return moment - started_at > timedelta(seconds=int(longest))


def _declare_dead(instance: dg.DagsterInstance, run: RunSeen) -> None:
    found = instance.get_run_by_id(run.run_id)
    if found is not None and not found.is_finished:
        instance.report_run_failed(
            found, "This run has no worker any more: its host or process is gone."
        )


def _launch(plane: ControlPlane, incident: Incident) -> Supervised:
    claimed = plane.incidents.claim_launch(judged=incident)
    if claimed is None:
        return Supervised(f"A restore for incident {incident.short_id} has just been launched.")
    return Supervised(
        f"Launch {claimed.launches} for incident {claimed.short_id}.", _request(claimed)
    )


def _request(incident: Incident) -> dg.RunRequest:
    """Return the request for the run of the last counted launch."""
    # Dagster never forgets run keys, not even those of failed runs: each launch has its own.
    return dg.RunRequest(
        run_key=f"{incident.incident_id}/launch-{incident.launches}",
        tags={INCIDENT_TAG: incident.incident_id, LAUNCH_TAG: str(incident.launches)},
    )
