"""The definitions that Dagster loads, without servers and settings."""

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from zoneinfo import ZoneInfo

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.definitions import capture_hours, defs
from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.settings import Settings


def test_everything_loads_and_is_described() -> None:
    dg.Definitions.validate_loadable(defs)
    repository = defs.get_repository_def()
    for spec in defs.resolve_all_asset_specs():
        assert spec.description, spec.key
    for job in ("hourly_snapshot_job", "tenant_tables_job", "recovery_points_job"):
        assert defs.resolve_job_def(job).description
    for schedule in repository.schedule_defs:
        assert schedule.description
        assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING


ASSETS = {
    "gateway_usage_store": ("gateway", {"nats"}, "team:ai-gateway"),
    "budget_usage_snapshots": ("snapshots", {"postgres"}, "team:budget-recovery"),
    "tenant_usage_tables": ("snapshots", {"parquet"}, "team:budget-recovery"),
    "recovery_points": ("recovery", {"postgres"}, "team:budget-recovery"),
    "restored_usage": ("recovery", {"nats"}, "team:budget-recovery"),
}
# Materialized by a schedule; a restore runs only after a loss.
HOURLY = ["budget_usage_snapshots", "tenant_usage_tables", "recovery_points"]


def spec(name: str) -> dg.AssetSpec:
    (found,) = [each for each in defs.resolve_all_asset_specs() if each.key == dg.AssetKey(name)]
    return found


def asset(name: str) -> dg.AssetsDefinition:
    return defs.resolve_asset_graph().assets_def_for_key(dg.AssetKey(name))


def test_every_asset_has_group_kinds_owner_and_tags() -> None:
    assert {each.key.to_user_string() for each in defs.resolve_all_asset_specs()} == set(ASSETS)
    for name, (group, kinds, owner) in ASSETS.items():
        asset = spec(name)
        assert (asset.group_name, asset.kinds, asset.owners) == (group, kinds, [owner])
        assert asset.tags["data"] == "tenant-usage"


def test_the_lineage_leads_from_the_gateways_store_to_tables_and_points() -> None:
    upstream = {
        name: sorted(dep.asset_key.to_user_string() for dep in spec(name).deps) for name in ASSETS
    }
    assert upstream == {
        "gateway_usage_store": [],
        "budget_usage_snapshots": ["gateway_usage_store"],
        "tenant_usage_tables": ["budget_usage_snapshots"],
        "recovery_points": ["budget_usage_snapshots"],
        "restored_usage": ["gateway_usage_store", "recovery_points"],
    }


@pytest.mark.parametrize("name", HOURLY)
def test_hourly_assets_have_a_freshness_policy_and_described_columns(name: str) -> None:
    schema = spec(name).metadata["dagster/column_schema"]
    assert isinstance(schema, dg.TableSchema)
    assert all(column.description for column in schema.columns)
    policy = spec(name).freshness_policy
    assert policy == dg.FreshnessPolicy.time_window(
        fail_window=timedelta(hours=2), warn_window=timedelta(minutes=75)
    )


def test_the_described_columns_are_those_of_the_view(database: psycopg.Connection) -> None:
    rows = database.execute(
        "select column_name, data_type from information_schema.columns"
        " where table_schema = 'budget_recovery' and table_name = 'budget_entry'"
        " order by ordinal_position"
    )
    names = {"timestamp with time zone": "timestamptz"}
    assert spec("budget_usage_snapshots").metadata["dagster/table_name"] == (
        "budget_recovery.budget_entry"
    )
    described = spec("budget_usage_snapshots").metadata["dagster/column_schema"].columns
    assert [(column.name, column.type) for column in described] == [
        (name, names.get(kind, kind)) for name, kind in rows
    ]


def test_every_check_is_described_and_in_the_job() -> None:
    layer = defs.resolve_job_def("hourly_snapshot_job").asset_layer
    names = {"tenant_coverage", "usage_never_drops", "recovery_point_age"}
    assert {key.name for key in layer.asset_graph.asset_check_keys} == names
    assert all(
        layer.asset_graph.get_check_spec(key).description
        for key in layer.asset_graph.asset_check_keys
    )


def test_captures_and_tables_have_a_pool_each_and_no_run_needs_both() -> None:
    pools = {name: asset(name).op.pool for name in HOURLY}
    assert pools == {
        "budget_usage_snapshots": "usage_store",
        "tenant_usage_tables": "usage_tables",
        "recovery_points": None,
    }
    for job in ("hourly_snapshot_job", "tenant_tables_job", "recovery_points_job"):
        keys = defs.resolve_job_def(job).asset_layer.selected_asset_keys
        assert len([key for key in keys if pools.get(key.to_user_string())]) <= 1


def test_a_backfill_of_tables_is_one_run() -> None:
    assert asset("tenant_usage_tables").backfill_policy == dg.BackfillPolicy.single_run()


def test_the_daemon_of_dagster_evaluates_freshness(tmp_path: Path) -> None:
    settings = files("budget_recovery_dagster.sandbox").joinpath("dagster.yaml").read_text()
    without_storage = re.sub(r"(?ms)^storage:.*?^(?=\S)", "", settings)
    (tmp_path / "dagster.yaml").write_text(without_storage)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.get_settings("freshness") == {"enabled": True}
        assert "FRESHNESS_DAEMON" in instance.get_required_daemon_types()


def test_every_job_runs_in_one_process() -> None:
    jobs = list(defs.resolve_all_job_defs())
    # Including the implicit job of backfills.
    assert "__ASSET_JOB" in {job.name for job in jobs}
    assert {job.executor_def for job in jobs} == {dg.in_process_executor}


def test_the_snapshot_job_is_not_retried_and_uses_the_pool() -> None:
    job = defs.resolve_job_def("hourly_snapshot_job")
    assert job.tags["dagster/max_retries"] == "0"
    assert job.tags["dagster/max_runtime"] == "3600"
    assert asset("budget_usage_snapshots").op.pool == "usage_store"
    assert job.partitions_def == asset("budget_usage_snapshots").partitions_def


def test_the_loaded_partitions_end_with_the_current_hour() -> None:
    now = datetime.now(UTC)
    partitions = asset("budget_usage_snapshots").partitions_def
    assert partitions is not None
    keys = partitions.get_partition_keys(current_time=now)
    assert keys[-1] == Hour.containing(now).key
    assert keys[0].endswith("-00:00")
    assert 8 * 24 < len(keys) <= 9 * 24


def test_an_invalid_setting_is_named_when_dagster_loads() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import budget_recovery_dagster.definitions"],
        env={"BUDGET_RECOVERY_RETENTION_DAYS": "7days"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.returncode != 0
    assert "BUDGET_RECOVERY_RETENTION_DAYS is '7days'" in loaded.stderr


def test_partitions_start_a_day_before_retention_and_end_with_the_current_hour() -> None:
    now = datetime(2026, 11, 30, 14, 25, tzinfo=UTC)
    keys = capture_hours(Settings(), now).get_partition_keys(current_time=now)
    assert (keys[0], keys[-1]) == ("2026-11-22-00:00", "2026-11-30-14:00")
    assert len(keys) == 8 * 24 + 15


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/New_York"])
def test_partitions_are_utc_hours_in_every_zone(zone: str) -> None:
    now = datetime(2026, 11, 1, 12, 25, tzinfo=UTC)
    local = now.astimezone(ZoneInfo(zone))
    expected = capture_hours(Settings(), now).get_partition_keys(current_time=now)
    assert capture_hours(Settings(), local).get_partition_keys(current_time=local) == expected
    assert len(set(expected)) == len(expected)
