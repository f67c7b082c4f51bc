"""Running the snapshot job in this process, and reading its results."""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

import dagster as dg
import psycopg

from budget_recovery_dagster.domain import Hour
from tests import services
from tests.integration.timeless_store import SteppedClock, capture, opened_at


def run_job(instance: dg.DagsterInstance, hour: Hour) -> dg.ExecuteInProcessResult:
    return (
        services.definitions()
        .resolve_job_def("hourly_snapshot_job")
        .execute_in_process(partition_key=hour.key, instance=instance, raise_on_error=False)
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


def entries(database: psycopg.Connection) -> dict[tuple[str, str, str, str | None], Decimal]:
    rows = database.execute(
        "select tenant, budget_id, window_token, entity, usage from budget_recovery.budget_entry"
    )
    return {tuple(row[:4]): row[4] for row in rows}


def capture_at(url: str, at: datetime) -> None:
    """Take a snapshot with the database's clock at ``at``."""
    clock = SteppedClock(at)
    with opened_at(url, clock) as database:
        capture(database, clock)
