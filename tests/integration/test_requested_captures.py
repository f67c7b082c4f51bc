"""Captures that the supervisor requests, and ``budget-recovery snapshot``, on real servers."""

from datetime import UTC, datetime, timedelta

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import CAPTURE_LEASE, Hour
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.commands import answer, invoke, page
from tests.integration.launched_runs import lost
from tests.integration.recovery_runs import check, requested, run_restore, skipped, supervise
from tests.integration.snapshot_job import run_job
from tests.nats_servers import Bucket
from tests.waiting import wait_until

LIFETIME = "lifetime"


@pytest.fixture
def current_hour() -> Hour:
    """Return the current hour, in which a tick still requests a capture until the test ends."""
    hour = Hour.containing(datetime.now(UTC))
    if hour.end - datetime.now(UTC) < timedelta(seconds=90):
        wait_until(lambda: hour.is_past(datetime.now(UTC)), seconds=120)
    return Hour.containing(datetime.now(UTC))


def the_capture(result: dg.SensorResult, hour: Hour) -> dg.RunRequest:
    """Return the one capture that a tick requested, of this hour."""
    (request,) = requested(result)
    assert (request.job_name, request.partition_key) == ("hourly_snapshot_job", hour.key)
    return request


def runs_of(database: psycopg.Connection) -> list[str]:
    rows = database.execute("select outcome from budget_recovery.capture_run order by number")
    return [outcome for (outcome,) in rows]


def test_an_installation_does_not_wait_for_the_next_hour(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert skipped(supervise(instance))
    assert skipped(check(instance))
    first = the_capture(supervise(instance), current_hour)
    # With the same key, for which Dagster creates no second run.
    assert the_capture(supervise(instance), current_hour).run_key == first.run_key
    assert run_job(instance, current_hour).success
    assert skipped(supervise(instance))


def test_a_restore_is_followed_by_a_snapshot_also_if_dagster_was_down_meanwhile(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    request = lost(configured, instance, current_hour)
    assert skipped(supervise(instance))
    assert run_restore(instance, request.tags).success
    # No tick has seen the incident; the database knows that a capture is due.
    after = the_capture(supervise(instance), current_hour)
    assert after.run_key is not None
    assert after.run_key.startswith("after-incident/")
    assert the_capture(supervise(instance), current_hour).run_key == after.run_key
    assert run_job(instance, current_hour).success
    assert skipped(supervise(instance))


def test_a_manual_restore_that_closes_the_incident_is_followed_by_a_snapshot(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    lost(configured, instance, current_hour)
    assert "is closed" in " ".join(page("restore", "--reason", "at night", "--yes"))
    the_capture(supervise(instance), current_hour)
    # The command takes it as well; nothing is due afterwards.
    assert "2 tenants stored, 2 counters." in " ".join(page("snapshot"))
    assert skipped(supervise(instance))


def test_resolve_takes_the_snapshot_by_itself(
    configured: Bucket,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    database: psycopg.Connection,
) -> None:
    lost(configured, instance, current_hour)
    document = answer("resolve", "--reason", "emptied", "--yes", "--keep-snapshots")
    assert document["capture"]["outcome"] == "stored"
    assert skipped(supervise(instance))
    assert runs_of(database) == ["stored", "stored"]


# budget-recovery snapshot


def test_snapshot_takes_one_now(
    configured: Bucket, current_hour: Hour, database: psycopg.Connection
) -> None:
    assert page("snapshot")[0].startswith("No snapshot: no tenant has a counter in the usage store")
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    configured.spend("globex", "users", LIFETIME, {"alice": "5", "bob": "1"})
    text = " ".join(page("snapshot"))
    assert "Snapshot of" in text
    assert "2 tenants stored, 3 counters." in text
    configured.remove("usage.globex.users.lifetime.bob")
    document = answer("snapshot")
    assert (document["outcome"], document["stored"], document["failed"]) == ("stored", 2, 0)
    assert (document["counters"], document["drops"], document["most_missing"]) == (2, 1, "1")
    assert (document["failures"], document["error"]) == ([], None)
    listed = [each["captured_at"] for each in answer("snapshots")["snapshots"]]
    assert len(listed) == 2
    assert listed[0] == document["captured_at"]
    assert answer("status", code=4)["captures"]["newest_run"]["run_id"].startswith("command ")
    assert runs_of(database) == ["nothing_to_store", "stored", "stored"]


def test_snapshot_is_refused_while_captures_are_paused(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    lost(configured, instance, current_hour)
    refused = invoke("snapshot")
    assert refused.exit_code == 2
    assert "Captures are paused: the store is RECOVERING." in refused.stderr
    assert "Try: see `budget-recovery status`." in refused.stderr
    assert answer("snapshot", code=2)["error"]["code"] == "captures_paused"


def test_snapshot_is_refused_while_another_capture_runs(
    configured: Bucket, database: psycopg.Connection
) -> None:
    with (
        opened_control_plane(services.present_settings()) as plane,
        plane.leases.hold(CAPTURE_LEASE, "run 1 on gw-7"),
    ):
        refused = invoke("snapshot")
    assert refused.exit_code == 2
    assert "run 1 on gw-7" in refused.stderr
    assert runs_of(database) == []


def test_snapshot_fails_if_the_store_is_away(
    configured: Bucket, current_hour: Hour, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert invoke("snapshot").exit_code == 0
    monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", "nats://127.0.0.1:9")
    failed = invoke("snapshot")
    assert failed.exit_code == 1
    # One error, not one for each tenant.
    assert failed.stderr.count("Error:") == 1
    assert failed.stdout == ""
