"""The sensor that detects a loss of the gateway's store."""

from typing import Any

import dagster as dg

from budget_recovery_dagster.domain.store import Verdict
from budget_recovery_dagster.errors import BudgetRecoveryError, SettingsError
from budget_recovery_dagster.jobs.restore import restore_job
from budget_recovery_dagster.presentation.text import VERDICTS
from budget_recovery_dagster.resources import ControlPlaneParam
from budget_recovery_dagster.sensors.supervision import Supervised, supervise_restore
from budget_recovery_dagster.sensors.ticks import TICK_SECONDS, Deadline, unknown_tick, within
from budget_recovery_dagster.services.store_watch import Checked, check_store
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import store_opener_in_a_tick

_DESCRIPTION = (
    "Compares the gateway's usage store with the accepted baseline: its creation time, its last "
    "sequence, and our marker in it. On a loss it opens an incident, which pauses snapshots, "
    "and launches restore_job. What cannot be read is unknown, never a loss; several unknown "
    "results in a row fail the tick."
)


def store_loss_sensor(settings: Settings) -> dg.SensorDefinition:
    """Return the sensor that checks the store as often as the settings say."""
    return dg.sensor(
        name="store_loss_sensor",
        job_name=restore_job.name,
        minimum_interval_seconds=settings.check_interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=_DESCRIPTION,
    )(_check)


def _check(
    context: dg.SensorEvaluationContext, control_plane: ControlPlaneParam
) -> dg.SensorResult:
    """Check the store once; skip with the reason, or request the run of a restore."""

    def check_and_launch(deadline: Deadline) -> tuple[Checked, Supervised]:
        open_store = store_opener_in_a_tick(control_plane.settings)
        with control_plane.opened() as plane:
            checked = check_store(plane, open_store, checked_by="store_loss_sensor")
            return checked, supervise_restore(context.instance, plane, deadline)

    try:
        checked, supervised = within(TICK_SECONDS, check_and_launch)
    except SettingsError:
        raise
    except BudgetRecoveryError as error:
        return unknown_tick(context, error.message, error.hint)
    observed = [dg.AssetObservation("gateway_usage_store", metadata=_metadata(checked))]
    check = checked.check
    if supervised.request is not None:
        return dg.SensorResult(run_requests=[supervised.request], cursor="0", asset_events=observed)
    if check.verdict is Verdict.UNKNOWN:
        return unknown_tick(context, check.reason, checked.hint, observed)
    report = f"{VERDICTS[check.verdict]}: {check.reason}"
    if checked.hint:
        report = f"{report} Try: {checked.hint}"
    if checked.recovery.incident is not None:
        report = f"{report} {supervised.reason}"
    return dg.SensorResult(skip_reason=report, cursor="0", asset_events=observed)


def _metadata(checked: Checked) -> dict[str, Any]:
    check, identity = checked.check, checked.check.identity
    metadata: dict[str, Any] = {
        "verdict": check.verdict.value,
        "reason": check.reason,
        "state": checked.recovery.state.value,
        "checked_at": dg.MetadataValue.timestamp(check.checked_at),
    }
    if identity is not None:
        metadata["created_at"] = dg.MetadataValue.timestamp(identity.created_at)
        # As text: a browser rounds whole numbers beyond 2**53.
        metadata["last_sequence"] = str(identity.last_sequence)
    if checked.recovery.incident is not None:
        metadata["incident"] = checked.recovery.incident.incident_id
    return metadata
