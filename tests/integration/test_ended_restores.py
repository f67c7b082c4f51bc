"""Runs that Dagster shows as started after their incident: they end as PostgreSQL knows it."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from dagster import DagsterRunStatus

from budget_recovery_dagster.domain import RESTORE_LEASE, Hour
from budget_recovery_dagster.embedded import PostgresServer
from budget_recovery_dagster.jobs.restore import restored_event
from budget_recovery_dagster.restore_runs import show_once
from budget_recovery_dagster.services.restore import Recovered
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.launched_runs import due, lost, recorded, status_of
from tests.integration.live_capture import capture_now
from tests.integration.recovery_runs import (
    check,
    incidents,
    requested,
    run_restore,
    skipped,
    state,
    supervise,
)
from tests.nats_servers import Bucket
from tests.postgres_servers import expire_leases
from tests.shut_gates import shut_gate
from tests.waiting import wait_until

STARTED, SUCCESS, FAILURE, CANCELED = (
    DagsterRunStatus.STARTED,
    DagsterRunStatus.SUCCESS,
    DagsterRunStatus.FAILURE,
    DagsterRunStatus.CANCELED,
)
RESTORED = dg.AssetKey("restored_usage")


@pytest.fixture
def request_(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> dg.RunRequest:
    """Return the request for the restore of a lost store."""
    return lost(configured, instance, current_hour)


def recover(run_id: str) -> None:
    """Restore the store as a run whose results Dagster does not store."""
    with opened_control_plane(services.present_settings()) as plane:
        assert isinstance(services.recover(plane, run_id=run_id), Recovered)


def two_minutes_later(instance: dg.DagsterInstance) -> str:
    """Return what the supervisor reports of a run that has had no worker for two minutes."""
    suspecting = supervise(instance)
    assert "is started but has no worker yet." in skipped(suspecting)
    count, run_id, token, since = str(suspecting.cursor).split()
    at = datetime.fromisoformat(since) - timedelta(minutes=2)
    return skipped(supervise(instance, f"{count} {run_id} {token} {at.isoformat()}"))


def shown(instance: dg.DagsterInstance) -> list[str]:
    """Return the runs of the materializations of restored_usage."""
    found = instance.fetch_materializations(RESTORED, limit=10)
    return [record.run_id for record in found.records]


def incident_of(database: psycopg.Connection) -> str:
    return str(incidents(database)[-1]["incident_id"])[:8]


def test_a_run_that_restored_the_store_is_ended_as_succeeded_with_its_event(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    run = recorded(instance, request_, STARTED)
    recover(run.run_id)
    assert state(database) == "healthy"
    assert (status_of(instance, run), shown(instance)) == (STARTED, [])

    report = two_minutes_later(instance)

    assert report == (
        f"Run {run.run_id[:8]} is marked as succeeded. Incident {incident_of(database)} ended: "
        "restored."
    )
    assert (status_of(instance, run), shown(instance)) == (SUCCESS, [run.run_id])
    # Nothing is left to end, so the snapshot after the incident is requested.
    (capture,) = requested(supervise(instance))
    assert capture.job_name == "hourly_snapshot_job"
    assert shown(instance) == [run.run_id]


def test_the_event_of_a_restore_is_stored_once_even_if_the_tick_dies_after_it(
    request_: dg.RunRequest, instance: dg.DagsterInstance
) -> None:
    run = recorded(instance, request_, STARTED)
    recover(run.run_id)
    with opened_control_plane(services.present_settings()) as plane:
        event = restored_event(plane, plane.incidents.recent(1)[0])
    assert event is not None
    show_once(instance, run.run_id, event)
    two_minutes_later(instance)
    assert (status_of(instance, run), shown(instance)) == (SUCCESS, [run.run_id])


def test_a_run_whose_attempt_another_run_made_up_for_is_ended_as_failed(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    dead = recorded(instance, request_, STARTED)
    database.execute(
        "insert into budget_recovery.restore_attempt"
        " (incident_id, loss, number, run_id, holder, started_at)"
        " select incident_id, 1, 1, %s, 'a dead host', now() from budget_recovery.incident",
        (dead.run_id,),
    )
    other = run_restore(instance, request_.tags)
    assert other.success
    assert "is marked as ended without success." in two_minutes_later(instance)
    assert (status_of(instance, dead), shown(instance)) == (FAILURE, [other.run_id])


def test_a_run_that_is_being_terminated_is_ended_as_canceled(
    configured: Bucket, instance: dg.DagsterInstance
) -> None:
    check(instance)
    run = recorded(instance, dg.RunRequest(), STARTED)
    instance.report_run_canceling(run)
    two_minutes_later(instance)
    assert (status_of(instance, run), shown(instance)) == (CANCELED, [])


def test_a_run_of_an_ended_incident_is_ended_while_another_one_waits(
    configured: Bucket,
    request_: dg.RunRequest,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
) -> None:
    run = recorded(instance, request_, STARTED)
    recover(run.run_id)
    configured.destroy()
    (again,) = requested(check(instance))
    recorded(instance, again, FAILURE)
    assert "is marked as succeeded." in two_minutes_later(instance)
    assert status_of(instance, run) is SUCCESS
    due(database)
    assert requested(supervise(instance))


def test_a_run_is_not_ended_while_a_worker_holds_the_lease(
    configured: Bucket, instance: dg.DagsterInstance
) -> None:
    check(instance)
    capture_now(Hour.containing(datetime.now(UTC)))
    run = recorded(instance, dg.RunRequest(), STARTED)
    with (
        opened_control_plane(services.present_settings()) as plane,
        plane.leases.hold(RESTORE_LEASE, "run 1 on gw-7"),
    ):
        assert skipped(supervise(instance)) == "run 1 on gw-7 is restoring."
    assert status_of(instance, run) is STARTED


# Dagster's own database


@pytest.fixture
def dagster_server(server_dir: Path) -> Iterator[PostgresServer]:
    """Start a server for Dagster alone, which a test can stop."""
    with PostgresServer(server_dir / f"dagster-{uuid.uuid4().hex[:8]}") as server:
        yield server


@contextmanager
def restoring_process(home: Path, server: PostgresServer) -> "Iterator[subprocess.Popen[bytes]]":
    """Run restore_job in a process whose Dagster stores everything on the server."""
    _, _, address = server.url().partition("://")
    storage = f"storage: {{postgres: {{postgres_url: 'postgresql+psycopg2://{address}'}}}}\n"
    (home / "dagster.yaml").write_text(storage)
    job = ["-m", "budget_recovery_dagster.definitions", "-j", "restore_job"]
    with (
        (home / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "dagster", "job", "execute", *job],
            env={**os.environ, "DAGSTER_HOME": str(home)},
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.disaster
@pytest.mark.parametrize("survives", [True, False], ids=["the worker waits", "the worker dies"])
def test_a_restore_ends_while_dagsters_database_is_stopped(
    request_: dg.RunRequest,
    database: psycopg.Connection,
    database_url: str,
    dagster_server: PostgresServer,
    tmp_path: Path,
    *,
    survives: bool,
) -> None:
    with restoring_process(tmp_path, dagster_server) as process:
        with shut_gate(database_url, "globex") as gate:
            wait_until(lambda: gate.has_waiting or process.poll() is not None, seconds=60)
            dagster_server.stop()
            gate.open()
            wait_until(lambda: state(database) == "healthy", seconds=60)
        waits = "The result waits for Dagster's database"
        wait_until(lambda: waits in (tmp_path / "log").read_text(), seconds=60)
        if not survives:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
            expire_leases(database)
        dagster_server.start()
        if survives:
            assert process.wait(120) == 0
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        (run,) = instance.get_runs()
        if not survives:
            assert (run.status, shown(instance)) == (STARTED, [])
            assert "is marked as succeeded." in two_minutes_later(instance)
        assert (status_of(instance, run), shown(instance)) == (SUCCESS, [run.run_id])
    assert [incident["attempts"] for incident in incidents(database)] == [1]
