"""A run of restore_job that is terminated, in a process of its own, which may be sent a signal."""

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from dagster import DagsterEventType, DagsterRunStatus

from budget_recovery_dagster.domain.moments import Hour
from tests.integration.launched_runs import lost, status_of
from tests.integration.recovery_runs import incidents, state, usages
from tests.nats_servers import Bucket
from tests.shut_gates import shut_gate
from tests.waiting import wait_until

LIFETIME = "lifetime"
_RETRIED = (DagsterEventType.STEP_UP_FOR_RETRY, DagsterEventType.STEP_RESTARTED)


@pytest.fixture
def request_(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> dg.RunRequest:
    """The request for the restore of a store that was lost."""
    return lost(configured, instance, current_hour)


def test_a_run_that_is_terminated_at_work_begins_no_further_attempt(
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
        said = [str(entry.dagster_event_type) for entry in kept.all_logs(run.run_id)]
    assert said.count(str(DagsterEventType.STEP_START)) == 1
    assert not {*map(str, _RETRIED)} & set(said)
    assert incidents(database)[0]["attempts"] == 1
    assert usages(configured, "acme", "total", LIFETIME) == {None: "80"}
    assert usages(configured, "globex", "total", LIFETIME) == {}


def test_a_run_that_is_terminated_in_the_pause_between_attempts_begins_no_further_one(
    configured: Bucket,
    request_: dg.RunRequest,
    database: psycopg.Connection,
    tmp_path: Path,
) -> None:
    configured.destroy()
    configured.create_with(max_bytes=64)

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
            process.terminate()
            assert process.wait(60) is not None
        assert status_of(kept, run) is DagsterRunStatus.CANCELED
    # A second one may have begun just before; it would have been followed by the third.
    assert incidents(database)[0]["attempts"] < 3
    assert state(database) == "RECOVERING"


def restoring_process(home: Path) -> "subprocess.Popen[bytes]":
    """Run restore_job in a process of its own."""
    (home / "dagster.yaml").touch()
    job = ["-m", "budget_recovery_dagster.definitions", "-j", "restore_job"]
    return subprocess.Popen(
        [sys.executable, "-m", "dagster", "job", "execute", *job],
        env={**os.environ, "DAGSTER_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
