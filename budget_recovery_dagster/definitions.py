"""Everything that Dagster loads: one function of the settings builds all definitions."""

import warnings
from datetime import UTC, datetime, timedelta

import dagster as dg

from budget_recovery_dagster.assets.budget_usage_snapshots import (
    budget_usage_snapshots,
    tenant_coverage,
    usage_never_drops,
)
from budget_recovery_dagster.assets.gateway import gateway_usage_store, restored_usage
from budget_recovery_dagster.assets.recovery_points import recovery_point_age, recovery_points
from budget_recovery_dagster.assets.tenant_usage_tables import tenant_usage_tables
from budget_recovery_dagster.jobs.incidents import (
    hold_restore_job,
    record_reset_job,
    release_restore_job,
    resolve_incident_job,
)
from budget_recovery_dagster.jobs.restore import manual_restore_job, restore_job
from budget_recovery_dagster.jobs.snapshots import (
    hourly_snapshot_job,
    hourly_snapshot_schedule,
    recovery_points_job,
    recovery_points_schedule,
    tenant_tables_job,
    tenant_tables_sensor,
)
from budget_recovery_dagster.resources import control_plane_resource
from budget_recovery_dagster.sensors import restore_supervisor_sensor, store_loss_sensor
from budget_recovery_dagster.settings import Settings, load_settings

# Dagster itself sets this parameter whenever it copies a sensor that can launch several jobs.
warnings.filterwarnings("ignore", "Parameter `owners` of initializer `SensorDef", dg.BetaWarning)
# Without this policy, Dagster starts a run for each hour of a backfill.
warnings.filterwarnings("ignore", "Parameter `backfill_policy` of function", dg.BetaWarning)


def build_definitions(settings: Settings) -> dg.Definitions:
    """Build all definitions of one store; no server is needed."""
    hours = capture_hours(settings, datetime.now(UTC))
    return dg.Definitions(
        assets=[
            gateway_usage_store(settings),
            budget_usage_snapshots(hours),
            tenant_usage_tables(hours),
            recovery_points,
            restored_usage,
        ],
        asset_checks=[tenant_coverage, usage_never_drops, recovery_point_age],
        jobs=[
            hourly_snapshot_job,
            tenant_tables_job,
            recovery_points_job,
            restore_job,
            manual_restore_job,
            resolve_incident_job,
            hold_restore_job,
            release_restore_job,
            record_reset_job,
        ],
        schedules=[hourly_snapshot_schedule, recovery_points_schedule],
        sensors=[store_loss_sensor(settings), restore_supervisor_sensor, tenant_tables_sensor],
        resources={"control_plane": control_plane_resource(settings)},
        # A process for each step of a job or a backfill would load everything again, for seconds.
        executor=dg.in_process_executor,
    )


def capture_hours(settings: Settings, now: datetime) -> dg.HourlyPartitionsDefinition:
    """Return the hours from one day before retention, at midnight UTC, to the current one.

    A partition is the UTC hour in which a capture happens. The start is fixed until Dagster reloads
    the definitions, so it may lag; older hours stay listed until then, though their snapshots are
    gone.
    """
    start = (now.astimezone(UTC) - timedelta(days=settings.retention_days + 1)).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    # end_offset=1: the current hour has begun and is the one to capture into.
    return dg.HourlyPartitionsDefinition(start_date=start, timezone="UTC", end_offset=1)


defs = build_definitions(load_settings())
