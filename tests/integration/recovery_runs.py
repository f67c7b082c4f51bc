"""Ticks of the sensors and runs of the restore in this process, and their results."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import dagster as dg
import psycopg
from psycopg.rows import dict_row

from budget_recovery_dagster.domain import BudgetWindow, Entity, Window, format_usage
from budget_recovery_dagster.jobs.snapshots import hourly_snapshot_schedule
from budget_recovery_dagster.sandbox.gateway import Place
from budget_recovery_dagster.sensors import restore_supervisor_sensor, store_loss_sensor
from tests import services
from tests.integration.gateway_harness import contents
from tests.nats_servers import Bucket


def check(
    instance: dg.DagsterInstance, cursor: str | None = None, *, is_preview: bool = False
) -> dg.SensorResult:
    """Evaluate store_loss_sensor once."""
    sensor = store_loss_sensor(services.present_settings())
    return _tick(sensor, instance, cursor, is_preview=is_preview)


def supervise(
    instance: dg.DagsterInstance, cursor: str | None = None, *, is_preview: bool = False
) -> dg.SensorResult:
    """Evaluate restore_supervisor_sensor once."""
    return _tick(restore_supervisor_sensor, instance, cursor, is_preview=is_preview)


def _tick(
    sensor: dg.SensorDefinition,
    instance: dg.DagsterInstance,
    cursor: str | None,
    *,
    is_preview: bool,
) -> dg.SensorResult:
    # An unclosed context leaves its instance to whatever loads definitions next.
    with dg.build_sensor_context(
        instance=instance,
        cursor=cursor,
        resources=services.definitions().resources,
        sensor_name=sensor.name,
        # With it, the context makes up a log key, as in the preview of a page.
        repository_name="__repository__" if is_preview else None,
    ) as context:
        result = sensor(context)
    assert isinstance(result, dg.SensorResult)
    return result


def schedule_tick(instance: dg.DagsterInstance, at: datetime) -> dg.RunRequest | dg.SkipReason:
    """Let hourly_snapshot_schedule tick at this time."""
    with dg.build_schedule_context(
        instance=instance, scheduled_execution_time=at, resources=services.definitions().resources
    ) as context:
        answer = hourly_snapshot_schedule(context)
    assert isinstance(answer, dg.RunRequest | dg.SkipReason)
    return answer


def requested(result: dg.SensorResult) -> list[dg.RunRequest]:
    """Return the runs that a tick requested."""
    return list(result.run_requests or [])


def skipped(result: dg.SensorResult) -> str:
    """Return why a tick requested no run."""
    assert not result.run_requests
    assert result.skip_reason is not None
    return str(result.skip_reason.skip_message)


def observed(result: dg.SensorResult) -> Mapping[str, Any]:
    """Return the metadata of a check's observation of the store."""
    (event,) = result.asset_events
    assert event.asset_key == dg.AssetKey("gateway_usage_store")
    return {name: value.value for name, value in event.metadata.items()}


def verdict(result: dg.SensorResult) -> str:
    return str(observed(result)["verdict"])


def run_restore(
    instance: dg.DagsterInstance, tags: Mapping[str, str] | None = None
) -> dg.ExecuteInProcessResult:
    return (
        services.definitions()
        .resolve_job_def("restore_job")
        .execute_in_process(instance=instance, tags=dict(tags or {}), raise_on_error=False)
    )


def outcome(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> str:
    """Return the outcome of a restore, from the tag of its run."""
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    return run.tags["budget_recovery/outcome"]


def restored_table(result: dg.ExecuteInProcessResult) -> list[Mapping[str, Any]]:
    (event,) = [
        event.step_materialization_data.materialization
        for event in result.all_events
        if event.is_step_materialization
    ]
    assert event.asset_key == dg.AssetKey("restored_usage")
    table = event.metadata["before_and_after"]
    assert isinstance(table, dg.TableMetadataValue)
    return [record.data for record in table.records]


def state(database: psycopg.Connection) -> str:
    (row,) = database.execute("select state from budget_recovery.store").fetchall()
    return str(row[0])


def incidents(database: psycopg.Connection) -> list[dict[str, Any]]:
    """Return all incidents, oldest first."""
    with database.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(
            "select * from budget_recovery.incident order by opened_at"
        ).fetchall()


def usages(bucket: Bucket, tenant: str, budget: str, window: str) -> dict[Entity, str]:
    """Return the present counters of a budget and window, as plain digits."""
    of = BudgetWindow(budget, Window.parse(window))
    found = contents(Place(services.present_settings().require_nats_url(), bucket.name)).usages
    return {
        counter.entity: format_usage(usage)
        for counter, usage in found.items()
        if (counter.tenant, counter.of) == (tenant, of)
    }
