import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import LiteralString

import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import (
    MAX_CONNECTIONS,
    Database,
    PostgresLeases,
    require_lease,
)
from budget_recovery_dagster.domain import CAPTURE_LEASE
from budget_recovery_dagster.errors import LeaseHeldError, LeaseLostError
from tests.contract.control_planes import is_held
from tests.postgres_servers import unreachable
from tests.waiting import wait_until

SHORT = timedelta(seconds=1)
OFTEN = timedelta(seconds=0.05)
NEVER = timedelta(hours=1)


@contextmanager
def taken_again(leases: PostgresLeases) -> Iterator[float]:
    """Try to take the lease until it is free; yield how long that took."""
    started = time.monotonic()
    while True:
        try:
            with leases.hold("capture", "next"):
                yield time.monotonic() - started
                return
        except LeaseHeldError:
            assert time.monotonic() < started + 20, "it never became free"
            time.sleep(0.02)


def test_a_living_holder_keeps_its_lease_beyond_its_duration(database: Database) -> None:
    leases = PostgresLeases(database, duration=SHORT, renew_every=OFTEN)
    with leases.hold("capture", "patient") as lease:
        time.sleep(1.5)
        lease.require_held()
        with database.writing() as connection:
            require_lease(connection, database, lease, name=CAPTURE_LEASE)
        with pytest.raises(LeaseHeldError, match="patient"), leases.hold("capture", "next"):
            pytest.fail("two hold it")


def test_a_lease_that_is_not_renewed_expires_by_the_servers_clock(database: Database) -> None:
    leases = PostgresLeases(database, duration=SHORT, renew_every=NEVER)
    with leases.hold("capture", "stalled") as lease, taken_again(leases) as waited:
        assert 0.5 < waited < 10
        with pytest.raises(LeaseLostError):
            lease.require_held()
        # The database refuses it too if the holder does not check.
        with (
            pytest.raises(LeaseLostError, match="next has taken it"),
            database.writing() as connection,
        ):
            require_lease(connection, database, Unaware(lease.token), name=CAPTURE_LEASE)


class Unaware:
    """A lease whose holder has not noticed that it has expired."""

    name = "capture"

    def __init__(self, token: int) -> None:
        self.token = token

    def require_held(self) -> None:
        pass


def test_an_expired_lease_is_refused_even_if_it_was_not_taken_over(
    database: Database, admin: psycopg.Connection
) -> None:
    leases = PostgresLeases(database, renew_every=NEVER)
    with leases.hold("capture", "stalled") as lease:
        admin.execute("update budget_recovery.lease set expires_at = clock_timestamp()")
        with pytest.raises(LeaseLostError, match="expired at"), database.writing() as connection:
            require_lease(connection, database, lease, name=CAPTURE_LEASE)


_HOLD = textwrap.dedent(
    """
    import sys, time
    from datetime import timedelta
    from budget_recovery_dagster.adapters.postgres import MAX_CONNECTIONS, Database
    from budget_recovery_dagster.adapters.postgres import PostgresLeases

    with Database(sys.argv[1]) as database:
        leases = PostgresLeases(
            database, duration=timedelta(seconds=2), renew_every=timedelta(seconds=0.1)
        )
        with leases.hold("capture", "doomed"):
            print("held", flush=True)
            time.sleep(600)
    """
)


def test_the_lease_of_a_killed_process_is_free_after_it_expires(
    database: Database, database_url: str
) -> None:
    leases = PostgresLeases(database, duration=timedelta(seconds=2))
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, database_url], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            # A living process renews it beyond its duration.
            time.sleep(2.5)
            with pytest.raises(LeaseHeldError, match="doomed"), leases.hold("capture", "next"):
                pytest.fail("two hold it")
        finally:
            os.kill(process.pid, signal.SIGKILL)
    with taken_again(leases) as waited:
        assert 0.5 < waited < 10


def test_a_long_transaction_under_a_lease_does_not_prevent_its_renewal(
    database: Database, admin: psycopg.Connection
) -> None:
    leases = PostgresLeases(database, duration=SHORT, renew_every=OFTEN)
    with leases.hold("capture", "busy") as lease, database.writing() as connection:
        require_lease(connection, database, lease, name=CAPTURE_LEASE)
        time.sleep(1.5)
        lease.require_held()
        expires = "select expires_at > clock_timestamp() from budget_recovery.lease"
        assert admin.execute(expires).fetchone() == (True,)


