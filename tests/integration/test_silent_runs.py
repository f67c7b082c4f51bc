"""Runs of captures, tables and manual jobs without a worker: ended, so that others can start."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import dagster as dg
import psycopg
import pytest
from dagster import DagsterRunStatus

from budget_recovery_dagster.adapters.postgres import Database
from budget_recovery_dagster.domain import CAPTURE_LEASE, Hour
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.resources import ControlPlaneResource
from budget_recovery_dagster.restore_runs import DEPLOYMENT_TAG, Location, RestoreRuns
from budget_recovery_dagster.sensors import Deadline, end_silent_runs
from budget_recovery_dagster.silent_runs import silent_runs
from budget_recovery_dagster.wiring import control_plane_on, opened_control_plane
from tests import services
from tests.integration.launched_runs import started_from, status_of
from tests.integration.recovery_runs import skipped, supervise
from tests.integration.snapshot_job import capture_at, failure_text
from tests.integration.timeless_store import LeapingClock, SteppedClock, opened_at
from tests.nats_servers import Bucket

OURS = Location("budget_recovery", "__repository__")
CAPTURE, ASSETS = "hourly_snapshot_job", "__ASSET_JOB"
STARTED, CANCELING, CANCELED, FAILURE = (
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
    DagsterRunStatus.CANCELED,
    DagsterRunStatus.FAILURE,
)
ANOTHER_STORE = {"budget_recovery/deployment": "3b1b0a54-0ee0-4a4b-a3a3-5b6c1b5a1a11"}


@pytest.fixture
def now(configured: Bucket) -> datetime:
    """Return the database's time; its store is known."""
    with opened_control_plane(services.present_settings()) as plane:
        plane.registry.claim()
        return plane.clock.now()


def supervised(instance: dg.DagsterInstance, url: str, at: datetime) -> list[str]:
    """Supervise as in our code location, with the database's clock at this time."""
    with opened_at(url, SteppedClock(at)) as plane:
        runs = RestoreRuns(instance, OURS, plane.registry.claim().deployment_id)
        return end_silent_runs(runs, plane, Deadline(60))


def store_event(instance: dg.DagsterInstance, run: dg.DagsterRun, at: datetime) -> None:
    event = dg.DagsterEvent(dg.DagsterEventType.RUN_START.value, run.job_name)
    instance.report_dagster_event(event, run.run_id, timestamp=at.timestamp())


def leave_lease(database: psycopg.Connection, run: dg.DagsterRun, expired: timedelta) -> None:
    """Leave the capture lease as a worker of the run that died, expired since so long."""
    database.execute(
        "insert into budget_recovery.lease (name, token, holder, acquired_at, expires_at)"
        " values (%s, 1, %s, now() - %s - interval '30 seconds', now() - %s)",
        (CAPTURE_LEASE, f"run {run.run_id[:8]} on gw-7 (pid 1)", expired, expired),
    )


def test_a_capture_whose_lease_has_expired_is_ended_after_a_minute(
    now: datetime, instance: dg.DagsterInstance, database: psycopg.Connection, database_url: str
) -> None:
    run = started_from(instance, OURS, CAPTURE)
    leave_lease(database, run, timedelta(seconds=30))
    # For ten seconds its lease has been over for less than a minute, and then it was not silent.
    assert supervised(instance, database_url, now + timedelta(seconds=10)) == []
    assert supervised(instance, database_url, now + timedelta(seconds=40)) == []
    assert supervised(instance, database_url, now + timedelta(seconds=70)) == [
        f"Run {run.run_id[:8]} of {CAPTURE} has no worker any more: it is marked as ended."
    ]
    assert status_of(instance, run) is FAILURE


def test_a_run_that_goes_on_without_the_lease_that_it_could_not_release_is_not_ended(
    now: datetime, instance: dg.DagsterInstance, database: psycopg.Connection, database_url: str
) -> None:
    run = started_from(instance, OURS, CAPTURE)
    leave_lease(database, run, timedelta(hours=1))
    later = now + timedelta(minutes=2)
    store_event(instance, run, at=later - timedelta(seconds=30))
    assert supervised(instance, database_url, later) == []
    assert len(supervised(instance, database_url, later + timedelta(seconds=40))) == 1


