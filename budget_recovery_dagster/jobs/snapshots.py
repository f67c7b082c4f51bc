"""Jobs that capture snapshots and refresh recovery points, with their schedules."""

from collections.abc import Mapping
from datetime import UTC, datetime

import dagster as dg
from dagster import DagsterRunStatus

from budget_recovery_dagster.assets.budget_usage_snapshots import (
    CAPTURE_MINUTES,
    HEALING_CODES,
    PARTITION_TAG,
)
from budget_recovery_dagster.domain.admission import CAPTURE_LEASE
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.domain.snapshots import RunOutcome
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import StoreReadError
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.resources import ControlPlaneParam, is_dry_run
from budget_recovery_dagster.restore_runs import DEPLOYMENT_TAG, location_of, location_of_run
from budget_recovery_dagster.services.restore.report import counted

_ASSETS = ("budget_usage_snapshots", "recovery_points")

hourly_snapshot_job = dg.define_asset_job(
    "hourly_snapshot_job",
    selection=dg.AssetSelection.assets(*_ASSETS)
    | dg.AssetSelection.checks_for_assets(*map(dg.AssetKey, _ASSETS)),
    description=(
        "Copies every tenant's budget counters from the gateway's usage store to PostgreSQL, "
        "checks the copy, and refreshes the recovery points. tenant_tables_job then writes the "
        "tables. Runs every hour; run the current hour manually for one more snapshot."
    ),
    tags={
        # The step tries again within seconds, and the schedule within the hour. A retry of the
        # whole run by Dagster has no delay, and would start while the cause lasts.
        "dagster/max_retries": "0",
        # A capture that runs past its hour cannot store anything.
        "dagster/max_runtime": "3600",
        # Ahead of tables and other queued runs, behind restores.
        "dagster/priority": "5",
    },
)

# A run of its own: with both, one run would need both pools, and a capture would wait for tables.
tenant_tables_job = dg.define_asset_job(
    "tenant_tables_job",
    selection=dg.AssetSelection.assets("tenant_usage_tables"),
    description=(
        "Writes the tenants' tables of an hour from the snapshots in PostgreSQL. "
        "tenant_tables_sensor launches it after each capture."
    ),
    tags={"dagster/max_retries": "0", "dagster/max_runtime": "3600"},
)


# More captures than a daemon misses that is away for hours; the next tick goes on after them.
_MOST_AT_ONCE = 25


@dg.sensor(
    job=tenant_tables_job,
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description=(
        "Launches tenant_tables_job for each hour of which a run of hourly_snapshot_job stored or "
        "verified snapshots, whether or not a later step of this run fails."
    ),
)
def tenant_tables_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
    """Request the tables of each hour that was captured since the last tick.

    The cursor is the number of the last event that was seen. It moves only with the requests, and
    Dagster launches a run once for each capture, so none is missed, and none is launched twice.
    """
    after = _event_in(context.cursor)
    # At the first tick only the newest one: the hours before it may be past retention.
    events = context.instance.fetch_materializations(
        dg.AssetRecordsFilter(dg.AssetKey("budget_usage_snapshots"), after_storage_id=after),
        limit=1 if after is None else _MOST_AT_ONCE,
        ascending=after is not None,
    ).records
    seen = max((event.storage_id for event in events), default=after or 0)
    requests = [each for event in events if (each := _tables_of(context, event)) is not None]
    if not requests:
        return dg.SensorResult(skip_reason="No snapshot since the last tick.", cursor=str(seen))
    return dg.SensorResult(run_requests=requests, cursor=str(seen))


def _event_in(cursor: str | None) -> int | None:
    """Return the number in a cursor; None if it has none, as that of an earlier version."""
    return int(cursor) if cursor is not None and cursor.isdecimal() else None


