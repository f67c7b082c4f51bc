"""Our marker in a real bucket with a maximum age."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from budget_recovery_dagster.adapters.nats import NatsUsageStore, open_usage_store
from budget_recovery_dagster.domain import FoundMarker, IntendedMarker
from budget_recovery_dagster.embedded import NatsServer
from tests.nats_servers import PATIENT, Bucket
from tests.waiting import wait_until

MAX_AGE = 1.0


@pytest.fixture
def bucket(nats_server: NatsServer) -> Iterator[Bucket]:
    with Bucket.connected(nats_server.url, f"markers-{uuid4().hex}") as bucket:
        yield bucket
        bucket.destroy()


@pytest.fixture
def store(nats_server: NatsServer, bucket: Bucket) -> Iterator[NatsUsageStore]:
    with open_usage_store(nats_server.url, bucket.name, timeouts=PATIENT) as store:
        yield store


def test_a_marker_outlives_the_buckets_maximum_age(store: NatsUsageStore, bucket: Bucket) -> None:
    bucket.create_with(max_age=MAX_AGE, allow_msg_ttl=True)
    marker = store.write_marker("d", IntendedMarker("n"), after=0)
    bucket.put("usage.t.b.2026-11.e", b"1")
    # So a missing marker has not expired.
    assert store.observe("d").keeps_for is None
    wait_until(lambda: bucket.stored("usage.t.b.2026-11.e") is None)
    assert store.observe("d").marker == FoundMarker("n", marker.revision)


def test_an_expired_marker_leaves_no_trace_without_ttl_support(
    store: NatsUsageStore, bucket: Bucket
) -> None:
    bucket.create_with(max_age=MAX_AGE, allow_msg_ttl=False)
    marker = store.write_marker("d", IntendedMarker("n"), after=0)
    wait_until(lambda: store.observe("d").marker is None)
    assert store.write_marker("d", IntendedMarker("m"), after=0).revision == marker.revision + 1


def test_an_expired_marker_with_a_delete_marker_counts_as_deleted(
    store: NatsUsageStore, bucket: Bucket
) -> None:
    bucket.create()
    # As another installation could write it.
    bucket.put("__guard.d", b'{"nonce":"n","written_by":"budget-recovery"}', {"Nats-TTL": "2s"})
    assert store.observe("d").marker == FoundMarker("n", 1)
    expired = FoundMarker(None, 2, is_deleted=True, is_expired=True)
    wait_until(lambda: store.observe("d").marker == expired)
    assert store.write_marker("d", IntendedMarker("m"), after=2).revision == 3
