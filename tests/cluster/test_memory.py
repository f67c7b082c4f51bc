"""Servers with buckets in memory restart: buckets without another replica are lost and restored."""

import pytest

from budget_recovery_dagster.domain import Verdict
from budget_recovery_dagster.errors import AttemptFailedError
from budget_recovery_dagster.services.restore import Recovered
from tests.cluster.conftest import OpenBucket
from tests.cluster.guarded_bucket import (
    FIRST,
    ONE_IN_MEMORY,
    THREE_IN_MEMORY,
    THREE_ON_FILE,
    GuardedBucket,
    together,
)
from tests.cluster.outcomes import assert_restored, assert_waits
from tests.cluster.work_in_progress import (
    PATIENCE,
    counted,
    counted_and_never_lost,
    fail_halfway,
    restore_until_halfway,
)
from tests.nats_cluster import NAMES, Cluster
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.disaster,
    pytest.mark.filterwarnings("ignore:.*StreamWriter:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def on_file(opened: OpenBucket) -> GuardedBucket:
    on_file = opened(THREE_ON_FILE)
    on_file.prepare()
    return on_file


@pytest.fixture
def in_memory(opened: OpenBucket) -> GuardedBucket:
    in_memory = opened(THREE_IN_MEMORY)
    in_memory.prepare()
    return in_memory


def assert_emptied(bucket: GuardedBucket, losses: int) -> None:
    """Require a further loss: the cluster has recreated the bucket with the old creation time.

    It is the same store, so its attempts do not start again: there was one for each loss before.
    """

    def is_found() -> bool:
        bucket.check()
        return len(bucket.plane.incidents.recent(1)) == 1 and len(bucket.incident.losses) == losses

    wait_until(is_found, seconds=60)
    loss = bucket.incident.losses[-1]
    assert loss.after is not None
    assert loss.after.created_at == loss.before.created_at
    assert loss.verdict is Verdict.LOST
    assert bucket.incident.attempts == losses - 1


def test_a_bucket_in_the_memory_of_one_server_is_lost_with_it_and_restored(
    cluster: Cluster, on_file: GuardedBucket, in_memory: GuardedBucket, opened: OpenBucket
) -> None:
    kept, single = [on_file, in_memory], opened(ONE_IN_MEMORY)
    single.prepare()
    host = single.leader
    together(kept, lambda bucket: bucket.be_led_by(FIRST))
    with counted_and_never_lost(kept):
        with counted([single]):
            fail_halfway([*kept, single], [], lambda: cluster.kill(host))
            # Without the server, checks are unknown.
            single.assert_never_lost()
            cluster.servers[host].start()
            assert_emptied(single, losses=1)
            together(kept, GuardedBucket.become_intact)
            (failure,) = restore_until_halfway(cluster, [single], lambda: cluster.kill(host))
            assert isinstance(failure, AttemptFailedError)
            assert_waits(single, attempts=1)
            cluster.servers[host].start()
            assert_emptied(single, losses=2)
        with counted([single]) as writers:
            assert isinstance(single.recover(patience=PATIENCE), Recovered)
            assert_restored(single, writers, losses=2, attempts=2)
        together(kept, GuardedBucket.become_intact)


def test_a_bucket_in_the_memory_of_all_servers_is_lost_if_all_restart_and_restored(
    cluster: Cluster, on_file: GuardedBucket, in_memory: GuardedBucket
) -> None:
    def kill_all() -> None:
        for name in NAMES:
            cluster.kill(name)

    with counted_and_never_lost([on_file]):
        with counted([in_memory]):
            fail_halfway([on_file, in_memory], [], kill_all)
            for bucket in (on_file, in_memory):
                bucket.assert_never_lost()
            cluster.start_missing()
            assert_emptied(in_memory, losses=1)
            on_file.become_intact()
            (failure,) = restore_until_halfway(cluster, [in_memory], kill_all)
            assert isinstance(failure, AttemptFailedError)
            assert_waits(in_memory, attempts=1)
            cluster.start_missing()
            assert_emptied(in_memory, losses=2)
        with counted([in_memory]) as writers:
            assert isinstance(in_memory.recover(patience=PATIENCE), Recovered)
            assert_restored(in_memory, writers, losses=2, attempts=2)
        on_file.become_intact()
