import os
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.domain import (
    Baseline,
    BudgetRecord,
    CaptureSource,
    Hour,
    Recovery,
    RecoveryState,
    StoreIdentity,
    TenantSnapshot,
)
from budget_recovery_dagster.embedded import PostgresServer
from budget_recovery_dagster.errors import DatabaseUnreachableError
from tests.contract.control_planes import (
    BORN,
    NOON,
    ControlPlane,
    Counters,
    of,
    on_postgres,
)
from tests.contract.incident_scene import CLOSING, open_one
from tests.postgres_servers import kill_server
from tests.waiting import wait_until

TEAM: Counters = {("team", "lifetime"): {"alice": "1"}}
RECORDS = 60_000


@pytest.fixture(scope="module")
def doomed_server(server_dir: Path) -> Iterator[PostgresServer]:
    """Start a server that only the tests of this file use, and kill."""
    with PostgresServer(server_dir / "doomed postgres") as server:
        yield server


@pytest.fixture
def doomed_url(doomed_server: PostgresServer) -> str:
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(doomed_server.url(), autocommit=True) as connection:
        connection.execute(f'create database "{name}"'.encode())
    url = doomed_server.url(name)
    migrate(url)
    return url


@pytest.fixture(scope="module")
def large_snapshot() -> TenantSnapshot:
    """Return a snapshot whose COPY lasts long enough to be observed."""
    return TenantSnapshot(
        tenant="acme",
        captured_at=NOON + timedelta(minutes=1),
        source=CaptureSource.COUNTERS,
        identity=StoreIdentity(BORN, 100),
        records=tuple(
            BudgetRecord(
                of=of(f"budget {number}", "lifetime"),
                usages={"alice": Decimal(1)},
                omitted=(),
                shape=None,
                expiries={},
                is_truncated=False,
                covers_earlier=True,
            )
            for number in range(RECORDS)
        ),
        unreadable=(),
        drops=(),
        is_partial=False,
    )


def commit_until_it_copies(
    plane: ControlPlane, snapshot: TenantSnapshot, url: str, pool: ThreadPoolExecutor
) -> tuple["Future[Baseline]", int]:
    """Start a commit; return it and the pid of its backend while it is copying records."""
    commit = pool.submit(plane.commit, snapshot)
    copying = (
        "select pid from pg_stat_progress_copy where tuples_processed > 1000"
        " and relid = 'budget_recovery.budget_record'::regclass"
    )
    with psycopg.connect(url, autocommit=True) as observer:
        wait_until(lambda: observer.execute(copying).rowcount > 0 or commit.done())
        row = observer.execute(copying).fetchone()
    assert row is not None, "the copy was over before it was seen"
    return commit, int(row[0])


@pytest.mark.parametrize("victim", ["backend", "server"])
def test_a_kill_during_a_commit_leaves_no_partial_snapshot(
    victim: str, doomed_server: PostgresServer, doomed_url: str, large_snapshot: TenantSnapshot
) -> None:
    with (
        psycopg.connect(doomed_url, autocommit=True) as witness,
        on_postgres(doomed_url) as plane,
        ThreadPoolExecutor(1) as pool,
    ):
        plane.capture("acme", TEAM)
        before = plane.baseline
        plane.clock.set(large_snapshot.captured_at)
        commit, backend = commit_until_it_copies(plane, large_snapshot, doomed_url, pool)
        if victim == "backend":
            os.kill(backend, signal.SIGKILL)
        else:
            kill_server(doomed_server)
            doomed_server.start()
        with pytest.raises(DatabaseUnreachableError):
            commit.result()
        wait_for_recovery(witness, doomed_url)

        # The same objects keep working, and see only the first snapshot.
        wait_until(lambda: works(plane))
        (summary,) = plane.reports.captured_in(Hour(NOON))
        assert summary.captured_at == NOON
        assert plane.baseline == before
        assert counts(doomed_url) == (1, 1, 1)
        assert plane.reports.damaged_in(Hour(NOON)) == ()

        # The interrupted snapshot can be committed unchanged, once the old lease has expired.
        plane.clock.advance(timedelta(minutes=1))
        assert plane.commit(large_snapshot).identity == large_snapshot.identity
        assert counts(doomed_url) == (2, RECORDS + 1, 1)


# Closing an incident updates the row of the store last, after all other writes.
HOLD_BACK = """
select pg_advisory_lock(1);
create function hold_back() returns trigger language plpgsql as $$ begin
    perform pg_advisory_xact_lock(1);
    return new;
end $$;
create trigger hold_back before update on budget_recovery.store
    for each row execute function hold_back();
"""
HELD_BACK = """
select pid from pg_stat_activity
where wait_event = 'advisory' and datname = current_database()
"""


@pytest.mark.parametrize("victim", ["backend", "server"])
def test_a_kill_while_an_incident_is_closed_leaves_it_open(
    victim: str, doomed_server: PostgresServer, doomed_url: str
) -> None:
    lease_duration = timedelta(days=1)
    with on_postgres(doomed_url, lease_duration=lease_duration) as plane:
        incident = open_one(plane)
        before = plane.incidents.recovery(), plane.baseline
        with plane.restore_lease() as lease, ThreadPoolExecutor(1) as pool:
            with psycopg.connect(doomed_url, autocommit=True) as observer:
                observer.execute(HOLD_BACK)
                closing = pool.submit(plane.incidents.close, CLOSING, judged=incident, lease=lease)
                wait_until(lambda: observer.execute(HELD_BACK).rowcount == 1)
                [(backend,)] = observer.execute(HELD_BACK).fetchall()
                if victim == "backend":
                    os.kill(backend, signal.SIGKILL)
                else:
                    kill_server(doomed_server)
                    doomed_server.start()
                with pytest.raises(DatabaseUnreachableError):
                    closing.result()
                wait_for_recovery(observer, doomed_url)

            # The lock is free now.
            wait_until(lambda: works(plane))
            assert (plane.incidents.recovery(), plane.baseline) == before
            closed = plane.incidents.close(CLOSING, judged=incident, lease=lease)
        assert plane.incidents.recovery() == Recovery(RecoveryState.HEALTHY, None)
        assert plane.incidents.recent(10) == (closed,)
        assert plane.baseline == replace(CLOSING.baseline, version=2)


def wait_for_recovery(witness: psycopg.Connection, url: str) -> None:
    """Wait until the server has ended all its sessions, among them this one, and takes new ones.

    After the kill of one session the server ends the others, and starts again when all have ended.
    """
    wait_until(lambda: not answers(witness))

    def accepts() -> bool:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            return False
        return True

    wait_until(accepts)


def answers(connection: psycopg.Connection) -> bool:
    try:
        connection.execute("select")
    except psycopg.OperationalError:
        return False
    return True


def works(plane: ControlPlane) -> bool:
    try:
        plane.snapshots.tenants()
    except DatabaseUnreachableError:
        return False
    return True


def counts(url: str) -> tuple[int, int, int]:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "select (select count(*) from budget_recovery.capture),"
            " (select count(*) from budget_recovery.budget_record),"
            " (select count(*) from budget_recovery.budget_content)"
        ).fetchone()
    assert row is not None
    return row
