"""Buckets as seen from both sides of a network partition."""

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
    """A bucket as seen through all servers, through the cut-off one, and through another one."""

    whole: GuardedBucket
    cut_off: GuardedBucket
    others: GuardedBucket

    @classmethod
    @contextmanager
    def of(
        cls, cluster: CuttableCluster, buckets: Sequence[GuardedBucket], server: str
    ) -> Iterator[list[Self]]:
        """Connect to buckets through the server that will be cut off, and through another."""
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
    """Run gateways that count into buckets on both sides; require that they can at the end.

    Yields the writers of each bucket.
    """
    with (
        counted([each.cut_off for each in sides]) as cut_off,
        counted([each.others for each in sides]) as others,
    ):
        yield [[here, there] for here, there in zip(cut_off, others, strict=True)]
