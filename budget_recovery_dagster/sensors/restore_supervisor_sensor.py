"""The sensor that sees to it that an open incident is worked on."""

import dagster as dg

from budget_recovery_dagster.errors import BudgetRecoveryError, SettingsError
from budget_recovery_dagster.jobs import restore_job
from budget_recovery_dagster.resources import ControlPlaneResource
from budget_recovery_dagster.sensors.deadline import TICK_SECONDS, within
from budget_recovery_dagster.sensors.launching import launch_restore
from budget_recovery_dagster.sensors.unknown_ticks import unknown_tick


@dg.sensor(
    job_name=restore_job.name,
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description=(
        "Launches restore_job while an incident is open and no run is at it: at once for a loss "
        "that a capture has found, and again, after a pause of at most five minutes, when a run "
        "had to wait for the store or has ended without success. Looks at PostgreSQL only."
    ),
)
def restore_supervisor_sensor(
    context: dg.SensorEvaluationContext, control_plane: ControlPlaneResource
) -> dg.SensorResult:
    """Look once whether a restore is due; skip with the reason, or request its run."""

    def look_and_launch() -> dg.RunRequest | str:
        with control_plane.opened() as plane:
            return launch_restore(context.instance, plane)

    try:
        launched = within(TICK_SECONDS, look_and_launch)
    except SettingsError:
        raise
    except BudgetRecoveryError as error:
        return unknown_tick(context, error.message, error.hint)
    if isinstance(launched, dg.RunRequest):
        return dg.SensorResult(run_requests=[launched], cursor="0")
    return dg.SensorResult(skip_reason=launched, cursor="0")
