"""The sensors: one detects a loss of the gateway's store, the other supervises its restore.

Both work within the deadline of a tick, and both launch ``restore_job`` in the same way.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

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
from budget_recovery_dagster.domain.verdict import Verdict
from budget_recovery_dagster.errors import BudgetRecoveryError, SettingsError
from budget_recovery_dagster.jobs.restore import restore_job
from budget_recovery_dagster.jobs.snapshots import hourly_snapshot_job
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.presentation.metadata import gone_table
from budget_recovery_dagster.presentation.text import label
from budget_recovery_dagster.resources import ControlPlaneParam
from budget_recovery_dagster.services.check import Checked, check_store
from budget_recovery_dagster.services.falls import CaptureRequest
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import store_opener

Result = TypeVar("Result")
TICK_SECONDS = 10.0
"""The longest that a tick works: Dagster terminates it after a minute, without a reason."""


class OutOfTimeError(BudgetRecoveryError):
    """A tick's work was not done in time; it may still end, without effect on the tick."""


class Deadline:
    """The time until which a tick's work must be done."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the tick has stopped waiting for the work."""
        return time.monotonic() >= self._at


def within(seconds: float, work: Callable[[Deadline], Result]) -> Result:
    """Return what ``work`` returns, or raise what it raises, within the time limit.

    If a server hangs, the thread that waits for it cannot be ended. It gets the deadline, and its
    later writes are conditional on what it has read.

    Raises:
        OutOfTimeError: it is not done in time.
    """
    done: Future[Result] = Future()
    deadline = Deadline(seconds)

    def run() -> None:
        try:
            done.set_result(work(deadline))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    # A daemon, so that it does not hold up the end of the code server.
    threading.Thread(target=run, name="tick", daemon=True).start()
    try:
        return done.result(timeout=seconds)
    except TimeoutError as error:
        if done.done():
            raise
        raise OutOfTimeError(
            f"The tick was not done within {seconds:g} s.",
            "see whether PostgreSQL and NATS answer.",
        ) from error


def write_suspicion(suspicion: Suspicion | None) -> str:
    """Write the cursor after a tick with a known result."""
    if suspicion is None:
        return "0"
    return f"0 {suspicion.suspect} {suspicion.token} {suspicion.since.isoformat()}"


def read_suspicion(cursor: str | None) -> Suspicion | None:
    """Read the suspicion; None if there is none, or if a person edited the cursor."""
    try:
        _, suspect, token, since = (cursor or "").split()
        at = datetime.fromisoformat(since)
        return Suspicion(suspect, int(token), at) if at.tzinfo else None
    except ValueError:
        return None


UNKNOWN_TO_FAIL = 3
"""A tick fails if it is at least the third unknown one in a row."""


def unknown_tick(
    context: dg.SensorEvaluationContext,
    reason: str,
    hint: str,
    events: list[dg.AssetObservation] | None = None,
) -> dg.SensorResult:
    """Skip the tick, and count it in the cursor.

    Raises:
        dagster.Failure: too many ticks in a row are unknown.
    """
    count = _counted(context.cursor) + 1
    text = f"{reason} Try: {hint}" if hint else reason
    if count >= UNKNOWN_TO_FAIL:
        # The cursor keeps its value, so the next tick fails as well unless its result is known.
        raise dg.Failure(f"At least {count} ticks in a row are unknown. {text}")
    return dg.SensorResult(skip_reason=text, cursor=str(count), asset_events=events or [])


def _tick(
    context: dg.SensorEvaluationContext, work: Callable[[Deadline], dg.SensorResult]
) -> dg.SensorResult:
    """Do the work of a tick within its deadline; an error of a server makes it unknown.

    Raises:
        SettingsError: a setting is missing or invalid.
        dagster.Failure: too many ticks in a row are unknown.
    """
    try:
        return within(TICK_SECONDS, work)
    except SettingsError:
        raise
    except BudgetRecoveryError as error:
        return unknown_tick(context, error.message, error.hint)


def _counted(cursor: str | None) -> int:
    # It can be edited in the UI. The supervisor stores more after the count.
    count = (cursor or "").partition(" ")[0]
    return int(count) if count.isdecimal() else 0


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
                f"run {run.short_id} was terminated in Dagster", "unknown user", judged=incident
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


def _has_outlived(record: dg.RunRecord, at: datetime) -> bool:
    """Whether a run had exceeded its maximum runtime by then."""
    longest = record.dagster_run.tags.get(MAX_RUNTIME_SECONDS_TAG, "")
    if record.start_time is None or not longest.isdecimal():
        return False
    started_at = datetime.fromtimestamp(record.start_time, UTC)
    return at - started_at > timedelta(seconds=int(longest))


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
        job_name=restore_job.name,
        tags={INCIDENT_TAG: incident.incident_id, LAUNCH_TAG: str(incident.launches)},
    )


