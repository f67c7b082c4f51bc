"""When the schedule requests a snapshot."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.assets.budget_usage_snapshots import CAPTURE_MINUTES
from budget_recovery_dagster.domain import CAPTURE_LEASE, Hour
from budget_recovery_dagster.errors import DatabaseUnreachableError
from budget_recovery_dagster.jobs.snapshots import hourly_snapshot_schedule
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.free_ports import unused_port
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


# Ticks after the first of an hour


@pytest.fixture
def filed(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """Return an instance in files, as the context of a schedule needs it."""
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        yield instance


def later_tick(filed: dg.DagsterInstance, hour: Hour) -> dg.RunRequest | dg.SkipReason:
    return schedule_tick(filed, hour.start + timedelta(minutes=CAPTURE_MINUTES[1]))


def skipped_later(filed: dg.DagsterInstance, hour: Hour) -> str:
    """Return why a later tick of the hour requests no run."""
    tick = later_tick(filed, hour)
    assert isinstance(tick, dg.SkipReason)
    return str(tick.skip_message)


def record_end(database: psycopg.Connection, hour: Hour, outcome: str, code: str | None) -> None:
    """Record a run of the hour that ended so."""
    described = (code, "No server responds.", "start it.") if code else (None, None, None)
    database.execute(
        "insert into budget_recovery.capture_run"
        " (run_id, hour, started_at, ended_at, outcome, stored, absent, failed, code, reason, hint)"
        " values ('a run', %s, now(), now(), %s, %s, 0, %s, %s, %s, %s)",
        (hour.start, outcome, int(outcome == "stored_in_part"), int(code is not None), *described),
    )


def test_the_schedule_ticks_several_times_within_the_hour() -> None:
    assert hourly_snapshot_schedule.cron_schedule == "0,2,5,10,20,30,40,50 * * * *"


def test_a_captured_hour_is_not_captured_again(
    configured: Bucket, filed: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert run_job(filed, current_hour).success
    assert f"The hour {current_hour} was captured at " in skipped_later(filed, current_hour)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ("failed", "store_unreachable"),
        ("failed", "store_no_quorum"),
        ("failed", "store_lost"),
        ("failed", "database_unreachable"),
        ("failed", "store_read"),
        ("stored_in_part", "store_unreachable"),
    ],
)
def test_an_hour_whose_capture_failed_for_what_may_pass_is_requested_again(
    outcome: str,
    code: str,
    configured: Bucket,
    database: psycopg.Connection,
    filed: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    assert isinstance(later_tick(filed, current_hour), dg.RunRequest)
    record_end(database, current_hour, outcome, code)
    assert isinstance(later_tick(filed, current_hour), dg.RunRequest)


@pytest.mark.parametrize("code", ["store_permission", "settings", "unexpected_error"])
def test_an_hour_whose_capture_needs_a_person_is_not_requested_again(
    code: str,
    configured: Bucket,
    database: psycopg.Connection,
    filed: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    schedule_tick(filed, current_hour.start)
    record_end(database, current_hour, "failed", code)
    assert skipped_later(filed, current_hour) == (
        f"The capture of the hour {current_hour} failed, and would fail again: No server responds. "
        "Try: start it. Then run hourly_snapshot_job."
    )


def test_all_tenants_are_not_captured_again_because_some_cannot_be_read(
    configured: Bucket, database: psycopg.Connection, filed: dg.DagsterInstance, current_hour: Hour
) -> None:
    schedule_tick(filed, current_hour.start)
    record_end(database, current_hour, "stored_in_part", "store_read")
    assert skipped_later(filed, current_hour).endswith(
        " UTC, but 1 tenant failed: No server responds. "
        "The next capture begins with the oldest snapshots."
    )


def test_an_hour_of_which_a_part_needs_a_person_was_captured(
    configured: Bucket, database: psycopg.Connection, filed: dg.DagsterInstance, current_hour: Hour
) -> None:
    schedule_tick(filed, current_hour.start)
    record_end(database, current_hour, "stored_in_part", "store_permission")
    said = skipped_later(filed, current_hour)
    assert said.startswith(f"The hour {current_hour} was captured at ")
    assert said.endswith(
        " UTC, but 1 tenant failed, and would fail again: No server responds. "
        "Try: start it. Then run hourly_snapshot_job."
    )


def test_an_hour_that_is_being_captured_is_not_requested_again(
    configured: Bucket, filed: dg.DagsterInstance, current_hour: Hour
) -> None:
    with (
        opened_control_plane(services.present_settings()) as plane,
        plane.leases.hold(CAPTURE_LEASE, "run 1 on gw-7"),
    ):
        assert skipped_later(filed, current_hour) == "The capture of run 1 on gw-7 is in progress."


def test_an_hour_whose_run_died_is_requested_again(
    configured: Bucket,
    database: psycopg.Connection,
    filed: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    schedule_tick(filed, current_hour.start)
    database.execute(
        "insert into budget_recovery.capture_run (run_id, hour, started_at)"
        " values ('a run', %s, now())",
        (current_hour.start,),
    )
    assert isinstance(later_tick(filed, current_hour), dg.RunRequest)


def test_a_tick_that_fails_with_the_database_is_made_up_for_by_the_next_one(
    configured: Bucket,
    database_url: str,
    filed: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = f"postgresql://127.0.0.1:{unused_port()}/none"
    monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", away)
    with pytest.raises(DatabaseUnreachableError):
        schedule_tick(filed, current_hour.start)
    monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", database_url)
    request = later_tick(filed, current_hour)
    assert isinstance(request, dg.RunRequest)
    assert request.partition_key == current_hour.key


def test_an_hour_is_captured_once_its_incident_has_ended(
    configured: Bucket,
    database: psycopg.Connection,
    filed: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    schedule_tick(filed, current_hour.start)
    database.execute("update budget_recovery.store set state = 'recovering'")
    assert isinstance(later_tick(filed, current_hour), dg.SkipReason)
    database.execute("update budget_recovery.store set state = 'healthy'")
    assert isinstance(later_tick(filed, current_hour), dg.RunRequest)