def test_a_lease_is_not_taken_over_while_a_transaction_under_it_is_open(
    database: Database,
) -> None:
    leases = PostgresLeases(database, duration=SHORT, renew_every=NEVER)
    with leases.hold("capture", "slow") as lease:
        taken = threading.Event()

        def take_over() -> None:
            with taken_again(leases):
                taken.set()

        thread = threading.Thread(target=take_over)
        with database.writing() as connection:
            require_lease(connection, database, lease, name=CAPTURE_LEASE)
            thread.start()
            assert not taken.wait(2), "taken over while the work under it could still commit"
        assert taken.wait(10)
        thread.join()


def test_renewal_survives_a_lost_connection(
    database: Database, admin: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    leases = PostgresLeases(database, duration=timedelta(seconds=3), renew_every=OFTEN)
    end_sessions = (
        "select pg_terminate_backend(pid) from pg_stat_activity where query like"
        " '%update budget_recovery.lease set expires_at%' and pid <> pg_backend_pid()"
    )
    with caplog.at_level(logging.WARNING), leases.hold("capture", "tough") as lease:
        wait_until(lambda: admin.execute(end_sessions).rowcount > 0)
        wait_until(lambda: "Could not renew the lease " in caplog.text)
        time.sleep(3.5)
        lease.require_held()


def test_a_holder_cut_off_from_the_database_loses_its_lease(
    database: Database, admin: psycopg.Connection
) -> None:
    leases = PostgresLeases(database, duration=SHORT, renew_every=OFTEN)
    with leases.hold("capture", "cut off") as lease:
        with unreachable(admin.info):
            lease.require_held()
            wait_until(lambda: not is_held(lease))
        # A lost lease stays lost.
        time.sleep(0.3)
        assert not is_held(lease)


def test_a_lease_that_could_not_be_released_is_free_to_its_process_at_once(
    database_url: str, admin: psycopg.Connection
) -> None:
    holder = "run 1 on db-host (pid 7)"
    with Database(database_url) as database:
        with ExitStack() as away, PostgresLeases(database).hold("capture", holder) as given_up:
            away.enter_context(unreachable(admin.info))
        # Whoever else wants it waits for its expiry, as long as it is not taken again.
        other = [sys.executable, "-c", _HOLD, database_url]
        refused = subprocess.run(other, capture_output=True, text=True, check=False)
        assert f"Another capture is running: {holder}" in refused.stderr
        assert PostgresLeases(database).state_of("capture").holder == holder
    with (
        Database(database_url) as database,
        PostgresLeases(database).hold("capture", holder) as again,
    ):
        assert again.token > given_up.token
        # One that it works under is held for it, too.
        with pytest.raises(LeaseHeldError), PostgresLeases(database).hold("capture", holder):
            pytest.fail("two hold it")


def test_a_late_renewal_does_not_revive_the_lease(
    database: Database, admin: psycopg.Connection
) -> None:
    leases = PostgresLeases(database, duration=SHORT, renew_every=timedelta(seconds=0.8))
    with leases.hold("capture", "late") as lease:
        with admin.transaction():
            admin.execute("select from budget_recovery.lease for update")
            wait_until(lambda: not is_held(lease))
        time.sleep(0.2)
        assert not is_held(lease)


def test_a_lease_leaves_no_session_and_no_thread(
    database: Database, admin: psycopg.Connection
) -> None:
    leases = PostgresLeases(database, renew_every=timedelta(seconds=0.01))

    def sessions() -> int:
        return one(
            admin, "select count(*) from pg_stat_activity where datname = current_database()"
        )

    def renewals() -> int:
        return one(
            admin, "select extract(epoch from expires_at) * 1000000 from budget_recovery.lease"
        )

    database.now()
    threads = threading.active_count()
    for number in range(10):
        with leases.hold("capture", f"holder {number}"):
            first = renewals()
            wait_until(lambda: renewals() > first)  # noqa: B023 - it is called at once
    assert threading.active_count() == threads
    # The pool may be full, and one session observes; ten leaked sessions would be more.
    wait_until(lambda: sessions() <= MAX_CONNECTIONS + 1)


def one(connection: psycopg.Connection, query: LiteralString) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])