def _tables_of(
    context: dg.SensorEvaluationContext, event: dg.EventLogRecord
) -> dg.RunRequest | None:
    """Return the request for the tables of a captured hour; None if another run captured it."""
    run = context.instance.get_run_by_id(event.run_id)
    # An asset of another location can have the same name.
    if run is None or location_of_run(run) != location_of(context):
        return None
    if run.job_name != hourly_snapshot_job.name or event.partition_key is None:
        return None
    return dg.RunRequest(
        run_key=run.run_id,
        partition_key=event.partition_key,
        tags={name: value for name, value in run.tags.items() if name == DEPLOYMENT_TAG},
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
_SCHEDULED_AT = ".dagster/scheduled_execution_time"
_ACTIVE = [
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
]
# Two captures of an hour are far fewer.
_NEWEST_RUNS = 20


@dg.schedule(
    job=hourly_snapshot_job,
    cron_schedule=f"{','.join(map(str, CAPTURE_MINUTES))} * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description=(
        "Takes a snapshot at the start of every UTC hour. Later ticks skip if the hour has its "
        "snapshot. They request it again if no run took it, or if the run failed for a reason that "
        "may pass, such as an unreachable server. While captures are paused, all ticks skip."
    ),
)
def hourly_snapshot_schedule(
    context: dg.ScheduleEvaluationContext, control_plane: ControlPlaneParam
) -> dg.RunRequest | dg.SkipReason:
    """Request a run for the tick's hour unless it has its snapshot.

    A tick fails while the database cannot be reached; the next one makes up for it.
    """
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
                f"Captures are paused: the usage store is {state.name}.{why} They resume once it "
                "is HEALTHY again; the last good snapshots are kept."
            )
        if hour.is_past(plane.clock.now()):
            return dg.SkipReason(
                f"The hour {hour} has closed before its snapshot could start; the store holds "
                "only the present, which must not be stored as the past."
            )
        settled = _settled(plane, hour)
    reason = settled or _in_progress(context, hour, tick_at, tags)
    if reason is not None:
        return dg.SkipReason(reason)
    return dg.RunRequest(run_key=hour.key, partition_key=hour.key, tags=tags)


def _settled(plane: ControlPlane, hour: Hour) -> str | None:
    """Return why an hour needs no further capture, as the database knows it; None: it does."""
    worker = plane.leases.state_of(CAPTURE_LEASE).holder
    if worker is not None:
        return f"The capture of {worker} is in progress."
    newest = next(
        (run for run in plane.reports.newest_runs(_NEWEST_RUNS) if run.hour == hour), None
    )
    if newest is None or newest.result is None:
        return None
    result = newest.result
    captured = f"The hour {hour} was captured at {newest.started_at:%H:%M:%S} UTC"
    if result.error is None:
        return f"{captured}."
    error, is_in_part = result.error, result.outcome is not RunOutcome.FAILED
    in_part = f"{captured}, but {counted(result.failed, 'tenant')} failed"
    # Not all tenants once more for some: those with the oldest snapshot are the first of an hour.
    if is_in_part and error.code == StoreReadError.code:
        return f"{in_part}: {error.message} The next capture begins with the oldest snapshots."
    if error.code in HEALING_CODES:
        return None
    failed = in_part if is_in_part else f"The capture of the hour {hour} failed"
    return (
        f"{failed}, and would fail again: {error.message} "
        f"Try: {error.hint} Then run hourly_snapshot_job."
    )


def _in_progress(
    context: dg.ScheduleEvaluationContext, hour: Hour, tick_at: datetime, ours: Mapping[str, str]
) -> str | None:
    """Return which run of an earlier tick is to capture the hour; None: there is none.

    ``ours`` are the tags of this store's runs: another code location can have the same names.
    """
    if not ours:
        return None
    filters = dg.RunsFilter(
        job_name=hourly_snapshot_job.name,
        tags={**ours, PARTITION_TAG: hour.key},
        statuses=_ACTIVE,
    )
    for run in context.instance.get_runs(filters):
        # A tick that was interrupted finds the run that it has requested.
        if run.tags.get(_SCHEDULED_AT) != tick_at.isoformat():
            return f"Run {run.run_id[:8]} of the hour {hour} is {run.status.value.lower()}."
    return None


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
