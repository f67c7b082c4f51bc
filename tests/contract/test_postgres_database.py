import gc
import os
import socket
import subprocess
import sys
import textwrap
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import Connection, Database, driver_errors, migrate
from budget_recovery_dagster.errors import (
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnreachableError,
)
from tests.waiting import wait_until

PASSWORD = "hunter2secret"


# URLs


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://me:{PASSWORD}@localhost/db",
        f"mysql://me:{PASSWORD}@localhost/db",
        f"postgresql://me:{PASSWORD}@localhost/db?no_such_setting=1",
        f"postgresql://me:{PASSWORD}@[::1/db",
        f"postgresql://me:{PASSWORD}/x@localhost/db",
        f"postgresql://me:x@{PASSWORD}@localhost/db",
        f"postgresql://me:5432/{PASSWORD}@localhost/db",
        "",
        " ",
    ],
)
@pytest.mark.parametrize("use", [Database, migrate])
def test_an_unusable_url_is_refused_without_quoting_it(use: type[Database], url: str) -> None:
    with pytest.raises(DatabaseError) as refused:
        use(url)
    assert "BUDGET_RECOVERY_POSTGRES_URL" in refused.value.hint
    assert PASSWORD not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{PASSWORD}@127.0.0.1:1/db",
        f"postgresql://me:{PASSWORD}@127.0.0.1:1,127.0.0.1:2/db",
        f"postgresql://me:{PASSWORD}@/db?host=/nowhere",
        f"postgresql://me:{PASSWORD}@no-such-host.invalid/db",
    ],
)
def test_an_unreachable_server_is_reported_without_the_password(url: str) -> None:
    with pytest.raises(DatabaseUnreachableError) as unreachable, Database(url):
        pytest.fail("opened")
    assert PASSWORD not in str(unreachable.value)
    assert isinstance(unreachable.value.__cause__, psycopg.OperationalError)
    with pytest.raises(DatabaseUnreachableError) as unreachable:
        migrate(url)
    assert PASSWORD not in str(unreachable.value)


def test_a_connection_that_timed_out_leaves_no_socket_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        database = Database(f"postgresql://me@127.0.0.1:{port}/db?connect_timeout=2")
        gc.disable()  # which would close the socket some time later
        try:
            before = len(list(Path("/proc/self/fd").iterdir()))
            with pytest.raises(psycopg.errors.ConnectionTimeout) as kept:
                database.connect()
            assert "timeout" in str(kept.value)
            assert len(list(Path("/proc/self/fd").iterdir())) == before
        finally:
            gc.enable()


def test_a_missing_database_is_named(database_url: str) -> None:
    url = database_url.replace("/test_", "/missing_")
    with (
        pytest.raises(DatabaseUnreachableError, match=r'"missing_.*" does not exist') as refused,
        Database(url),
    ):
        pytest.fail("opened")
    assert refused.value.hint.startswith("create it")


def test_an_unopened_database_cannot_be_used(database_url: str) -> None:
    with pytest.raises(RuntimeError, match="has not been opened"):
        Database(database_url).now()


# Sessions


def test_now_is_the_servers_clock_in_utc(database: Database, admin: psycopg.Connection) -> None:
    row = admin.execute("select clock_timestamp()").fetchone()
    assert row is not None
    now = database.now()
    assert now.tzinfo is UTC
    assert timedelta(0) <= now - row[0] < timedelta(seconds=5)


def test_the_clock_can_be_set_for_tests(database_url: str) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    with Database(database_url, clock=lambda _: at) as database:
        assert database.now() == at


_CAPTURE_ELSEWHERE = textwrap.dedent(
    """
    import sys, time
    from tests.contract.control_planes import NOON, on_postgres

    assert time.localtime(0).tm_hour == 14
    with on_postgres(sys.argv[1]) as plane:
        plane.capture("acme", {("team", "2026-11-25"): {"alice": "1"}})
        (summary,) = plane.reports.captured_by("a run")
        print(summary.captured_at.isoformat(), summary.identity.created_at.isoformat())
        print(len(plane.points.current_usages("acme", NOON)))
    """
)


