"""Running the snapshot job in this process, and reading what it shows."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from budget_recovery_dagster.definitions import defs
from budget_recovery_dagster.domain.moments import Hour


def run_job(instance: dg.DagsterInstance, hour: Hour) -> dg.ExecuteInProcessResult:
    return defs.resolve_job_def("hourly_snapshot_job").execute_in_process(
        partition_key=hour.key, instance=instance, raise_on_error=False
    )


def metadata(result: dg.ExecuteInProcessResult) -> Mapping[str, Any]:
    (event,) = result.asset_materializations_for_node("budget_usage_snapshots")
    return {name: value.value for name, value in event.metadata.items()}


def checks(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetCheckEvaluation]:
    return {check.check_name: check for check in result.get_asset_check_evaluations()}


def details(check: dg.AssetCheckEvaluation) -> list[Mapping[str, Any]]:
    table = check.metadata["details"]
    assert isinstance(table, dg.TableMetadataValue)
    return [record.data for record in table.records]


def failure_text(result: dg.ExecuteInProcessResult) -> str:
    (event,) = [event for event in result.all_events if event.is_step_failure]
    failure = event.step_failure_data.user_failure_data
    assert failure is not None
    return str(failure.description)
