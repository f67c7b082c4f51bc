"""Runs of other installations in the same Dagster instance: never waited for, never touched."""

from datetime import timedelta
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from dagster import DagsterRunStatus
from dagster._core.remote_origin import (
    GrpcServerCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.storage.tags import (
    RUN_KEY_TAG,
    SCHEDULE_NAME_TAG,
    SCHEDULED_EXECUTION_TIME_TAG,
)

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.restore_runs import Location, RestoreRuns
from budget_recovery_dagster.sensors import Deadline, Supervised, read_suspicion, supervise_restore
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.launched_runs import due, lost, status_of
from tests.integration.recovery_runs import incidents, schedule_tick, state
from tests.nats_servers import Bucket

REPOSITORY = "__repository__"
OURS = Location("budget_recovery", REPOSITORY)
SAME_REPOSITORY = Location("other_team", REPOSITORY)
SAME_LOCATION = Location("budget_recovery", "other_team")
ANOTHER_STORE = {"budget_recovery/deployment": "3b1b0a54-0ee0-4a4b-a3a3-5b6c1b5a1a11"}
UNFINISHED = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED]


@pytest.fixture
def request_(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> dg.RunRequest:
    """Return the request for the restore of a lost store."""
    return lost(configured, instance, current_hour)


def launched(
    instance: dg.DagsterInstance,
    location: Location | None,
    status: DagsterRunStatus,
    tags: dict[str, str] | None = None,
) -> dg.DagsterRun:
    """Record a run of a job called restore_job, as launched from a code location."""
    job = services.definitions().resolve_job_def("restore_job")
    origin = None
    if location is not None:
        code = GrpcServerCodeLocationOrigin(
            host="localhost", port=4000, location_name=location.name
        )
        origin = RemoteJobOrigin(RemoteRepositoryOrigin(code, location.repository), job.name)
    run = instance.create_run_for_job(job, status=status, tags=tags, remote_job_origin=origin)
    if status is DagsterRunStatus.STARTED:
        event = dg.DagsterEvent(dg.DagsterEventType.RUN_START.value, run.job_name)
        instance.report_dagster_event(event, run.run_id)
    return run


def supervised(instance: dg.DagsterInstance, *, after: timedelta = timedelta()) -> Supervised:
    """Supervise twice as in our code location, the second time as if so much later."""
    with opened_control_plane(services.present_settings()) as plane:
        runs = RestoreRuns(instance, OURS, plane.registry.claim().deployment_id)
        first = supervise_restore(runs, plane, Deadline(60))
        if not after or first.suspicion is None:
            return first
        since = first.suspicion.since - after
        earlier = f"0 {first.suspicion.suspect} {first.suspicion.token} {since.isoformat()}"
        return supervise_restore(runs, plane, Deadline(60), read_suspicion(earlier))


FOREIGN = {
    "same repository name": (SAME_REPOSITORY, {}),
    "same location name": (SAME_LOCATION, {}),
    "another store": (OURS, ANOTHER_STORE),
    "another store elsewhere": (SAME_REPOSITORY, ANOTHER_STORE),
    "no location and no tags": (None, {}),
}
foreign = pytest.mark.parametrize(("location", "tags"), FOREIGN.values(), ids=FOREIGN)


@foreign
@pytest.mark.parametrize("status", UNFINISHED)
def test_a_foreign_run_blocks_no_launch_and_is_not_marked(
    request_: dg.RunRequest,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    location: Location | None,
    tags: dict[str, str],
    status: DagsterRunStatus,
) -> None:
    theirs = launched(instance, location, status, tags)
    due(database)
    decided = supervised(instance, after=timedelta(hours=1))
    assert decided.request is not None, decided.reason
    assert status_of(instance, theirs) is status


@foreign
def test_terminating_a_foreign_run_does_not_hold_the_incident(
    request_: dg.RunRequest,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    location: Location | None,
    tags: dict[str, str],
) -> None:
    theirs = launched(instance, location, DagsterRunStatus.STARTED, tags)
    instance.report_run_canceling(theirs)
    instance.report_run_canceled(theirs)
    assert "on hold" not in supervised(instance).reason
    assert incidents(database)[0]["held_at"] is None


@foreign
def test_a_foreign_run_is_left_alone_without_an_incident(
    configured: Bucket,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    location: Location | None,
    tags: dict[str, str],
) -> None:
    theirs = launched(instance, location, DagsterRunStatus.STARTED, tags)
    reason = supervised(instance, after=timedelta(hours=1)).reason
    assert reason == "The store is HEALTHY."
    assert status_of(instance, theirs) is DagsterRunStatus.STARTED
    assert state(database) == "healthy"


def test_a_flood_of_foreign_runs_does_not_hide_ours(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    ours = launched(instance, OURS, DagsterRunStatus.STARTED, dict(request_.tags))
    for _ in range(30):
        launched(instance, SAME_REPOSITORY, DagsterRunStatus.SUCCESS)
    due(database)
    assert supervised(instance).reason == (
        f"Run {ours.run_id[:8]} is started but has no worker yet."
    )


@pytest.mark.parametrize("is_tagged", [True, False], ids=["sensor", "launchpad"])
def test_a_run_of_our_location_counts_with_and_without_tags(
    request_: dg.RunRequest,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    *,
    is_tagged: bool,
) -> None:
    tags = dict(request_.tags) if is_tagged else {}
    ours = launched(instance, OURS, DagsterRunStatus.STARTED, tags)
    due(database)
    assert "it is marked as failed" in supervised(instance, after=timedelta(hours=1)).reason
    assert status_of(instance, ours) is DagsterRunStatus.FAILURE


def test_a_run_without_a_location_counts_by_the_tags_that_it_gives_itself(
    request_: dg.RunRequest, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    # As `dagster job execute` creates it.
    ours = launched(instance, None, DagsterRunStatus.STARTED, dict(request_.tags))
    due(database)
    assert supervised(instance).reason == (
        f"Run {ours.run_id[:8]} is started but has no worker yet."
    )


def test_a_schedule_of_the_same_name_does_not_take_our_hour(
    configured: Bucket, current_hour: Hour, tmp_path: Path
) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        instance.create_run_for_job(
            services.definitions().resolve_job_def("hourly_snapshot_job"),
            status=DagsterRunStatus.SUCCESS,
            tags={
                **ANOTHER_STORE,
                SCHEDULE_NAME_TAG: "hourly_snapshot_schedule",
                SCHEDULED_EXECUTION_TIME_TAG: current_hour.start.isoformat(),
                RUN_KEY_TAG: current_hour.key,
            },
        )
        requested = schedule_tick(instance, current_hour.start + timedelta(minutes=59))
        assert isinstance(requested, dg.RunRequest)
        assert requested.tags["budget_recovery/deployment"] not in ANOTHER_STORE.values()
