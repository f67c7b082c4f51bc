"""Jobs with which an operator controls an incident: hold, release, resolve, record a reset."""

from enum import Enum

import dagster as dg
from pydantic import Field

from budget_recovery_dagster.domain.counters import Entity
from budget_recovery_dagster.domain.plan import OF_THAT_NAME
from budget_recovery_dagster.domain.recovery_point import EVERYONE, Everyone
from budget_recovery_dagster.domain.windows import parse_time
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.presentation.metadata import capture_metadata
from budget_recovery_dagster.presentation.text import release_report, reset_report, resolved_report
from budget_recovery_dagster.resources import (
    ControlPlaneParam,
    await_dagster,
    failure,
    holder_of,
    order_by,
)
from budget_recovery_dagster.services.capture import capture_now
from budget_recovery_dagster.services.resets import ResetRequest, record_reset
from budget_recovery_dagster.services.restore.manual import (
    Acceptance,
    hold_restore,
    release_restore,
    resolve_incident,
)
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import store_opener


class HoldConfig(dg.Config):
    """The reason of a hold."""

    reason: str = Field(description="Why the restore must stop; shown by `budget-recovery status`.")


@dg.op(
    out=dg.Out(dg.Nothing),
    description=(
        "Puts the open incident on hold. No restore starts; a running one stops after the current "
        "tenant. Captures stay paused."
    ),
)
def hold_incident(
    context: dg.OpExecutionContext, config: HoldConfig, control_plane: ControlPlaneParam
) -> None:
    """Put the open incident on hold.

    Raises:
        dagster.Failure: no restore is under way, or no reason is given.
    """
    with control_plane.opened_in_step() as plane:
        incident, _ = hold_restore(plane, config.reason, by=f"run {context.run.run_id[:8]}")
    context.log.warning(
        f"Incident {incident.short_id} is on hold until release_restore_job or "
        "`budget-recovery release`."
    )


@dg.op(
    out=dg.Out(dg.Nothing),
    description="Continues the restore of the open incident, at once and with all its attempts.",
)
def release_incident(context: dg.OpExecutionContext, control_plane: ControlPlaneParam) -> None:
    """Release the open incident.

    Raises:
        dagster.Failure: no restore is under way.
    """
    with control_plane.opened_in_step() as plane:
        released = release_restore(plane, by=f"run {context.run.run_id[:8]}")
    context.log.info(release_report(released))


class AcceptedUsage(Enum):
    """The choices of ``Acceptance``; the config selects one by name."""

    record_resets = Acceptance.RECORD_RESETS.value
    keep_snapshots = Acceptance.KEEP_SNAPSHOTS.value


class ResolveConfig(dg.Config):
    """Why the store is accepted as it is, and what becomes of usage that it lacks."""

    reason: str = Field(description="Why nothing more is restored; stored permanently.")
    usage_in_snapshots: AcceptedUsage = Field(
        description=(
            "What happens to usage that the snapshots have and the store does not. record_resets: "
            "it was removed on purpose; restores exclude it. keep_snapshots: the next loss brings "
            "it back. A preview with manual_restore_job shows how much it is."
        )
    )
    accept_unconverged: bool = Field(
        default=False,
        description="Accept the store even if its servers are missing or catching up.",
    )


@dg.op(
    name="resolve_incident",
    out=dg.Out(dg.Nothing),
    description=(
        "Closes the open incident without restoring anything more. The present store becomes the "
        "new baseline, and captures resume with one at once. Fails while the store cannot be read."
    ),
)
def resolve_open_incident(
    context: dg.OpExecutionContext, config: ResolveConfig, control_plane: ControlPlaneParam
) -> None:
    """Accept the store as it is.

    Raises:
        dagster.Failure: no incident is open, the reason is empty, or the store is not reachable.
    """
    order = order_by(context, config.reason, accept_unconverged=config.accept_unconverged)
    with control_plane.opened_in_step() as plane:
        resolved = resolve_incident(
            plane,
            store_opener(control_plane.settings),
            order,
            acceptance=Acceptance(config.usage_in_snapshots.value),
            retention=control_plane.settings.retention,
            convergence_timeout=control_plane.settings.convergence_timeout,
        )
        await_dagster(context, plane)
        context.log.info(" ".join(resolved_report(resolved, None, None)))
        _capture(context, plane, control_plane.settings)