@pytest.mark.parametrize("ahead", [timedelta(hours=1), -timedelta(hours=1)])
def test_a_clock_of_the_database_that_is_wrong_ends_no_run_and_saves_none(
    now: datetime, instance: dg.DagsterInstance, database_url: str, ahead: timedelta
) -> None:
    run = started_from(instance, OURS, CAPTURE)
    for minutes, ended in ((4, 0), (6, 1)):
        right = now + timedelta(minutes=minutes)
        with Database(database_url, clock=SteppedClock(right + ahead)) as database:
            plane = control_plane_on(database, services.present_settings().bucket)
            plane = replace(plane, clock=LeapingClock(database, SteppedClock(right)))
            runs = RestoreRuns(instance, OURS, plane.registry.claim().deployment_id)
            assert len(end_silent_runs(runs, plane, Deadline(60))) == ended
    assert status_of(instance, run) is FAILURE


def test_a_capture_that_holds_its_lease_is_not_ended(
    now: datetime, instance: dg.DagsterInstance, database_url: str
) -> None:
    run = started_from(instance, OURS, CAPTURE)
    later = now + timedelta(hours=1)
    with (
        opened_at(database_url, SteppedClock(later)) as plane,
        plane.leases.hold(CAPTURE_LEASE, f"run {run.run_id[:8]} on gw-7 (pid 1)"),
    ):
        assert supervised(instance, database_url, later) == []
    assert status_of(instance, run) is STARTED
    # Its lease is released, and it has been silent for an hour.
    assert len(supervised(instance, database_url, later)) == 1


@pytest.mark.parametrize(
    ("job", "assets"),
    [
        (CAPTURE, ()),
        ("tenant_tables_job", ()),
        ("manual_restore_job", ()),
        (ASSETS, ("tenant_usage_tables",)),
        (ASSETS, ("budget_usage_snapshots", "recovery_points")),
    ],
)
def test_a_run_without_lease_and_events_for_five_minutes_is_ended(
    now: datetime,
    instance: dg.DagsterInstance,
    database_url: str,
    job: str,
    assets: tuple[str, ...],
) -> None:
    run = started_from(instance, OURS, job, *assets)
    assert supervised(instance, database_url, now + timedelta(minutes=4)) == []
    assert len(supervised(instance, database_url, now + timedelta(minutes=6))) == 1
    assert status_of(instance, run) is FAILURE


def test_a_run_that_is_being_terminated_is_ended_as_canceled(
    now: datetime, instance: dg.DagsterInstance, database_url: str
) -> None:
    run = started_from(instance, OURS, CAPTURE)
    instance.report_run_canceling(run)
    supervised(instance, database_url, now + timedelta(minutes=6))
    assert status_of(instance, run) is CANCELED


def foreign_runs(instance: dg.DagsterInstance) -> Iterator[dg.DagsterRun]:
    yield started_from(instance, Location("other_team", "__repository__"), CAPTURE)
    yield started_from(instance, Location("budget_recovery", "other_team"), CAPTURE)
    yield started_from(instance, OURS, CAPTURE, tags=ANOTHER_STORE)
    yield started_from(instance, OURS, ASSETS)
    # Supervised by its incident.
    yield started_from(instance, OURS, "restore_job")


def test_runs_that_are_not_provably_ours_are_never_ended(
    now: datetime, instance: dg.DagsterInstance, database_url: str
) -> None:
    runs = list(foreign_runs(instance))
    assert supervised(instance, database_url, now + timedelta(hours=2)) == []
    assert {status_of(instance, run) for run in runs} == {STARTED}


def test_a_run_with_an_asset_of_others_is_never_ended(
    now: datetime, instance: dg.DagsterInstance, database_url: str
) -> None:
    # It may work in silence for hours.
    run = started_from(instance, OURS, ASSETS, "budget_usage_snapshots", "recovery_points")
    ours = {"budget_usage_snapshots"}
    with opened_at(database_url, SteppedClock(now + timedelta(hours=2))) as plane:
        runs = RestoreRuns(instance, OURS, plane.registry.claim().deployment_id)
        assert list(silent_runs(runs, plane, (), ours)) == []
        (found,) = silent_runs(runs, plane, (), {*ours, "recovery_points"})
    assert found.run_id == run.run_id


