"""The sensor that sees to it that an open incident is worked on."""

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
        "Sees to it that an open incident is worked on: launches restore_job while nobody is at "
        "it, at once for a loss that a capture has found, and again, after a pause of at most "
        "five minutes, when a run had to wait for the store or has died. Whether somebody works "
        "is told by a lease in PostgreSQL: a run that is called started and has had none for a "
        "minute is declared failed. A launch of which no run is known is requested once more. A "
        "run that a person terminates puts the incident on hold."
    ),
)
def restore_supervisor_sensor(
    context: dg.SensorEvaluationContext, control_plane: ControlPlaneParam
) -> dg.SensorResult:
    """Do once what is to be done; skip with the reason, or request a run."""

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
