"""Terminated runs of restore_job: what their processes do, and whether they cause a hold."""

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from dagster import MAX_RUNTIME_SECONDS_TAG, DagsterEventType, DagsterRunStatus

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.services.restore import hold_restore, release_restore
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.launched_runs import due, lost, recorded, status_of
from tests.integration.recovery_runs import (
    incidents,
    requested,
    skipped,
    state,
    supervise,
    usages,
)
from tests.nats_servers import Bucket
from tests.shut_gates import shut_gate
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LIFETIME = "lifetime"
_RETRIED = (DagsterEventType.STEP_UP_FOR_RETRY, DagsterEventType.STEP_RESTARTED)


@pytest.fixture
def request_(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> dg.RunRequest:
    """Return the request for the restore of a lost store."""
    return lost(configured, instance, current_hour)


def test_a_run_terminated_during_an_attempt_starts_no_further_attempt(
    configured: Bucket,
    request_: dg.RunRequest,
    database: psycopg.Connection,
    database_url: str,
    tmp_path: Path,
) -> None:
    # As dagster-io/dagster#15026.
    with dg.DagsterInstance.local_temp(str(tmp_path)) as kept:
        with shut_gate(database_url, "globex") as gate, restoring_process(tmp_path) as process:
            wait_until(lambda: gate.has_waiting or process.poll() is not None, seconds=60)
            (run,) = kept.get_runs()
            kept.report_run_canceling(run)
            process.terminate()
            assert process.wait(60) is not None
        assert status_of(kept, run) is DagsterRunStatus.CANCELED
        events = [str(entry.dagster_event_type) for entry in kept.all_logs(run.run_id)]
    assert events.count(str(DagsterEventType.STEP_START)) == 1
    assert not {*map(str, _RETRIED)} & set(events)
    assert incidents(database)[0]["attempts"] == 1
    assert usages(configured, "acme", "total", LIFETIME) == {None: "80"}
    assert usages(configured, "globex", "total", LIFETIME) == {}


@pytest.mark.parametrize(
    "is_interrupted",
    [
        True,
        # It waits for a minute.
        pytest.param(False, marks=pytest.mark.disaster),
    ],
)
def test_a_run_terminated_between_attempts_starts_no_further_attempt(
    configured: Bucket,
    request_: dg.RunRequest,
    database: psycopg.Connection,
    tmp_path: Path,
    *,
    is_interrupted: bool,
) -> None:
    configured.destroy()
    configured.create()
    # An attempt that finds only unreadable counters fails.
    for tenant in ("acme", "globex"):
        configured.put(f"usage.{tenant}.total.lifetime.=", b"unreadable")

    def has_failed_once() -> bool:
        return bool(
            database.execute(
                "select from budget_recovery.restore_attempt where ended_at is not null"
            ).fetchall()
        )

    with dg.DagsterInstance.local_temp(str(tmp_path)) as kept:
        with restoring_process(tmp_path) as process:
            wait_until(has_failed_once, seconds=60)
            (run,) = kept.get_runs()
            kept.report_run_canceling(run)
            if is_interrupted:
                process.terminate()
            # At the latest, it finds that it is terminated before the next attempt, after a minute.
            assert process.wait(100) is not None
        assert status_of(kept, run) is DagsterRunStatus.CANCELED
    assert incidents(database)[0]["attempts"] == 1
    assert state(database) == "recovering"


def restoring_process(home: Path) -> "subprocess.Popen[bytes]":
    """Run restore_job in its own process."""
    (home / "dagster.yaml").touch()
    job = ["-m", "budget_recovery_dagster.definitions", "-j", "restore_job"]
    return subprocess.Popen(
        [sys.executable, "-m", "dagster", "job", "execute", *job],
        env={**os.environ, "DAGSTER_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


# Which terminations cause a hold


def test_a_run_requested_before_a_release_and_terminated_after_it_holds_again(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    run = recorded(instance, request_, DagsterRunStatus.STARTED)
    with opened_control_plane(services.present_settings()) as plane:
        hold_restore(plane, "the disk is changed", by="ann")
        release_restore(plane, by="ann")
    assert "has no worker yet" in skipped(supervise(instance))
    instance.report_run_canceling(run)
    assert "is on hold until `budget-recovery release`." in skipped(supervise(instance))
    with opened_control_plane(services.present_settings()) as plane:
        release_restore(plane, by="ann")
    # It ended late; this is not another termination.
    instance.report_run_canceled(run)
    (again,) = requested(supervise(instance))
    assert again.run_key == f"{incidents(database)[0]['incident_id']}/launch-2"


@pytest.mark.parametrize("is_tagged", [True, False])
def test_a_terminated_manual_run_holds_the_incident(
    request_: dg.RunRequest, instance: dg.DagsterInstance, *, is_tagged: bool
) -> None:
    manual_request = dg.RunRequest(tags=request_.tags if is_tagged else {})
    run = recorded(instance, manual_request, DagsterRunStatus.STARTED)
    # A run that came meanwhile has found nothing to do.
    recorded(instance, request_, DagsterRunStatus.SUCCESS)
    instance.report_run_canceling(run)
    instance.report_run_canceled(run)
    reason = skipped(supervise(instance))
    assert reason.startswith(f"Run {run.run_id[:8]} was terminated, so incident ")


def test_a_canceled_run_holds_the_incident_even_if_its_worker_marks_it_failed(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    run = recorded(instance, request_, DagsterRunStatus.STARTED)
    due(database)
    instance.report_run_canceled(run)
    instance.report_run_failed(run)
    assert status_of(instance, run) is DagsterRunStatus.FAILURE
    assert f"Run {run.run_id[:8]} was terminated" in skipped(supervise(instance))


def test_a_terminated_run_of_another_incident_does_not_hold(
    request_: dg.RunRequest, instance: dg.DagsterInstance
) -> None:
    before = dg.RunRequest(tags={**request_.tags, "budget_recovery/incident": "an earlier one"})
    recorded(instance, request_, DagsterRunStatus.FAILURE)
    instance.report_run_canceled(recorded(instance, before, DagsterRunStatus.STARTED))
    assert "is due at" in skipped(supervise(instance))


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_run_that_dagster_ends_for_its_duration_does_not_hold(
    request_: dg.RunRequest,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    *,
    has_ended: bool,
) -> None:
    short = dg.RunRequest(tags={**request_.tags, MAX_RUNTIME_SECONDS_TAG: "0"})
    run = recorded(instance, short, DagsterRunStatus.STARTING)
    begun = dg.DagsterEvent(DagsterEventType.RUN_START.value, run.job_name)
    instance.report_dagster_event(begun, run.run_id)
    instance.report_run_canceling(run, "Canceling due to exceeding maximum runtime of 0 seconds.")
    if not has_ended:
        # Its worker may continue for a while, and is not replaced.
        assert "has no worker yet" in skipped(supervise(instance))
        return
    instance.report_run_canceled(run)
    due(database)
    (again,) = requested(supervise(instance))
    assert str(again.run_key).endswith("/launch-2")
