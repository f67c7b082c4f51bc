"""What operators do to a healthy cluster is no loss: no check finds one, and no incident opens.

Checks run all the time: before, during and after each change.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from nats.js.api import DiscardPolicy, Placement, StorageType

from budget_recovery_dagster.domain import RecoveryState, Verdict
from budget_recovery_dagster.services import Checked, preview_restore
from budget_recovery_dagster.services.restore import Order, RestoreRequest, restore_manually
from tests.cluster.conftest import OpenBucket
from tests.cluster.guarded_bucket import (
    KEYS,
    ONE_ON_FILE,
    THREE_IN_MEMORY,
    THREE_ON_FILE,
    GuardedBucket,
    Kind,
    succeeds,
    succeeds_with,
    together,
)
from tests.nats_cluster import NAMES, Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.disaster]

ONE_ANYWHERE = Kind(1, StorageType.FILE)
ORDER = Order("ann", "counter deleted", "a run", lambda _: None, accept_unconverged=True)
CREATION_TOLERANCE = timedelta(seconds=5)
# Reasons for an unknown verdict while no leader with a majority answers.
WITHOUT_LEADER = re.compile(
    "has no leader|may no longer be the leader|No response to|Cannot connect|Lost the connection"
    "|no leader or no quorum|temporarily unavailable|accepts writes|stream is offline"
)
# No limit is reached by what the bucket holds.
EDITS: tuple[dict[str, Any], ...] = (
    {"max_age": 3600.0},
    {"max_age": 86400.0, "max_bytes": 10_000_000},
    {"max_bytes": -1, "discard": DiscardPolicy.OLD},
    {"discard": DiscardPolicy.NEW, "max_msgs_per_subject": 5},
    {"max_msgs_per_subject": 1, "description": "budgets of the gateway"},
    {"subject_delete_marker_ttl": 60.0},
    {"max_msg_size": 1_000_000, "duplicate_window": 30.0},
    {"placement": Placement(cluster="C"), "allow_direct": True},
    {"max_age": 0.0},
)


class Watch:
    """Checks of a bucket, one after another, until it ends."""

    def __init__(self, bucket: GuardedBucket) -> None:
        self.bucket = bucket
        self.checked: list[Checked] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.checked.append(self.bucket.check())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def settle(self) -> None:
        """Wait until two checks in a row, begun from now on, are good and renew the marker."""
        # The running check began earlier.
        begun = len(self.checked) + 1

        def is_settled() -> bool:
            newest = self.checked[begun:][-2:]
            return len(newest) == 2 and all(map(is_good, newest))

        wait_until(is_settled, seconds=60)


def is_good(checked: Checked) -> bool:
    return checked.check.verdict is Verdict.SAME and not checked.hint


@contextmanager
def watched(*buckets: GuardedBucket) -> Iterator[list[Watch]]:
    """Check buckets all the time; require at the end that nothing was ever taken for a loss."""
    watches = [Watch(bucket) for bucket in buckets]
    for watch in watches:
        watch.start()
    try:
        settle(watches)
        yield watches
        settle(watches)
    finally:
        for watch in watches:
            watch.stop()
    for watch in watches:
        watch.bucket.assert_never_lost()
        assert is_good(watch.bucket.check())
        for checked in watch.checked:
            assert checked.recovery.state is RecoveryState.HEALTHY
            is_same = checked.check.verdict is Verdict.SAME
            assert is_same or WITHOUT_LEADER.search(checked.check.reason), checked.check


def settle(watches: list[Watch]) -> None:
    for watch in watches:
        watch.settle()


def unknown(watch: Watch) -> list[str]:
    """Return the reasons of checks that could not tell."""
    checks = [checked.check for checked in watch.checked]
    return [check.reason for check in checks if check.verdict is not Verdict.SAME]


def step_down(bucket: GuardedBucket, *, rounds: int) -> Iterator[str]:
    """Let each server lead in turn."""
    for name in NAMES * rounds:
        bucket.be_led_by(name)
        yield name


def scale(bucket: GuardedBucket, replicas: int) -> None:
    """Change the number of replicas, and wait until they all have caught up."""
    wait_until(lambda: succeeds(lambda: bucket.bucket.reconfigure(num_replicas=replicas)))

    def is_scaled() -> bool:
        found = bucket.bucket.info().cluster
        current = [each for each in found.replicas or () if each.current]
        return bool(found.leader) and len(current) == replicas - 1

    wait_until(lambda: succeeds_with(is_scaled), seconds=60)


def test_scaling_a_bucket_and_step_downs_of_its_leader_are_no_loss(opened: OpenBucket) -> None:
    bucket = opened(ONE_ANYWHERE)
    bucket.prepare()
    with watched(bucket) as watches:
        scale(bucket, 3)
        settle(watches)
        for _ in step_down(bucket, rounds=1):
            settle(watches)
        scale(bucket, 1)
        settle(watches)


def test_edits_of_the_configuration_are_no_loss(opened: OpenBucket) -> None:
    buckets = [opened(THREE_ON_FILE), opened(ONE_ANYWHERE)]
    together(buckets, GuardedBucket.prepare)
    with watched(*buckets) as watches:
        for edit in EDITS:
            for bucket in buckets:
                bucket.bucket.reconfigure(**edit)
            settle(watches)
    replicated, _ = watches
    # A single replica may drop a write meanwhile; then that check cannot tell.
    assert unknown(replicated) == []


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_servers_that_restart_one_after_another_are_no_loss(
    cluster: Cluster,
    opened: OpenBucket,
    is_killed: bool,  # noqa: FBT001 - a parameter of pytest's
) -> None:
    buckets = [opened(kind) for kind in (THREE_ON_FILE, THREE_IN_MEMORY, ONE_ON_FILE)]
    together(buckets, GuardedBucket.prepare)
    with watched(*buckets) as watches:
        for name in NAMES:
            if is_killed:
                cluster.kill(name)
            else:
                cluster.servers[name].stop()
            cluster.servers[name].start()
            wait_until(lambda: not cluster.behind(), seconds=60)
            settle(watches)


@pytest.fixture
def restored(opened: OpenBucket) -> GuardedBucket:
    """Return a bucket that was restored from a backup before our first check."""
    bucket = opened(THREE_ON_FILE)
    bucket.create()
    bucket.fill()
    backup = bucket.bucket.back_up()
    bucket.bucket.destroy()
    bucket.bucket.restore(backup)
    bucket.become_intact()
    return bucket


def created_at(bucket: GuardedBucket) -> datetime:
    found: datetime = bucket.bucket.info().created
    return found


def test_a_new_leader_of_a_bucket_restored_from_a_backup_is_no_loss(
    restored: GuardedBucket,
) -> None:
    with watched(restored) as watches:
        times = set()
        for _ in step_down(restored, rounds=2):
            settle(watches)
            times.add(created_at(restored))
    # The servers disagree, or this would prove nothing.
    assert len(times) > 1
    assert max(times) - min(times) < CREATION_TOLERANCE


def test_a_preview_before_a_new_leader_of_such_a_bucket_can_be_applied(
    restored: GuardedBucket,
) -> None:
    restored.bucket.remove(KEYS[0])
    request, before = RestoreRequest(), created_at(restored)
    preview = preview_restore(
        restored.plane, restored._open_store, request, by="ann", on_progress=lambda _: None
    )
    leaders = step_down(restored, rounds=2)
    wait_until(lambda: bool(next(leaders)) and created_at(restored) != before)
    with watched(restored):
        applied = restore_manually(
            restored.plane,
            restored._open_store,
            request,
            ORDER,
            convergence_timeout=timedelta(0),
            preview_id=preview.preview_id,
        )
    assert applied.raised == 1
    assert restored.bucket.stored(KEYS[0]) is not None
