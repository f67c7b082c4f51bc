"""The usage store on three servers: who answers, and what is known when some of them are gone."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from budget_recovery_dagster.adapters.nats_connection import Timeouts
from budget_recovery_dagster.adapters.nats_store import open_usage_store
from budget_recovery_dagster.errors import (
    StoreError,
    StoreMissingError,
    StoreNoQuorumError,
    StoreUnreachableError,
)
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from tests.free_ports import unused_ports
from tests.nats_servers import COUNTERS, PROMPT_SECONDS, Bucket, DisturbedNetwork, failure_of
from tests.waiting import wait_until

BUCKET = "budget-usage"
COUNT = 20_000
TIMEOUTS = Timeouts(connect=2.0, answer=5.0, reading=60.0)


class Cluster:
    """Three servers, of which single ones can be killed and wiped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        ports = unused_ports(6)
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports[3:])
        self.servers = {
            f"n{number}": NatsServer(
                directory / f"n{number}",
                port=ports[number],
                config=f"""
                    server_name: n{number}
                    cluster {{
                        name: C, host: 127.0.0.1, port: {ports[3 + number]}, routes: [{routes}]
                    }}""",
            )
            for number in range(3)
        }

    def kill(self, name: str) -> None:
        server = self.servers[name]
        os.kill(server.pid, signal.SIGKILL)
        server.stop()

    def wipe(self, name: str) -> None:
        shutil.rmtree(self._directory / name)


@pytest.fixture
def cluster(server_dir: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(server_dir / request.node.name)
    with ExitStack() as stack:
        for server in cluster.servers.values():
            stack.callback(server.stop)
            server.start()
        yield cluster


@pytest.fixture
def leader(cluster: Cluster) -> str:
    """Make a bucket of three replicas with counters; return who leads it."""
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


def test_neither_a_dead_nor_a_wiped_follower_is_read(cluster: Cluster, leader: str) -> None:
    follower, other = sorted(cluster.servers.keys() - {leader})
    with open_usage_store(cluster.servers[other].url, BUCKET, timeouts=TIMEOUTS) as store:
        identity = store.identity()
        cluster.kill(follower)
        for _ in range(3):
            assert len(store.reader(COUNTERS).read("t").counters) == COUNT
        cluster.wipe(follower)
        cluster.servers[follower].start()
        # It takes some seconds to fill up again, and holds nothing at first.
        for _ in range(20):
            reading = store.reader(COUNTERS).read("t")
            assert len(reading.counters) == COUNT
            assert not reading.is_partial
        assert store.identity() == identity
    with Bucket.connected(cluster.servers[leader].url, BUCKET) as bucket:
        wait_until(lambda: bucket.consumers() == 0, seconds=60)


def test_without_a_quorum_nothing_is_known_and_nothing_missing(
    cluster: Cluster, leader: str
) -> None:
    first, second = sorted(cluster.servers.keys() - {leader})
    with open_usage_store(cluster.servers[leader].url, BUCKET, timeouts=TIMEOUTS) as store:
        before = store.identity()
        cluster.kill(first)
        cluster.kill(second)
        seen: list[StoreError] = []

        def is_without_quorum() -> bool:
            try:
                assert store.identity() == before
            except StoreError as error:
                seen.append(error)
            return any(isinstance(error, StoreNoQuorumError) for error in seen)

        # The leader takes some ten seconds to see that it is alone.
        wait_until(is_without_quorum, seconds=60)
        seen.append(failure_of(lambda: store.reader(COUNTERS).read("t")))
        assert isinstance(failure_of(store.reader(COUNTERS).list_tenants), StoreNoQuorumError)
        assert all(isinstance(e, StoreNoQuorumError | StoreUnreachableError) for e in seen)
        cluster.servers[first].start()
        # The stream's leader answers for the identity; a reading needs the cluster's leader, too.
        wait_until(lambda: _succeeds(lambda: store.reader(COUNTERS).read("t")), seconds=60)
        assert store.identity() == before
        assert len(store.reader(COUNTERS).read("t").counters) == COUNT


def test_a_cluster_that_finds_its_leader_in_a_moment_is_read(cluster: Cluster, leader: str) -> None:
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
    """Turn an answer of JetStream into what it says while the cluster has no leader."""
    line, end, _ = answer.partition(b"\r\n")
    error = b'{"error":{"code":503,"err_code":10008,"description":"temporarily unavailable"}}'
    return b"%s %d%s%s%s" % (line.rpartition(b" ")[0], len(error), end, error, end)


def test_a_missing_bucket_is_told_by_the_cluster_with_authority(cluster: Cluster) -> None:
    with open_usage_store(cluster.servers["n0"].url, BUCKET, timeouts=TIMEOUTS) as store:
        wait_until(lambda: isinstance(failure_of(store.identity), StoreMissingError), seconds=60)
