import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest

from budget_recovery_dagster.domain import Hour, RetentionPolicy, StoreIdentity, TenantSnapshot
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    BudgetRecoveryError,
    CapturesPausedError,
    DatabaseError,
)
from budget_recovery_dagster.ports import Lease
from tests.contract.control_planes import (
    BORN,
    NOON,
    ControlPlane,
    Counters,
    on_postgres,
    point_of,
    reading,
)
from tests.waiting import wait_until

HOUR = timedelta(hours=1)
TEAM: Counters = {("team", "lifetime"): {"alice": "1"}}


@pytest.fixture
def plane(postgres_plane: ControlPlane) -> ControlPlane:
    return postgres_plane


@pytest.fixture
def lease(plane: ControlPlane) -> Iterator[Lease]:
    """Return one lease for concurrent workers, so that only the database separates them."""
    with plane.lease() as lease:
        yield lease


def count(admin: psycopg.Connection, table: str) -> int:
    row = admin.execute(f"select count(*) from budget_recovery.{table}".encode()).fetchone()
    assert row is not None
    return int(row[0])


def commit(plane: ControlPlane, snapshot: TenantSnapshot, lease: Lease) -> None:
    plane.snapshots.commit(
        snapshot,
        hour=Hour.containing(snapshot.captured_at),
        run_id="a run",
        lease=lease,
        judged=plane.baseline,
    )


# What an hour costs


