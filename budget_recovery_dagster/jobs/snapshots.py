"""Jobs that capture snapshots and refresh recovery points, with their schedules."""

from collections.abc import Mapping
from datetime import UTC, datetime

import dagster as dg

from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.resources import ControlPlaneParam, is_dry_run
from budget_recovery_dagster.restore_runs import DEPLOYMENT_TAG

_ASSETS = ("budget_usage_snapshots", "tenant_usage_tables", "recovery_points")

hourly_snapshot_job = dg.define_asset_job(
    "hourly_snapshot_job",
    selection=dg.AssetSelection.assets(*_ASSETS)
    | dg.AssetSelection.checks_for_assets(*map(dg.AssetKey, _ASSETS)),
    description=(
        "Copies every tenant's budget counters from the gateway's usage store to PostgreSQL and "
        "checks the copy. Then writes the tenants' tables of the hour and refreshes the recovery "
        "points. Runs every hour; run the current hour manually for one more snapshot."
    ),
    tags={
        # A failed capture is not retried; the next hour takes the next snapshot.
        "dagster/max_retries": "0",
        # A capture that runs past its hour cannot store anything.
        "dagster/max_runtime": "3600",
    },
)

recovery_points_job = dg.define_asset_job(
    "recovery_points_job",
    selection=dg.AssetSelection.assets("recovery_points")
    | dg.AssetSelection.checks_for_assets(dg.AssetKey("recovery_points")),
    description=(
        "Refreshes the recovery points and checks their age. Needs only PostgreSQL, so the result "
        "is correct while the usage store is down, captures fail or captures are paused. Runs "
        "twice an hour on a schedule."
    ),
    tags={"dagster/max_retries": "0", "dagster/max_runtime": "1800"},
)

# Tags that Dagster's scheduler sets on the runs that it launches.
_SCHEDULE = "dagster/schedule_name"
_RUN_KEY = "dagster/run_key"
_SCHEDULED_AT = ".dagster/scheduled_execution_time"


@dg.schedule(
    job=hourly_snapshot_job,
    cron_schedule="0 * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description=(
        "Takes a snapshot at the start of every UTC hour. Skips, with the reason, while captures "
        "are paused or if the tick is too late for its hour."
    ),
)
def hourly_snapshot_schedule(
    context: dg.ScheduleEvaluationContext, control_plane: ControlPlaneParam
) -> dg.RunRequest | dg.SkipReason:
    """Request the run of the tick's hour, once even if the tick is evaluated again."""
    tick_at = context.scheduled_execution_time.astimezone(UTC)
    hour = Hour.containing(tick_at)
    with control_plane.opened() as plane:
        registry = plane.registry
        store = registry.find() if is_dry_run(context.log_key) else registry.claim()
        tags = {DEPLOYMENT_TAG: store.deployment_id} if store else {}
        state = store.state if store else RecoveryState.HEALTHY
        if state.captures_paused:
            incident = plane.incidents.recovery().incident
            why = f" {incident.losses[-1].reason}" if incident else ""
            return dg.SkipReason(
                f"Captures are paused: the usage store is {state.name}.{why} They resume with the "
                "first hour in which it is HEALTHY again; the last good snapshots are kept."
            )
        if hour.is_past(plane.clock.now()):
            return dg.SkipReason(
                f"The hour {hour} has closed before its snapshot could start; the store holds "
                "only the present, which must not be stored as the past."
            )
    if _has_had_its_run(context, hour, tick_at, tags):
        return dg.SkipReason(
            f"The hour {hour} already has its run: the schedule was edited within the hour."
        )
    return dg.RunRequest(run_key=hour.key, partition_key=hour.key, tags=tags)


def _has_had_its_run(
    context: dg.ScheduleEvaluationContext, hour: Hour, tick_at: datetime, ours: Mapping[str, str]
) -> bool:
    """Whether a tick with another scheduled time has requested a snapshot of the hour.

    Dagster compares run keys only within one scheduled time. ``ours`` are the tags of this store's
    runs: a schedule of another code location can have the same name.
    """
    if not ours:
        return False
    requested = {_SCHEDULE: hourly_snapshot_schedule.name, _RUN_KEY: hour.key}
    runs = context.instance.get_runs(dg.RunsFilter(tags={**requested, **ours}))
    return any(run.tags.get(_SCHEDULED_AT) != tick_at.isoformat() for run in runs)


recovery_points_schedule = dg.ScheduleDefinition(
    name="recovery_points_schedule",
    job=recovery_points_job,
    # Between the snapshots: the hourly job itself refreshes the recovery points.
    cron_schedule="20,50 * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description=(
        "Checks the age of the recovery points twice an hour, even if captures fail or do not run."
    ),
)
