"""The sensors: one detects a loss of the gateway's store, the other supervises its restore.

Both work within the deadline of a tick, and both launch ``restore_job`` in the same way. A tick
that a person previews changes nothing, and says what a real one would do.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import dagster as dg

from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.incident import Incident, may_launch
from budget_recovery_dagster.domain.supervision import (
    Decision,
    DeclareDead,
    Launch,
    LaunchAgain,
    PutOnHold,
    Rest,
    RunSeen,
    Scene,
    Suspicion,
    fate_of,
    supervise,
)
from budget_recovery_dagster.domain.verdict import Verdict
from budget_recovery_dagster.errors import BudgetRecoveryError, SettingsError, describe_error
from budget_recovery_dagster.jobs.incidents import (
    hold_restore_job,
    record_reset_job,
    release_restore_job,
    resolve_incident_job,
)
from budget_recovery_dagster.jobs.restore import (
    incident_of,
    manual_event,
    manual_restore_job,
    not_shown,
    restore_job,
    restored_event,
)
from budget_recovery_dagster.jobs.snapshots import (
    hourly_snapshot_job,
    recovery_points_job,
    tenant_tables_job,
)
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.presentation.metadata import gone_table
from budget_recovery_dagster.presentation.text import label
from budget_recovery_dagster.resources import ControlPlaneParam, ControlPlaneResource, is_dry_run
from budget_recovery_dagster.restore_runs import (
    LAUNCH_TAG,
    RestoredEvent,
    RestoreRuns,
    location_of,
    show_once,
)
from budget_recovery_dagster.services.check import Checked, check_store, foresee_check
from budget_recovery_dagster.services.falls import (
    CaptureRequest,
    missed_by_checks,
    requested_capture,
)
from budget_recovery_dagster.services.restore.report import counted
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.silent_runs import end_run, silent_runs
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
    context: dg.SensorEvaluationContext,
    work: Callable[[Deadline], dg.SensorResult],
    afterwards: Callable[[dg.SensorResult], dg.SensorResult] = lambda result: result,
) -> dg.SensorResult:
    """Do the work of a tick within its deadline; an error of a server makes it unknown.

    ``afterwards`` may add to a known result.

    Raises:
        SettingsError: a setting is missing or invalid.
        dagster.Failure: too many ticks in a row are unknown.
    """
    try:
        known = within(TICK_SECONDS, work)
    except SettingsError:
        raise
    except BudgetRecoveryError as error:
        return unknown_tick(context, error.message, error.hint)
    return afterwards(known)


def _counted(cursor: str | None) -> int:
    # It can be edited in the UI. The supervisor stores more after the count.
    count = (cursor or "").partition(" ")[0]
    return int(count) if count.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class Supervised:
    """The result of a tick: the reason, the requested run if any, and the suspicion to store.

    ``rests``: nothing of a restore was done, suspected or is going on, so the tick may show
    something else than its reason.
    """

    reason: str
    request: dg.RunRequest | None = None
    suspicion: Suspicion | None = None
    rests: bool = False


def supervise_restore(
    runs: RestoreRuns,
    plane: ControlPlane,
    deadline: Deadline,
    suspicion: Suspicion | None = None,
) -> Supervised:
    """Supervise the restore of the open incident, and end runs that have no worker any more.

    Nothing is done after the ``deadline``: a launched run would not be requested any more, and the
    next tick may do the same.
    """
    scene = _scene(runs, plane, suspicion)
    decision = supervise(scene, plane.clock.now())
    if deadline.is_over and not isinstance(decision, Rest):
        return Supervised("The tick took too long to do anything.")
    match decision:
        case Rest() as rest:
            is_over = _is_at_rest(scene, rest)
            return Supervised(rest.reason, suspicion=rest.suspicion, rests=is_over)
        case DeclareDead(run):
            return _end(runs, plane, run)
        case PutOnHold(incident, run):
            plane.incidents.hold(
                f"run {run.short_id} was terminated in Dagster", "unknown user", judged=incident
            )
            return Supervised(
                f"Run {run.short_id} was terminated, so incident {incident.short_id} is on hold "
                "until `budget-recovery release`."
            )
        case Launch(incident):
            return _launch(runs, plane, incident)
        case LaunchAgain(incident):
            return Supervised(
                f"Launch {incident.launches} for incident {incident.short_id} is requested again: "
                "the first request was lost.",
                _request(runs, incident),
            )


def _is_at_rest(scene: Scene, decision: Decision) -> bool:
    """Whether nothing of a restore is due, suspected or going on."""
    is_rest = isinstance(decision, Rest) and decision.suspicion is None
    return is_rest and not scene.left and scene.worker is None


def _scene(runs: RestoreRuns, plane: ControlPlane, suspicion: Suspicion | None) -> Scene:
    recovery = plane.incidents.recovery()
    lease = plane.leases.state_of(RESTORE_LEASE)
    return Scene(
        recovery=recovery,
        runs=runs.of(recovery.incident) if recovery.incident else (),
        worker=lease.holder,
        token=lease.token,
        suspicion=suspicion,
        left=runs.left(recovery.incident),
    )


def _end(runs: RestoreRuns, plane: ControlPlane, run: RunSeen) -> Supervised:
    """End a dead run as the database knows it, and show what it restored if it could not."""
    incident = incident_of(plane, run.incident_id)
    attempts = plane.incidents.attempts_of(incident.incident_id) if incident else ()
    fate = fate_of(run, incident, attempts)
    # First the event: a tick that ends in between leaves a started run, which the next one ends.
    if fate.shown is not None and (event := restored_event(plane, fate.shown)) is not None:
        show_once(runs.instance, run.run_id, event)
    runs.end(run, fate)
    if fate.has_succeeded:
        return Supervised(f"Run {run.short_id} is marked as succeeded. {fate.reason}")
    if incident is None or incident.ended is not None or incident.given_up is not None:
        return Supervised(f"Run {run.short_id} is marked as ended without success. {fate.reason}")
    awaited = may_launch(plane.incidents.recovery(), plane.clock.now())
    return Supervised(
        f"Run {run.short_id} is started but has no worker: it is marked as failed. "
        f"{awaited or 'The next tick launches the restore again.'}"
    )


def _launch(runs: RestoreRuns, plane: ControlPlane, incident: Incident) -> Supervised:
    claimed = plane.incidents.claim_launch(judged=incident)
    if claimed is None:
        return Supervised(f"A restore for incident {incident.short_id} has just been launched.")
    return Supervised(
        f"Launch {claimed.launches} for incident {claimed.short_id}.", _request(runs, claimed)
    )


def _request(runs: RestoreRuns, incident: Incident) -> dg.RunRequest:
    """Return the request for the run of the last counted launch."""
    # Dagster never forgets run keys, not even those of failed runs: each launch has its own.
    return dg.RunRequest(
        run_key=f"{incident.incident_id}/launch-{incident.launches}",
        job_name=restore_job.name,
        tags={**runs.tags(incident), LAUNCH_TAG: str(incident.launches)},
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
    if is_dry_run(context.log_key):
        return _preview(
            control_plane, lambda plane: _foreseen_check(context, plane, control_plane.settings)
        )

    def check_and_launch(deadline: Deadline) -> dg.SensorResult:
        open_store = store_opener(control_plane.settings, in_a_tick=True)
        with control_plane.opened() as plane:
            checked = check_store(plane, open_store, checked_by="store_loss_sensor")
            runs = _our_runs(context, plane)
            return _checked(context, checked, supervise_restore(runs, plane, deadline), runs)

    return _tick(context, check_and_launch)


def _our_runs(context: dg.SensorEvaluationContext, plane: ControlPlane) -> RestoreRuns:
    record = plane.registry.find()
    deployment_id = record.deployment_id if record else None
    return RestoreRuns(context.instance, location_of(context), deployment_id)


def _checked(
    context: dg.SensorEvaluationContext,
    checked: Checked,
    supervised: Supervised,
    runs: RestoreRuns,
) -> dg.SensorResult:
    observed = [dg.AssetObservation("gateway_usage_store", metadata=_metadata(checked))]
    check = checked.check
    request = supervised.request
    if request is None and checked.compared.request is not None:
        request = _capture_request(checked.compared.request, runs)
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


def _due_capture(plane: ControlPlane, runs: RestoreRuns) -> dg.RunRequest | None:
    """Return the request for a capture that the database knows to be due; None: none is."""
    request = requested_capture(plane)
    return None if request is None else _capture_request(request, runs)


def _capture_request(request: CaptureRequest, runs: RestoreRuns) -> dg.RunRequest:
    # A current hour can be captured again. The daemon ignores a key that already has its run.
    return dg.RunRequest(
        run_key=request.key,
        job_name=hourly_snapshot_job.name,
        partition_key=request.hour.key,
        tags=runs.tags(),
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
    jobs=[restore_job, hourly_snapshot_job],
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description=(
        "Supervises the restore of an open incident: launches restore_job if none is running, at "
        "once for a loss that a capture found. Launches it again, at most five minutes later, if "
        "a run had to wait for the store or died. A PostgreSQL lease tracks liveness: a started "
        "run without a lease for a minute is marked as failed. A launch without a run is "
        "requested again. Terminating a run puts the incident on hold. A run without a worker "
        "that Dagster still shows as started after the incident ends as PostgreSQL knows it. A "
        "capture or another run of this project without a worker is marked as failed, so that "
        "the next one can start. Requests one run of hourly_snapshot_job at the first start, and "
        "once an incident is closed: the next hour may be far away. Shows restores of the command "
        "`budget-recovery restore` on the asset restored_usage."
    ),
)
def restore_supervisor_sensor(
    context: dg.SensorEvaluationContext, control_plane: ControlPlaneParam
) -> dg.SensorResult:
    """Supervise once; skip with the reason, or request a run."""
    if is_dry_run(context.log_key):
        return _preview(control_plane, lambda plane: _foreseen_supervision(context, plane))

    def supervise_once(deadline: Deadline) -> dg.SensorResult:
        with control_plane.opened() as plane:
            known = read_suspicion(context.cursor)
            runs = _our_runs(context, plane)
            supervised = supervise_restore(runs, plane, deadline, known)
            request = supervised.request
            # Nothing may delay a launch that is counted.
            ended = [] if request else end_silent_runs(runs, plane, deadline)
            # A tick with a request shows no reason, so what was done comes first.
            if supervised.rests and not ended:
                request = _due_capture(plane, runs)
        cursor = write_suspicion(supervised.suspicion)
        if request is not None:
            return dg.SensorResult(run_requests=[request], cursor=cursor)
        reason = " ".join([supervised.reason, *ended])
        return dg.SensorResult(skip_reason=reason, cursor=cursor)

    return _tick(
        context,
        supervise_once,
        lambda known: _with_restores(context.instance, control_plane, known),
    )


_MOST_AT_ONCE = 10
_SHOW_SECONDS = 3.0
_log = logging.getLogger(__name__)


def _with_restores(
    instance: dg.DagsterInstance, control_plane: ControlPlaneResource, known: dg.SensorResult
) -> dg.SensorResult:
    """Add the manual restores that the asset restored_usage lacks; never fail the tick.

    Dagster stores the events of a tick before it launches a run, so none delays a restore.
    """
    requests = known.run_requests or []
    if any(request.job_name == restore_job.name for request in requests):
        return known

    def events(_: Deadline) -> list[RestoredEvent]:
        with control_plane.opened() as plane:
            lacking = not_shown(instance, plane)[:_MOST_AT_ONCE]
            return [manual_event(plane, each) for each in lacking]

    added: Sequence[RestoredEvent] = ()
    try:
        added = within(_SHOW_SECONDS, events)
        report = shown_report(len(added)) if added else ""
    except Exception as error:  # noqa: BLE001 - supervision goes on, whatever this needs fails
        report = not_shown_report(describe_error(error)[0])
        _log.warning(report)
    if requests or not report:
        return known._replace(asset_events=[*added])
    said = known.skip_reason.skip_message if known.skip_reason else ""
    reason = dg.SkipReason(f"{said} {report}".strip())
    return known._replace(skip_reason=reason, asset_events=[*added])


def shown_report(count: int) -> str:
    """Report the restores that a tick shows."""
    return f"Now shown on restored_usage: {counted(count, 'manual restore')}."


def not_shown_report(reason: str) -> str:
    """Report why manual restores are not shown."""
    return f"Manual restores are not shown on restored_usage: {reason} The next tick tries again."


# Every job but that of restores, which the leases and the incident supervise.
_OTHER_JOBS = frozenset(
    job.name
    for job in (
        hourly_snapshot_job,
        tenant_tables_job,
        recovery_points_job,
        manual_restore_job,
        resolve_incident_job,
        hold_restore_job,
        release_restore_job,
        record_reset_job,
    )
)
_ASSETS = frozenset({"budget_usage_snapshots", "tenant_usage_tables", "recovery_points"})


def end_silent_runs(runs: RestoreRuns, plane: ControlPlane, deadline: Deadline) -> list[str]:
    """End our other runs that have no worker any more; return a sentence about each."""
    ended: list[str] = []
    for run in silent_runs(runs, plane, _OTHER_JOBS, _ASSETS):
        if deadline.is_over:
            break
        ended.append(end_run(runs.instance, run))
    return ended


def _preview(
    control_plane: ControlPlaneResource, foresee: Callable[[ControlPlane], str]
) -> dg.SensorResult:
    """Skip with what a tick would do; no request and no cursor, which the page could commit."""

    def preview(_: Deadline) -> str:
        with control_plane.opened() as plane:
            if plane.registry.find() is None:
                return "No check has run yet: the first one records the store."
            return foresee(plane)

    try:
        foreseen = within(TICK_SECONDS, preview)
    except SettingsError:
        raise
    except BudgetRecoveryError as error:
        foreseen = f"A tick would be unknown: {error.message} Try: {error.hint}"
    return dg.SensorResult(skip_reason=f"Dry run, nothing was changed. {foreseen}")


def _foreseen_check(
    context: dg.SensorEvaluationContext, plane: ControlPlane, settings: Settings
) -> str:
    found = foresee_check(plane, store_opener(settings, in_a_tick=True))
    report = f"{label(found.verdict)}: {found.judgement.reason}"
    if found.verdict.is_alarm:
        return f"{report} A tick would {_about_alarm(plane)}."
    scene = _scene(_our_runs(context, plane), plane, None)
    foreseen = [_foreseen(supervise(scene, plane.clock.now()))]
    if found.verdict.is_good and scene.recovery.incident is None:
        foreseen.extend(_about_capture(missed_by_checks(plane)))
    return " ".join([report, *foreseen])


def _about_alarm(plane: ControlPlane) -> str:
    incident = plane.incidents.recovery().incident
    if incident is None:
        return "confirm this, open an incident, pause captures, and launch restore_job"
    return f"confirm this, and add a further loss to incident {incident.short_id}"


def _foreseen_supervision(context: dg.SensorEvaluationContext, plane: ControlPlane) -> str:
    runs = _our_runs(context, plane)
    scene = _scene(runs, plane, read_suspicion(context.cursor))
    decision = supervise(scene, plane.clock.now())
    ended = [
        f"A tick would end run {run.run_id[:8]} of {run.job_name}, which has no worker any more."
        for run in silent_runs(runs, plane, _OTHER_JOBS, _ASSETS)
    ]
    foreseen = [_foreseen(decision), *ended]
    if _is_at_rest(scene, decision) and not ended:
        foreseen.extend(_about_capture(requested_capture(plane)))
    if not isinstance(decision, Launch | LaunchAgain):
        foreseen.extend(_about_restores(len(not_shown(context.instance, plane))))
    return " ".join(foreseen)


def _about_capture(request: CaptureRequest | None) -> Iterator[str]:
    if request is not None:
        yield f"A tick would request a capture, once for this reason: {request.reason}"


def _about_restores(count: int) -> Iterator[str]:
    if count:
        yield f"A tick would show {counted(count, 'manual restore')} on restored_usage."


def _foreseen(decision: Decision) -> str:
    match decision:
        case Rest(reason):
            return reason
        case DeclareDead(run):
            return f"A tick would end run {run.short_id}, which has no worker any more."
        case PutOnHold(incident, run):
            return (
                f"A tick would put incident {incident.short_id} on hold, because run "
                f"{run.short_id} was terminated."
            )
        case Launch(incident):
            return f"A tick would launch restore_job for incident {incident.short_id}."
        case LaunchAgain(incident):
            return (
                f"A tick would request launch {incident.launches} for incident "
                f"{incident.short_id} again."
            )
