"""Restores whose workers are killed or stopped, and their successors."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.domain import RESTORE_LEASE, FailureReason, Hour, RecoveryState
from budget_recovery_dagster.embedded import PostgresServer
from budget_recovery_dagster.errors import AttemptFailedError, DatabaseError, StoreError
from budget_recovery_dagster.ports import Incidents
from budget_recovery_dagster.services.restore import GaveUp, Recovered, RecoveryResult
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.live_capture import capture_now
from tests.integration.recovery_harness import all_stored
from tests.integration.recovery_runs import incidents, state, usages
from tests.integration.restore_worker import Overriding, Worker, killed
from tests.nats_servers import Bucket
from tests.postgres_servers import expire_leases, kill_server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LIFETIME = "lifetime"
# More than are in flight at once: the first are written before the last are sent.
MANY = 2_500
LATE = 2_300


@pytest.fixture
def lost(configured: Bucket, database: psycopg.Connection) -> Bucket:
    """Return a store of two tenants whose loss was detected."""
    lose(configured)
    return configured


def lose(bucket: Bucket) -> None:
    value = b'{"usage":"1.5","updated_at":"2026-11-29T14:00:00Z"}'
    bucket.put_many({f"usage.acme.users.lifetime.user{n}": value for n in range(MANY)})
    bucket.spend("globex", "total", LIFETIME, {None: "80", "bob": "5"})
    with opened_control_plane(services.present_settings()) as plane:
        capture_now(Hour.containing(plane.clock.now()))
        services.check(plane)
        bucket.destroy()
        bucket.create()
        services.check(plane)
        assert plane.incidents.recovery().state is RecoveryState.RECOVERING


def run(run_id: str) -> RecoveryResult:
    """Recover in this process, once the lease is free."""
    with opened_control_plane(services.present_settings()) as plane:
        wait_until(lambda: plane.leases.state_of(RESTORE_LEASE).holder is None)
        return services.recover(plane, run_id=run_id)


def raised(bucket: Bucket, tenant: str, budget: str) -> int:
    return len(usages(bucket, tenant, budget, LIFETIME))


def attempts(database: psycopg.Connection) -> list[tuple[int, str]]:
    """Return all attempts, oldest first: number and run."""
    return database.execute(
        "select number, run_id from budget_recovery.restore_attempt order by started_at"
    ).fetchall()


def assert_restored(bucket: Bucket, database: psycopg.Connection) -> None:
    assert state(database) == "healthy"
    assert raised(bucket, "acme", "users") == MANY
    assert set(usages(bucket, "acme", "users", LIFETIME).values()) == {"1.5"}
    assert usages(bucket, "globex", "total", LIFETIME) == {None: "80", "bob": "5"}


def test_a_stopped_worker_writes_nothing_after_another_has_taken_over(
    lost: Bucket, database: psycopg.Connection
) -> None:
    with Worker.started("paused", LATE, signal.SIGSTOP) as paused:
        wait_until(lambda: paused.is_stopped, seconds=60)
        assert isinstance(run("another"), Recovered)
        assert_restored(lost, database)
        # If the stopped worker continued, it would raise this counter again.
        lost.remove("usage.globex.total.lifetime.bob")
        before = all_stored(lost)
        audits = database.execute("select * from budget_recovery.restore_audit").fetchall()

        paused.resume()

        assert paused.report()["ended"] == "LeaseLostError"
    assert all_stored(lost) == before
    assert database.execute("select * from budget_recovery.restore_audit").fetchall() == audits
    assert attempts(database) == [(1, "paused"), (2, "another")]
    assert state(database) == "healthy"


def test_a_worker_whose_lease_expired_while_it_was_stopped_writes_nothing_more(
    lost: Bucket, database: psycopg.Connection
) -> None:
    # Fewer writes than are in flight at once: the worker never waits for a response before it.
    with Worker.started("paused", 900, signal.SIGSTOP) as paused:
        wait_until(lambda: paused.is_stopped, seconds=60)
        with opened_control_plane(services.present_settings()) as plane:
            wait_until(lambda: plane.leases.state_of(RESTORE_LEASE).holder is None)
        before = raised(lost, "acme", "users")
        paused.resume()
        assert paused.report()["ended"] == "LeaseLostError"
    # The driver had already been given a few, which it sends once it runs again.
    assert 800 < before <= raised(lost, "acme", "users") <= before + 50
    assert state(database) == "recovering"


def test_three_attempts_killed_while_writing_fail_and_count_what_they_raised(
    lost: Bucket, database: psycopg.Connection
) -> None:
    found = [0]
    for number, before_write in enumerate((LATE, 150, 50), 1):
        killed(f"run {number}", before_write)
        expire_leases(database)
        found.append(raised(lost, "acme", "users"))
    assert 0 < found[1] <= found[2] <= found[3] < MANY

    ended = run("the last")

    assert isinstance(ended, GaveUp)
    assert ended.reason is FailureReason.NOT_WRITTEN
    assert f"{MANY - found[3] + 2:,} counters" in ended.detail
    assert state(database) == "failed"
    assert attempts(database) == [(n, f"run {n}") for n in (1, 2, 3)]
    incident_id = ended.incident.incident_id
    with opened_control_plane(services.present_settings()) as plane:
        restored = plane.audits.restored_in(incident_id)
        assert (restored.tenants, restored.windows, restored.counters) == (1, 1, found[3])
        audits = {entry.tenant: entry for entry in plane.audits.largest(incident_id, 10).largest}
    assert audits["acme"].raised == found[3]
    assert audits["acme"].before == 0
    assert audits["acme"].after == Decimal("1.5") * found[3]


@pytest.mark.disaster
def test_three_attempts_killed_after_their_last_write_make_the_store_healthy(
    lost: Bucket, database: psycopg.Connection
) -> None:
    for number in (1, 2, 3):
        killed(f"run {number}", 0)
        expire_leases(database)
    assert state(database) == "recovering"
    before = all_stored(lost)

    ended = run("the last")

    assert isinstance(ended, Recovered)
    assert_restored(lost, database)
    assert attempts(database) == [(n, f"run {n}") for n in (1, 2, 3)]
    assert ended.incident.ended is not None
    assert ended.incident.ended.restored.counters == MANY + 2
    # The final check writes only our marker.
    after = all_stored(lost)
    assert {key for key in after if after[key] != before[key]} <= {
        key for key in after if key.startswith("__guard.")
    }


@pytest.mark.disaster
def test_a_database_killed_while_the_incident_is_closed_only_delays_the_end(
    configured: Bucket, doomed_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", doomed_server.url())
    lose(configured)
    with opened_control_plane(services.present_settings()) as plane:
        for number, action, error in (
            (1, refuse, AttemptFailedError),
            (2, refuse, AttemptFailedError),
            (3, lambda: kill_server(doomed_server), DatabaseError),
        ):
            incidents_: Any = ClosedAfter(plane.incidents, action)
            doomed = replace(plane, incidents=incidents_)
            with pytest.raises(error):
                services.recover(doomed, run_id=f"run {number}", holder="a test")
    doomed_server.start()
    monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", doomed_server.url())
    with psycopg.connect(doomed_server.url(), autocommit=True) as database:
        assert state(database) == "recovering"
        assert [number for number, _ in attempts(database)] == [1, 2, 3]
        expire_leases(database)

        assert isinstance(run("the last"), Recovered)

        assert_restored(configured, database)
        (incident,) = incidents(database)
        assert (incident["attempts"], incident["restored_counters"]) == (3, MANY + 2)
        assert len(attempts(database)) == 3


@pytest.fixture
def doomed_server(server_dir: Path) -> Iterator[PostgresServer]:
    """Start a migrated server for one test, which kills it."""
    with PostgresServer(server_dir / f"doomed {uuid4().hex}") as server:
        migrate(server.url())
        yield server


def refuse() -> None:
    raise StoreError("Not yet.", "try again.")


class ClosedAfter(Overriding):
    """The incidents, with a hook before one is closed."""

    def __init__(self, incidents: Incidents, action: Callable[[], None]) -> None:
        super().__init__(incidents)
        self._action = action

    def close(self, *arguments: Any, **named: Any) -> Any:
        self._action()
        return self._part.close(*arguments, **named)
