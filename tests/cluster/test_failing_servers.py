"""Servers fail during captures, checks and restores: unknown is not a loss.

The restores of two lost buckets wait during all tests; the last test completes them.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from budget_recovery_dagster.domain import Outcome, Verdict
from budget_recovery_dagster.errors import AttemptFailedError
from budget_recovery_dagster.services.restore import Recovered
from tests.cluster.conftest import OpenBucket
from tests.cluster.guarded_bucket import (
    FIRST,
    KEYS,
    ONE_ON_FILE,
    THREE_IN_MEMORY,
    THREE_ON_FILE,
    GuardedBucket,
    together,
)
from tests.cluster.patient_writers import PatientWriters, jumps_of
from tests.cluster.work_in_progress import (
    counted,
    counted_and_never_lost,
    fail_halfway,
    lose,
    restore_until_halfway,
)
from tests.hung_servers import hung
from tests.nats_cluster import Cluster
from tests.waiting import wait_until

# The driver forgets to close connections to servers that accept them without responding.
pytestmark = [
    pytest.mark.disaster,
    pytest.mark.filterwarnings("ignore:.*StreamWriter:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def lost(kept_open: OpenBucket) -> list[GuardedBucket]:
    """Return buckets that their gateway recreated and that must be restored."""
    lost = [kept_open(THREE_ON_FILE), kept_open(THREE_IN_MEMORY)]
    together(lost, GuardedBucket.prepare)
    together(lost, lose)
    return lost


@pytest.fixture(scope="module")
def writers_of_lost(lost: list[GuardedBucket]) -> Iterator[list[PatientWriters]]:
    with counted(lost) as writers:
        yield writers


@pytest.fixture
def intact(cluster: Cluster, lost: list[GuardedBucket], opened: OpenBucket) -> list[GuardedBucket]:
    """Return buckets with three replicas or one, on file and in memory, checked and captured."""
    wait_until(lambda: not cluster.behind(), seconds=60)
    intact = [opened(kind) for kind in (THREE_ON_FILE, THREE_IN_MEMORY, ONE_ON_FILE)]
    together(intact, GuardedBucket.prepare)
    return intact


@pytest.fixture
def leader(cluster: Cluster, lost: list[GuardedBucket], intact: list[GuardedBucket]) -> str:
    """Return the leader of the cluster, which also leads all buckets with three replicas."""
    wait_until(lambda: cluster.meta_leader() is not None, seconds=60)
    leader = cluster.meta_leader()
    assert leader is not None
    together([*lost, *replicated(intact)], lambda bucket: bucket.be_led_by(leader))
    return leader


@pytest.fixture
def followers(cluster: Cluster, leader: str) -> list[str]:
    return sorted(cluster.servers.keys() - {leader})


@pytest.fixture
def followers_of_lost(cluster: Cluster, lost: list[GuardedBucket]) -> list[str]:
    leaders = {bucket.leader for bucket in lost}
    return sorted(cluster.servers.keys() - leaders)


def wipe(cluster: Cluster, names: Sequence[str]) -> None:
    for name in names:
        cluster.kill(name)
        cluster.wipe(name)


def assert_unknown(bucket: GuardedBucket) -> None:
    assert bucket.check().check.verdict is Verdict.UNKNOWN


def replicated(buckets: Sequence[GuardedBucket]) -> list[GuardedBucket]:
    return [bucket for bucket in buckets if bucket.kind.replicas > 1]


def test_a_dead_follower_of_an_idle_cluster_stops_neither_captures_nor_checks(
    cluster: Cluster,
    lost: list[GuardedBucket],
    intact: list[GuardedBucket],
    followers: list[str],
) -> None:
    # Neither the first server, to which we are connected, nor the host of a single replica.
    dead = followers[-1]
    alive = [bucket for bucket in intact if bucket.kind.replicas > 1 or bucket.leader != dead]
    fail_halfway(alive, lost, lambda: cluster.kill(dead))
    for bucket in alive:
        assert bucket.is_found_intact()
        assert bucket.is_captured()
        # Checks during its death were good too.
        assert Verdict.UNKNOWN not in bucket.verdicts
        bucket.assert_never_lost()
    cluster.servers[dead].start()


def test_a_killed_leader_is_not_a_loss(
    cluster: Cluster,
    lost: list[GuardedBucket],
    writers_of_lost: list[PatientWriters],
    intact: list[GuardedBucket],
    leader: str,
) -> None:
    with counted_and_never_lost(intact):
        fail_halfway(intact, lost, lambda: cluster.kill(leader))
        together(replicated(intact), GuardedBucket.become_intact)
        cluster.servers[leader].start()
        together(intact, GuardedBucket.become_intact)


def test_a_leader_that_hung_for_a_while_is_not_a_loss(
    cluster: Cluster,
    lost: list[GuardedBucket],
    writers_of_lost: list[PatientWriters],
    intact: list[GuardedBucket],
    leader: str,
) -> None:
    with counted_and_never_lost(intact), ExitStack() as stack:

        def cut_off() -> None:
            stack.enter_context(hung(cluster.servers[leader].pid))

        fail_halfway(intact, lost, cut_off)
        together(replicated(intact), GuardedBucket.become_intact)
        stack.close()
        # At first it still claims to be the leader.
        together(intact, GuardedBucket.become_intact)


def test_a_wiped_follower_is_not_a_loss_but_a_wiped_only_replica_is(
    cluster: Cluster,
    lost: list[GuardedBucket],
    writers_of_lost: list[PatientWriters],
    intact: list[GuardedBucket],
) -> None:
    *kept, single = intact
    host = single.leader
    together([*lost, *kept], lambda bucket: bucket.be_led_by(FIRST))
    with counted_and_never_lost(kept), counted([single]):
        fail_halfway(intact, lost, lambda: wipe(cluster, [host]))
        # Without the server, checks are unknown.
        single.assert_never_lost()
        cluster.servers[host].start()
        together(kept, GuardedBucket.become_intact)
        wait_until(single.is_found_lost, seconds=60)
        assert single.is_found_lost()
        (loss,) = single.incident.losses
        assert loss.after is not None
        # The cluster has recreated the bucket with the old creation time.
        assert loss.after.created_at == loss.before.created_at
        assert loss.verdict in (Verdict.LOST, Verdict.LOST)


def test_a_quorum_that_returns_with_empty_disks_is_not_a_loss_and_a_restore_waits_for_it(
    cluster: Cluster,
    lost: list[GuardedBucket],
    writers_of_lost: list[PatientWriters],
    intact: list[GuardedBucket],
    leader: str,
    followers: list[str],
) -> None:
    kept = replicated(intact)
    proven = threading.Event()

    def kill_the_leader() -> None:
        assert proven.wait(60)
        assert {bucket.leader for bucket in lost} == {leader}
        cluster.kill(leader)

    with ThreadPoolExecutor(1) as pool:
        with counted_and_never_lost(kept):
            fail_halfway(kept, lost, lambda: wipe(cluster, followers))
            together(kept, assert_unknown)
            for name in followers:
                cluster.servers[name].start()
            restoring = pool.submit(restore_until_halfway, cluster, lost, kill_the_leader)
            together(kept, GuardedBucket.become_intact)
        proven.set()
        failures = restoring.result()
    cluster.servers[leader].start()
    for bucket, failure in zip(lost, failures, strict=True):
        assert isinstance(failure, AttemptFailedError)
        assert bucket.incident.attempts == 1


def test_a_restore_that_waited_and_failed_succeeds_although_a_follower_dies(
    cluster: Cluster,
    lost: list[GuardedBucket],
    writers_of_lost: list[PatientWriters],
    followers_of_lost: list[str],
) -> None:
    # Not the first server, to which we are connected: that would fail the attempt.
    dead = followers_of_lost[-1]
    attempts = [bucket.incident.attempts for bucket in lost]
    results = restore_until_halfway(cluster, lost, lambda: cluster.kill(dead))
    cluster.servers[dead].start()
    for bucket, writer, before, result in zip(
        lost, writers_of_lost, attempts, results, strict=True
    ):
        assert isinstance(result, Recovered)
        assert result.incident == bucket.incident
        assert (len(result.incident.losses), result.incident.attempts) == (1, before + 1)
        assert result.incident.ended is not None
        assert result.incident.ended.outcome is Outcome.RESTORED
        assert result.incident.ended.restored.counters == len(KEYS)
        # This includes counts during the read of the history.
        jumps = jumps_of(bucket.bucket, [writer], bucket.restorable)
        assert sorted(jumps.values()) == sorted(KEYS)
        # Our marker was written to a converged store before anything else of ours.
        assert min(jumps) > bucket.first_marker_revision
