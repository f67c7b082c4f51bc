"""Restores that cannot succeed, or not yet."""

from datetime import timedelta

import dagster as dg
import psycopg
import pytest
from click.testing import CliRunner

from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.errors import AttemptFailedError
from budget_recovery_dagster.jobs.restore import restore, restore_job
from budget_recovery_dagster.services.restore import GaveUp
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.documentation import steps
from tests.integration.interrupted_store import Interruptions, interrupted
from tests.integration.recovery_runs import (
    check,
    incidents,
    outcome,
    requested,
    run_restore,
    skipped,
    state,
    supervise,
    usages,
)
from tests.integration.snapshot_job import failure_text, run_job
from tests.nats_servers import Bucket

LIFETIME = "lifetime"
RUNBOOK = "docs/runbook.md"


@pytest.fixture
def captured(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> Bucket:
    """Return a bucket that was captured and checked."""
    configured.spend("acme", "total", LIFETIME, {None: "80", "alice": "30"})
    assert run_job(instance, current_hour).success
    check(instance)
    return configured


def fail(bucket: Bucket, instance: dg.DagsterInstance) -> None:
    """Replace the store by one whose counters are purged after each write, and use all attempts."""
    bucket.destroy()
    bucket.create()
    check(instance)
    purging = interrupted(Interruptions(after_raising=lambda: bucket.purge("usage.")))
    with opened_control_plane(services.present_settings()) as plane:
        for _ in range(2):
            with pytest.raises(AttemptFailedError, match="missing after the restore"):
                services.recover(plane, open_store=purging)
        assert isinstance(services.recover(plane, open_store=purging), GaveUp)


def run_documented(name: str, *more: str) -> None:
    """Run the command of this name from the runbook's steps for FAILED."""
    (documented,) = [
        command
        for command in steps(RUNBOOK, "FAILED", "budget-recovery")
        if command.arguments[0] == name
    ]
    result = CliRunner().invoke(main, [*documented.arguments, *more])
    assert result.exit_code == 0, result.output


def attempts(database: psycopg.Connection) -> list[tuple[int, str | None]]:
    """Return the attempts of all incidents: number and outcome."""
    return database.execute(
        "select number, outcome from budget_recovery.restore_attempt order by started_at"
    ).fetchall()


def test_refused_writes_use_no_attempt_and_are_repeated_until_they_succeed(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    captured.destroy()
    captured.create_with(max_bytes=64)
    (request,) = requested(check(instance))

    for waits in range(1, 6):
        result = run_restore(instance, request.tags)
        assert outcome(instance, result) == "waiting"
        (incident,) = incidents(database)
        assert (incident["attempts"], incident["waits"]) == (0, waits)
        assert "maximum bytes exceeded" in incident["waiting_reason"]
    assert state(database) == "recovering"
    captured.reconfigure(max_bytes=-1)

    assert outcome(instance, run_restore(instance, request.tags)) == "restored"
    assert usages(captured, "acme", "total", LIFETIME) == {None: "80", "alice": "30"}
    recorded = attempts(database)
    assert [number for number, _ in recorded] == [1, 2, 3, 4, 5, 6]
    assert str(recorded[0][1]).startswith("Stopped, and not counted. ")


def test_three_failed_attempts_fail_the_store_with_that_reason(
    captured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    fail(captured, instance)

    assert state(database) == "failed"
    recorded = attempts(database)
    assert [number for number, _ in recorded] == [1, 2, 3]
    assert all("missing after the restore" in str(outcome) for _, outcome in recorded)
    (incident,) = incidents(database)
    assert "missing after the restore" in incident["failure_detail"]
    assert incident["failure_code"] == "attempt_failed"
    # No restore is launched again, and captures stay paused.
    assert "FAILED" in skipped(supervise(instance))
    assert not requested(check(instance))
    paused = run_job(instance, current_hour)
    assert paused.success
    assert paused.asset_materializations_for_node("budget_usage_snapshots") == []


def test_an_attempt_is_repeated_after_a_minute_and_after_five_more(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    """The run itself waits for the second attempt; the supervisor launches the third."""
    captured.destroy()
    captured.create()
    (request,) = requested(check(instance))
    with opened_control_plane(services.present_settings()) as plane:
        purging = interrupted(Interruptions(after_raising=lambda: captured.purge("usage.")))
        for seconds in (60, 300):
            with pytest.raises(AttemptFailedError):
                services.recover(plane, open_store=purging)
            (incident,) = incidents(database)
            pause = incident["next_attempt_at"] - plane.clock.now()
            assert timedelta(seconds=seconds - 10) < pause <= timedelta(seconds=seconds)
            result = run_restore(instance, request.tags)
            assert outcome(instance, result) == "nothing_to_do"
            assert "due at" in skipped(supervise(instance))
    database.execute(
        "update budget_recovery.incident set next_attempt_at = now(), next_launch_at = now()"
    )
    (again,) = requested(supervise(instance))
    assert outcome(instance, run_restore(instance, again.tags)) == "restored"
    (incident,) = incidents(database)
    assert (incident["attempts"], incident["next_attempt_at"]) == (3, None)


def test_a_restore_waits_for_a_missing_bucket_without_using_an_attempt(
    captured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BUDGET_RECOVERY_CONVERGENCE_TIMEOUT_SECONDS", "0")
    captured.destroy()
    (request,) = requested(check(instance))

    for waits in (1, 2):
        result = run_restore(instance, request.tags)
        assert result.success
        assert outcome(instance, result) == "waiting"
        (incident,) = incidents(database)
        assert (incident["attempts"], incident["waits"]) == (0, waits)
        assert "does not exist" in incident["waiting_reason"]
    # The next launch follows a pause.
    assert "is due at" in skipped(supervise(instance))
    database.execute("update budget_recovery.incident set next_launch_at = now()")
    (again,) = requested(supervise(instance))
    assert again.run_key == f"{incident['incident_id']}/launch-2"

    captured.create()
    result = run_restore(instance, again.tags)

    assert outcome(instance, result) == "restored"
    assert usages(captured, "acme", "total", LIFETIME) == {None: "80", "alice": "30"}
    (incident,) = incidents(database)
    assert (incident["attempts"], incident["waiting_reason"]) == (1, None)
    assert state(database) == "healthy"


def test_a_restore_without_an_incident_does_nothing(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    before = captured.info().state.last_seq

    result = run_restore(instance)

    assert result.success
    assert outcome(instance, result) == "nothing_to_do"
    assert captured.info().state.last_seq == before
    assert incidents(database) == []


def test_the_final_check_fails_the_store_after_three_lost_attempts(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    captured.destroy()
    captured.create()
    (request,) = requested(check(instance))
    database.execute("update budget_recovery.incident set attempts = 3")

    result = run_restore(instance, request.tags)

    assert not result.success
    assert "2 counters are still lower than in the snapshots" in failure_text(result)
    assert state(database) == "failed"
    assert usages(captured, "acme", "total", LIFETIME) == {}


def test_the_final_check_accepts_a_store_restored_by_lost_attempts(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    captured.destroy()
    captured.create()
    (request,) = requested(check(instance))
    captured.spend("acme", "total", LIFETIME, {None: "80", "alice": "30"})
    database.execute("update budget_recovery.incident set attempts = 3")

    result = run_restore(instance, request.tags)

    assert outcome(instance, result) == "nothing_lost"
    assert state(database) == "healthy"


def test_the_runbooks_steps_restore_a_failed_store(
    captured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    fail(captured, instance)
    assert state(database) == "failed"
    # A hold that arrived after the last attempt had checked for one.
    database.execute(
        "update budget_recovery.incident set held_at = now(), held_by = 'ann', held_reason = 'x'"
    )

    run_documented("preview")
    # Without a terminal, --yes replaces the confirmation.
    run_documented("restore", "--yes")

    assert state(database) == "healthy"
    assert usages(captured, "acme", "total", LIFETIME) == {None: "80", "alice": "30"}
    (incident,) = incidents(database)
    assert incident["outcome"] == "restored_manually"
    assert "same" in skipped(check(instance))
    assert run_job(instance, current_hour).success


def test_the_runbooks_steps_accept_a_failed_store(
    captured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    fail(captured, instance)

    run_documented("resolve", "--yes")

    assert "same" in skipped(check(instance))
    assert state(database) == "healthy"
    assert run_job(instance, current_hour).success
    assert usages(captured, "acme", "total", LIFETIME) == {}


def test_restore_job_is_retried_twice_only_by_its_own_policy() -> None:
    assert restore.retry_policy is not None
    assert restore.retry_policy.max_retries == 2
    assert restore.retry_policy.delay == 60
    # Otherwise Dagster would multiply the attempts.
    assert restore_job.tags["dagster/max_retries"] == "0"
