"""Tables and recovery points on real servers, run by Dagster in this process."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import psycopg
import pytest
from click.testing import CliRunner

from budget_recovery_dagster.adapters.parquet import directory_of
from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.jobs.snapshots import tenant_tables_sensor
from budget_recovery_dagster.presentation.metadata import duration
from budget_recovery_dagster.restore_runs import Location, show_once
from tests import services
from tests.free_ports import unused_port
from tests.integration.launched_runs import started_from
from tests.integration.snapshot_job import capture_at, checks, details, failure_text, run_job
from tests.nats_servers import Bucket

LIFETIME = "lifetime"
TABLES = "tenant_usage_tables"
POINTS = "recovery_points"


def materialize(
    instance: dg.DagsterInstance, asset: str, hour: Hour | None = None
) -> dg.ExecuteInProcessResult:
    """Materialize only this asset, as from its page."""
    job = services.definitions().resolve_implicit_global_asset_job_def()
    return job.execute_in_process(
        asset_selection=[dg.AssetKey(asset)],
        partition_key=hour.key if hour else None,
        instance=instance,
        raise_on_error=False,
    )


def run_both(
    instance: dg.DagsterInstance, hour: Hour
) -> tuple[dg.ExecuteInProcessResult, dg.ExecuteInProcessResult]:
    """Capture an hour with its job, then write its tables as its sensor does."""
    return run_job(instance, hour), materialize(instance, TABLES, hour)


def requested_tables(
    instance: dg.DagsterInstance, cursor: str | None = None
) -> tuple[list[dg.RunRequest], str]:
    """Return what a tick of tenant_tables_sensor requests, and its cursor."""
    context = dg.build_sensor_context(
        instance=instance, cursor=cursor, sensor_name=tenant_tables_sensor.name
    )
    answer = tenant_tables_sensor(context)
    assert isinstance(answer, dg.SensorResult)
    assert answer.cursor is not None
    return [*(answer.run_requests or [])], answer.cursor


def metadata(result: dg.ExecuteInProcessResult, asset: str) -> Mapping[str, Any]:
    (event,) = result.asset_materializations_for_node(asset)
    return {name: value.value for name, value in event.metadata.items()}


def rows(result: dg.ExecuteInProcessResult, asset: str, table: str) -> list[Mapping[str, Any]]:
    return [record.data for record in metadata(result, asset)[table].records]


def files(tables: Path) -> list[str]:
    return sorted(str(path.relative_to(tables)) for path in tables.rglob("*.parquet"))


def test_the_hourly_job_and_the_job_of_tables_materialize_tables_and_points(
    configured: Bucket, tables: Path, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "12345678901234567890.5"})
    configured.spend("acme", "users", LIFETIME, {"alice": "16777216.01", "bo": "1E-18"})
    configured.spend("/etc/東京", "models", LIFETIME, {"gpt-4o": "3"})

    result, written = run_both(instance, current_hour)

    assert result.success
    assert written.success
    assert all(check.passed for check in checks(result).values())
    name = f"{current_hour.start:%Y-%m-%dT%HZ}.parquet"
    assert files(tables) == sorted(
        f"{directory_of(tenant)}/{name}" for tenant in ("acme", "/etc/東京")
    )
    shown = metadata(written, TABLES)
    assert (shown["files"], shown["dagster/row_count"], shown["removed_files"]) == (2, 4, 0)
    assert [(row["tenant"], row["rows"]) for row in rows(written, TABLES, "tenants")] == [
        ("/etc/東京", 1),
        ("acme", 3),
    ]
    assert shown["directory"] == str(tables)

    points = metadata(result, POINTS)
    assert (points["tenants"], points["budget_windows"], points["entities"]) == (2, 3, 4)
    assert 0 <= points["newest_point_age_seconds"] == points["oldest_point_age_seconds"] < 60
    listed = [
        (row["tenant"], row["budget"], row["entities"], row["usage"], row["marks"])
        for row in rows(result, POINTS, "points")
    ]
    assert listed == [
        ("/etc/東京", "models", 1, "3", ""),
        ("acme", "total", 1, "12345678901234567890.5", ""),
        ("acme", "users", 2, "16777216.010000000000000001", ""),
    ]
    captured = metadata(result, "budget_usage_snapshots")
    assert captured["source"] == "counters"


def test_the_shown_one_liners_read_the_tables(
    configured: Bucket,
    tables: Path,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    pandas: Any,
) -> None:
    configured.spend("acme", "users", LIFETIME, {"alice": "0.662"})
    _, result = run_both(instance, current_hour)
    shown = metadata(result, TABLES)["how_to_read"]
    in_python, in_sql = (
        part.split("```")[0]
        for part in (shown.partition("```python\n")[2], shown.partition("```sql\n")[2])
    )
    with_pandas = eval(in_python, {"pandas": pandas})  # noqa: S307 - it is what we show to people
    assert [*with_pandas["usage"]] == [Decimal("0.662")]
    with_duckdb = duckdb.execute(f"select tenant, entity, usage from ({in_sql})")
    assert with_duckdb.fetchall() == [("acme", "alice", Decimal("0.662"))]


def test_the_table_of_a_past_hour_is_rewritten_from_the_database(
    configured: Bucket,
    database_url: str,
    tables: Path,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
    pandas: Any,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    past = Hour(current_hour.start - timedelta(hours=5))
    capture_at(database_url, past.start + timedelta(minutes=10))
    assert materialize(instance, TABLES, past).success
    (name,) = files(tables)
    before = (tables / name).read_bytes()
    configured.spend("acme", "total", LIFETIME, {None: "81"})
    run_both(instance, current_hour)
    (tables / name).unlink()
    # The gateway's store is not needed.
    monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", f"nats://127.0.0.1:{unused_port()}")

    result = materialize(instance, TABLES, past)

    assert result.success
    assert (tables / name).read_bytes() == before
    assert metadata(result, TABLES)["dagster/row_count"] == 1
    assert [*pandas.read_parquet(tables)["usage"]] == [80, 81]


def test_an_hour_that_was_never_captured_fails_with_the_reason(
    configured: Bucket, tables: Path, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    never = Hour(current_hour.start - timedelta(hours=3))
    result = materialize(instance, TABLES, never)
    assert not result.success
    text = failure_text(result)
    assert f"No table of the hour {never} can be written: no snapshot of it is retained." in text
    assert "Try: choose an hour that is green in budget_usage_snapshots" in text
    assert files(tables) == []


def test_a_failure_of_the_tables_does_not_affect_snapshots_and_points(
    configured: Bucket, tables: Path, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    tables.write_text("a file in the way")

    result, written = run_both(instance, current_hour)

    assert result.success
    assert not written.success
    assert failure_text(written).startswith(
        f"Cannot use {tables} for tables (BUDGET_RECOVERY_TABLES_DIR): Not a directory."
        " No table was written; the snapshots are not affected. Try: "
    )
    assert metadata(result, "budget_usage_snapshots")["tenants_stored"] == 1
    assert metadata(result, POINTS)["tenants"] == 1
    assert all(check.passed for check in checks(result).values())
    assert len(checks(result)) == 3
    # After the fix, the table of the hour is written from the database.
    tables.unlink()
    assert materialize(instance, TABLES, current_hour).success


def test_a_failed_table_is_reported_and_the_others_are_written(
    configured: Bucket, tables: Path, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    for tenant in ("acme", "bad", "other"):
        configured.spend(tenant, "total", LIFETIME, {None: "80"})
    tables.mkdir()
    (tables / directory_of("bad")).write_text("in the way")

    _, result = run_both(instance, current_hour)

    assert not result.success
    text = failure_text(result)
    assert text.startswith("1 tables of this hour failed, 2 are written")
    assert "'bad'" in text
    assert "BUDGET_RECOVERY_TABLES_DIR" in text
    assert [Path(file).parent.name for file in files(tables)] == [
        directory_of("acme"),
        directory_of("other"),
    ]


def test_points_are_skipped_and_no_tables_requested_while_captures_are_paused(
    configured: Bucket,
    database: psycopg.Connection,
    tables: Path,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    run_both(instance, current_hour)
    _, cursor = requested_tables(instance)
    written = files(tables)
    assert written
    database.execute("update budget_recovery.store set state = 'recovering'")

    result = run_job(instance, current_hour)

    assert result.success
    skipped = {event.step_key for event in result.all_events if event.is_step_skipped}
    assert {POINTS, "recovery_points_recovery_point_age"} <= skipped
    assert requested_tables(instance, cursor) == ([], cursor)
    assert result.get_asset_materialization_events() == []
    assert files(tables) == written
    # A success, but no capture: the list of runs and the page of the asset show that.
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    assert run.tags["budget_recovery/outcome"] == "skipped"
    (observed,) = result.get_asset_observation_events()
    observation = observed.asset_observation_data.asset_observation
    assert (observation.asset_key.path, observation.partition) == (
        ["budget_usage_snapshots"],
        current_hour.key,
    )
    shown = {name: value.value for name, value in observation.metadata.items()}
    assert (shown["outcome"], shown["state"]) == ("skipped", "recovering")
    assert "captures are paused" in str(shown["reason"])
    # Both can still be materialized manually.
    assert materialize(instance, POINTS).success
    assert materialize(instance, TABLES, current_hour).success


def test_recovery_points_need_only_the_database(
    configured: Bucket,
    database_url: str,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    configured.spend("acme", "a day that is over", "2026-11-01", {None: "80"})
    capture_at(database_url, current_hour.start - timedelta(hours=2))
    configured.spend("fresh", "total", LIFETIME, {None: "1"})
    configured.purge("usage.acme.")
    assert run_job(instance, current_hour).success
    monkeypatch.delenv("BUDGET_RECOVERY_NATS_URL")

    result = materialize(instance, POINTS)

    assert result.success
    shown = metadata(result, POINTS)
    # The age of what the store does not have any more is no age of a capture.
    assert shown["newest_point_age_seconds"] == shown["oldest_point_age_seconds"] < 60
    assert shown["gone_windows"] == 1
    assert [
        (row["tenant"], row["usage"], row["marks"]) for row in rows(result, POINTS, "points")
    ] == [("acme", "80", "gone"), ("fresh", "1", "")]
    check = checks(result)["recovery_point_age"]
    assert not check.passed
    assert check.severity is dg.AssetCheckSeverity.WARN
    assert str(check.description).startswith("Nothing is older than 1h 30min. The newest")
    assert str(check.description).endswith("s ago, holds nothing: 'acme'.")
    (row,) = details(check)
    assert row["tenant"] == "acme"
    assert "ago, holds nothing: its counters were deleted." in str(row["action"])
    assert "record_reset_job" in str(row["action"])


def test_a_tenant_whose_counters_were_deleted_on_purpose_is_quiet_after_a_reset(
    configured: Bucket, database_url: str, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    configured.spend("fresh", "total", LIFETIME, {None: "1"})
    capture_at(database_url, current_hour.start - timedelta(hours=2))
    configured.purge("usage.acme.")
    result = run_job(instance, current_hour)
    assert not checks(result)["recovery_point_age"].passed
    status = answer(database_url, "status")
    # The reading is not late; what is missing is reported as missing.
    assert [each["code"] for each in status["attention"]] == ["usage_missing"]
    assert list(status["points"]["emptied_tenants"]) == ["acme"]
    assert list(status["points"]["newest_by_tenant"]) == ["fresh"]
    shown = " ".join(CliRunner().invoke(main, ["status"]).stdout.split())
    assert "Holds nothing: acme, read" in shown
    assert "Furthest behind: fresh" in shown
    command = ("record-reset", "--tenant", "acme", "--budget", "total", "--reason", "left")
    answer(database_url, *command)
    # At once, and once a capture has read the tenant again.
    for result in (materialize(instance, POINTS), run_job(instance, current_hour)):
        check = checks(result)["recovery_point_age"]
        assert (check.passed, list(check.metadata)) == (
            True,
            ["tenants", "tenants_too_old", "tenants_emptied", "damaged_records"],
        )
    status = answer(database_url, "status")
    assert (status["condition"], status["points"]["emptied_tenants"]) == ("healthy", {})


def answer(database_url: str, *arguments: str) -> dict[str, Any]:
    environment = {"BUDGET_RECOVERY_POSTGRES_URL": database_url}
    ended = CliRunner().invoke(main, [*arguments, "--json"], env=environment)
    content: dict[str, Any] = json.loads(ended.stdout)
    return content


def test_damaged_records_are_reported_and_not_used(
    configured: Bucket,
    database: psycopg.Connection,
    database_url: str,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    configured.spend("fresh", "total", LIFETIME, {None: "1"})
    capture_at(database_url, current_hour.start - timedelta(minutes=20))
    configured.spend("acme", "total", LIFETIME, {None: "90"})
    assert run_job(instance, current_hour).success
    assert answer(database_url, "snapshots")["damaged_records_by_tenant"] == {}
    database.execute(
        "update budget_recovery.budget_content set usages = '{7}' where usages = '{90}'"
    )

    result = materialize(instance, POINTS)

    shown = {row["tenant"]: row for row in rows(result, POINTS, "points")}
    assert (shown["acme"]["usage"], shown["acme"]["marks"]) == ("80", "damaged(1)")
    assert (shown["fresh"]["usage"], shown["fresh"]["marks"]) == ("1", "")
    assert metadata(result, POINTS)["damaged_records"] == 1
    check = checks(result)["recovery_point_age"]
    assert not check.passed
    assert "1 record is damaged (checksum mismatch), of 'acme'" in str(check.description)
    assert [row["tenant"] for row in details(check)] == ["acme"]
    status = answer(database_url, "status")
    assert status["points"]["damaged_records_by_tenant"] == {"acme": 1}
    assert (status["condition"], status["exit_code"]) == ("attention", 4)
    (attention,) = status["attention"]
    assert attention["code"] == "records_damaged"
    assert "Snapshots of 'acme' have damaged records" in attention["message"]
    assert answer(database_url, "snapshots")["damaged_records_by_tenant"] == {"acme": 1}
    document = answer(database_url, "snapshots", "--tenant", "fresh")
    assert document["damaged_records_by_tenant"] == {}
    (tenant,) = answer(database_url, "preview", "--tenant", "acme")["tenants"]
    (entry,) = tenant["windows"]
    assert (entry["recorded"], len(entry["damaged_records"])) == ("80", 1)


@pytest.mark.parametrize("trouble", ["the store is down", "captures are paused"])
def test_the_age_of_points_is_checked_even_if_no_capture_succeeds(
    trouble: str,
    configured: Bucket,
    database: psycopg.Connection,
    database_url: str,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    capture_at(database_url, current_hour.start - timedelta(hours=2))
    if trouble == "the store is down":
        monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", f"nats://127.0.0.1:{unused_port()}")
    else:
        database.execute("update budget_recovery.store set state = 'failed'")
    captured = run_job(instance, current_hour)
    assert not captured.asset_materializations_for_node("budget_usage_snapshots")
    assert "recovery_point_age" not in checks(captured)

    result = (
        services.definitions()
        .resolve_job_def("recovery_points_job")
        .execute_in_process(instance=instance)
    )

    check = checks(result)["recovery_point_age"]
    assert not check.passed
    assert str(check.description).startswith("Older than 1h 30min: 'acme'.")


def test_the_asset_check_of_points_fails_without_snapshots(
    configured: Bucket, instance: dg.DagsterInstance
) -> None:
    result = materialize(instance, POINTS)
    assert result.success
    assert metadata(result, POINTS)["tenants"] == 0
    check = checks(result)["recovery_point_age"]
    assert not check.passed
    assert check.description == "No snapshot is stored: a restore would bring back nothing."


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0s"),
        (59.9, "59s"),
        (60, "1min"),
        (5400, "1h 30min"),
        (86400, "1d 0h"),
        (180000, "2d 2h"),
    ],
)
def test_ages_are_readable(seconds: float, written: str) -> None:
    assert duration(timedelta(seconds=seconds)) == written


def test_the_tables_of_a_captured_hour_are_requested_once(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    _, nothing_yet = requested_tables(instance)
    captured = run_job(instance, current_hour)
    (request,), cursor = requested_tables(instance, nothing_yet)
    assert (request.partition_key, request.run_key) == (current_hour.key, captured.run_id)
    assert requested_tables(instance, cursor) == ([], cursor)
    # A cursor of an earlier version, or one that a person edited: the run key launches it once.
    for unknown in (None, '{"record_id": 7, "__class__": "RunStatusSensorCursor"}'):
        assert requested_tables(instance, unknown) == ([request], cursor)


@contextmanager
def without_records_after_a_capture(database: psycopg.Connection) -> Iterator[None]:
    """Take the table of records away as soon as a capture has ended, as an administrator might."""
    database.execute(
        "create function take_away() returns trigger language plpgsql security definer as $$begin "
        "alter table budget_recovery.budget_record rename to taken_away; return new; end$$"
    )
    database.execute(
        "create trigger take_away after update on budget_recovery.capture_run"
        " for each row when (new.outcome is not null) execute function take_away()"
    )
    yield
    database.execute("drop trigger take_away on budget_recovery.capture_run")
    database.execute("alter table budget_recovery.taken_away rename to budget_record")


def test_tables_are_written_if_a_step_after_the_capture_fails(
    configured: Bucket,
    database: psycopg.Connection,
    tables: Path,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    _, cursor = requested_tables(instance)
    with without_records_after_a_capture(database):
        captured = run_job(instance, current_hour)
    assert not captured.success
    assert captured.asset_materializations_for_node("budget_usage_snapshots")
    assert not captured.asset_materializations_for_node(POINTS)
    (request,), cursor = requested_tables(instance, cursor)
    assert (request.partition_key, request.run_key) == (current_hour.key, captured.run_id)
    assert materialize(instance, TABLES, Hour.parse(str(request.partition_key))).success
    assert len(files(tables)) == 1
    # A capture from the page of the asset is no run of the job.
    assert materialize(instance, "budget_usage_snapshots", current_hour).success
    assert requested_tables(instance, cursor)[0] == []


def test_the_same_asset_of_another_location_requests_no_tables(
    instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    _, cursor = requested_tables(instance)
    foreign = started_from(
        instance, Location("other_team", "__repository__"), "hourly_snapshot_job"
    )
    event = dg.AssetMaterialization("budget_usage_snapshots", partition=current_hour.key)
    show_once(instance, foreign.run_id, event)
    requested, moved = requested_tables(instance, cursor)
    assert requested == []
    assert int(moved) > int(cursor)


def test_a_backfill_writes_all_hours_in_one_run_and_names_the_incomplete_ones(
    configured: Bucket,
    database_url: str,
    tables: Path,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    first, missed, last = (Hour(current_hour.start - timedelta(hours=n)) for n in (5, 4, 3))
    for hour in (first, last):
        capture_at(database_url, hour.start + timedelta(minutes=10))
    job = services.definitions().resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(
        asset_selection=[dg.AssetKey(TABLES)],
        tags={
            "dagster/asset_partition_range_start": first.key,
            "dagster/asset_partition_range_end": last.key,
        },
        instance=instance,
        raise_on_error=False,
    )
    assert failure_text(result).startswith(
        "1 of 3 hours are incomplete; the others are written. The first: No table of the hour "
        f"{missed} can be written: no snapshot of it is retained."
    )
    written = instance.get_materialized_partitions(dg.AssetKey(TABLES))
    assert written == {first.key, last.key}
    assert len(files(tables)) == 2
