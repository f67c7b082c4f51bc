"""Ops by which a person holds the restore of the open incident, or lets it go on."""

import dagster as dg
from pydantic import Field

from budget_recovery_dagster.failures import failure, shown_as_failures
from budget_recovery_dagster.resources import ControlPlaneResource


class HoldConfig(dg.Config):
    """Why a restore is to stop."""

    reason: str = Field(description="Why the restore is to stop; everybody who looks is told.")


@dg.op(
    out=dg.Out(dg.Nothing),
    description=(
        "Puts the open incident on hold: no restore is launched for it, and one that works stops "
        "before the next tenant. Captures stay paused."
    ),
)
def hold_incident(
    context: dg.OpExecutionContext, config: HoldConfig, control_plane: ControlPlaneResource
) -> None:
    """Put the open incident on hold.

    Raises:
        dagster.Failure: no restore is under way, or no reason is given.
    """
    if not config.reason.strip():
        raise failure("The reason is empty.", "say why the restore is to stop.")
    with shown_as_failures(), control_plane.opened() as plane:
        incident = plane.hold_service().hold(config.reason, by=f"run {context.run.run_id[:8]}")
    context.log.warning(
        f"Incident {incident.short_id} is on hold until release_restore_job or "
        "`budget-recovery release`."
    )


@dg.op(
    out=dg.Out(dg.Nothing),
    description="Lets the restore of the open incident go on, at once and with all its attempts.",
)
def release_incident(context: dg.OpExecutionContext, control_plane: ControlPlaneResource) -> None:
    """Release the open incident.

    Raises:
        dagster.Failure: no restore is under way.
    """
    with shown_as_failures(), control_plane.opened() as plane:
        incident = plane.hold_service().release(by=f"run {context.run.run_id[:8]}")
    context.log.info(f"Incident {incident.short_id} is not on hold; its restore is launched soon.")
