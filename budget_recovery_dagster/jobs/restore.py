"""The job that recovers a lost store, and the job that previews or applies a manual restore."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any, NoReturn

import dagster as dg
from dagster import DagsterRunStatus
from pydantic import Field

from budget_recovery_dagster.assets.gateway import restored_usage
from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.audits import MOST_AMOUNTS, ManualRestore
from budget_recovery_dagster.domain.incident import MAX_ATTEMPTS, Incident
from budget_recovery_dagster.domain.plan import EVERY_TENANT, LATEST, OF_THAT_NAME
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    BudgetRecoveryError,
    SettingsError,
    StoreLostError,
)
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.presentation.metadata import MOST_ROWS
from budget_recovery_dagster.presentation.restore_metadata import (
    RESTORE_ID,
    applied_metadata,
    manual_metadata,
    preview_metadata,
    restored_metadata,
)
from budget_recovery_dagster.presentation.text import (
    FAILURES,
    applied_headline,
    comparison,
    difference_line,
    end_of_incident,
    headline,
    most_relevant,
)
from budget_recovery_dagster.resources import (
    OUTCOME_TAG,
    ControlPlaneParam,
    ControlPlaneResource,
    await_dagster,
    failure,
    holder_of,
    never_failing,
    order_by,
)
from budget_recovery_dagster.restore_runs import (
    DEPLOYMENT_TAG,
    INCIDENT_TAG,
    RESTORE_JOB,
    RESTORE_STEP,
    RestoredEvent,
    is_shown,
)
from budget_recovery_dagster.services.restore.automatic import (
    GaveUp,
    NothingToDo,
    Recovered,
    RecoveryResult,
    StillWaiting,
    recover_store,
)
from budget_recovery_dagster.services.restore.manual import restore_manually
from budget_recovery_dagster.services.restore.preview import RestoreRequest, preview_restore
from budget_recovery_dagster.wiring import store_opener

LONGEST_WAIT = timedelta(seconds=60)
"""A run waits for its next attempt at most so long, since it occupies one of Dagster's run slots.