def test_time_zones_of_host_and_database_do_not_matter(
    database_url: str, admin: psycopg.Connection
) -> None:
    name = admin.info.dbname
    admin.execute(f"alter database \"{name}\" set timezone = 'America/St_Johns'".encode())
    admin.execute(f"alter database \"{name}\" set datestyle = 'German'".encode())
    elsewhere = {"TZ": "Etc/GMT-14", "PGTZ": "Asia/Kathmandu", "PGDATESTYLE": "SQL, DMY"}
    done = subprocess.run(
        [sys.executable, "-c", _CAPTURE_ELSEWHERE, database_url],
        env={**os.environ, **elsewhere},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "2026-11-25T12:00:00+00:00",
        "2026-11-01T08:30:00.123456+00:00",
        "1",
    ]


def test_a_session_has_time_limits(database: Database) -> None:
    with database.writing() as connection:
        row = connection.execute(
            "select current_setting('statement_timeout'), current_setting('lock_timeout'),"
            " current_setting('idle_in_transaction_session_timeout'),"
            " current_setting('application_name'), current_setting('client_encoding'),"
            " current_setting('client_connection_check_interval')"
        ).fetchone()
    assert row == ("2min", "30s", "1min", "budget-recovery", "UTF8", "2s")


def test_a_reading_session_cannot_write(database: Database) -> None:
    with pytest.raises(DatabaseError, match="read-only"), database.reading() as connection:
        connection.execute("delete from budget_recovery.lease")


def test_an_exception_rolls_back_a_writing_session(database: Database) -> None:
    def write_and_fail(connection: Connection) -> None:
        connection.execute("insert into budget_recovery.lease (name, token) values ('x', 1)")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), database.writing() as connection:
        write_and_fail(connection)
    with database.reading() as connection:
        assert connection.execute("select from budget_recovery.lease").fetchone() is None


def test_a_statement_timeout_is_reported_with_a_hint(database: Database) -> None:
    with pytest.raises(DatabaseError) as late, database.writing() as connection:
        connection.execute("set local statement_timeout = '10ms'; select pg_sleep(10)")
    assert isinstance(late.value, DatabaseBusyError)
    assert "pg_stat_activity" in late.value.hint


def test_a_lock_timeout_is_reported_with_a_hint(
    database: Database, admin: psycopg.Connection
) -> None:
    with admin.transaction():
        admin.execute("lock table budget_recovery.lease")
        with pytest.raises(DatabaseError) as late, database.writing() as connection:
            connection.execute("set local lock_timeout = '10ms'; select from budget_recovery.lease")
    assert isinstance(late.value, DatabaseBusyError)
    assert "pg_locks" in late.value.hint


def test_text_that_is_not_unicode_is_reported(database: Database) -> None:
    with pytest.raises(DatabaseError, match="not valid Unicode"), database.reading() as connection:
        connection.execute("select %s", ("\ud83d",))


def test_errors_of_other_code_pass_unchanged() -> None:
    with pytest.raises(ZeroDivisionError), driver_errors():
        raise ZeroDivisionError


# The pool


def test_the_pool_replaces_sessions_that_the_server_ended(
    database: Database, admin: psycopg.Connection
) -> None:
    end_sessions = (
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and application_name = 'budget-recovery'"
    )
    for _ in range(3):
        database.now()
        assert admin.execute(end_sessions).fetchall()
        database.now()


def test_a_session_that_ends_in_use_is_reported_as_unreachable(
    database: Database, admin: psycopg.Connection
) -> None:
    def be_ended(connection: Connection) -> None:
        admin.execute("select pg_terminate_backend(%s)", (connection.info.backend_pid,))
        connection.execute("select 1")

    with pytest.raises(DatabaseUnreachableError), database.writing() as connection:
        be_ended(connection)
    database.now()


def test_closing_leaves_no_session_and_no_thread(
    database_url: str, admin: psycopg.Connection
) -> None:
    threads = set(threading.enumerate())
    with Database(database_url) as database:
        database.now()
    assert set(threading.enumerate()) == threads
    sessions = (
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and application_name = 'budget-recovery'"
    )
    wait_until(lambda: admin.execute(sessions).fetchone() == (0,))
