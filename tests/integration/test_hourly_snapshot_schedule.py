"""When the schedule requests a snapshot."""

from datetime import timedelta
from pathlib import Path

import dagster as dg
import psycopg

from budget_recovery_dagster.domain import Hour
from tests.integration.recovery_runs import schedule_tick
from tests.integration.snapshot_job import run_job
from tests.nats_servers import Bucket

LIFETIME = "lifetime"


def test_a_paused_store_ends_the_run_without_output_and_skips_the_schedule(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert run_job(instance, current_hour).success
    database.execute("update budget_recovery.store set state = 'recovering'")

    result = run_job(instance, current_hour)

    assert result.success
    assert result.asset_materializations_for_node("budget_usage_snapshots") == []
    skipped = schedule_tick(instance, current_hour.start)
    assert isinstance(skipped, dg.SkipReason)
    assert "RECOVERING" in str(skipped.skip_message)


def test_a_tick_requests_its_own_hour(
    configured: Bucket, current_hour: Hour, tmp_path: Path
) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        request = schedule_tick(instance, current_hour.start)
    assert isinstance(request, dg.RunRequest)
    assert request.partition_key == request.run_key == current_hour.key


def test_a_tick_for_a_closed_hour_is_skipped(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    skipped = schedule_tick(instance, current_hour.start - timedelta(hours=1))
    assert isinstance(skipped, dg.SkipReason)
    assert "has closed" in str(skipped.skip_message)
