"""Ways to end a PostgreSQL server that a server does not like."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import psycopg

from budget_recovery_dagster.sandbox.postgres_server import PostgresServer
from tests.waiting import wait_until


def kill_server(server: PostgresServer) -> None:
    """Kill a server with all its processes, as the kernel or a power cut does."""
    with psycopg.connect(server.url(), autocommit=True) as observer:
        rows = observer.execute("select pid from pg_stat_activity").fetchall()
    for pid in (server.pid, *(pid for (pid,) in rows)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.stop()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for (pid,) in rows))
