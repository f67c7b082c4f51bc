"""Jobs with which a person steers an incident: hold, release, resolve, record a reset."""

import dagster as dg
from pydantic import Field

from budget_recovery_dagster.domain.counters import Entity
from budget_recovery_dagster.domain.resets import EVERYONE, Everyone
from budget_recovery_dagster.domain.windows import parse_moment
from budget_recovery_dagster.jobs.snapshots import IN_ONE_PROCESS
from budget_recovery_dagster.presentation.text import told
from budget_recovery_dagster.resources import (
    ControlPlaneParam,
    failure,
    order_by,
    shown_as_failures,
)
from budget_recovery_dagster.services.resets import ResetRequest, record_reset
from budget_recovery_dagster.services.restore.manual import (
    hold_restore,
    release_restore,
    resolve_incident,
)


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
    context: dg.OpExecutionContext, config: HoldConfig, control_plane: ControlPlaneParam
) -> None:
    """Put the open incident on hold.

    Raises:
        dagster.Failure: no restore is under way, or no reason is given.
    """
    if not config.reason.strip():
        raise failure("The reason is empty.", "say why the restore is to stop.")
    with shown_as_failures(), control_plane.opened() as plane:
        incident = hold_restore(plane, config.reason, by=f"run {context.run.run_id[:8]}")
    context.log.warning(
        f"Incident {incident.short_id} is on hold until release_restore_job or "
        "`budget-recovery release`."
    )


@dg.op(
    out=dg.Out(dg.Nothing),
    description="Lets the restore of the open incident go on, at once and with all its attempts.",
)
def release_incident(context: dg.OpExecutionContext, control_plane: ControlPlaneParam) -> None:
    """Release the open incident.

    Raises:
        dagster.Failure: no restore is under way.
    """
    with shown_as_failures(), control_plane.opened() as plane:
        incident = release_restore(plane, by=f"run {context.run.run_id[:8]}")
    context.log.info(f"Incident {incident.short_id} is not on hold; its restore is launched soon.")


class ResolveConfig(dg.Config):
    """Why the store is accepted as it is."""

    reason: str = Field(description="Why nothing more is to be restored; it is kept for ever.")
    accept_unconverged: bool = Field(
        default=False,
        description="Accept the store even though servers of it are missing or catching up.",
    )


@dg.op(
    name="resolve_incident",
    out=dg.Out(dg.Nothing),
    description=(
        "Ends the open incident without restoring anything more: the store is accepted as it is, "
        "and snapshots are taken again. Not while the store cannot be seen."
    ),
)
def resolve_open_incident(
    context: dg.OpExecutionContext, config: ResolveConfig, control_plane: ControlPlaneParam
) -> None:
    """Accept the store as it is.

    Raises:
        dagster.Failure: no incident is open, no reason is given, or the store cannot be seen.
    """
    order = order_by(context, config.reason, accept_unconverged=config.accept_unconverged)
    with shown_as_failures(), control_plane.opened() as plane:
        resolved = resolve_incident(
            plane,
            control_plane.store_opener(),
            order,
            convergence_timeout=control_plane.settings.convergence_timeout,
        )
    ended = resolved.incident.ended
    context.log.info(
        f"Incident {resolved.incident.short_id} is closed; the store is HEALTHY. "
        + (ended.detail if ended else "")
    )


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
    name="record_reset",
    out=dg.Out(dg.Nothing),
    description=(
        "Notes that counters of a budget were lowered or cleared in the gateway, so that no "
        "restore uses what snapshots of that moment or before hold of them. Lower them first, "
        "then record it."
    ),
)
def record_deliberate_reset(
    context: dg.OpExecutionContext, config: ResetConfig, control_plane: ControlPlaneParam
) -> None:
    """Record a reset.

    Raises:
        dagster.Failure: it names what no snapshot has, or a time to come, or gives no reason.
    """
    request = _request(config, by=f"run {context.run.run_id[:8]}")
    with shown_as_failures(), control_plane.opened() as plane:
        recorded = record_reset(plane, request)
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


_ONCE = {"dagster/max_retries": "0", "dagster/max_runtime": "300"}


@dg.job(
    name="hold_restore_job",
    description=(
        "Stops the restore of the open incident until release_restore_job: none is launched, and "
        "one that works stops before the next tenant. To terminate a run of restore_job does the "
        "same."
    ),
    executor_def=IN_ONE_PROCESS,
    tags=_ONCE,
)
def hold_restore_job() -> None:
    """Hold the restore."""
    hold_incident()


@dg.job(
    name="release_restore_job",
    description="Lets a restore go on that is on hold, with all its attempts.",
    executor_def=IN_ONE_PROCESS,
    tags=_ONCE,
)
def release_restore_job() -> None:
    """Release the restore."""
    release_incident()


@dg.job(
    name="record_reset_job",
    description=(
        "Notes that counters of a budget were lowered or cleared in the gateway on purpose: no "
        "restore brings back what snapshots of that moment or before hold of them. Lower them "
        "first, then run this. It lowers no counter itself."
    ),
    executor_def=IN_ONE_PROCESS,
    tags=_ONCE,
)
def record_reset_job() -> None:
    """Record a reset."""
    record_deliberate_reset()


@dg.job(
    name="resolve_incident_job",
    description=(
        "Ends the open incident without restoring anything more: the store is accepted as it is, "
        "and snapshots are taken again. What the snapshots say more stays in them."
    ),
    executor_def=IN_ONE_PROCESS,
    tags={
        # It waits for the store, and reads all of it.
        "dagster/max_retries": "0",
        "dagster/max_runtime": "3600",
        "dagster/priority": "20",
    },
)
def resolve_incident_job() -> None:
    """Accept the store as it is."""
    resolve_open_incident()
