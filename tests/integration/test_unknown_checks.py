"""A usage store that cannot be read or written is not lost: no incident is opened."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import (
    Connection,
    Database,
    server_clock,
)
from budget_recovery_dagster.wiring import control_plane_on
from tests import services
from tests.hung_servers import hung, hung_at_request
from tests.integration.detection_records import assert_intact, store_checks, store_row
from tests.integration.own_store import BUCKET, OwnStore, opened_store
from tests.integration.recovery_runs import check, incidents, requested, skipped, verdict
from tests.integration.unknown_ticks import (
    assert_recovered,
    assert_red_from_the_third_in_a_row,
    no_leaks,
    unknown,
)
from tests.nats_cluster import Cluster
from tests.nats_servers import PASSWORD, Bucket, DisturbedNetwork, users, with_user
from tests.waiting import wait_until

WHOLE = ("same",)
READING = [f"$JS.API.STREAM.INFO.KV_{BUCKET}", f"$JS.API.STREAM.MSG.GET.KV_{BUCKET}"]


@pytest.fixture
def own_store(
    tmp_path: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    instance: dg.DagsterInstance,
) -> Iterator[OwnStore]:
    """Start an accepted store for this test: a counter at sequence 1, our marker at 2."""
    with opened_store(tmp_path, database_url, monkeypatch) as store:
        store.do(lambda bucket: bucket.create())
        store.spend("10")
        assert verdict(check(instance)) == "first_seen"
        yield store


def test_a_check_is_unknown_while_the_server_is_down(
    own_store: OwnStore, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    # As gardener/etcd-backup-restore#200: a check mistook a network error for bad data.
    accepted = store_row(database)
    with no_leaks():
        own_store.server.stop()
        assert_red_from_the_third_in_a_row(instance, reason="Cannot connect to NATS at ")
        assert store_row(database) == accepted
        assert [each["verdict"] for each in store_checks(database)] == ["first_seen"] + [
            "unknown"
        ] * 4
        own_store.server.start()
        assert own_store.last_sequence == 2
        assert_recovered(instance, database)


def test_a_check_is_unknown_while_the_server_hangs(
    own_store: OwnStore, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    accepted = store_row(database)
    with no_leaks():
        with hung(own_store.server.pid):
            assert "timed out" in unknown(instance)
        assert store_row(database) == accepted
        assert own_store.last_sequence == 2
        assert own_store.do(Bucket.consumers) == 0
        assert_recovered(instance, database)


def test_a_check_is_unknown_if_the_server_hangs_while_the_marker_is_written(
    own_store: OwnStore,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted = store_row(database)
    with no_leaks():
        with (
            DisturbedNetwork(own_store.server.url, b"PUB $KV.") as network,
            hung_at_request(network, lambda: [own_store.server.pid]),
            monkeypatch.context() as elsewhere,
        ):
            elsewhere.setenv("BUDGET_RECOVERY_NATS_URL", network.url)
            assert "No response to $KV." in unknown(instance)
        row = store_row(database)
        assert {name: row[name] for name in row if name.startswith(("marker", "baseline_l"))} == {
            name: accepted[name] for name in accepted if name.startswith(("marker", "baseline_l"))
        }
        # When it continues, the server may still store the marker, which is then recognized.
        wait_until(lambda: own_store.last_sequence == 3)
        assert_recovered(instance, database)
    assert_intact(instance, database)


def test_a_check_is_unknown_if_the_bucket_never_existed(
    configured: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    configured.destroy()
    assert "The store does not exist, and none was accepted" in unknown(instance)
    assert incidents(database) == []
    assert store_row(database)["baseline_version"] is None
    configured.create()
    assert verdict(check(instance, "1")) == "first_seen"
    assert_intact(instance, database)


@pytest.fixture
def guarded(
    tmp_path: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    instance: dg.DagsterInstance,
) -> Iterator[OwnStore]:
    """Start an accepted store as above, on a server with users of different permissions."""

    def confined(name: str, *publish: str) -> dict[str, object]:
        permissions = {"publish": publish, "subscribe": ["_INBOX_budget_recovery.>"]}
        return {"user": name, "password": PASSWORD, "permissions": permissions}

    config = users(
        {"user": "gateway", "password": PASSWORD},
        confined("recovery", *READING, f"$KV.{BUCKET}.__guard.>"),
        confined("reader", *READING),
        confined("blind", READING[0], f"$KV.{BUCKET}.__guard.>"),
    )
    with opened_store(tmp_path, database_url, monkeypatch, config=config, user="gateway") as store:
        store.do(lambda bucket: bucket.create())
        store.spend("10")
        become(store, "recovery", monkeypatch)
        assert verdict(check(instance)) == "first_seen"
        yield store


def become(
    store: OwnStore, user: str, monkeypatch: pytest.MonkeyPatch, password: str = PASSWORD
) -> None:
    url = with_user(store.server.url, user, password)
    monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", url)


@pytest.mark.parametrize(
    ("user", "password", "reason"),
    [
        ("blind", PASSWORD, f"The NATS user may not publish to {READING[1]}."),
        ("recovery", "wr0ng", "rejected the NATS user"),
    ],
)
def test_a_check_is_unknown_if_the_user_may_not_read_the_marker(
    guarded: OwnStore,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    user: str,
    password: str,
    reason: str,
) -> None:
    accepted = store_row(database)
    with no_leaks():
        become(guarded, user, monkeypatch, password)
        message = unknown(instance)
        assert reason in message
        assert "Try:" in message
        assert password not in message
        assert store_row(database) == accepted
        assert guarded.last_sequence == 2
        become(guarded, "recovery", monkeypatch)
        assert_recovered(instance, database)


def test_a_check_without_permission_to_write_the_marker_is_good_with_a_hint(
    guarded: OwnStore,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted = store_row(database)
    become(guarded, "reader", monkeypatch)
    guarded.spend("20")
    result = check(instance, "2")
    assert (verdict(result), result.cursor) == ("same", "0")
    assert "The marker was not renewed: The NATS user may not publish to $KV." in skipped(result)
    assert "Try: grant it" in skipped(result)
    assert "The marker was not renewed" in store_checks(database)[-1]["reason"]
    row = store_row(database)
    assert (row["baseline_last_sequence"], row["marker_revision"]) == (3, 2)
    assert row["marker_nonce"] == accepted["marker_nonce"]
    assert guarded.last_sequence == 3
    # A loss is detected without writing the marker.
    guarded.do(lambda bucket: bucket.purge("__guard."))
    requested(check(instance))
    (incident,) = incidents(database)
    assert incident["target_last_sequence"] == 3


@pytest.mark.parametrize("minutes", [1, -1])
def test_clocks_that_disagree_by_a_minute_are_not_a_loss(
    configured: Bucket,
    database_url: str,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    minutes: int,
) -> None:
    """A check compares the store only with itself, so the clocks may disagree."""
    configured.spend("acme", "total", "lifetime", {None: "80"})
    assert verdict(check(instance)) == "first_seen"

    def clock(connection: Connection) -> datetime:
        return server_clock(connection) + timedelta(minutes=minutes)

    with Database(database_url, clock=clock) as shifted:
        plane = control_plane_on(shifted, services.present_settings().bucket)
        for revision in (3, 4):
            checked = services.check(plane)
            assert checked.check.verdict.is_good
            assert store_row(database)["marker_revision"] == revision
    assert_intact(instance, database)


def test_a_check_is_unknown_without_a_quorum(
    server_dir: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
) -> None:
    with Cluster.started(server_dir / "unknown checks") as cluster:
        urls = {name: server.url for name, server in cluster.servers.items()}
        with Bucket.connected(urls["n0"], BUCKET) as bucket:
            wait_until(lambda: _is_created(bucket), seconds=60)
            leader: str = bucket.info().cluster.leader
        monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", ",".join(urls.values()))
        monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", BUCKET)
        monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", database_url)
        wait_until(lambda: verdict(check(instance)) in WHOLE, seconds=60)
        accepted = store_row(database)
        others = [server.pid for name, server in cluster.servers.items() if name != leader]
        monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", urls[leader])
        with no_leaks():
            # For about ten seconds the leader does not know that it is alone. It responds, but
            # cannot store the marker.
            with hung(*others):
                assert "No response to $KV." in unknown(instance)
            row = store_row(database)
            for column in ("baseline_last_sequence", "marker_nonce", "marker_revision"):
                assert row[column] == accepted[column]
            assert incidents(database) == []
        wait_until(lambda: verdict(check(instance)) in WHOLE, seconds=60)
        assert_intact(instance, database)


def _is_created(bucket: Bucket) -> bool:
    try:
        bucket.create(replicas=3)
    except Exception:  # noqa: BLE001 - a cluster that is forming fails in every way
        return False
    return True
