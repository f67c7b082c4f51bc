"""The job that previews or applies a restore that a person chose."""

from enum import Enum

import dagster as dg
from pydantic import Field

from budget_recovery_dagster.assets.restored_usage import restored_usage
from budget_recovery_dagster.domain.plan import EVERY_TENANT, LATEST
from budget_recovery_dagster.jobs.snapshots import IN_ONE_PROCESS
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.presentation.metadata import applied_metadata, preview_metadata
from budget_recovery_dagster.presentation.text import (
    applied_headline,
    comparison,
    difference_line,
    end_of_incident,
    headline,
    most_telling,
)
from budget_recovery_dagster.resources import (
    ControlPlaneParam,
    ControlPlaneResource,
    failure,
    order_by,
    shown_as_failures,
)
from budget_recovery_dagster.services.preview import preview_restore
from budget_recovery_dagster.services.restore.choice import RestoreRequest
from budget_recovery_dagster.services.restore.manual import restore_manually

_LOGGED = 50


class Mode(Enum):
    """What is done with the plan; in Dagster it is chosen by its name."""

    preview = "preview"
    apply = "apply"


class ManualRestoreConfig(dg.Config):
    """What is restored, from what, and whether it is only looked at."""

    tenant: str = Field(
        default=EVERY_TENANT,
        description=f"Whose counters: the name of one tenant, or {EVERY_TENANT} for every tenant.",
    )
    budget: str = Field(
        default="",
        description="Only this budget of the tenant. Empty: all of its budgets.",
    )
    snapshot: str = Field(
        default=LATEST,
        description=(
            f"From what: {LATEST} takes the highest that any retained snapshot knows, which is "
            "what an automatic restore does; a moment in UTC such as 2026-11-30T03:00:04 takes "
            "exactly the snapshot of then (its beginning is enough). A preview lists the moments."
        ),
    )
    mode: Mode = Field(
        default=Mode.preview,
        description=(
            "preview: tell what would be done, among the Events of the asset restored_usage, and "
            "write nothing. apply: do it. Preview first: apply of the same choice then tells what "
            "has changed since."
        ),
    )
    reason: str = Field(
        default="",
        description="Why; needed to apply, and kept with what is done for whoever asks later.",
    )
    accept_unconverged: bool = Field(
        default=False,
        description=(
            "Apply even though servers of the store are missing or catching up. Only when they "
            "will not come back: what is written may be lost with the servers that are left."
        ),
    )
    despite_resets: bool = Field(
        default=False,
        description="Also bring back what was reset on purpose (see record_reset_job).",
    )
    preview_id: str = Field(
        default="",
        description=(
            "The preview that an apply is compared with, as that shows it. Empty: the newest one "
            "of the same choice of the last day."
        ),
    )

    def request(self) -> RestoreRequest:
        """Return what is asked for."""
        return RestoreRequest(self.tenant, self.budget, self.snapshot, self.despite_resets)


@dg.op(
    out=dg.Out(dg.Nothing),
    description=(
        "Previews a restore, or applies it: raises the chosen counters to what the snapshots say "
        "and never lowers one. What it would do, or did, is told among the Events of the asset "
        "restored_usage."
    ),
)
def restore_by_hand(
    context: dg.OpExecutionContext, config: ManualRestoreConfig, control_plane: ControlPlaneParam
) -> None:
    """Preview or apply.

    Raises:
        dagster.Failure: what is asked for does not exist, or somebody else restores; or not all
            could be done: then what was raised stays raised, and the asset tells it.
    """
    with shown_as_failures(), control_plane.opened() as plane:
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
        control_plane.store_opener(),
        config.request(),
        by=f"run {run_id[:8]}",
        on_progress=context.log.info,
    )
    context.log.info(headline(preview))
    choices = plane.snapshot_list.all(preview.choice.tenant)
    context.log_event(
        dg.AssetObservation(restored_usage.key, metadata=preview_metadata(preview, choices))
    )


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
            control_plane.store_opener(),
            config.request(),
            order,
            convergence_timeout=control_plane.settings.convergence_timeout,
            preview_id=config.preview_id.strip() or None,
        )
    except dg.DagsterExecutionInterruptedError as error:
        raise dg.Failure(
            "The run was terminated; what was raised stays raised, and restore_audit has it.",
            allow_retries=False,
        ) from error
    context.log.info(f"{applied_headline(applied)} {comparison(applied)}")
    for difference in most_telling(applied.differences)[:_LOGGED]:
        context.log.info(difference_line(difference))
    if told := end_of_incident(applied):
        context.log.info(told)
    metadata = applied_metadata(applied, order)
    if applied.raised:
        context.log_event(dg.AssetMaterialization(restored_usage.key, metadata=metadata))
    else:
        context.log_event(dg.AssetObservation(restored_usage.key, metadata=metadata))
    if applied.failure is not None:
        raise failure(applied.failure.message, applied.failure.hint)


@dg.job(
    name="manual_restore_job",
    description=(
        "Previews or applies a restore that a person chooses: one budget, one tenant or the whole "
        "store, from the latest or from one snapshot. In the Launchpad leave mode at preview "
        "first, and see among the Events of the asset restored_usage what would be done; then set "
        "it to apply and give a reason. A restore after which nothing of the whole store is left "
        "to be raised ends the open incident."
    ),
    executor_def=IN_ONE_PROCESS,
    tags={
        "dagster/max_retries": "0",
        "dagster/max_runtime": "3600",
        # Ahead of whatever else is queued: a person waits for it.
        "dagster/priority": "20",
    },
)
def manual_restore_job() -> None:
    """Preview or restore what a person has chosen."""
    restore_by_hand()
