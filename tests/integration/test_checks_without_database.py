"""A check without its database is unknown and changes nothing."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.embedded import NatsServer, PostgresServer
from tests.hung_servers import hung, hung_at_request
from tests.integration.detection_records import assert_intact, store_checks, store_row
from tests.integration.recovery_runs import check, incidents, state, verdict
from tests.integration.unknown_ticks import (
    assert_recovered,
    assert_red_from_the_third_in_a_row,
    no_leaks,
    unknown,
)
from tests.nats_servers import Bucket, DisturbedNetwork
from tests.processes import descendants

# One worker runs all tests of this file, so that its servers start only once.
pytestmark = pytest.mark.xdist_group("checks_without_database")


@pytest.fixture(scope="module")
def own_postgres(server_dir: Path) -> Iterator[PostgresServer]:
    """Start a server that may be stopped and started again at the same address."""
    with PostgresServer(server_dir / "checks without database") as server:
        yield server


@pytest.fixture
def database_url(own_postgres: PostgresServer) -> str:
    """Create a migrated database for this test on that server."""
    name = f"test_{uuid4().hex[:12]}"
    with psycopg.connect(own_postgres.url(), autocommit=True) as connection:
        connection.execute(f"create database {name}")
    url = own_postgres.url(name)
    migrate(url)
    return url


@pytest.fixture
def accepted(configured: Bucket, instance: dg.DagsterInstance) -> Bucket:
    """Return a bucket with a counter at sequence 1 and our marker at 2."""
    configured.spend("acme", "total", "lifetime", {None: "80"})
    assert verdict(check(instance)) == "first_seen"
    return configured


def processes(server: PostgresServer) -> list[int]:
    return [server.pid, *descendants(server.pid)]


def test_a_check_is_unknown_while_the_database_is_down(
    accepted: Bucket,
    instance: dg.DagsterInstance,
    own_postgres: PostgresServer,
    database_url: str,
) -> None:
    # As gardener/etcd-backup-restore#200: a check mistook a network error for bad data.
    with psycopg.connect(database_url) as connection:
        before = store_row(connection)
    with no_leaks():
        own_postgres.stop()
        assert_red_from_the_third_in_a_row(
            instance, reason="Cannot connect to the control-plane database"
        )
        own_postgres.start()
        assert accepted.info().state.last_seq == 2
        with psycopg.connect(database_url, autocommit=True) as connection:
            assert store_row(connection) == before
            assert [each["verdict"] for each in store_checks(connection)] == ["first_seen"]
            assert_recovered(instance, connection)


def test_a_check_is_unknown_while_the_database_hangs(
    accepted: Bucket,
    instance: dg.DagsterInstance,
    own_postgres: PostgresServer,
    database: psycopg.Connection,
) -> None:
    before = store_row(database)
    with no_leaks():
        with hung(*processes(own_postgres)):
            assert "Cannot connect to the control-plane database" in unknown(instance)
        assert accepted.info().state.last_seq == 2
        assert store_row(database) == before
        assert_recovered(instance, database)


def test_a_check_whose_database_hangs_midway_times_out_and_its_thread_ends(
    accepted: Bucket,
    nats_server: NatsServer,
    instance: dg.DagsterInstance,
    own_postgres: PostgresServer,
    database: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = store_row(database)
    with (
        DisturbedNetwork(nats_server.url, b"STREAM.MSG.GET") as network,
        monkeypatch.context() as elsewhere,
    ):
        elsewhere.setenv("BUDGET_RECOVERY_NATS_URL", network.url)
        with no_leaks(), hung_at_request(network, lambda: processes(own_postgres)):
            assert "The tick was not done within 10 s" in unknown(instance)
            assert accepted.info().state.last_seq == 2
            # The abandoned check continues and ends normally.
    row = store_row(database)
    assert row["baseline_created_at"] == before["baseline_created_at"]
    assert store_checks(database)[-1]["verdict"] in ("first_seen", "same")
    assert state(database) == "healthy"
    assert incidents(database) == []
    assert_intact(instance, database)
