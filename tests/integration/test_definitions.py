"""What Dagster loads, without any server or setting."""

import subprocess
import sys
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import dagster as dg
import pytest

from budget_recovery_dagster.assets.budget_usage_snapshots import budget_usage_snapshots
from budget_recovery_dagster.definitions import defs
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.partitions import capture_hours, hourly_partitions


def test_everything_loads_and_is_described() -> None:
    dg.Definitions.validate_loadable(defs)
    repository = defs.get_repository_def()
    for spec in defs.resolve_all_asset_specs():
        assert spec.description, spec.key
    for job in ("hourly_snapshot_job",):
        assert defs.resolve_job_def(job).description
    for schedule in repository.schedule_defs:
        assert schedule.description
        assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING


def test_the_job_runs_in_one_process_in_order_and_is_not_repeated() -> None:
    job = defs.resolve_job_def("hourly_snapshot_job")
    assert job.executor_def is dg.in_process_executor
    assert job.tags["dagster/max_retries"] == "0"
    assert job.tags["dagster/max_runtime"] == "3600"
    assert budget_usage_snapshots.op.pool == "usage_store"
    assert job.partitions_def == capture_hours


def test_the_partitions_that_dagster_loads_end_with_the_current_hour() -> None:
    now = datetime.now(UTC)
    keys = capture_hours.get_partition_keys(current_time=now)
    assert keys[-1] == Hour.containing(now).key
    assert keys[0].endswith("-00:00")
    assert 8 * 24 < len(keys) <= 9 * 24


def test_a_wrong_setting_is_named_where_dagster_loads() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import budget_recovery_dagster.definitions"],
        env={"BUDGET_RECOVERY_RETENTION_DAYS": "7days"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.returncode != 0
    assert "BUDGET_RECOVERY_RETENTION_DAYS is '7days'" in loaded.stderr


def test_partitions_run_from_a_day_before_retention_to_the_current_hour() -> None:
    now = datetime(2026, 11, 30, 14, 25, tzinfo=UTC)
    keys = hourly_partitions(now).get_partition_keys(current_time=now)
    assert (keys[0], keys[-1]) == ("2026-11-22-00:00", "2026-11-30-14:00")
    assert len(keys) == 8 * 24 + 15


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/New_York"])
def test_partitions_are_utc_hours_in_every_zone(zone: str) -> None:
    now = datetime(2026, 11, 1, 12, 25, tzinfo=UTC)
    local = now.astimezone(ZoneInfo(zone))
    expected = hourly_partitions(now).get_partition_keys(current_time=now)
    assert hourly_partitions(local).get_partition_keys(current_time=local) == expected
    assert len(set(expected)) == len(expected)
