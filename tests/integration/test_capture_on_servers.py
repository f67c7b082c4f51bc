"""Captures through the service on real servers: failures, repetition and concurrency."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import (
    MAX_CONNECTIONS,
    Database,
    PostgresLeases,
    migrate,
)
from budget_recovery_dagster.domain import CAPTURE_LEASE, Hour
from budget_recovery_dagster.embedded import NatsServer, PostgresServer
from budget_recovery_dagster.errors import DatabaseUnreachableError, LeaseHeldError
from budget_recovery_dagster.services import Captured, TenantOutcome
from tests.integration.confined_user import confined_to
from tests.integration.snapshot_job import checks, details, failure_text, metadata, run_job
from tests.integration.timeless_store import SteppedClock, capture, opened_at
from tests.nats_servers import Bucket
from tests.postgres_servers import kill_server
from tests.waiting import wait_until

LIFETIME = "lifetime"
NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)


@pytest.fixture
def guarded(
    server_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """Start a server whose user may read the tenants a and c, but not b."""
    with confined_to(
        "usage.a.>",
        "usage.c.>",
        data_dir=server_dir / "nats-with-users",
        database_url=database_url,
        monkeypatch=monkeypatch,
    ) as bucket:
        for tenant in ("a", "b", "c"):
            bucket.spend(tenant, "total", LIFETIME, {None: "10"})
        yield bucket


def test_a_tenant_that_the_user_may_not_read_is_reported_and_the_others_are_stored(
    guarded: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    # An old snapshot of b, past retention and no longer needed.
    database.execute(
        "insert into budget_recovery.capture values"
        " ('b', now() - interval '9 days', now(), 'old', 'counters', now(), 1,"
        "  0, 0, 0, 0, '[]', 0, '[]', false),"
        " ('a', now() - interval '9 days', now(), 'old', 'counters', now(), 1,"
        "  0, 0, 0, 0, '[]', 0, '[]', false)"
    )
    created = guarded.info().created
    database.execute("update budget_recovery.capture set store_created_at = %s", (created,))

    result = run_job(instance, current_hour)

    assert result.success
    shown = metadata(result)
    assert (shown["tenants_stored"], shown["tenants_failed"]) == (2, 1)
    failed, *stored = [row.data for row in shown["tenants"].records]
    assert (failed["tenant"], failed["outcome"]) == ("b", "failed")
    assert "usage.b.>" in str(failed["detail"])
    assert [row["tenant"] for row in stored] == ["a", "c"]

    coverage = checks(result)["tenant_coverage"]
    assert not coverage.passed
    assert coverage.severity is dg.AssetCheckSeverity.WARN
    assert [row["tenant"] for row in details(coverage)] == ["b"]

    kept = database.execute(
        "select tenant, count(*) from budget_recovery.capture group by tenant order by tenant"
    )
    assert kept.fetchall() == [("a", 1), ("b", 1), ("c", 1)]


def test_a_second_run_at_the_same_time_is_refused_with_the_lease_holder(
    configured: Bucket,
    database_url: str,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "10"})
    with (
        Database(database_url) as another,
        PostgresLeases(another).hold(CAPTURE_LEASE, "run 0123abcd on gw-7 (pid 42)"),
    ):
        result = run_job(instance, current_hour)
    assert not result.success
    assert "run 0123abcd on gw-7 (pid 42)" in failure_text(result)
    assert database.execute("select count(*) from budget_recovery.capture").fetchone() == (0,)
    assert run_job(instance, current_hour).success


def test_only_one_of_two_concurrent_captures_runs(configured: Bucket, database_url: str) -> None:
    for number in range(20):
        configured.spend(f"t{number}", "total", LIFETIME, {None: "10"})
    started = threading.Barrier(2)
    ended: list[Captured | Exception] = []

    def run(name: str) -> None:
        clock = SteppedClock(NOON)
        with opened_at(database_url, clock) as plane:
            started.wait(timeout=30)
            try:
                ended.append(capture(plane, clock, name))
            except Exception as error:  # noqa: BLE001 - looked at below
                ended.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    winners = [end for end in ended if isinstance(end, Captured)]
    (loser,) = [end for end in ended if not isinstance(end, Captured)]
    assert len(winners[0].stored) == 20
    assert "is running" in str(loser)


def test_any_name_is_captured_exactly(
    configured: Bucket, database_url: str, database: psycopg.Connection
) -> None:
    names = ["*", ">", "a.b", "a:b", "user:alice+x@exämple.com", "team a / 東京", "\t\n\x7f", "a"]
    for number, name in enumerate(names, start=1):
        configured.spend(name, name, LIFETIME, {name: str(number)})
    configured.put("usage.a.b.lifetime." + "x" * 1500, b"1")

    clock = SteppedClock(NOON)
    with opened_at(database_url, clock) as plane:
        captured = capture(plane, clock)

    assert len(captured.stored) == len(names)
    rows = database.execute(
        "select tenant, budget_id, entity, usage from budget_recovery.budget_entry"
    )
    assert sorted(rows.fetchall()) == sorted(
        (name, name, name, Decimal(number)) for number, name in enumerate(names, start=1)
    )
    (too_long,) = database.execute(
        "select tenant, unreadable from budget_recovery.capture where unreadable_count > 0"
    ).fetchall()
    assert too_long[0] == "a"
    assert "more than 1000" in too_long[1][0]["reason"]


def test_a_budget_missing_for_an_hour_is_missing_only_from_that_snapshot(
    configured: Bucket, database_url: str, database: psycopg.Connection
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "10"})
    clock = SteppedClock(NOON)
    with opened_at(database_url, clock) as plane:
        for present in (True, False, True):
            configured.purge("usage.acme.users.")
            if present:
                configured.spend("acme", "users", LIFETIME, {"bob": "2.50"})
            capture(plane, clock)
            clock.time += timedelta(hours=1)
    rows = database.execute(
        "select extract(hour from captured_at at time zone 'UTC')::int, budget_id"
        " from budget_recovery.budget_record order by 1, 2"
    )
    assert rows.fetchall() == [
        (12, "total"),
        (12, "users"),
        (13, "total"),
        (14, "total"),
        (14, "users"),
    ]
    contents = database.execute("select count(*) from budget_recovery.budget_content")
    assert contents.fetchone() == (2,)


@pytest.mark.disaster
def test_a_killed_postgres_leaves_whole_snapshots_and_the_next_run_succeeds(
    bucket: Bucket, nats_server: NatsServer, server_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in ("a", "b", "c"):
        bucket.spend(tenant, "total", LIFETIME, {None: "10", "bob": "4"})
    monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", nats_server.url)
    monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", bucket.name)
    clock = SteppedClock(NOON)
    with PostgresServer(server_dir / "postgres-to-be-killed") as server:
        migrate(server.url())

        def kill(outcome: TenantOutcome) -> None:
            if outcome.tenant == "a":
                kill_server(server)

        with (
            opened_at(server.url(), clock) as plane,
            pytest.raises(DatabaseUnreachableError),
        ):
            capture(plane, clock, "killed", kill)
        server.start()
        with psycopg.connect(server.url()) as connection:
            rows = connection.execute(
                "select tenant, entity, usage::text from budget_recovery.budget_entry"
            )
            assert sorted(rows.fetchall(), key=str) == [("a", "bob", "4"), ("a", None, "10")]
            # As if the lease had expired, 30 seconds after the holder's death.
            connection.execute(
                "update budget_recovery.lease"
                " set holder = null, acquired_at = null, expires_at = null"
            )
        with opened_at(server.url(), clock) as plane:
            assert len(capture(plane, clock, "next").stored) == 3


def test_a_hundred_captures_leak_nothing(
    configured: Bucket, database_url: str, database: psycopg.Connection
) -> None:
    for tenant in ("a", "b"):
        configured.spend(tenant, "total", LIFETIME, {None: "10"})
    clock = SteppedClock(NOON)
    with opened_at(database_url, clock) as plane:
        for _ in range(3):
            capture(plane, clock)
        before = open_things(database)
        for number in range(100):
            if number % 10 == 0:  # some of them fail
                with plane.leases.hold(CAPTURE_LEASE, "another"), pytest.raises(LeaseHeldError):
                    capture(plane, clock)
            assert len(capture(plane, clock, f"run {number}").stored) == 2
        # The pool may fill up, with a session and a file for each connection; 100 leaks are more.
        wait_until(lambda: open_things(database) <= before + 2 * MAX_CONNECTIONS)
    assert configured.consumers() == 0


def open_things(database: psycopg.Connection) -> int:
    """Count the threads and files of this process, and the sessions of the test's database."""
    sessions = database.execute(
        "select count(*) from pg_stat_activity where datname = current_database()"
    ).fetchone()
    assert sessions is not None
    files = len(list(Path("/proc/self/fd").iterdir()))
    return int(sessions[0]) + files + threading.active_count()
