"""The job that recovers a lost store."""

import dagster as dg

from budget_recovery_dagster.assets.restored_usage import restored_usage
from budget_recovery_dagster.domain.incident import MAX_ATTEMPTS, Incident
from budget_recovery_dagster.errors import BudgetRecoveryError, SettingsError
from budget_recovery_dagster.jobs.snapshots import IN_ONE_PROCESS
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.presentation.metadata import MOST_ROWS, restored_metadata
from budget_recovery_dagster.presentation.text import FAILURES
from budget_recovery_dagster.resources import ControlPlaneParam, failure, holder_of
from budget_recovery_dagster.services.restore.automatic import (
    GaveUp,
    NothingToDo,
    Recovered,
    RecoveryResult,
    StillWaiting,
    recover_store,
)

OUTCOME_TAG = "budget_recovery/outcome"
"""Tag of a run: its outcome, beyond success or failure."""


@dg.op(
    # The asset restored_usage shows what it wrote.
    out=dg.Out(dg.Nothing),
    retry_policy=dg.RetryPolicy(
        # The database counts the attempts, too, even if the run ends unexpectedly.
        max_retries=MAX_ATTEMPTS - 1,
        delay=2,
        backoff=dg.Backoff.EXPONENTIAL,
        jitter=dg.Jitter.PLUS_MINUS,
    ),
    description=(
        "Waits until the usage store has converged; waiting uses no attempt. Then raises every "
        "counter of an open window that is lower than in the snapshots. No counter is ever lowered."
    ),
)
def restore(context: dg.OpExecutionContext, control_plane: ControlPlaneParam) -> None:
    """Try once to restore the store of the open incident.

    Raises:
        dagster.Failure: the attempt failed; the policy retries it unless no attempt remains.
    """
    run_id = context.run.run_id
    try:
        with control_plane.opened() as plane:
            result = recover_store(
                plane,
                control_plane.store_opener(),
                run_id=run_id,
                holder=holder_of(run_id),
                convergence_timeout=control_plane.settings.convergence_timeout,
                on_progress=context.log.info,
            )
            _show_result(context, plane, result)
    except dg.DagsterExecutionInterruptedError as error:
        # Otherwise the policy would start another attempt in a terminated run.
        raise dg.Failure("The run was terminated.", allow_retries=False) from error
    except SettingsError as error:
        raise failure(error.message, error.hint) from error
    except BudgetRecoveryError as error:
        raise dg.Failure(str(error), metadata={"what_to_do": error.hint}) from error


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
    audits = plane.audits.largest(incident.incident_id, MOST_ROWS)
    if not audits.windows:
        return
    restored = plane.audits.restored_in(incident.incident_id)
    metadata = {
        "incident": incident.incident_id,
        "loss": incident.losses[-1].reason,
        "outcome": incident.ended.outcome.value if incident.ended else "failed",
        **({"outcome_detail": incident.ended.detail} if incident.ended else {}),
        **restored_metadata(restored, audits),
    }
    if restored.counters:
        context.log_event(dg.AssetMaterialization(restored_usage.key, metadata=metadata))
    else:
        context.log_event(dg.AssetObservation(restored_usage.key, metadata=metadata))


@dg.job(
    name="restore_job",
    description=(
        "Restores the store of the open incident: waits until the store has converged, raises "
        "every counter of an open window to the highest usage in the snapshots, and closes the "
        "incident. The sensors launch it automatically, with at most three attempts per loss; "
        "a manual launch runs it once. Without an open incident it does nothing."
    ),
    executor_def=IN_ONE_PROCESS,
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
