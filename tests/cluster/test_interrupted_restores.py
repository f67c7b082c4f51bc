"""Restores that lose disks or a quorum while they write."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from budget_recovery_dagster.errors import AttemptFailedError
from budget_recovery_dagster.services.restore import Recovered, StillWaiting
from tests.cluster.conftest import OpenBucket
from tests.cluster.guarded_bucket import (
    FIRST,
    THREE_IN_MEMORY,
    THREE_ON_FILE,
    GuardedBucket,
    together,
)
from tests.cluster.outcomes import assert_restored, assert_waits
from tests.cluster.work_in_progress import AT_ONCE, PATIENCE, counted, lose, restore_until_halfway
from tests.nats_cluster import NAMES, Cluster
from tests.waiting import wait_until

# The driver forgets to close connections to servers that accept them without responding.
pytestmark = [
    pytest.mark.disaster,
    pytest.mark.filterwarnings("ignore:.*StreamWriter:pytest.PytestUnraisableExceptionWarning"),
]

Fail = Callable[[Cluster, Sequence[str]], None]

FOLLOWERS = [name for name in NAMES if name != FIRST]


@pytest.fixture
def lost(cluster: Cluster, opened: OpenBucket) -> list[GuardedBucket]:
    """Return buckets with three replicas that their gateway recreated, led by the first server."""
    wait_until(lambda: not cluster.behind(), seconds=60)
    lost = [opened(THREE_ON_FILE), opened(THREE_IN_MEMORY)]
    together(lost, GuardedBucket.prepare)
    together(lost, lose)
    together(lost, lambda bucket: bucket.be_led_by(FIRST))
    return lost


def kill(cluster: Cluster, names: Sequence[str]) -> None:
    for name in names:
        cluster.kill(name)


def wipe(cluster: Cluster, names: Sequence[str]) -> None:
    kill(cluster, names)
    for name in names:
        cluster.wipe(name)


@pytest.mark.parametrize(
    ("fail", "names"),
    [(kill, FOLLOWERS), (wipe, FOLLOWERS), (wipe, [FIRST])],
    ids=["quorum lost", "two wiped", "leader wiped"],
)
def test_an_interrupted_restore_waits_for_all_servers_and_succeeds(
    cluster: Cluster, lost: list[GuardedBucket], fail: Fail, names: list[str]
) -> None:
    with counted(lost) as writers:
        failures = restore_until_halfway(cluster, lost, lambda: fail(cluster, names))
        assert all(isinstance(failure, AttemptFailedError) for failure in failures)
        # First without a quorum, then with an incomplete one.
        for name in names:
            together(lost, partial(assert_waits, attempts=1))
            cluster.servers[name].start()
        for result in together(lost, partial(GuardedBucket.recover, patience=PATIENCE)):
            assert isinstance(result, Recovered)
        for bucket, writer in zip(lost, writers, strict=True):
            assert_restored(bucket, [writer], attempts=2)


def test_a_restore_whose_servers_lost_all_disks_restarts_in_the_recreated_bucket(
    cluster: Cluster, lost: list[GuardedBucket]
) -> None:
    failures = restore_until_halfway(cluster, lost, lambda: wipe(cluster, NAMES))
    assert all(isinstance(failure, AttemptFailedError) for failure in failures)
    for name in NAMES:
        together(lost, partial(assert_waits, attempts=1))
        cluster.servers[name].start()

    def is_found_gone() -> bool:
        together(lost, GuardedBucket.check)
        return all(len(bucket.incident.losses) == 2 for bucket in lost)

    wait_until(is_found_gone, seconds=60)
    for bucket in lost:
        result = bucket.recover(patience=AT_ONCE)
        assert isinstance(result, StillWaiting)
        assert "does not exist" in result.reason
        # The further loss resets the attempts, and waiting uses none.
        assert result.incident.attempts == 0
    together(lost, GuardedBucket.create)
    with counted(lost) as writers:
        for result in together(lost, partial(GuardedBucket.recover, patience=PATIENCE)):
            assert isinstance(result, Recovered)
        for bucket, writer in zip(lost, writers, strict=True):
            assert_restored(bucket, [writer], losses=2, attempts=1)
