"""Captures, checks and restores that are running when servers fail."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from budget_recovery_dagster.services import Captured
from budget_recovery_dagster.services.restore import RecoveryResult, StillWaiting
from tests.cluster.disturbed_store import Disturbances
from tests.cluster.guarded_bucket import KEYS, GuardedBucket
from tests.cluster.halfway import Halfway
from tests.cluster.patient_writers import PatientWriters, counting, jumps_of
from tests.nats_cluster import Cluster
from tests.waiting import wait_until

PATIENCE = timedelta(seconds=90)
AT_ONCE = timedelta(0)

# Enough for observations before and after a failure, but less than the time for which a cluster
# must be settled, so that the restore always waits.
_IMPATIENCE = timedelta(seconds=3)
_INCREMENTS = 50
_SECONDS = 60


def lose(bucket: GuardedBucket) -> None:
    """Let the gateway recreate a bucket, so that it must be restored."""
    bucket.bucket.destroy()
    bucket.create()
    assert bucket.is_found_lost()


def fail_halfway(
    intact: Sequence[GuardedBucket], lost: Sequence[GuardedBucket], failure: Callable[[], None]
) -> None:
    """Let servers fail while each intact bucket is being captured and checked.

    Checks continue until the captures have ended, so that some start without a leader. The
    restores of lost buckets wait meanwhile. They use no attempt and write nothing.
    """
    halfway = Halfway(2 * len(intact))
    with ThreadPoolExecutor(2 * len(intact) + len(lost)) as pool:
        works: list[Future[Any]] = []
        for bucket in intact:
            at_reading = Disturbances(after_reading=halfway.stop())
            at_marking = Disturbances(before_marking=halfway.stop())
            capture = pool.submit(bucket.capture, at_reading)
            works += [capture, pool.submit(_check_on, bucket, at_marking, capture)]
        works.extend(pool.submit(_wait_in_vain, bucket) for bucket in lost)
        halfway.meanwhile(failure)
        for work in works:
            work.result()


def _check_on(bucket: GuardedBucket, disturbances: Disturbances, capture: Future[Captured]) -> None:
    bucket.check(disturbances)
    while not capture.done():
        bucket.check()


def _wait_in_vain(bucket: GuardedBucket) -> None:
    losses = len(bucket.incident.losses)
    result = bucket.recover(Disturbances(before_marking=_never), patience=_IMPATIENCE)
    assert isinstance(result, StillWaiting)
    assert result.incident.attempts == 0
    assert result.incident.waiting is not None
    # A check finds no further loss.
    bucket.check()
    assert len(bucket.incident.losses) == losses


def _never() -> None:
    raise AssertionError("it was written into a store that had not converged")


def restore_until_halfway(
    cluster: Cluster, lost: Sequence[GuardedBucket], failure: Callable[[], None]
) -> list[RecoveryResult | BaseException]:
    """Restore buckets, and let servers fail once half of their counters are in flight.

    A bucket is written only after all servers hold its stream. Returns the results or errors of
    the restores.
    """
    halfway = Halfway(len(lost))

    def restore(bucket: GuardedBucket) -> RecoveryResult:
        def require_converged() -> None:
            others = cluster.behind(bucket.bucket.stream)
            assert len(cluster.servers) - len(others) == bucket.kind.replicas, others

        return bucket.recover(
            Disturbances(before_marking=require_converged, halfway_raised=halfway.stop()),
            patience=PATIENCE,
        )

    with ThreadPoolExecutor(len(lost)) as pool:
        restores = [pool.submit(restore, bucket) for bucket in lost]
        halfway.meanwhile(failure)
        failures = [each.exception() for each in restores]
    return [
        each.result() if error is None else error
        for each, error in zip(restores, failures, strict=True)
    ]


@contextmanager
def counted(buckets: Sequence[GuardedBucket]) -> Iterator[list[PatientWriters]]:
    """Run gateways that count into buckets; require that they can at the end."""
    with ExitStack() as stack:
        writers = [stack.enter_context(counting(each.bucket, KEYS)) for each in buckets]
        yield writers
        due = [len(writer.added) + _INCREMENTS for writer in writers]
        wait_until(
            lambda: all(len(each.added) >= count for each, count in zip(writers, due, strict=True)),
            seconds=_SECONDS,
        )


@contextmanager
def counted_and_never_lost(buckets: Sequence[GuardedBucket]) -> Iterator[None]:
    """Run gateways that count into intact buckets; require at the end that no loss was found."""
    with counted(buckets) as writers:
        yield
    for bucket, writer in zip(buckets, writers, strict=True):
        bucket.assert_never_lost()
        # Only the gateway's ``fill`` has ever written a counter.
        jumps = jumps_of(bucket.bucket, [writer], bucket.filled)
        assert sorted(jumps.values()) == sorted(KEYS)
