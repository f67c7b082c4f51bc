"""Buckets as they are known on both sides of a cut between servers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

from tests.cluster.cut_routes import CuttableCluster
from tests.cluster.guarded_bucket import GuardedBucket
from tests.cluster.patient_writers import PatientWriters
from tests.cluster.work_in_progress import counted


@dataclass(frozen=True)
class BothSides:
    """A bucket as those see it who know all servers, the one that is cut off, and another one."""

    whole: GuardedBucket
    cut_off: GuardedBucket
    others: GuardedBucket

    @classmethod
    @contextmanager
    def of(
        cls, cluster: CuttableCluster, buckets: Sequence[GuardedBucket], server: str
    ) -> Iterator[list[Self]]:
        """Look at buckets from a server that is going to be cut off, and from another."""
        other = min(cluster.servers.keys() - {server})
        with ExitStack() as stack:
            yield [
                cls(
                    bucket,
                    stack.enter_context(bucket.seen_from(cluster.servers[server])),
                    stack.enter_context(bucket.seen_from(cluster.servers[other])),
                )
                for bucket in buckets
            ]


@contextmanager
def counted_on_both_sides(sides: Sequence[BothSides]) -> Iterator[list[list[PatientWriters]]]:
    """Let gateways on both sides count into buckets, which all of them can again in the end.

    Yields the writers of each bucket.
    """
    with (
        counted([each.cut_off for each in sides]) as cut_off,
        counted([each.others for each in sides]) as others,
    ):
        yield [[here, there] for here, there in zip(cut_off, others, strict=True)]
