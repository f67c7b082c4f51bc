"""A check without its database finds nothing out and changes nothing."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.embedded import NatsServer, PostgresServer
from tests.integration.detection_records import assert_whole, store_checks, store_row
from tests.integration.hung_servers import hung, hung_at_request
from tests.integration.recovery_runs import check, incidents, state, verdict
from tests.integration.unknown_ticks import (
    assert_recovered,
    assert_red_from_the_third_in_a_row,
    nothing_left,
    unknown,
)
from tests.nats_servers import Bucket, DisturbedNetwork
from tests.processes import descendants

# What this file starts, it starts once: all of it belongs to one worker.
pytestmark = pytest.mark.xdist_group("checks_without_database")


@pytest.fixture(scope="module")
def own_postgres(server_dir: Path) -> Iterator[PostgresServer]:
    """A server that may be stopped; it comes back at the same address."""
    with PostgresServer(server_dir / "checks without database") as server:
        yield server


@pytest.fixture
def database_url(own_postgres: PostgresServer) -> str:
    """A migrated database of this test's own, on that server."""
    name = f"test_{uuid4().hex[:12]}"
    with psycopg.connect(own_postgres.url(), autocommit=True) as connection:
        connection.execute(f"create database {name}")
    url = own_postgres.url(name)
    migrate(url)
    return url


@pytest.fixture
def accepted(configured: Bucket, instance: dg.DagsterInstance) -> Bucket:
    """A bucket with a counter at sequence 1 and our marker at 2."""
    configured.spend("acme", "total", "lifetime", {None: "80"})
    assert verdict(check(instance)) == "first_seen"
    return configured


def processes(server: PostgresServer) -> list[int]:
    return [server.pid, *descendants(server.pid)]


def test_a_database_that_is_down_makes_a_check_unknown(
    accepted: Bucket,
    instance: dg.DagsterInstance,
    own_postgres: PostgresServer,
    database_url: str,
) -> None:
    # As gardener/etcd-backup-restore#200: a network error in a check was taken for bad data.
    with psycopg.connect(database_url) as connection:
        before = store_row(connection)
    with nothing_left():
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


def test_a_database_that_hangs_makes_a_check_unknown(
    accepted: Bucket,
    instance: dg.DagsterInstance,
    own_postgres: PostgresServer,
    database: psycopg.Connection,
) -> None:
    before = store_row(database)
    with nothing_left():
        with hung(*processes(own_postgres)):
            assert "Cannot connect to the control-plane database" in unknown(instance)
        assert accepted.info().state.last_seq == 2
        assert store_row(database) == before
        assert_recovered(instance, database)


def test_a_check_whose_database_hangs_midway_is_broken_off_and_its_thread_ends(
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
        with nothing_left(), hung_at_request(network, lambda: processes(own_postgres)):
            assert "The tick was not done within 10 s" in unknown(instance)
            assert accepted.info().state.last_seq == 2
            # The check that was given up goes on, unheeded, and ends as any other.
    row = store_row(database)
    assert row["baseline_created_at"] == before["baseline_created_at"]
    assert store_checks(database)[-1]["verdict"] in ("first_seen", "unchanged", "advanced")
    assert state(database) == "healthy"
    assert incidents(database) == []
    assert_whole(instance, database)
