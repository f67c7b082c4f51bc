"""All servers of a bucket lose their disks: one incident, which ends restored."""

from collections.abc import Sequence

import pytest

from budget_recovery_dagster.domain import Verdict
from budget_recovery_dagster.errors import AttemptFailedError
from budget_recovery_dagster.services.restore import Recovered, StillWaiting
from tests.cluster.conftest import OpenBucket
from tests.cluster.guarded_bucket import (
    FIRST,
    ONE_ON_FILE,
    THREE_IN_MEMORY,
    THREE_ON_FILE,
    GuardedBucket,
    together,
)
from tests.cluster.outcomes import assert_restored
from tests.cluster.work_in_progress import (
    AT_ONCE,
    counted,
    fail_halfway,
    restore_until_halfway,
)
from tests.nats_cluster import Cluster
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.disaster,
    pytest.mark.filterwarnings("ignore:.*StreamWriter:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def single(opened: OpenBucket) -> GuardedBucket:
    """Return a bucket with one replica, checked and captured."""
    single = opened(ONE_ON_FILE)
    single.prepare()
    return single


@pytest.fixture
def replicated(opened: OpenBucket) -> list[GuardedBucket]:
    """Return buckets with three replicas, on file and in memory, checked and captured."""
    replicated = [opened(THREE_ON_FILE), opened(THREE_IN_MEMORY)]
    together(replicated, GuardedBucket.prepare)
    return replicated


def wipe(cluster: Cluster, names: Sequence[str]) -> None:
    for name in names:
        cluster.kill(name)
    for name in names:
        cluster.wipe(name)


def start(cluster: Cluster, names: Sequence[str]) -> None:
    for name in names:
        cluster.servers[name].start()


def test_every_counter_is_restored_after_the_loss_of_all_disks_and_then_of_one(
    cluster: Cluster, single: GuardedBucket, replicated: list[GuardedBucket]
) -> None:
    every, names = [*replicated, single], list(cluster.servers)
    fail_halfway(every, [], lambda: wipe(cluster, names))
    for bucket in every:
        # Without servers, checks are unknown.
        bucket.assert_never_lost()
    start(cluster, names)
    for bucket in every:
        wait_until(bucket.is_found_lost, seconds=60)
        assert bucket.incident.target is None
    for result in together(every, lambda bucket: bucket.recover(patience=AT_ONCE)):
        assert isinstance(result, StillWaiting)
        assert "does not exist" in result.reason
        assert result.incident.attempts == 0

    together(every, GuardedBucket.create)
    host = single.leader
    together(replicated, lambda bucket: bucket.be_led_by(FIRST))
    created = single.bucket.info().created
    with counted(replicated) as writers:
        results = restore_until_halfway(cluster, every, lambda: wipe(cluster, [host]))
        start(cluster, [host])
        # The cluster recreates the bucket with the old creation time.
        assert single.leader == host
        assert single.bucket.info().created == created
        # The loss of one replica stops no restore; the loss of the only replica does.
        with counted([single]) as (writers_of_single,):
            assert isinstance(results.pop(), AttemptFailedError)
            (again,) = restore_until_halfway(cluster, [single], lambda: None)
    for bucket, writer, done in zip(replicated, writers, results, strict=True):
        assert isinstance(done, Recovered)
        assert_restored(bucket, [writer], attempts=1)
    assert isinstance(again, Recovered)
    # The same store lost its data again, so its attempts do not start again.
    assert_restored(single, [writers_of_single], losses=2, attempts=2)
    assert single.incident.losses[-1].verdict is Verdict.LOST
