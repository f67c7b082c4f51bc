"""A real PgBouncer in transaction mode in front of a server, and strangers who share its sessions.

It is installed by the system's packages only: without it, the tests are skipped.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import psycopg
import pytest

from budget_recovery_dagster.embedded import OwnedProcess, PostgresServer, Program
from budget_recovery_dagster.embedded.child_process import Account

_PORT = 6432
_SETTINGS = """
[databases]
* = host={server} port=5432

[pgbouncer]
unix_socket_dir = {own}
listen_port = {port}
auth_type = trust
auth_file = {own}/users
pool_mode = {mode}
default_pool_size = {size}
query_wait_timeout = 30
"""
# What a program may leave in a session for the next one that gets it.
_LEFT_BEHIND = """
select 'setting', name, setting from pg_settings
where source = 'session' and name <> all (%s)
   or name = 'transaction_read_only' and setting = 'on'
union all
select 'lock', locktype, mode from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'
union all select 'prepared statement', name, statement from pg_prepared_statements
union all select 'channel', channel, '' from pg_listening_channels() channel
union all select 'cursor', name, statement from pg_cursors where is_holdable
union all
select 'temporary table', relname, '' from pg_class where relnamespace = pg_my_temp_schema()
"""
# These the pooler itself sets for each client.
_OF_THE_POOLER = [
    "application_name",
    "client_encoding",
    "DateStyle",
    "TimeZone",
    "standard_conforming_strings",
    # And these the transaction.
    "transaction_deferrable",
    "transaction_isolation",
    "transaction_read_only",
]


@dataclass(frozen=True)
class PgBouncer:
    """A running pooler with so many sessions of each role and database."""

    directory: Path
    sessions: int

    def url(self, url: str) -> str:
        """Return the URL of the same role and database through the pooler."""
        user, _, _ = urlsplit(url).netloc.rpartition("@")
        database = urlsplit(url).path
        return f"postgresql://{user}@:{_PORT}{database}?host={quote(str(self.directory), safe='')}"

    def left_behind(self, url: str) -> list[tuple[Any, ...]]:
        """Return what is left in the sessions that the role and database of the URL have."""
        found: list[tuple[Any, ...]] = []
        seen = set()
        with ExitStack() as exits:
            # All at once, so that each has another one.
            for _ in range(self.sessions):
                stranger = exits.enter_context(psycopg.connect(self.url(url)))
                found += stranger.execute(_LEFT_BEHIND, (_OF_THE_POOLER,)).fetchall()
                seen.update(stranger.execute("select pg_backend_pid()").fetchall())
        assert len(seen) == self.sessions
        return found


@contextmanager
def running_pgbouncer(
    server: PostgresServer,
    directory: Path,
    *,
    roles: Sequence[str],
    mode: str = "transaction",
    sessions: int = 4,
) -> Iterator[PgBouncer]:
    """Run it as the account of the server, which is never root; skip the test if it is missing."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("pgbouncer is not installed: apt install pgbouncer")
    (sockets,) = parse_qs(urlsplit(server.url()).query)["host"]
    account = Account.of(Path(sockets).stat().st_uid)
    directory.mkdir(mode=0o700)
    os.chown(directory, account.uid, account.gid)
    settings, users = directory / "pgbouncer.ini", directory / "users"
    settings.write_text(
        _SETTINGS.format(server=sockets, own=directory, port=_PORT, mode=mode, size=sessions)
    )
    users.write_text("".join(f'"{role}" ""\n' for role in roles))
    process = OwnedProcess(
        Program(
            "PgBouncer",
            [program, settings],
            log=directory.with_name(f"{directory.name}.log"),
            environment={"PATH": os.defpath},
            account=account if os.geteuid() == 0 else None,
        )
    )
    try:
        socket = directory / f".s.PGSQL.{_PORT}"
        process.wait_until_ready(socket.exists, seconds=20)
        yield PgBouncer(directory, sessions)
    finally:
        process.stop()
