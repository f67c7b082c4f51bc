"""Launches that are counted in the database and of which no run ever comes."""

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
from budget_recovery_dagster.settings import load_settings
from budget_recovery_dagster.wiring import opened_control_plane
from tests.integration.launched_runs import due, lost, recorded
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

LOOKS_APART = timedelta(seconds=30)


@pytest.fixture
def request_(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> dg.RunRequest:
    """The request for the restore of a store that was lost."""
    return lost(configured, instance, current_hour)


def earlier(cursor: str | None) -> str:
    """Let a suspicion be of the look before, as time makes it."""
    count, suspect, token, since = str(cursor).split()
    moment = datetime.fromisoformat(since) - LOOKS_APART
    return f"{count} {suspect} {token} {moment.isoformat()}"


def launches(database: psycopg.Connection) -> int:
    return int(incidents(database)[0]["launches"])


@contextmanager
def launches_kept_waiting(database_url: str) -> Iterator[None]:
    """Let nobody change the incident for a while."""
    with psycopg.connect(database_url) as connection:
        connection.execute("select from budget_recovery.incident for update")
        connection.execute("select from budget_recovery.store for update")
        yield


def test_a_request_that_never_became_a_run_is_made_again_by_the_next_looks(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    # As dagster-io/dagster#33741: what was promised was never launched.
    database.execute(
        "update budget_recovery.incident set next_launch_at = now() + interval '5 minutes'"
    )
    first = supervise(instance)
    assert "Launch 1 has no run yet." in skipped(first)
    assert "nobody" not in skipped(check(instance))

    (again,) = requested(supervise(instance, earlier(first.cursor)))

    # By the same key: where the first one was only slow, Dagster makes no second run of it.
    assert (again.run_key, again.tags) == (request_.run_key, request_.tags)
    assert launches(database) == 1
    run = recorded(instance, again, DagsterRunStatus.FAILURE)
    assert "is due at" in skipped(supervise(instance, earlier(first.cursor)))
    assert run.tags["budget_recovery/launch"] == "1"
    due(database)
    (second,) = requested(supervise(instance))
    assert outcome(instance, run_restore(instance, second.tags)) == "restored"


def test_without_the_supervisor_the_next_check_picks_a_lost_retry_up(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    recorded(instance, request_, DagsterRunStatus.FAILURE)
    due(database)
    (retry,) = requested(check(instance))
    assert str(retry.run_key).endswith("/launch-2")
    # Nothing has come of it ten minutes later.
    due(database)
    (again,) = requested(check(instance))
    assert str(again.run_key).endswith("/launch-3")
    assert outcome(instance, run_restore(instance, again.tags)) == "restored"


def test_a_tick_that_is_broken_off_while_it_counts_a_launch_costs_a_minute_at_most(
    request_: dg.RunRequest,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    database_url: str,
) -> None:
    recorded(instance, request_, DagsterRunStatus.FAILURE)
    due(database)
    with (
        opened_control_plane(load_settings()) as plane,
        ThreadPoolExecutor(1) as threads,
        launches_kept_waiting(database_url),
    ):
        tick = threads.submit(within, 1.0, lambda late: supervise_restore(instance, plane, late))
        with pytest.raises(OutOfTimeError):
            tick.result()
    # What was given up has counted a launch that nobody asks Dagster for.
    wait_until(lambda: launches(database) == 2)
    first = supervise(instance)
    (again,) = requested(supervise(instance, earlier(first.cursor)))
    assert str(again.run_key).endswith("/launch-2")
    assert launches(database) == 2


def test_a_tick_whose_time_is_over_counts_no_launch(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    recorded(instance, request_, DagsterRunStatus.FAILURE)
    due(database)

    def tick(seconds: float) -> Supervised:
        with opened_control_plane(load_settings()) as plane:
            return supervise_restore(instance, plane, Deadline(seconds))

    late = tick(0)
    assert (late.request, launches(database)) == (None, 1)
    assert "took too long" in late.reason
    in_time = tick(10)
    assert in_time.request is not None
    assert launches(database) == 2
