"""The op by which a person accepts the store as it is."""

import dagster as dg
from pydantic import Field

from budget_recovery_dagster.failures import shown_as_failures
from budget_recovery_dagster.ops.run_orders import order_by
from budget_recovery_dagster.resources import ControlPlaneResource


class ResolveConfig(dg.Config):
    """Why the store is accepted as it is."""

    reason: str = Field(description="Why nothing more is to be restored; it is kept for ever.")
    accept_unconverged: bool = Field(
        default=False,
        description="Accept the store even though servers of it are missing or catching up.",
    )


@dg.op(
    out=dg.Out(dg.Nothing),
    description=(
        "Ends the open incident without restoring anything more: the store is accepted as it is, "
        "and snapshots are taken again. Not while the store cannot be seen."
    ),
)
def resolve_incident(
    context: dg.OpExecutionContext, config: ResolveConfig, control_plane: ControlPlaneResource
) -> None:
    """Accept the store as it is.

    Raises:
        dagster.Failure: no incident is open, no reason is given, or the store cannot be seen.
    """
    order = order_by(context, config.reason, accept_unconverged=config.accept_unconverged)
    with shown_as_failures(), control_plane.opened() as plane:
        resolved = plane.resolve_service().resolve(order)
    ended = resolved.incident.ended
    context.log.info(
        f"Incident {resolved.incident.short_id} is closed; the store is HEALTHY. "
        + (ended.detail if ended else "")
    )
