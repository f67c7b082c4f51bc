"""What a terminated run leaves in PostgreSQL."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psycopg
import pytest

from tests.contract.control_planes import ControlPlane
from tests.waiting import wait_until

# Interrupted as Dagster interrupts a run: by a BaseException that is not an Exception. The process
# keeps running, so its end does not close the connection.
_WORK = textwrap.dedent(
    """
    import signal, sys, time
    from budget_recovery_dagster.adapters.postgres import Database
    from budget_recovery_dagster.adapters.postgres.store import lock_store

    class Interrupted(BaseException):
        pass

    def interrupt(*_):
        raise Interrupted

    signal.signal(signal.SIGTERM, interrupt)
    with Database(sys.argv[1]) as database:
        try:
            with database.writing() as connection:
                lock_store(connection)
                print("at work", flush=True)
                connection.execute("select pg_sleep(100)")
        except Interrupted:
            print("interrupted", flush=True)
            time.sleep(600)
    """
)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_terminated_run_unlocks_the_row_of_the_store_within_seconds(
    postgres_plane: ControlPlane,
    admin: psycopg.Connection,
    database_url: str,
    end: signal.Signals,
) -> None:
    assert postgres_plane.registry.claim()
    with subprocess.Popen(
        [sys.executable, "-c", _WORK, database_url], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "at work\n"
            wait_until(lambda: sleeps(admin))
            assert not is_free(admin)
            os.kill(process.pid, end)
            started = time.monotonic()
            wait_until(lambda: is_free(admin))
            assert time.monotonic() - started < 10
            assert not sleeps(admin)
            if end is signal.SIGTERM:
                assert process.stdout.readline() == "interrupted\n"
                assert process.poll() is None
        finally:
            process.kill()


def sleeps(admin: psycopg.Connection) -> bool:
    at_it = "select from pg_stat_activity where wait_event = 'PgSleep'"
    return admin.execute(f"{at_it} and datname = current_database()".encode()).rowcount > 0


def is_free(admin: psycopg.Connection) -> bool:
    row = admin.execute("select from budget_recovery.store for update skip locked").fetchone()
    return row is not None
