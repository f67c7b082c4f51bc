import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from psycopg import sql

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.embedded import NatsServer, PostgresServer
from tests.integration.own_store import OwnStore, opened_store
from tests.integration.recovery_harness import Harness, opened_harness
from tests.nats_servers import Bucket
from tests.waiting import wait_until

_LONGEST_TEST_SECONDS = 30


# Creation times less than five seconds apart count as equal, and most tests lose their bucket and
# make it anew sooner. So each worker makes the buckets of its next tests in advance.
_MADE_IN_ADVANCE = 12
_DISTINCT_AFTER = 6.0


@pytest.fixture(scope="session")
def made_buckets(nats_server: NatsServer) -> deque[tuple[str, float]]:
    """Return names of buckets, with the times at which they were made."""
    return deque(_make_bucket(nats_server) for _ in range(_MADE_IN_ADVANCE))


def _make_bucket(server: NatsServer) -> tuple[str, float]:
    name = f"b-{uuid.uuid4().hex[:12]}"
    with Bucket.connected(server.url, name) as bucket:
        bucket.create()
    return name, time.monotonic()


@pytest.fixture
def bucket(nats_server: NatsServer, made_buckets: deque[tuple[str, float]]) -> Iterator[Bucket]:
    """Return a bucket for this test, which is so old that one made anew is another one."""
    made_buckets.append(_make_bucket(nats_server))
    name, made_at = made_buckets.popleft()
    wait_until(lambda: time.monotonic() - made_at >= _DISTINCT_AFTER)
    with Bucket.connected(nats_server.url, name) as bucket:
        yield bucket


@pytest.fixture
def own_store(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OwnStore]:
    """Return a server of this test alone, to which the settings point."""
    with opened_store(tmp_path, database_url, monkeypatch) as store:
        yield store


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory for tables, not created yet, so that no test uses the default one.

    Child processes inherit it in their environment.
    """
    place = tmp_path / "tables"
    monkeypatch.setenv("BUDGET_RECOVERY_TABLES_DIR", str(place))
    return place


@pytest.fixture
def configured(
    nats_server: NatsServer, bucket: Bucket, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Bucket:
    """Set the settings to this test's bucket and database."""
    monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", nats_server.url)
    monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", bucket.name)
    monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", database_url)
    return bucket


@pytest.fixture
def harness(configured: Bucket, database_url: str) -> Iterator[Harness]:
    """Open the services on this test's bucket, with the test's clock."""
    with opened_harness(configured, database_url) as harness:
        yield harness


@pytest.fixture
def copy_of_the_database(
    postgres_server: PostgresServer, database_url: str
) -> Iterator[Callable[[], str]]:
    """Return a function that copies the database; no session may be connected meanwhile."""
    copies: list[str] = []

    def copy() -> str:
        name = f"copy_{uuid.uuid4().hex[:12]}"
        statement = sql.SQL("create database {} template {}")
        with psycopg.connect(database_url) as connection:
            original = connection.info.dbname
        with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
            connection.execute(statement.format(sql.Identifier(name), sql.Identifier(original)))
        copies.append(name)
        return postgres_server.url(name)

    yield copy
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        for name in copies:
            drop = sql.SQL("drop database {} with (force)")
            connection.execute(drop.format(sql.Identifier(name)))


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Return the directory of the ledger of this test's simulated gateway; not created yet."""
    return tmp_path / "ledger"


@pytest.fixture
def database(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="session")
def shared_instance() -> Iterator[dg.DagsterInstance]:
    """Create Dagster's storage in memory once: its migrations take longer than most tests."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def instance(shared_instance: dg.DagsterInstance) -> Iterator[dg.DagsterInstance]:
    """Return an instance without runs, events and assets."""
    yield shared_instance
    shared_instance.wipe()


@pytest.fixture
def current_hour() -> Hour:
    """Return the current hour; it does not close before the test ends."""
    hour = Hour.containing(datetime.now(UTC))
    left = (hour.end - datetime.now(UTC)).total_seconds()
    if left > _LONGEST_TEST_SECONDS:
        return hour
    time.sleep(left)
    return Hour(hour.end)
