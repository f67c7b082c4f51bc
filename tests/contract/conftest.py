from collections.abc import Iterator

import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import Database
from tests.contract import usage_stores
from tests.contract.control_planes import ControlPlane, in_memory, on_postgres
from tests.contract.usage_stores import Subject


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with Database(database_url) as database:
        yield database


@pytest.fixture
def admin(database_url: str) -> Iterator[psycopg.Connection]:
    """Open a plain session on the test's database, to inspect and disturb it."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def postgres_plane(database_url: str) -> Iterator[ControlPlane]:
    with on_postgres(database_url) as plane:
        yield plane


@pytest.fixture(params=["memory", "postgres"])
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """Return the control plane, once in memory and once on PostgreSQL."""
    if request.param == "memory":
        yield in_memory()
    else:
        with on_postgres(request.getfixturevalue("database_url")) as plane:
            yield plane


@pytest.fixture(params=["memory", "nats"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Return the usage store, once in memory and once on a NATS server."""
    if request.param == "memory":
        yield usage_stores.in_memory()
    else:
        with usage_stores.on_nats(request.getfixturevalue("nats_server").url) as subject:
            yield subject