For a later attempt the supervisor launches another run.
"""
_RESULTS = {dg.DagsterEventType.ASSET_MATERIALIZATION, dg.DagsterEventType.ASSET_OBSERVATION}
# Longer than Dagster is usually away. After an upgrade, no older restores appear.
_SHOWN_FOR = timedelta(hours=24)
# A day has fewer, unless a script restores tenant by tenant; ticks keep up with that.
_MOST_COMPARED = 50
_PAGES, _SPARE = 4, 10
# Far more than any run can outlive, and than can end within the day in which a restore is shown.
_RECENT_INCIDENTS = 100
# So that the database's clock has reached the time of the next attempt.
_MARGIN_SECONDS = 1


@dg.op(
    name=RESTORE_STEP,
    # The asset restored_usage shows what it wrote.
    out=dg.Out(dg.Nothing),
    # The database counts the attempts, too, even if the run ends unexpectedly, and has the time of
    # the next. The delay is for errors that leave that time unknown.
    retry_policy=dg.RetryPolicy(max_retries=MAX_ATTEMPTS - 1, delay=LONGEST_WAIT.total_seconds()),
    description=(
        "Waits until the usage store has converged; waiting uses no attempt. Then raises every "
        "counter of an open window that is lower than in the snapshots. No counter is ever lowered."
    ),
)
def restore(context: dg.OpExecutionContext, control_plane: ControlPlaneParam) -> None:
    """Try once to restore the store of the open incident.

    Raises:
        dagster.RetryRequested: the attempt failed, and the next one is due soon.
        dagster.Failure: it failed, and the next one is due later, or none is left.
    """
    run_id = context.run.run_id
    try:
        with control_plane.opened() as plane:
            _tag_with_incident(context, plane)
            result = recover_store(
                plane,
                store_opener(control_plane.settings),
                run_id=run_id,
                holder=holder_of(run_id),
                convergence_timeout=control_plane.settings.convergence_timeout,
                on_progress=never_failing(context.log.info),
            )
            await_dagster(context, plane)
            _show_result(context, plane, result)
    except dg.DagsterExecutionInterruptedError as error:
        raise _terminated() from error
    except (AttemptFailedError, StoreLostError) as error:
        _retry_or_fail(context, error, control_plane)
    except BudgetRecoveryError as error:
        is_temporary = not isinstance(error, SettingsError)
        raise failure(error.message, error.hint, allow_retries=is_temporary) from error


def _terminated() -> dg.Failure:
    # Otherwise the policy would start another attempt in a terminated run.
    return dg.Failure("The run was terminated.", allow_retries=False)


def _is_terminated(context: dg.OpExecutionContext) -> bool:
    """Whether Dagster has asked the run to end: the interruption may have hit a cleanup."""
    try:
        run = context.instance.get_run_by_id(context.run.run_id)
    except Exception:  # noqa: BLE001 - of any driver; the next attempt matters more
        return False
    return run is not None and run.status is DagsterRunStatus.CANCELING


def _retry_or_fail(
    context: dg.OpExecutionContext, error: BudgetRecoveryError, control_plane: ControlPlaneResource
) -> NoReturn:
    """Wait for the next attempt and request it, or fail the run if it is due later."""
    with control_plane.opened() as plane:
        incident, now = plane.incidents.recovery().incident, plane.clock.now()
    awaited = incident.awaited_attempt(now) if incident else None
    if incident is not None and incident.next_attempt_at is not None and awaited is not None:
        pause = incident.next_attempt_at - now
        if pause > LONGEST_WAIT:
            raise failure(f"{error.message} {awaited}", error.hint) from error
        never_failing(context.log.warning)(f"{error} {awaited}")
        # Dagster's own wait would delay a termination of the run until it ends.
        try:
            time.sleep(pause.total_seconds())
        except dg.DagsterExecutionInterruptedError as interrupted:
            raise _terminated() from interrupted
    if _is_terminated(context):
        raise _terminated() from error
    raise dg.RetryRequested(MAX_ATTEMPTS - 1, _MARGIN_SECONDS) from failure(
        error.message, error.hint
    )


def _tag_with_incident(context: dg.OpExecutionContext, plane: ControlPlane) -> None:
    """Prove by tags what a run from the launchpad restores; the sensors tag theirs."""
    record, incident = plane.registry.claim(), plane.incidents.recovery().incident
    tags = {DEPLOYMENT_TAG: record.deployment_id}
    if incident is not None:
        tags[INCIDENT_TAG] = incident.incident_id
    missing = {key: value for key, value in tags.items() if key not in context.run.tags}
    if missing:
        try:
            context.instance.add_run_tags(context.run.run_id, missing)
        except Exception:  # noqa: BLE001 - of any driver; the restore matters more than its tags
            never_failing(context.log.info)(
                "The run is not tagged: Dagster's database does not answer."
            )


def _show_result(
    context: dg.OpExecutionContext, plane: ControlPlane, result: RecoveryResult
) -> None:
    """Show the result in the log, in a tag of the run, and on the asset restored_usage."""
    match result:
        case NothingToDo():
            context.log.info(result.reason)
            _tag(context, "nothing_to_do")
        case StillWaiting():
            again = result.incident.next_launch_at
            context.log.warning(
                f"Waiting; no attempt was used. {result.reason} Try: {result.hint}"
                + (f" The next launch is due at {again:%H:%M:%S} UTC." if again else "")
            )
            _tag(context, "waiting")
        case Recovered():
            ended = result.incident.ended
            detail = ended.detail if ended else ""
            context.log.info(f"The store is HEALTHY. {detail}")
            _tag(context, ended.outcome.value if ended else "closed")
            _log_restored(context, plane, result.incident)
        case GaveUp():
            _tag(context, "failed")
            _log_restored(context, plane, result.incident)
            raise failure(
                f"The store is FAILED: {FAILURES[result.reason]}. {result.detail}",
                "see `budget-recovery status` for the next step; captures are paused until then.",
            )


def _tag(context: dg.OpExecutionContext, outcome: str) -> None:
    context.instance.add_run_tags(context.run.run_id, {OUTCOME_TAG: outcome})


def _log_restored(context: dg.OpExecutionContext, plane: ControlPlane, incident: Incident) -> None:
    event = restored_event(plane, incident)
    # The supervisor may have shown it already, for a worker that Dagster's database kept waiting.
    if event is not None and not is_shown(context.instance, event):
        context.log_event(event)


def restored_event(plane: ControlPlane, incident: Incident) -> RestoredEvent | None:
    """Return what the asset restored_usage shows of an incident; None: nothing was raised."""
    audits = plane.audits.largest(incident.incident_id, MOST_ROWS)
    if not audits.windows:
        return None
    restored = plane.audits.restored_in(incident.incident_id)
    amounts = plane.audits.amounts_in(incident.incident_id, MOST_AMOUNTS)
    metadata = {
        "incident": incident.incident_id,
        "loss": incident.losses[-1].reason,
        "outcome": incident.ended.outcome.value if incident.ended else "failed",
        **({"outcome_detail": incident.ended.detail} if incident.ended else {}),
        **restored_metadata(incident, restored, audits, amounts),
    }
    return _event(metadata, raised=restored.counters)


def manual_event(plane: ControlPlane, restore: ManualRestore) -> RestoredEvent:
    """Return what the asset restored_usage shows of a manual restore that no run has shown."""
    restored, audits = plane.audits.raised_by(restore.run_id, MOST_ROWS)
    metadata = manual_metadata(restore, restored, audits, incident_of(plane, restore.incident_id))
    return _event(metadata, raised=restored.counters)


def incident_of(plane: ControlPlane, incident_id: str | None) -> Incident | None:
    """Return a recent incident by its id; None: it is unknown."""
    recent = plane.incidents.recent(_RECENT_INCIDENTS) if incident_id else ()
    return next((each for each in recent if each.incident_id == incident_id), None)


def not_shown(instance: dg.DagsterInstance, plane: ControlPlane) -> list[ManualRestore]:
    """Return the manual restores of the last day that restored_usage lacks, oldest first."""
    restores = plane.audits.manual_restores(plane.clock.now() - _SHOWN_FOR, _MOST_COMPARED)
    # One restore runs at a time, and it may be the newest of these. The lease is read after them:
    # while it is free, they are over.
    if restores and plane.leases.state_of(RESTORE_LEASE).holder is not None:
        restores = restores[1:]
    return _lacking(instance, restores[::-1])


def _lacking(
    instance: dg.DagsterInstance, restores: Sequence[ManualRestore]
) -> list[ManualRestore]:
    """Return the restores that restored_usage lacks, in their order.

    Dagster knows a command only by an entry of a materialization. So the newest of these are read,
    and a few more than there are restores: those of other restores lie in between.
    """
    left = {each.run_id: each for each in restores}
    for run in instance.get_runs(dg.RunsFilter(run_ids=list(left))) if left else ():
        # An active run may still show its result itself.
        if not run.is_finished or instance.all_logs(run.run_id, of_type=_RESULTS):
            del left[run.run_id]
    cursor: str | None = None
    for _ in range(_PAGES):
        if not left:
            break
        page = instance.fetch_materializations(
            restored_usage.key, limit=len(restores) + _SPARE, cursor=cursor
        )
        for record in page.records:
            event = record.asset_materialization
            entry = event.metadata.get(RESTORE_ID) if event else None
            left.pop(str(entry.value) if entry else "", None)
        if not page.has_more:
            break
        cursor = page.cursor
    return list(left.values())


def _event(metadata: Mapping[str, Any], *, raised: int = 0) -> RestoredEvent:
    """Return a result for the asset restored_usage, which materializes only if counters rose."""
    event = dg.AssetMaterialization if raised else dg.AssetObservation
    return event(restored_usage.key, metadata=metadata)


@dg.job(
    name=RESTORE_JOB,
    description=(
        "Restores the store of the open incident: waits until the store has converged, raises "
        "every counter of an open window to the highest usage in the snapshots, and closes the "
        "incident. The sensors launch it automatically, with at most three attempts per loss: at "
        "once, after a minute, and after five more minutes. Without an open incident it does "
        "nothing."
    ),
    tags={
        # Attempts are counted in the database, and the sensors launch again.
        "dagster/max_retries": "0",
        "dagster/max_runtime": "3600",
        # Ahead of other queued runs, such as a backfill.
        "dagster/priority": "10",
    },
)
def restore_job() -> None:
    """Recover the store."""
    restore()


_LOGGED = 50


class Mode(Enum):
    """What happens with the plan; the config selects it by name."""

    preview = "preview"
    apply = "apply"


class ManualRestoreConfig(dg.Config):
    """What to restore, from which snapshot, and whether to apply it."""

    tenant: str = Field(
        default=EVERY_TENANT,
        description=(
            f"Name of the tenant to restore, or {EVERY_TENANT} for every tenant. {OF_THAT_NAME}"
        ),
    )
    budget: str = Field(
        default="",
        description="Budget of the tenant. Empty: all of its budgets.",
    )
    snapshot: str = Field(
        default=LATEST,
        description=(
            "Snapshot timestamp in UTC, such as 2026-11-30T03:00:04, or a unique prefix; a preview "
            f"lists the timestamps. {LATEST} takes the highest usage of all retained snapshots, as "
            "an automatic restore does."
        ),
    )
    mode: Mode = Field(
        default=Mode.preview,
        description=(
            "preview: show in the Events of the asset restored_usage what would change, and write "
            "nothing. apply: restore. Preview first: an apply with the same options then reports "
            "what changed since."
        ),
    )
    reason: str = Field(
        default="",
        description="Why; required to apply, and stored with the result.",
    )
    accept_unconverged: bool = Field(
        default=False,
        description=(
            "Apply even if servers of the store are missing or catching up. Use it only if they "
            "will not come back: restored usage may be lost with the remaining servers."
        ),
    )
    despite_resets: bool = Field(
        default=False,
        description="Also restore usage that was reset on purpose (see record_reset_job).",
    )
    preview_id: str = Field(
        default="",
        description=(
            "Id of the preview to compare the apply with. Empty: the newest preview with the same "
            "options in the last 24 hours."
        ),
    )

    def request(self) -> RestoreRequest:
        """Return the request of this config."""
        return RestoreRequest(self.tenant, self.budget, self.snapshot, self.despite_resets)


@dg.op(
    name="manual_restore",
    out=dg.Out(dg.Nothing),
    description=(
        "Previews or applies a restore: raises the chosen counters to the usage in the snapshots. "
        "No counter is ever lowered. The result is in the Events of the asset restored_usage."
    ),
)
def preview_or_apply(
    context: dg.OpExecutionContext, config: ManualRestoreConfig, control_plane: ControlPlaneParam
) -> None:
    """Preview or apply.

    Raises:
        dagster.Failure: the choice does not exist, another restore is running, or not everything
            was restored. Raised counters stay raised; the asset shows them.
    """
    with control_plane.opened_in_step() as plane:
        match config.mode:
            case Mode.preview:
                _preview(context, config, control_plane, plane)
            case Mode.apply:
                _apply(context, config, control_plane, plane)


def _preview(
    context: dg.OpExecutionContext,
    config: ManualRestoreConfig,
    control_plane: ControlPlaneResource,
    plane: ControlPlane,
) -> None:
    run_id = context.run.run_id
    preview = preview_restore(
        plane,
        store_opener(control_plane.settings),
        config.request(),
        by=f"run {run_id[:8]}",
        on_progress=never_failing(context.log.info),
    )
    await_dagster(context, plane)
    context.log.info(headline(preview))
    choices = plane.snapshots.listed(preview.choice.tenant)
    context.log_event(_event(preview_metadata(preview, choices)))


def _apply(
    context: dg.OpExecutionContext,
    config: ManualRestoreConfig,
    control_plane: ControlPlaneResource,
    plane: ControlPlane,
) -> None:
    order = order_by(context, config.reason, accept_unconverged=config.accept_unconverged)
    try:
        applied = restore_manually(
            plane,
            store_opener(control_plane.settings),
            config.request(),
            order,
            convergence_timeout=control_plane.settings.convergence_timeout,
            preview_id=config.preview_id.strip() or None,
        )
    except dg.DagsterExecutionInterruptedError as error:
        raise dg.Failure(
            "The run was terminated. Raised counters stay raised; see the table restore_audit.",
            allow_retries=False,
        ) from error
    await_dagster(context, plane)
    context.log.info(f"{applied_headline(applied)} {comparison(applied)}")
    for difference in most_relevant(applied.differences)[:_LOGGED]:
        context.log.info(difference_line(difference))
    if text := end_of_incident(applied):
        context.log.info(text)
    context.log_event(_event(applied_metadata(applied, order), raised=applied.raised))
    if applied.failure is not None:
        raise failure(applied.failure.message, applied.failure.hint)


@dg.job(
    name="manual_restore_job",
    description=(
        "Previews or applies a manual restore of one budget, one tenant or every tenant, from all "
        "snapshots or from one. Start it from the Launchpad with mode preview, and check the "
        "Events of the asset restored_usage. Then set mode to apply and give a reason. If no "
        "counter is lower than in the snapshots afterwards, the open incident is closed."
    ),
    tags={
        "dagster/max_retries": "0",
        "dagster/max_runtime": "3600",
        # Ahead of other queued runs: a person waits for it.
        "dagster/priority": "20",
    },
)
def manual_restore_job() -> None:
    """Preview or apply a manual restore."""
    preview_or_apply()
