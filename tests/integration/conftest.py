import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.embedded import NatsServer
from tests.integration.recovery_harness import Harness, opened_harness
from tests.nats_servers import Bucket

_LONGEST_TEST_SECONDS = 30


@pytest.fixture
def bucket(nats_server: NatsServer) -> Iterator[Bucket]:
    """Create a bucket for this test."""
    with Bucket.connected(nats_server.url, f"b-{uuid.uuid4().hex[:12]}") as bucket:
        bucket.create()
        yield bucket


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