def test_an_unchanged_budget_costs_a_small_row_an_hour(
    plane: ControlPlane, admin: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    hours, budgets = 100, 100
    usages = {f"user:{number}@example.com": f"{number}.123456" for number in range(20)}
    counters = {(f"budget-{number}", "lifetime"): usages for number in range(budgets)}

    def size(table: str) -> int:
        row = admin.execute("select pg_total_relation_size(%s::regclass)", (table,)).fetchone()
        assert row is not None
        return int(row[0])

    plane.capture("acme", counters, at=NOON)
    first_hour = {name: size(f"budget_recovery.{name}") for name in ("budget_record", "capture")}
    for hour in range(1, hours):
        plane.capture("acme", counters, at=NOON + hour * HOUR)
    assert count(admin, "budget_content") == 1
    assert count(admin, "budget_record") == hours * budgets
    # Row, line pointer and three index entries.
    grown = size("budget_recovery.budget_record") - first_hour["budget_record"]
    bytes_per_record = grown / ((hours - 1) * budgets)
    with capsys.disabled():
        print(f"\n{bytes_per_record:.0f} bytes per unchanged budget and hour")  # noqa: T201
    assert bytes_per_record < 250


def test_equal_contents_are_stored_once(plane: ControlPlane, admin: psycopg.Connection) -> None:
    plane.capture("acme", {("a", "lifetime"): {"x": "1", "y": "2"}})
    plane.capture("other", {("b", "2026-11"): {"y": "2", "x": "1"}, ("c", "2026-11"): {"x": "1"}})
    plane.capture("third", {("a", "lifetime"): {"x": "1", "y": "1"}})
    assert count(admin, "budget_content") == 3


def test_reading_a_recovery_point_stops_at_the_newest_covering_record(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.capture("acme", {("team", "lifetime"): {"alice": "1"}}, at=NOON)
    plane.capture("acme", {("team", "lifetime"): {"alice": "2"}}, at=NOON + HOUR)
    # If the first content were read, this would show.
    admin.execute("update budget_recovery.budget_content set usages = '{99}' where usages = '{1}'")
    assert plane.points.current_usages("acme", NOON + HOUR) == point_of(
        {("team", "lifetime"): {"alice": "2"}}
    )


# Concurrency


def test_only_one_of_concurrent_commits_on_the_same_baseline_succeeds(
    plane: ControlPlane, admin: psycopg.Connection, lease: Lease
) -> None:
    judged = plane.baseline

    def attempt(number: int) -> type[Exception] | None:
        snapshot = plane.take(reading(f"tenant {number}", TEAM))
        try:
            plane.snapshots.commit(
                snapshot, hour=Hour(NOON), run_id="r", lease=lease, judged=judged
            )
        except BudgetRecoveryError as error:
            return type(error)
        return None

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(attempt, range(8)))
    assert outcomes.count(None) == 1
    assert outcomes.count(BaselineMovedError) == 7
    assert (count(admin, "capture"), count(admin, "budget_record")) == (1, 1)
    assert plane.baseline is not None
    assert plane.baseline.version == 1


def test_a_commit_that_waited_for_an_incident_is_refused(
    plane: ControlPlane, admin: psycopg.Connection, lease: Lease
) -> None:
    snapshot = plane.take(reading("acme", TEAM))
    with ThreadPoolExecutor(1) as pool:
        with admin.transaction():
            admin.execute("select from budget_recovery.store for update")
            admin.execute("update budget_recovery.store set state = 'recovering'")
            late = pool.submit(commit, plane, snapshot, lease)
            wait_until(lambda: waits_for_a_lock(admin))
        with pytest.raises(CapturesPausedError):
            late.result()
    assert count(admin, "capture") == 0


def test_the_hour_is_checked_after_waiting_for_the_store(
    plane: ControlPlane, admin: psycopg.Connection, lease: Lease
) -> None:
    snapshot = plane.take(reading("acme", TEAM))
    with ThreadPoolExecutor(1) as pool:
        with admin.transaction():
            admin.execute("select from budget_recovery.store for update")
            late = pool.submit(commit, plane, snapshot, lease)
            wait_until(lambda: waits_for_a_lock(admin))
            plane.clock.set(NOON + timedelta(seconds=10))
        late.result()
    row = admin.execute("select stored_at from budget_recovery.capture").fetchone()
    assert row == (NOON + timedelta(seconds=10),)


def waits_for_a_lock(admin: psycopg.Connection) -> bool:
    waiting = "select from pg_stat_activity where wait_event_type = 'Lock'"
    return admin.execute(f"{waiting} and datname = current_database()".encode()).rowcount > 0


DAY = RetentionPolicy(days=1)


def test_concurrent_prunes_and_commits_never_lose_a_shared_content(
    database_url: str, admin: psycopg.Connection
) -> None:
    """Three contents alternate, so that a commit may share a content that is being pruned."""
    stop = threading.Event()

    def prune_on(plane: ControlPlane, lease: Lease) -> int:
        removed = 0
        while not stop.is_set():
            report = plane.snapshots.prune(["acme"], policy=DAY, now=plane.clock.now(), lease=lease)
            removed += report.contents
        return removed

    def commit_on(plane: ControlPlane, lease: Lease) -> None:
        for step in range(120):
            plane.clock.set(NOON + step * timedelta(days=1))
            token = plane.clock.now().date().isoformat()
            content = {"alice": str(step % 3)}
            commit(plane, plane.take(reading("acme", {("team", token): content})), lease)

    years = timedelta(days=3650)
    with on_postgres(database_url, lease_duration=years) as plane, plane.lease() as lease:
        with ThreadPoolExecutor(1) as pool:
            pruning = pool.submit(prune_on, plane, lease)
            try:
                commit_on(plane, lease)
            finally:
                stop.set()
        assert pruning.result() > 0
        assert len(plane.points.current_usages("acme", plane.clock.now())) == 1
        assert plane.reports.damaged_in(Hour.containing(plane.clock.now())) == ()
        plane.snapshots.prune(["acme"], policy=DAY, now=plane.clock.now(), lease=lease)
    assert (count(admin, "capture"), count(admin, "budget_content")) == (2, 2)


def test_three_hundred_commits_leave_no_session_and_no_thread(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.capture("acme", TEAM)
    threads = threading.active_count()
    for number in range(300):
        plane.capture("acme", TEAM, at=NOON + timedelta(seconds=number + 1))
    assert threading.active_count() <= threads
    sessions = "select count(*) from pg_stat_activity where application_name = 'budget-recovery'"
    row = admin.execute(f"{sessions} and datname = current_database()".encode()).fetchone()
    assert row is not None
    assert row[0] <= 4
    assert count(admin, "capture") == 301


# A missing row of the store


def test_a_database_without_a_store_refuses_commits(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    with plane.lease() as lease:
        snapshot = plane.take(reading("acme", TEAM))
        admin.execute("delete from budget_recovery.store")
        with pytest.raises(DatabaseError, match="does not belong to a store yet"):
            plane.snapshots.commit(snapshot, hour=Hour(NOON), run_id="r", lease=lease, judged=None)
    assert plane.registry.claim().baseline is None


def test_the_newest_identity_does_not_depend_on_the_store_row(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.capture("acme", TEAM)
    admin.execute("delete from budget_recovery.store")
    assert plane.snapshots.newest_identity() == StoreIdentity(BORN, next(plane.sequences) - 1)
