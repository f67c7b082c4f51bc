"""The usage store on three servers: who responds, and what is known when some are down."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from budget_recovery_dagster.adapters.nats import Timeouts, open_usage_store
from budget_recovery_dagster.domain import FoundMarker, IntendedMarker, Window, Written, objection
from budget_recovery_dagster.errors import (
    StoreError,
    StoreMissingError,
    StoreNoQuorumError,
    StoreUnreachableError,
)
from tests.contract.restore_orders import order
from tests.identities import identity_of
from tests.nats_cluster import Cluster
from tests.nats_servers import COUNTERS, PROMPT_SECONDS, Bucket, DisturbedNetwork, failure_of
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

BUCKET = "budget-usage"
COUNT = 20_000
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
TIMEOUTS = Timeouts(connect=2.0, answer=5.0, reading=60.0)


@pytest.fixture
def cluster(server_dir: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster.started(server_dir / request.node.name) as cluster:
        yield cluster


@pytest.fixture
def leader(cluster: Cluster) -> str:
    """Create a bucket with three replicas and some counters; return its leader."""
    with Bucket.connected(cluster.servers["n0"].url, BUCKET) as bucket:
        wait_until(lambda: _succeeds(lambda: bucket.create(replicas=3)), seconds=60)
        bucket.put_many({f"usage.t.b.2026-11.{n}": b"1" for n in range(COUNT)})
        name: str = bucket.info().cluster.leader
    return name


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 - a cluster that is forming fails in every way
        return False
    return True


@pytest.mark.disaster
def test_dead_and_wiped_followers_are_never_read(cluster: Cluster, leader: str) -> None:
    follower, other = sorted(cluster.servers.keys() - {leader})
    with open_usage_store(cluster.servers[other].url, BUCKET, timeouts=TIMEOUTS) as store:
        identity = identity_of(store)
        cluster.kill(follower)
        for _ in range(3):
            assert len(store.reader(COUNTERS).read("t").counters) == COUNT
        cluster.wipe(follower)
        cluster.servers[follower].start()
        # The wiped server starts empty and needs some seconds to catch up.
        for _ in range(20):
            reading = store.reader(COUNTERS).read("t")
            assert len(reading.counters) == COUNT
            assert not reading.is_partial
        assert identity_of(store) == identity
    with Bucket.connected(cluster.servers[leader].url, BUCKET) as bucket:
        wait_until(lambda: bucket.consumers() == 0, seconds=60)


@pytest.mark.disaster
def test_the_store_is_unknown_and_not_missing_without_a_quorum(
    cluster: Cluster, leader: str
) -> None:
    first, second = sorted(cluster.servers.keys() - {leader})
    with open_usage_store(cluster.servers[leader].url, BUCKET, timeouts=TIMEOUTS) as store:
        before = identity_of(store)
        cluster.kill(first)
        cluster.kill(second)
        seen: list[StoreError] = []

        def is_without_quorum() -> bool:
            with suppress(StoreError):
                assert identity_of(store) == before
            try:
                # An observation also reads a single key, which may fail earlier than the rest.
                store.now()
            except StoreError as error:
                seen.append(error)
            return any(isinstance(error, StoreNoQuorumError) for error in seen)

        # The leader needs about ten seconds to detect that it is alone.
        wait_until(is_without_quorum, seconds=60)
        seen.append(failure_of(lambda: store.reader(COUNTERS).read("t")))
        assert isinstance(failure_of(store.reader(COUNTERS).list_tenants), StoreNoQuorumError)
        seen.append(failure_of(lambda: store.observe("d")))
        seen.append(failure_of(lambda: store.write_marker("d", IntendedMarker("n"), after=0)))
        assert all(isinstance(e, StoreNoQuorumError | StoreUnreachableError) for e in seen)
        # Without a leader this call does not fail: it reports that there is none.
        view = store.cluster_view(NOW)
        assert (view.cluster, view.leader, view.replica_count) == ("C", None, 3)
        assert objection(view) == "the stream has no leader"
        cluster.servers[first].start()
        # The stream's leader responds with the identity; a read also needs the meta leader.
        wait_until(lambda: _succeeds(lambda: store.reader(COUNTERS).read("t")), seconds=60)
        assert identity_of(store) == before
        assert len(store.reader(COUNTERS).read("t").counters) == COUNT


def test_the_cluster_view_lists_all_servers_and_a_dead_one_prevents_convergence(
    cluster: Cluster, leader: str
) -> None:
    follower, other = sorted(cluster.servers.keys() - {leader})
    with open_usage_store(cluster.servers[other].url, BUCKET, timeouts=TIMEOUTS) as store:
        # Catching up with many writes takes some time.
        wait_until(lambda: objection(store.cluster_view(NOW)) is None, seconds=60)
        view = store.cluster_view(NOW)
        assert (view.seen_at, view.cluster, view.leader, view.replica_count) == (
            NOW,
            "C",
            leader,
            3,
        )
        assert view.leader_since is not None
        assert {replica.name for replica in view.replicas} == {follower, other}
        marker = store.write_marker("d", IntendedMarker("n"), after=0)
        assert store.observe("d").marker == FoundMarker("n", marker.revision)
        cluster.kill(follower)
        wait_until(lambda: follower in (objection(store.cluster_view(NOW)) or ""), seconds=60)


@pytest.mark.disaster
def test_a_restore_that_loses_the_leader_fails_and_can_be_repeated(
    cluster: Cluster, leader: str
) -> None:
    _, other = sorted(cluster.servers.keys() - {leader})
    orders = [order(str(number), "5") for number in range(COUNT)]
    asked: list[Window] = []

    def is_open(window: Window) -> bool:
        asked.append(window)
        if len(asked) == COUNT // 2:
            cluster.kill(leader)
        return True

    with open_usage_store(cluster.servers[other].url, BUCKET, timeouts=TIMEOUTS) as store:
        live = store.open_tenant("t")
        failure = failure_of(lambda: live.raise_counters(orders, is_open=is_open))
        assert isinstance(failure, StoreNoQuorumError | StoreUnreachableError)
        wait_until(lambda: _succeeds(lambda: store.open_tenant("t")), seconds=60)
        again = store.open_tenant("t")
        # Written values stay, and there are only old and new values.
        assert {counter.usage for counter in again.reading.counters} <= {1, 5}
        results = again.raise_counters(orders, is_open=lambda _: True)
        assert {result.written for result in results} == {Written.RAISED, Written.KEPT}
        assert {counter.usage for counter in store.open_tenant("t").reading.counters} == {5}


def test_a_read_waits_for_a_short_election(cluster: Cluster, leader: str) -> None:
    refusals = [5]

    def refuse(answer: bytes) -> bytes:
        if b"consumer_create_response" not in answer or refusals[0] == 0:
            return answer
        refusals[0] -= 1
        return refused(answer)

    with (
        DisturbedNetwork(cluster.servers[leader].url) as network,
        open_usage_store(network.url, BUCKET, timeouts=TIMEOUTS) as store,
    ):
        network.rewrite = refuse
        assert len(store.reader(COUNTERS).read("t").counters) == COUNT
        assert refusals == [0]
        refusals[0] = 1000
        started = time.monotonic()
        assert isinstance(failure_of(lambda: store.reader(COUNTERS).read("t")), StoreNoQuorumError)
        assert time.monotonic() - started < PROMPT_SECONDS


def refused(answer: bytes) -> bytes:
    """Replace a JetStream response by that of a cluster without a leader."""
    line, end, _ = answer.partition(b"\r\n")
    error = b'{"error":{"code":503,"err_code":10008,"description":"temporarily unavailable"}}'
    return b"%s %d%s%s%s" % (line.rpartition(b" ")[0], len(error), end, error, end)


def test_only_the_cluster_as_a_whole_reports_a_missing_bucket(cluster: Cluster) -> None:
    with open_usage_store(cluster.servers["n0"].url, BUCKET, timeouts=TIMEOUTS) as store:
        ask = partial(identity_of, store)
        wait_until(lambda: isinstance(failure_of(ask), StoreMissingError), seconds=60)