_DESCRIPTION = (
    "Compares the gateway's usage store with the accepted baseline: its creation time, its last "
    "sequence, and our marker in it. On a loss it opens an incident, which pauses snapshots, "
    "and launches restore_job. If the store is intact, but counters are missing, it requests "
    "one more run of hourly_snapshot_job, which names them. What cannot be read is unknown, never "
    "a loss; several unknown results in a row fail the tick."
)


def store_loss_sensor(settings: Settings) -> dg.SensorDefinition:
    """Return the sensor that checks the store as often as the settings say."""
    return dg.sensor(
        name="store_loss_sensor",
        jobs=[restore_job, hourly_snapshot_job],
        minimum_interval_seconds=settings.check_interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=_DESCRIPTION,
    )(_check)


def _check(
    context: dg.SensorEvaluationContext, control_plane: ControlPlaneParam
) -> dg.SensorResult:
    """Check the store once; skip with the reason, or request the run of a restore."""

    def check_and_launch(deadline: Deadline) -> dg.SensorResult:
        open_store = store_opener(control_plane.settings, in_a_tick=True)
        with control_plane.opened() as plane:
            checked = check_store(plane, open_store, checked_by="store_loss_sensor")
            return _checked(context, checked, supervise_restore(context.instance, plane, deadline))

    return _tick(context, check_and_launch)


def _checked(
    context: dg.SensorEvaluationContext, checked: Checked, supervised: Supervised
) -> dg.SensorResult:
    observed = [dg.AssetObservation("gateway_usage_store", metadata=_metadata(checked))]
    check = checked.check
    request = supervised.request
    if request is None and checked.compared.request is not None:
        request = _capture_request(checked.compared.request)
    if request is not None:
        return dg.SensorResult(run_requests=[request], cursor="0", asset_events=observed)
    if check.verdict is Verdict.UNKNOWN:
        return unknown_tick(context, check.reason, checked.hint, observed)
    report = f"{label(check.verdict)}: {check.reason}"
    if checked.hint:
        report = f"{report} Try: {checked.hint}"
    if checked.recovery.incident is not None:
        report = f"{report} {supervised.reason}"
    return dg.SensorResult(skip_reason=report, cursor="0", asset_events=observed)


def _capture_request(request: CaptureRequest) -> dg.RunRequest:
    # A current hour can be captured again. The daemon ignores a key that already has its run.
    return dg.RunRequest(
        run_key=request.key, job_name=hourly_snapshot_job.name, partition_key=request.hour.key
    )


def _metadata(checked: Checked) -> dict[str, Any]:
    check, identity = checked.check, checked.check.identity
    metadata: dict[str, Any] = {
        "verdict": check.verdict.value,
        "reason": check.reason,
        "state": checked.recovery.state.value,
        "checked_at": dg.MetadataValue.timestamp(check.checked_at),
    }
    if identity is not None:
        metadata["created_at"] = dg.MetadataValue.timestamp(identity.created_at)
        # As text: a browser rounds whole numbers beyond 2**53.
        metadata["last_sequence"] = str(identity.last_sequence)
    compared = checked.compared
    metadata["counters_gone"] = sum(count.missing for count in compared.gone)
    if compared.gone:
        metadata["gone"] = gone_table(compared.gone)
    if compared.changes:
        metadata["configuration_changes"] = ", ".join(map(str, compared.changes))
    if checked.recovery.incident is not None:
        metadata["incident"] = checked.recovery.incident.incident_id
    return metadata


@dg.sensor(
    job_name=restore_job.name,
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description=(
        "Supervises the restore of an open incident: launches restore_job if none is running, at "
        "once for a loss that a capture found. Launches it again, at most five minutes later, if "
        "a run had to wait for the store or died. A PostgreSQL lease tracks liveness: a started "
        "run without a lease for a minute is marked as failed. A launch without a run is "
        "requested again. Terminating a run puts the incident on hold."
    ),
)
def restore_supervisor_sensor(
    context: dg.SensorEvaluationContext, control_plane: ControlPlaneParam
) -> dg.SensorResult:
    """Supervise once; skip with the reason, or request a run."""

    def supervise_once(deadline: Deadline) -> dg.SensorResult:
        with control_plane.opened() as plane:
            known = read_suspicion(context.cursor)
            supervised = supervise_restore(context.instance, plane, deadline, known)
        cursor = write_suspicion(supervised.suspicion)
        if supervised.request is not None:
            return dg.SensorResult(run_requests=[supervised.request], cursor=cursor)
        return dg.SensorResult(skip_reason=supervised.reason, cursor=cursor)

    return _tick(context, supervise_once)