def _capture(context: dg.OpExecutionContext, plane: ControlPlane, settings: Settings) -> None:
    """Capture the accepted store at once, and show it at the asset of the snapshots."""
    run_id = context.run.run_id
    try:
        captured = capture_now(
            plane,
            store_opener(settings),
            source=settings.capture_source,
            retention=settings.retention,
            run_id=run_id,
            holder=holder_of(run_id),
        )
    except BudgetRecoveryError:
        # The incident is closed in any case.
        context.log.exception(
            "The first capture failed. restore_supervisor_sensor requests another one."
        )
        return
    for failed in captured.failed:
        context.log.error(f"Tenant {failed.tenant!r} is not in this snapshot: {failed.reason}")
    if captured.stored:
        context.log_event(
            dg.AssetMaterialization(
                "budget_usage_snapshots",
                partition=captured.hour.key,
                metadata=capture_metadata(captured),
            )
        )


class ResetConfig(dg.Config):
    """Which counters were lowered, when and why."""

    tenant: str = Field(description=f"Tenant of the budget. {OF_THAT_NAME}")
    budget: str = Field(description="Budget that was reset.")
    entity: str | None = Field(
        default=None,
        description="Entity that was reset. Empty: all entities, and the aggregate.",
    )
    aggregate: bool = Field(default=False, description="Only the aggregate of the budget.")
    window: str | None = Field(
        default=None, description="Window that was reset, such as 2026-11. Empty: all windows."
    )
    at: str | None = Field(
        default=None, description="Time in UTC, such as 2026-11-29T14:00. Empty: now."
    )
    reason: str = Field(description="Why the counters were lowered; stored with the reset.")


@dg.op(
    name="record_reset",
    out=dg.Out(dg.Nothing),
    description=(
        "Records that counters of a budget were lowered or cleared in the gateway. Restores then "
        "exclude their usage from snapshots up to that time. Lower the counters first, then "
        "record the reset."
    ),
)
def record_deliberate_reset(
    context: dg.OpExecutionContext, config: ResetConfig, control_plane: ControlPlaneParam
) -> None:
    """Record a reset.

    Raises:
        dagster.Failure: no snapshot has the names, the time is in the future, or the reason is
            empty.
    """
    request = _request(config, by=f"run {context.run.run_id[:8]}")
    with control_plane.opened_in_step() as plane:
        settings = control_plane.settings
        open_store = store_opener(settings) if settings.nats_url is not None else None
        recorded = record_reset(plane, request, open_store)
    for paragraph in reset_report(recorded):
        context.log.info(paragraph)


def _request(config: ResetConfig, by: str) -> ResetRequest:
    if config.aggregate and config.entity is not None:
        raise failure("Both an entity and the aggregate are given.", "choose one of them.")
    try:
        at = None if config.at is None else parse_time(config.at)
    except ValueError as error:
        raise failure(f"{error}.", "write it as 2026-11-29T14:00, in UTC.") from error
    named = config.entity is not None or config.aggregate
    who: Entity | Everyone = config.entity if named else EVERYONE
    return ResetRequest(config.tenant, config.budget, config.window, who, at, by, config.reason)


_ONCE = {"dagster/max_retries": "0", "dagster/max_runtime": "300"}


@dg.job(
    name="hold_restore_job",
    description=(
        "Stops the restore of the open incident until release_restore_job. No restore starts; a "
        "running one stops after the current tenant. Terminating a run of restore_job has the "
        "same effect."
    ),
    tags=_ONCE,
)
def hold_restore_job() -> None:
    """Hold the restore."""
    hold_incident()


@dg.job(
    name="release_restore_job",
    description="Continues the restore that is on hold, with all its attempts.",
    tags=_ONCE,
)
def release_restore_job() -> None:
    """Release the restore."""
    release_incident()


@dg.job(
    name="record_reset_job",
    description=(
        "Records that counters of a budget were lowered or cleared in the gateway on purpose. "
        "Restores then exclude their usage from snapshots up to that time. Lower the counters "
        "first, then run this job. It lowers no counter."
    ),
    tags=_ONCE,
)
def record_reset_job() -> None:
    """Record a reset."""
    record_deliberate_reset()


@dg.job(
    name="resolve_incident_job",
    description=(
        "Closes the open incident without restoring anything more. The present store becomes the "
        "new baseline, and captures resume with one at once. Choose whether usage that the store "
        "lacks was removed on purpose. A manual restore is still possible."
    ),
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
