"""The final state of a bucket, proven by its whole history and by the database."""

from collections.abc import Sequence

from budget_recovery_dagster.domain import Outcome
from budget_recovery_dagster.services.restore import StillWaiting
from tests.cluster.guarded_bucket import KEYS, GuardedBucket
from tests.cluster.patient_writers import PatientWriters, jumps_of
from tests.cluster.work_in_progress import AT_ONCE


def assert_never_lost(bucket: GuardedBucket, writers: Sequence[PatientWriters]) -> None:
    """Require that no loss was found and that only these writers and ``fill`` wrote."""
    bucket.assert_never_lost()
    jumps = jumps_of(bucket.bucket, writers, bucket.filled)
    assert sorted(jumps.values()) == sorted(KEYS)


def assert_waits(bucket: GuardedBucket, *, losses: int = 1, attempts: int) -> None:
    """Require that a restore waits without using an attempt, and a check finds no further loss."""
    result = bucket.recover(patience=AT_ONCE)
    assert isinstance(result, StillWaiting)
    assert result.incident.waiting is not None
    bucket.check()
    assert (len(bucket.incident.losses), bucket.incident.attempts) == (losses, attempts)


def assert_restored(
    bucket: GuardedBucket, writers: Sequence[PatientWriters], *, losses: int = 1, attempts: int
) -> None:
    """Require that each counter was restored once, after so many attempts since the last loss."""
    incident = bucket.incident
    assert (len(incident.losses), incident.attempts) == (losses, attempts)
    assert incident.ended is not None
    assert incident.ended.outcome is Outcome.RESTORED
    jumps = jumps_of(bucket.bucket, writers, bucket.restorable)
    assert sorted(jumps.values()) == sorted(KEYS)
    # Our marker was written to a converged store before anything else of ours.
    assert min(jumps) > bucket.first_marker_revision
