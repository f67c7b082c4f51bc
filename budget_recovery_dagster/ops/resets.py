"""The op by which a person records that counters were lowered on purpose."""

import dagster as dg
from pydantic import Field

from budget_recovery_dagster.domain.counters import Entity
from budget_recovery_dagster.domain.moments import parse_moment
from budget_recovery_dagster.domain.resets import EVERYONE, Everyone
from budget_recovery_dagster.failures import failure, shown_as_failures
from budget_recovery_dagster.resources import ControlPlaneResource
from budget_recovery_dagster.services.reset_words import told
from budget_recovery_dagster.services.resets import ResetRequest


class ResetConfig(dg.Config):
    """Whose counters were lowered, when and why."""

    tenant: str = Field(description="Whose budget it is.")
    budget: str = Field(description="Which budget was reset.")
    entity: str | None = Field(
        default=None,
        description="Whose counter was reset; without it, those of all, and the aggregate.",
    )
    aggregate: bool = Field(default=False, description="Only the aggregate of the budget.")
    window: str | None = Field(
        default=None, description="Which window was reset, such as 2026-11; without it, all."
    )
    at: str | None = Field(
        default=None, description="When, in UTC, such as 2026-11-29T14:00; without it, now."
    )
    reason: str = Field(description="Why they were lowered; kept with the reset.")


@dg.op(
    out=dg.Out(dg.Nothing),
    description=(
        "Notes that counters of a budget were lowered or cleared in the gateway, so that no "
        "restore uses what snapshots of that moment or before hold of them. Lower them first, "
        "then record it."
    ),
)
def record_reset(
    context: dg.OpExecutionContext, config: ResetConfig, control_plane: ControlPlaneResource
) -> None:
    """Record a reset.

    Raises:
        dagster.Failure: it names what no snapshot has, or a time to come, or gives no reason.
    """
    request = _request(config, by=f"run {context.run.run_id[:8]}")
    with shown_as_failures(), control_plane.opened() as plane:
        recorded = plane.reset_service().record(request)
    for paragraph in told(recorded):
        context.log.info(paragraph)


def _request(config: ResetConfig, by: str) -> ResetRequest:
    if config.aggregate and config.entity is not None:
        raise failure("An entity is named, and the aggregate.", "choose one of them.")
    try:
        at = None if config.at is None else parse_moment(config.at)
    except ValueError as error:
        raise failure(f"{error}.", "write it as 2026-11-29T14:00, in UTC.") from error
    named = config.entity is not None or config.aggregate
    who: Entity | Everyone = config.entity if named else EVERYONE
    return ResetRequest(config.tenant, config.budget, config.window, who, at, by, config.reason)
