"""What has become of a bucket, proven by its whole history and by what is kept about it."""

from collections.abc import Sequence

from budget_recovery_dagster.domain import Outcome
from budget_recovery_dagster.services.restore import StillWaiting
from tests.cluster.guarded_bucket import KEYS, GuardedBucket
from tests.cluster.patient_writers import PatientWriters, jumps_of
from tests.cluster.work_in_progress import AT_ONCE


def assert_never_lost(bucket: GuardedBucket, writers: Sequence[PatientWriters]) -> None:
    """Nothing was ever done to the bucket: nobody but these and who has filled it wrote into it."""
    bucket.assert_never_lost()
    jumps = jumps_of(bucket.bucket, writers, bucket.filled)
    assert sorted(jumps.values()) == sorted(KEYS)


def assert_waits(bucket: GuardedBucket, *, losses: int = 1, attempts: int) -> None:
    """A restore waits and spends nothing, and a check finds nothing else to be lost."""
    result = bucket.recover(patience=AT_ONCE)
    assert isinstance(result, StillWaiting)
    assert result.incident.waiting is not None
    bucket.check()
    assert (len(bucket.incident.losses), bucket.incident.attempts) == (losses, attempts)


def assert_restored(
    bucket: GuardedBucket, writers: Sequence[PatientWriters], *, losses: int = 1, attempts: int
) -> None:
    """Every counter has come back, once, after so many attempts since the last loss."""
    incident = bucket.incident
    assert (len(incident.losses), incident.attempts) == (losses, attempts)
    assert incident.ended is not None
    assert incident.ended.outcome is Outcome.RESTORED
    jumps = jumps_of(bucket.bucket, writers, bucket.restorable)
    assert sorted(jumps.values()) == sorted(KEYS)
    # Our marker was written into a converged store, and nothing of ours is older.
    assert min(jumps) > bucket.first_marker_revision
