"""Real servers for the tests, started once per session as owned child processes."""

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from budget_recovery_dagster.sandbox.postgres_server import PostgresServer


@pytest.fixture(scope="session")
def server_dir() -> Iterator[Path]:
    """A directory that a server's own account can reach; pytest's are private to the user."""
    with tempfile.TemporaryDirectory(prefix="budget-recovery tests ") as directory:
        path = Path(directory)
        path.chmod(0o711)
        yield path


@pytest.fixture(scope="session")
def nats_server(server_dir: Path) -> Iterator[NatsServer]:
    with NatsServer(server_dir / "nats") as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server(server_dir: Path) -> Iterator[PostgresServer]:
    with PostgresServer(server_dir / "postgres") as server:
        yield server


@pytest.fixture(scope="session")
def migrated_template(postgres_server: PostgresServer) -> str:
    """A database with the schema and nothing in it, to be cloned."""
    name = f"template_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    migrate(postgres_server.url(name))
    return name


@pytest.fixture
def database_url(postgres_server: PostgresServer, migrated_template: str) -> Iterator[str]:
    """A migrated database of this test's own."""
    yield from _fresh_database(postgres_server, migrated_template)


@pytest.fixture
def empty_database_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A database of this test's own without the schema."""
    yield from _fresh_database(postgres_server, "template0")


def _fresh_database(server: PostgresServer, template: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        create = sql.SQL("create database {} template {}")
        connection.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
        yield server.url(name)
        drop = sql.SQL("drop database {} with (force)")
        connection.execute(drop.format(sql.Identifier(name)))
