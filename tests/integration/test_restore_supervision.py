"""The supervisor and the runs of a restore: running, dead, canceled and on hold."""

from datetime import datetime, timedelta
from typing import Any

import dagster as dg
import psycopg
import pytest
from click.testing import CliRunner, Result
from dagster import DagsterRunStatus

from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.domain import RESTORE_LEASE, Hour
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.launched_runs import due, lost, recorded, status_of
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
from tests.integration.snapshot_job import failure_text
from tests.nats_servers import Bucket

LIFETIME = "lifetime"
MINUTE = timedelta(minutes=1)


@pytest.fixture
def request_(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> dg.RunRequest:
    """Return the request for the restore of a lost store."""
    return lost(configured, instance, current_hour)


def earlier(cursor: str | None, by: timedelta) -> str:
    """Date a suspicion earlier by this duration."""
    count, run_id, token, since = str(cursor).split()
    return f"{count} {run_id} {token} {(datetime.fromisoformat(since) - by).isoformat()}"


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def run_job(
    instance: dg.DagsterInstance, name: str, config: dict[str, Any] | None = None
) -> dg.ExecuteInProcessResult:
    return (
        services.definitions()
        .resolve_job_def(name)
        .execute_in_process(instance=instance, run_config=config, raise_on_error=False)
    )


def hold_job(instance: dg.DagsterInstance, reason: str) -> dg.ExecuteInProcessResult:
    config = {"ops": {"hold_incident": {"config": {"reason": reason}}}}
    return run_job(instance, "hold_restore_job", config)


# Runs that Dagster shows as started


def test_a_run_with_a_worker_is_neither_replaced_nor_declared_dead(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    run = recorded(instance, request_, DagsterRunStatus.STARTED)
    due(database)
    # No tick has seen the worker take the lease.
    suspecting = supervise(instance)
    assert "has no worker yet" in skipped(suspecting)
    with (
        opened_control_plane(services.present_settings()) as plane,
        plane.leases.hold(RESTORE_LEASE, "run 1 on gw-7"),
    ):
        cursor: str | None = earlier(suspecting.cursor, timedelta(days=1))
        for _ in range(3):
            tick = supervise(instance, cursor)
            assert skipped(tick) == "run 1 on gw-7 is restoring."
            cursor = tick.cursor
            # The check shows the same, whatever the status of the run.
            assert "run 1 on gw-7 is restoring." in skipped(check(instance))
        assert status_of(instance, run) is DagsterRunStatus.STARTED
        instance.report_run_failed(run)
        assert skipped(supervise(instance, cursor)) == "run 1 on gw-7 is restoring."
    assert incidents(database)[0]["launches"] == 1


def test_a_worker_seen_between_two_ticks_restarts_the_minute(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    run = recorded(instance, request_, DagsterRunStatus.STARTED)
    cursor = earlier(supervise(instance).cursor, MINUTE)
    with (
        opened_control_plane(services.present_settings()) as plane,
        plane.leases.hold(RESTORE_LEASE, "run 1"),
    ):
        pass
    assert "has no worker yet" in skipped(supervise(instance, cursor))
    assert status_of(instance, run) is DagsterRunStatus.STARTED


def test_a_started_run_without_a_worker_is_dead_after_a_minute_and_launched_again(
    configured: Bucket,
    request_: dg.RunRequest,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
) -> None:
    silent = recorded(instance, request_, DagsterRunStatus.STARTED)
    due(database)
    first = supervise(instance)
    later = supervise(instance, earlier(first.cursor, MINUTE / 2))
    assert "has no worker yet" in skipped(later)
    assert status_of(instance, silent) is DagsterRunStatus.STARTED

    declaring = supervise(instance, earlier(later.cursor, MINUTE / 2))

    assert "it is marked as failed" in skipped(declaring)
    assert status_of(instance, silent) is DagsterRunStatus.FAILURE
    (again,) = requested(supervise(instance, declaring.cursor))
    assert again.run_key == f"{incidents(database)[0]['incident_id']}/launch-2"
    assert outcome(instance, run_restore(instance, again.tags)) == "restored"
    assert usages(configured, "acme", "total", LIFETIME) == {None: "80"}
    assert state(database) == "healthy"


# Runs that an operator cancels


@pytest.mark.parametrize("status", [DagsterRunStatus.NOT_STARTED, DagsterRunStatus.STARTED])
def test_a_canceled_run_holds_the_incident_until_a_release_launches_a_new_one(
    request_: dg.RunRequest,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    status: DagsterRunStatus,
) -> None:
    run = recorded(instance, request_, status)
    due(database)
    database.execute("update budget_recovery.incident set attempts = 2")
    instance.report_run_canceled(run)

    assert "is on hold until `budget-recovery release`." in skipped(supervise(instance))
    for tick in (supervise(instance), check(instance)):
        assert f"run {run.run_id[:8]} was terminated in Dagster" in skipped(tick)
    assert outcome(instance, run_restore(instance, request_.tags)) == "nothing_to_do"
    page = " ".join(command("status").output.split())
    assert f"run {run.run_id[:8]} was terminated in Dagster" in page
    assert "budget-recovery release" in page

    assert command("release").exit_code == 0

    (again,) = requested(supervise(instance))
    (incident,) = incidents(database)
    assert again.run_key == f"{incident['incident_id']}/launch-2"
    assert incident["attempts"] == 0
    assert "On hold since" not in command("status").output
    assert outcome(instance, run_restore(instance, again.tags)) == "restored"
    # The canceled run has no further effect.
    (capture,) = requested(supervise(instance))
    assert capture.job_name == "hourly_snapshot_job"


# Holds by jobs and commands


@pytest.mark.parametrize("reason", ["", " \n"])
def test_a_hold_needs_a_reason(
    request_: dg.RunRequest,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    reason: str,
) -> None:
    by_job = hold_job(instance, reason)
    assert not by_job.success
    assert "The reason is empty." in failure_text(by_job)
    by_command = command("hold", "--reason", reason)
    assert by_command.exit_code == 2
    assert "The reason is empty." in by_command.output
    assert incidents(database)[0]["held_at"] is None


def test_hold_and_release_are_refused_without_a_restore(
    configured: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    check(instance)
    message = "The store is HEALTHY: no restore is under way."
    for job in (hold_job(instance, "why"), run_job(instance, "release_restore_job")):
        assert not job.success
        assert message in failure_text(job)
    for arguments in (("hold", "--reason", "why"), ("release",)):
        refused = command(*arguments)
        assert refused.exit_code != 0
        assert message in (refused.output or str(refused.exception))
    assert state(database) == "healthy"


def test_an_incident_on_hold_keeps_its_first_reason_and_is_released_once(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    due(database)
    first = hold_job(instance, "the disk is changed")
    assert first.success
    held = incidents(database)
    assert held[0]["held_by"] == f"run {first.run_id[:8]}"
    again = command("hold", "--reason", "another")
    assert again.exit_code == 0
    output = " ".join(again.output.split())
    assert ", by run " in output
    assert "The new reason is not stored." in output
    assert incidents(database) == held
    assert "the disk is changed" in skipped(supervise(instance))
    assert run_job(instance, "release_restore_job").success
    released = incidents(database)
    # A second release succeeds and changes nothing.
    second = command("release")
    assert (second.exit_code, second.output) == (
        0,
        f"Incident {held[0]['incident_id'][:8]} is not on hold. Nothing was changed.\n",
    )
    assert incidents(database) == released
    (request,) = requested(supervise(instance))
    assert request.run_key == f"{released[0]['incident_id']}/launch-2"
    assert hold_job(instance, "once more").success
    assert outcome(instance, run_restore(instance, request.tags)) == "nothing_to_do"
    assert incidents(database)[0]["attempts"] == 0
