"""A PostgreSQL server that requires a password."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.embedded import PostgresServer
from tests.nats_servers import PASSWORD
from tests.waiting import wait_until

_ROLE = "recovery"
_RULES = "local all postgres trust\nlocal all all scram-sha-256\n"


@contextmanager
def locked_database(data_dir: Path) -> Iterator[str]:
    """Start the server with the schema; yield the URL of a role with a password."""
    with PostgresServer(data_dir) as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"create role {_ROLE} login password '{PASSWORD}'")
            connection.execute(f"grant create on database postgres to {_ROLE}")
            [(rules,)] = connection.execute("show hba_file").fetchall()
            Path(rules).write_text(_RULES, encoding="utf-8")
            connection.execute("select pg_reload_conf()")
        url = server.url().replace("postgres@", f"{_ROLE}:{PASSWORD}@")
        wait_until(lambda: _asks_for_a_password(url))
        migrate(url)
        yield url


def _asks_for_a_password(url: str) -> bool:
    try:
        psycopg.connect(url.replace(PASSWORD, "wrong")).close()
    except psycopg.OperationalError:
        return True
    return False
