"""A server is cut off from the others, while clients and writers still reach all servers.

A former leader keeps responding as the leader for about ten seconds after the others have elected
a new one. It reports an older state, which is neither a loss nor a restore target.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from nats.js.api import StorageType

from budget_recovery_dagster.domain import SILENT_FOR, Verdict
from budget_recovery_dagster.errors import AttemptFailedError
from budget_recovery_dagster.services.restore import Recovered
from tests.cluster.both_sides import BothSides, counted_on_both_sides
from tests.cluster.conftest import OpenBucket
from tests.cluster.cut_routes import CuttableCluster
from tests.cluster.guarded_bucket import (
    THREE_IN_MEMORY,
    THREE_ON_FILE,
    GuardedBucket,
    Kind,
    succeeds,
    together,
)
from tests.cluster.outcomes import assert_never_lost, assert_restored, assert_waits
from tests.cluster.work_in_progress import (
    PATIENCE,
    counted,
    fail_halfway,
    lose,
    restore_until_halfway,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.disaster

_ELECTION_SECONDS = 30
# The minimum time for which an old leader coexists with the new one.
_OVERLAP_SECONDS = 8


@pytest.fixture(scope="module")
def cluster(server_dir: Path) -> Iterator[CuttableCluster]:
    with CuttableCluster.started(server_dir / "cuttable cluster") as cluster:
        yield cluster


@pytest.fixture
def intact(cluster: CuttableCluster, opened: OpenBucket) -> list[GuardedBucket]:
    """Return buckets with three replicas, on file and in memory, checked and captured."""
    return prepared(cluster, opened)


@pytest.fixture
def lost(cluster: CuttableCluster, opened: OpenBucket) -> list[GuardedBucket]:
    """Return such buckets recreated by their gateway, which must be restored."""
    lost = prepared(cluster, opened)
    together(lost, lose)
    return lost


def prepared(cluster: CuttableCluster, opened: OpenBucket) -> list[GuardedBucket]:
    wait_until(lambda: not cluster.behind(), seconds=60)
    buckets = [opened(THREE_ON_FILE), opened(THREE_IN_MEMORY)]
    together(buckets, GuardedBucket.prepare)
    return buckets


@pytest.fixture
def leader(cluster: CuttableCluster) -> str:
    """Return the leader of the cluster."""
    wait_until(lambda: cluster.meta_leader() is not None, seconds=60)
    leader = cluster.meta_leader()
    assert leader is not None
    return leader


def let_be_led(buckets: list[GuardedBucket], leader: str) -> None:
    """Make the leader of the cluster the leader of the buckets, so that its loss has an effect."""
    together(buckets, lambda bucket: bucket.be_led_by(leader))


def let_others_elect(cluster: CuttableCluster, sides: list[BothSides], old: str) -> None:
    """Wait until others lead the buckets, while the old leader still claims to lead."""
    other = min(cluster.servers.keys() - {old})
    streams = [side.whole.bucket.stream for side in sides]
    wait_until(
        lambda: not {cluster.leader_of(each, asked=other) for each in streams} & {None, old},
        seconds=_ELECTION_SECONDS,
    )
    assert {cluster.leader_of(each, asked=old) for each in streams} == {old}


def misses(bucket: GuardedBucket, follower: str) -> bool:
    """Return whether a follower has been silent for so long that it may be dead."""
    replicas = {replica.name: replica for replica in bucket.bucket.info().cluster.replicas}
    return timedelta(microseconds=replicas[follower].active / 1000) > SILENT_FOR


def test_a_leader_cut_off_during_captures_and_checks_is_not_a_loss(
    cluster: CuttableCluster, intact: list[GuardedBucket], lost: list[GuardedBucket], leader: str
) -> None:
    let_be_led(intact + lost, leader)
    with (
        BothSides.of(cluster, intact, leader) as sides,
        BothSides.of(cluster, lost, leader) as waiting,
        counted_on_both_sides(sides) as writers,
    ):
        with ExitStack() as stack:
            fail_halfway(
                [side.cut_off for side in sides],
                [side.cut_off for side in waiting],
                lambda: stack.enter_context(cluster.cut_off(leader)),
            )
            together([side.others for side in sides], GuardedBucket.become_intact)
            together([side.others for side in waiting], partial(assert_waits, attempts=0))
        together([side.cut_off for side in sides], GuardedBucket.become_intact)
        for side, counting in zip(sides, writers, strict=True):
            assert_never_lost(side.whole, counting)


def test_the_state_of_an_old_leader_is_not_a_loss(
    cluster: CuttableCluster, intact: list[GuardedBucket], leader: str
) -> None:
    let_be_led(intact, leader)
    with (
        BothSides.of(cluster, intact, leader) as sides,
        counted_on_both_sides(sides) as writers,
    ):
        with cluster.cut_off(leader):
            let_others_elect(cluster, sides, leader)
            # The old leader does not have the marker that is accepted now. The new one may need
            # some more time to accept it.
            others = [side.others for side in sides]
            wait_until(
                lambda: all(together(others, GuardedBucket.is_found_intact)),
                seconds=_OVERLAP_SECONDS,
            )
            for checked in together([side.cut_off for side in sides], GuardedBucket.check):
                assert checked.check.verdict is Verdict.UNKNOWN
                assert "may no longer be the leader" in checked.check.reason
            for captured in together([side.cut_off for side in sides], GuardedBucket.capture):
                assert not captured.stored
            together([side.others for side in sides], GuardedBucket.become_intact)
        together([side.cut_off for side in sides], GuardedBucket.become_intact)
        for side, counting in zip(sides, writers, strict=True):
            assert_never_lost(side.whole, counting)


def test_a_deleted_bucket_that_an_old_leader_still_reports_stays_lost(
    cluster: CuttableCluster, intact: list[GuardedBucket], leader: str
) -> None:
    let_be_led(intact, leader)
    with BothSides.of(cluster, intact, leader) as sides:

        def find_gone(bucket: GuardedBucket) -> None:
            def is_found() -> bool:
                # The cluster may need some time to elect a leader for this.
                succeeds(bucket.bucket.destroy)
                return bucket.is_found_lost()

            wait_until(is_found, seconds=_ELECTION_SECONDS)

        with cluster.cut_off(leader):
            let_others_elect(cluster, sides, leader)
            together([side.others for side in sides], find_gone)
            for checked in together([side.cut_off for side in sides], GuardedBucket.check):
                assert checked.check.verdict is Verdict.UNKNOWN
            assert all(bucket.incident.target is None for bucket in intact)
        together(intact, GuardedBucket.create)
        with counted(intact) as writers:
            for result in together(intact, partial(GuardedBucket.recover, patience=PATIENCE)):
                assert isinstance(result, Recovered)
            for bucket, writer in zip(intact, writers, strict=True):
                assert_restored(bucket, [writer], attempts=1)


def test_a_follower_that_is_cut_off_stops_captures_and_checks_only_on_its_side(
    cluster: CuttableCluster, intact: list[GuardedBucket], lost: list[GuardedBucket], leader: str
) -> None:
    let_be_led(intact + lost, leader)
    follower = max(cluster.servers.keys() - {leader})
    with (
        BothSides.of(cluster, intact, follower) as sides,
        BothSides.of(cluster, lost, follower) as waiting,
        counted_on_both_sides(sides) as writers,
    ):
        with ExitStack() as stack:
            fail_halfway(
                [side.others for side in sides],
                [side.others for side in waiting],
                lambda: stack.enter_context(cluster.cut_off(follower)),
            )
            for side in sides:
                assert Verdict.UNKNOWN not in side.others.verdicts
                assert side.others.is_captured()
                assert side.cut_off.check().check.verdict is Verdict.UNKNOWN
                assert not side.cut_off.capture().stored
            together([side.cut_off for side in waiting], partial(assert_waits, attempts=0))
        together([side.cut_off for side in sides], GuardedBucket.become_intact)
        for side, counting in zip(sides, writers, strict=True):
            assert_never_lost(side.whole, counting)


def test_a_bucket_held_only_by_a_server_that_is_cut_off_is_not_a_loss(
    cluster: CuttableCluster, opened: OpenBucket, leader: str
) -> None:
    wait_until(lambda: not cluster.behind(), seconds=60)
    single = opened(Kind(1, StorageType.FILE, host=leader))
    single.prepare()
    with (
        BothSides.of(cluster, [single], leader) as (side,),
        counted_on_both_sides([side]) as (writers,),
    ):
        with ExitStack() as stack:
            cut = cluster.cut_off(leader)
            fail_halfway([side.others], [], lambda: stack.enter_context(cut))
            assert side.others.check().check.verdict is Verdict.UNKNOWN
            # It holds the only replica, so no other server can have another state. Counters cannot
            # be counted: a new consumer needs a quorum of the cluster.
            checked = side.cut_off.check()
            assert checked.check.verdict is Verdict.SAME
            assert "Missing counters were not searched for" in checked.check.reason
        side.others.become_intact()
        assert_never_lost(single, writers)


@pytest.mark.parametrize("which", ["leader", "follower"])
def test_a_restore_through_a_server_that_is_cut_off_fails_and_waits_for_its_return(
    cluster: CuttableCluster, lost: list[GuardedBucket], leader: str, which: str
) -> None:
    let_be_led(lost, leader)
    server = leader if which == "leader" else max(cluster.servers.keys() - {leader})
    with (
        BothSides.of(cluster, lost, server) as sides,
        counted_on_both_sides(sides) as writers,
    ):
        with ExitStack() as stack:
            failures = restore_until_halfway(
                cluster,
                [side.cut_off for side in sides],
                lambda: stack.enter_context(cluster.cut_off(server)),
            )
            assert all(isinstance(failure, AttemptFailedError) for failure in failures)
            for seen in ([side.cut_off for side in sides], [side.others for side in sides]):
                together(seen, partial(assert_waits, attempts=1))
        seen = [side.cut_off for side in sides]
        for result in together(seen, partial(GuardedBucket.recover, patience=PATIENCE)):
            assert isinstance(result, Recovered)
        for side, counting in zip(sides, writers, strict=True):
            assert_restored(side.whole, counting, attempts=2)


def test_a_restore_continues_while_a_follower_is_cut_off(
    cluster: CuttableCluster, lost: list[GuardedBucket], leader: str
) -> None:
    let_be_led(lost, leader)
    follower = max(cluster.servers.keys() - {leader})
    with (
        BothSides.of(cluster, lost, follower) as sides,
        counted_on_both_sides(sides) as writers,
    ):
        with ExitStack() as stack:
            seen = [side.others for side in sides]

            def cut_off_until_it_is_missed() -> None:
                stack.enter_context(cluster.cut_off(follower))
                wait_until(lambda: all(misses(bucket, follower) for bucket in seen))

            for result in restore_until_halfway(cluster, seen, cut_off_until_it_is_missed):
                assert isinstance(result, Recovered)
            for side in sides:
                assert side.cut_off.check().check.verdict is Verdict.UNKNOWN
        for side in sides:
            wait_until(side.cut_off.is_found_intact)
        for side, counting in zip(sides, writers, strict=True):
            assert_restored(side.whole, counting, attempts=1)
