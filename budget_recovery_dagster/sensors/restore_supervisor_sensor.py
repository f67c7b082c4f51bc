"""The sensor that supervises the restore of an open incident."""

import dagster as dg

from budget_recovery_dagster.errors import BudgetRecoveryError, SettingsError
from budget_recovery_dagster.jobs.restore import restore_job
from budget_recovery_dagster.resources import ControlPlaneParam
from budget_recovery_dagster.sensors.supervision import Supervised, supervise_restore
from budget_recovery_dagster.sensors.ticks import (
    TICK_SECONDS,
    Deadline,
    read_suspicion,
    unknown_tick,
    within,
    write_suspicion,
)


@dg.sensor(
    job_name=restore_job.name,
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description=(
        "Supervises the restore of an open incident: launches restore_job if none is running, at "
        "once for a loss that a capture found. Launches it again, at most five minutes later, if "
        "a run had to wait for the store or died. A PostgreSQL lease tracks liveness: a started "
        "run without a lease for a minute is marked as failed. A launch without a run is "
        "requested again. Terminating a run puts the incident on hold."
    ),
)
def restore_supervisor_sensor(
    context: dg.SensorEvaluationContext, control_plane: ControlPlaneParam
) -> dg.SensorResult:
    """Supervise once; skip with the reason, or request a run."""

    def observe(deadline: Deadline) -> Supervised:
        with control_plane.opened() as plane:
            known = read_suspicion(context.cursor)
            return supervise_restore(context.instance, plane, deadline, known)

    try:
        supervised = within(TICK_SECONDS, observe)
    except SettingsError:
        raise
    except BudgetRecoveryError as error:
        return unknown_tick(context, error.message, error.hint)
    cursor = write_suspicion(supervised.suspicion)
    if supervised.request is not None:
        return dg.SensorResult(run_requests=[supervised.request], cursor=cursor)
    return dg.SensorResult(skip_reason=supervised.reason, cursor=cursor)
