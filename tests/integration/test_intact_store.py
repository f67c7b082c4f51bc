"""Everyday operations on a store are not a loss: no incident opens, and the marker is renewed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import Hour, Verdict
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.commands import run
from tests.integration.detection_records import assert_intact, store_row
from tests.integration.live_capture import capture_now, stored_tenants
from tests.integration.own_store import OwnStore
from tests.integration.recovery_runs import check, incidents, skipped, verdict
from tests.nats_servers import Bucket, DisturbedNetwork
from tests.waiting import wait_until

LIFETIME = "lifetime"
COUNTER = "usage.acme.total.lifetime.="
DELETED = {"KV-Operation": "DEL"}
PURGED = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}


@pytest.fixture
def accepted(
    configured: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> Bucket:
    """Return a bucket with a counter at sequence 1 and our marker at 2."""
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert verdict(check(instance)) == "first_seen"
    assert store_row(database)["marker_revision"] == 2
    return configured


def marker_key(database: psycopg.Connection) -> str:
    return f"__guard.{store_row(database)['deployment_id']}"


def reconfigure(bucket: Bucket) -> None:
    bucket.reconfigure(description="counters of budgets")


def delete_keys(bucket: Bucket) -> None:
    bucket.remove(COUNTER)
    bucket.put("ratelimit.acme", b"1")
    bucket.put("ratelimit.acme", b"", PURGED)


def let_a_key_expire(bucket: Bucket) -> None:
    bucket.put("blocked.acme", b"1", {"Nats-TTL": "1s"})
    wait_until(lambda: not holds(bucket, "blocked.acme"))


def holds(bucket: Bucket, key: str) -> bool:
    stored = bucket.stored(key)
    return stored is not None and stored.data != b""


def purge_a_tenant(bucket: Bucket) -> None:
    """Purge keys without a trace in the stream; captures report them by name."""
    bucket.purge("usage.acme.")


@pytest.mark.parametrize(
    "change", [reconfigure, Bucket.create, delete_keys, let_a_key_expire, purge_a_tenant]
)
def test_normal_changes_of_a_bucket_are_not_a_loss(
    accepted: Bucket,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    change: Callable[[Bucket], None],
) -> None:
    change(accepted)
    assert_intact(instance, database)


@pytest.mark.parametrize("headers", [DELETED, PURGED])
def test_deleting_all_keys_including_our_marker_is_not_a_loss(
    accepted: Bucket,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    headers: dict[str, str],
) -> None:
    for key in (COUNTER, marker_key(database)):
        accepted.put(key, b"", headers)
    assert_intact(instance, database)


@pytest.mark.parametrize("keeps_marker", [True, False])
def test_expiry_by_the_maximum_age_of_a_bucket_is_not_a_loss(
    configured: Bucket,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    *,
    keeps_marker: bool,
) -> None:
    configured.destroy()
    configured.create_with(max_age=1.0, allow_msg_ttl=keeps_marker)
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert verdict(check(instance)) == "first_seen"
    left = 1 if keeps_marker else 0
    wait_until(lambda: configured.messages() == left)
    assert holds(configured, marker_key(database)) is keeps_marker
    assert_intact(instance, database)


def test_a_restart_of_the_server_is_not_a_loss(
    own_store: OwnStore, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    own_store.do(lambda bucket: bucket.create())
    own_store.spend("10")
    assert verdict(check(instance)) == "first_seen"
    own_store.restart()
    assert_intact(instance, database)
    own_store.spend("20")
    own_store.kill()
    own_store.server.start()
    assert_intact(instance, database)


def test_concurrent_captures_and_checks_see_no_loss(
    accepted: Bucket,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    current_hour: Hour,
) -> None:
    tenants = [f"t{number}" for number in range(8)]
    for tenant in tenants:
        accepted.spend(tenant, "total", LIFETIME, {None: "1"})
    with ThreadPoolExecutor(1) as pool:
        captured = pool.submit(capture_now, current_hour)
        found = {verdict(check(instance))}
        while not captured.done():
            found.add(verdict(check(instance)))
    assert stored_tenants(captured.result()) == ["acme", *tenants]
    assert found <= {"same"}
    assert_intact(instance, database)


def test_a_marker_renewed_during_a_capture_is_not_a_loss(
    accepted: Bucket,
    nats_server: NatsServer,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted.spend("globex", "total", LIFETIME, {None: "5"})
    renewed: list[int] = []

    def renew(_: int) -> None:
        assert verdict(check(instance)) == "same"
        renewed.append(store_row(database)["marker_revision"])

    with DisturbedNetwork(nats_server.url) as network, monkeypatch.context() as elsewhere:
        elsewhere.setenv("BUDGET_RECOVERY_NATS_URL", network.url)
        through_network = services.present_settings()
        elsewhere.undo()
        network.before_request = renew
        captured = capture_now(current_hour, through_network)
    assert stored_tenants(captured) == ["acme", "globex"]
    assert len(renewed) >= 2
    assert_intact(instance, database)


def test_concurrent_first_checks_see_no_loss(
    configured: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    checks = 4
    barrier = Barrier(checks)

    def observe(_: int) -> set[Verdict]:
        # Its own pool and client, like another process.
        with opened_control_plane(services.present_settings()) as plane:
            barrier.wait()
            return {services.check(plane, by="a tick").check.verdict for _ in range(3)}

    with ThreadPoolExecutor(checks) as pool:
        found = set().union(*pool.map(observe, range(checks)))
    # Some checks find another one running, so they have no verdict.
    assert Verdict.FIRST_SEEN in found
    assert not any(each.is_alarm for each in found)
    assert incidents(database) == []
    assert "Try:" not in skipped(check(instance))
    assert_intact(instance, database)


def test_a_marker_that_cannot_be_renewed_needs_attention_until_it_is(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    # A full bucket would delete a counter for the marker.
    configured.reconfigure(discard="old", max_msgs=1)
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert verdict(check(instance)) == "first_seen"
    capture_now(current_hour)
    assert verdict(check(instance)) == "same"
    page = " ".join(run("status", code=4).split())
    assert "The marker in the store is not renewed, so some losses are not detected." in page
    assert "The bucket" in page
    configured.reconfigure(max_msgs=-1)
    assert verdict(check(instance)) == "same"
    assert "not renewed" not in run("status")
