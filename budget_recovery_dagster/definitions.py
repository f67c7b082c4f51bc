"""Everything that Dagster loads, assembled in one place."""

import dagster as dg

from budget_recovery_dagster.assets.budget_usage_snapshots import budget_usage_snapshots
from budget_recovery_dagster.assets.gateway_usage_store import gateway_usage_store
from budget_recovery_dagster.assets.recovery_points import recovery_point_age, recovery_points
from budget_recovery_dagster.assets.restored_usage import restored_usage
from budget_recovery_dagster.assets.snapshot_checks import tenant_coverage, usage_never_drops
from budget_recovery_dagster.assets.tenant_usage_tables import tenant_usage_tables
from budget_recovery_dagster.jobs.incidents import (
    hold_restore_job,
    record_reset_job,
    release_restore_job,
    resolve_incident_job,
)
from budget_recovery_dagster.jobs.manual_restore import manual_restore_job
from budget_recovery_dagster.jobs.restore import restore_job
from budget_recovery_dagster.jobs.snapshots import hourly_snapshot_job, recovery_points_job
from budget_recovery_dagster.resources import ControlPlaneResource
from budget_recovery_dagster.schedules import (
    hourly_snapshot_schedule,
    recovery_points_schedule,
)
from budget_recovery_dagster.sensors.restore_supervisor_sensor import restore_supervisor_sensor
from budget_recovery_dagster.sensors.store_loss_sensor import store_loss_sensor

defs = dg.Definitions(
    assets=[
        gateway_usage_store,
        budget_usage_snapshots,
        tenant_usage_tables,
        recovery_points,
        restored_usage,
    ],
    asset_checks=[tenant_coverage, usage_never_drops, recovery_point_age],
    jobs=[
        hourly_snapshot_job,
        recovery_points_job,
        restore_job,
        manual_restore_job,
        resolve_incident_job,
        hold_restore_job,
        release_restore_job,
        record_reset_job,
    ],
    schedules=[hourly_snapshot_schedule, recovery_points_schedule],
    sensors=[store_loss_sensor, restore_supervisor_sensor],
    resources={"control_plane": ControlPlaneResource()},
)
