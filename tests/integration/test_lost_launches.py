"""Launches that are recorded in the database, but never become a run."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta

import dagster as dg
import psycopg
import pytest
from dagster import DagsterRunStatus

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.sensors import (
    Deadline,
    OutOfTimeError,
    Supervised,
    supervise_restore,
    within,
)
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.launched_runs import due, lost, our_runs, recorded
from tests.integration.recovery_runs import (
    check,
    incidents,
    outcome,
    requested,
    run_restore,
    skipped,
    supervise,
)
from tests.nats_servers import Bucket
from tests.waiting import wait_until

TICK_INTERVAL = timedelta(seconds=30)


@pytest.fixture
def request_(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> dg.RunRequest:
    """Return the request for the restore of a lost store."""
    return lost(configured, instance, current_hour)


def earlier(cursor: str | None) -> str:
    """Date a suspicion one tick earlier."""
    count, suspect, token, since = str(cursor).split()
    dated = datetime.fromisoformat(since) - TICK_INTERVAL
    return f"{count} {suspect} {token} {dated.isoformat()}"


def launches(database: psycopg.Connection) -> int:
    return int(incidents(database)[0]["launches"])


@contextmanager
def launches_kept_waiting(database_url: str) -> Iterator[None]:
    """Lock the incident for a while."""
    with psycopg.connect(database_url) as connection:
        connection.execute("select from budget_recovery.incident for update")
        connection.execute("select from budget_recovery.store for update")
        yield


def test_a_request_that_never_became_a_run_is_repeated_by_the_next_ticks(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    # As dagster-io/dagster#33741: a requested run was never launched.
    database.execute(
        "update budget_recovery.incident set next_launch_at = now() + interval '5 minutes'"
    )
    first = supervise(instance)
    assert "Launch 1 has no run yet." in skipped(first)
    assert "nobody" not in skipped(check(instance))

    (again,) = requested(supervise(instance, earlier(first.cursor)))

    # With the same key, so that Dagster creates no second run if the first was only slow.
    assert (again.run_key, again.tags) == (request_.run_key, request_.tags)
    assert launches(database) == 1
    run = recorded(instance, again, DagsterRunStatus.FAILURE)
    assert "is due at" in skipped(supervise(instance, earlier(first.cursor)))
    assert run.tags["budget_recovery/launch"] == "1"
    due(database)
    (second,) = requested(supervise(instance))
    assert outcome(instance, run_restore(instance, second.tags)) == "restored"


def test_the_next_check_repeats_a_lost_launch_without_the_supervisor(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    recorded(instance, request_, DagsterRunStatus.FAILURE)
    due(database)
    (retry,) = requested(check(instance))
    assert str(retry.run_key).endswith("/launch-2")
    # Ten minutes later it has not become a run.
    due(database)
    (again,) = requested(check(instance))
    assert str(again.run_key).endswith("/launch-3")
    assert outcome(instance, run_restore(instance, again.tags)) == "restored"


def test_a_launch_recorded_by_an_abandoned_tick_is_requested_by_the_next_ticks(
    request_: dg.RunRequest,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    database_url: str,
) -> None:
    recorded(instance, request_, DagsterRunStatus.FAILURE)
    due(database)
    with (
        opened_control_plane(services.present_settings()) as plane,
        ThreadPoolExecutor(1) as threads,
        launches_kept_waiting(database_url),
    ):
        tick = threads.submit(
            within, 1.0, lambda late: supervise_restore(our_runs(instance, plane), plane, late)
        )
        with pytest.raises(OutOfTimeError):
            tick.result()
    # The abandoned tick has recorded a launch that is never requested.
    wait_until(lambda: launches(database) == 2)
    first = supervise(instance)
    (again,) = requested(supervise(instance, earlier(first.cursor)))
    assert str(again.run_key).endswith("/launch-2")
    assert launches(database) == 2


def test_a_tick_after_its_deadline_records_no_launch(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    recorded(instance, request_, DagsterRunStatus.FAILURE)
    due(database)

    def tick(seconds: float) -> Supervised:
        with opened_control_plane(services.present_settings()) as plane:
            return supervise_restore(our_runs(instance, plane), plane, Deadline(seconds))

    late = tick(0)
    assert (late.request, launches(database)) == (None, 1)
    assert "took too long" in late.reason
    in_time = tick(10)
    assert in_time.request is not None
    assert launches(database) == 2
