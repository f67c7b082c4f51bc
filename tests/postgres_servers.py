"""Databases of single tests, expired leases, a standby, and a way to kill a PostgreSQL server."""

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
from psycopg import sql

from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.embedded import PostgresServer
from tests.waiting import wait_until


@contextmanager
def temporary_database(server: PostgresServer, template: str) -> Iterator[str]:
    """Clone a database; drop the clone at the end, even with open sessions."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    # Copying the files is faster than writing them to the log too.
    create = sql.SQL("create database {} template {} strategy file_copy")
    drop = sql.SQL("drop database {} with (force)")
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
        try:
            yield server.url(name)
        finally:
            connection.execute(drop.format(sql.Identifier(name)))


def expire_leases(database: psycopg.Connection) -> None:
    """Let the leases of dead workers expire now, instead of after half a minute."""
    database.execute(
        "update budget_recovery.lease set expires_at = acquired_at where holder is not null"
    )


def skip_pause(url: str) -> None:
    """Let the next attempt of a restore be due now, instead of after minutes."""
    with psycopg.connect(url) as database:
        # Also if the server's default is another.
        database.read_only = False
        database.execute(
            "update budget_recovery.incident set next_attempt_at = null"
            " where next_attempt_at is not null and closed_at is null"
        )


@contextmanager
def unreachable(database: psycopg.ConnectionInfo) -> Iterator[None]:
    """End all sessions of a database, and refuse new ones; its server goes on."""
    with psycopg.connect(database.dsn, dbname="postgres", autocommit=True) as other:
        name = sql.Identifier(database.dbname)
        other.execute(sql.SQL("alter database {} allow_connections false").format(name))
        try:
            other.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s",
                (database.dbname,),
            )
            yield
        finally:
            other.execute(sql.SQL("alter database {} allow_connections true").format(name))


def kill_server(server: PostgresServer) -> None:
    """Kill a server with all its processes, like the kernel or a power failure."""
    with psycopg.connect(server.url(), autocommit=True) as observer:
        rows = observer.execute("select pid from pg_stat_activity").fetchall()
    for pid in (server.pid, *(pid for (pid,) in rows)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.stop()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for (pid,) in rows))


@contextmanager
def standby_server(data_dir: Path) -> Iterator[str]:
    """Run a standby whose database has the schema; yield its URL."""
    with PostgresServer(data_dir) as server:
        migrate(server.url())
    (data_dir / "standby.signal").touch()
    with PostgresServer(data_dir) as standby:
        yield standby.url()