def test_a_tick_reports_the_runs_that_it_ends(
    now: datetime, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    run = instance.create_run_for_job(
        services.definitions().resolve_job_def(CAPTURE), status=STARTED
    )
    leave_lease(database, run, timedelta(minutes=2))
    store_event(instance, run, at=now - timedelta(minutes=2))
    assert skipped(supervise(instance)) == (
        "The store is HEALTHY. "
        f"Run {run.run_id[:8]} of {CAPTURE} has no worker any more: it is marked as ended."
    )


@dataclass
class SlowHost:
    """A host on which two minutes pass whenever a step looks at its clock, and supervision ticks.

    Events of Dagster have its time as well.
    """

    url: str
    instance: dg.DagsterInstance
    passed: timedelta = timedelta(0)
    ended: list[str] = field(default_factory=list)

    def time(self) -> datetime:
        return datetime.fromtimestamp(time.time(), UTC)

    def look(self) -> datetime:
        self.passed += timedelta(minutes=2)
        self.ended += supervised(self.instance, self.url, self.time())
        return self.time()


@dataclass(frozen=True)
class SlowClock:
    """The clock of a database on a slow host."""

    database: Database
    host: SlowHost

    def now(self) -> datetime:
        return self.database.now()

    def host_time(self) -> datetime:
        return self.host.look()

    def wait(self, span: timedelta) -> None:
        self.database.wait(span)


@dataclass(frozen=True)
class OnSlowHost(ControlPlaneResource):
    """The control plane for runs on a slow host."""

    host: SlowHost

    @contextmanager
    def opened(self) -> Iterator[ControlPlane]:
        with Database(self.host.url) as database:
            plane = control_plane_on(database, self.settings.bucket)
            yield replace(plane, clock=SlowClock(database, self.host))


@pytest.fixture
def slow_host(
    database_url: str, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> SlowHost:
    host = SlowHost(database_url, instance)
    seconds, nanoseconds = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: seconds() + host.passed.total_seconds())
    monkeypatch.setattr(
        time, "time_ns", lambda: nanoseconds() + int(host.passed.total_seconds()) * 10**9
    )
    return host


@pytest.mark.parametrize(
    ("job", "shown"),
    [
        ("recovery_points_job", "Recovery points: tenant 'tenant-5', 6 of 9."),
        ("tenant_tables_job", ": table of tenant 'tenant-5', 6 of 9."),
        # The hour is past, so its snapshots are verified.
        (CAPTURE, ": snapshot 6 of 9 is verified."),
    ],
)
def test_a_step_that_works_for_longer_than_a_dead_one_is_silent_is_not_ended(
    now: datetime,
    configured: Bucket,
    slow_host: SlowHost,
    instance: dg.DagsterInstance,
    job: str,
    shown: str,
) -> None:
    for number in range(9):
        configured.spend(f"tenant-{number}", "total", "lifetime", {None: "80"})
    past = Hour(Hour.containing(now).start - timedelta(hours=2))
    capture_at(slow_host.url, past.start + timedelta(minutes=10))
    settings = services.present_settings()
    with opened_at(slow_host.url, SteppedClock(now)) as plane:
        ours = {DEPLOYMENT_TAG: plane.registry.claim().deployment_id}
    result = (
        services.definitions()
        .resolve_job_def(job)
        .execute_in_process(
            instance=instance,
            partition_key=None if job == "recovery_points_job" else past.key,
            tags=ours,
            resources={"control_plane": OnSlowHost(settings, slow_host)},
            raise_on_error=False,
        )
    )
    assert slow_host.ended == []
    assert result.success, failure_text(result)
    assert slow_host.passed > timedelta(minutes=15)
    assert any(shown in entry.user_message for entry in instance.all_logs(result.run_id))
