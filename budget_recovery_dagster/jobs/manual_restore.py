"""The job that previews or applies a manual restore."""

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
    most_relevant,
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
    """What happens with the plan; the config selects it by name."""

    preview = "preview"
    apply = "apply"


class ManualRestoreConfig(dg.Config):
    """What to restore, from which snapshot, and whether to apply it."""

    tenant: str = Field(
        default=EVERY_TENANT,
        description=f"Name of the tenant to restore, or {EVERY_TENANT} for every tenant.",
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
    out=dg.Out(dg.Nothing),
    description=(
        "Previews or applies a restore: raises the chosen counters to the usage in the snapshots. "
        "No counter is ever lowered. The result is in the Events of the asset restored_usage."
    ),
)
def restore_by_hand(
    context: dg.OpExecutionContext, config: ManualRestoreConfig, control_plane: ControlPlaneParam
) -> None:
    """Preview or apply.

    Raises:
        dagster.Failure: the choice does not exist, another restore is running, or not everything
            was restored. Raised counters stay raised; the asset shows them.
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
            "The run was terminated. Raised counters stay raised; see the table restore_audit.",
            allow_retries=False,
        ) from error
    context.log.info(f"{applied_headline(applied)} {comparison(applied)}")
    for difference in most_relevant(applied.differences)[:_LOGGED]:
        context.log.info(difference_line(difference))
    if text := end_of_incident(applied):
        context.log.info(text)
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
        "Previews or applies a manual restore of one budget, one tenant or every tenant, from all "
        "snapshots or from one. Start it from the Launchpad with mode preview, and check the "
        "Events of the asset restored_usage. Then set mode to apply and give a reason. If no "
        "counter is lower than in the snapshots afterwards, the open incident is closed."
    ),
    executor_def=IN_ONE_PROCESS,
    tags={
        "dagster/max_retries": "0",
        "dagster/max_runtime": "3600",
        # Ahead of other queued runs: a person waits for it.
        "dagster/priority": "20",
    },
)
def manual_restore_job() -> None:
    """Preview or apply a manual restore."""
    restore_by_hand()
