"""Writers that keep counting whatever happens to the servers, like a gateway."""

import asyncio
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from decimal import Decimal
from itertools import pairwise

from nats import errors
from nats.js.errors import APIError

from tests.contract.racing_writers import RacingWriters, history_of
from tests.nats_servers import Bucket
from tests.waiting import wait_until

WRITERS = 4

_PAUSE_SECONDS = 0.02


class PatientWriters(RacingWriters):
    """Racing writers that retry after any failure.

    They do not know whether an addition without an acknowledgement was stored.
    """

    async def _add_one(self, key: str) -> int | None:
        try:
            return await super()._add_one(key)
        except (errors.Error, APIError, OSError, TimeoutError):
            return None
        finally:
            await asyncio.sleep(_PAUSE_SECONDS)


@contextmanager
def counting(bucket: Bucket, keys: list[str]) -> Iterator[PatientWriters]:
    """Count into keys until the context ends, half of the time into the first."""
    writers = PatientWriters(bucket, keys[:1], keys[1:], WRITERS)
    with writers.at_work():
        yield writers


def jumps_of(
    bucket: Bucket, writers: Sequence[PatientWriters], restored: dict[str, Decimal]
) -> dict[int, str]:
    """Prove a bucket's whole history; return the revisions that were not written by writers.

    No key ever decreases. Every acknowledged addition is stored. Every other write has set its key
    to the value in ``restored``.
    """
    added: dict[int, str] = {}
    for each in writers:
        # One copy, because the writers may still be running.
        added |= each.added.copy()
    jumps = {}
    for key, revisions in _whole_history_of(bucket, added.keys()).items():
        for (_, before), (revision, after) in pairwise([(0, Decimal(0)), *revisions]):
            assert after > before
            if revision in added:
                assert (added[revision], after) == (key, before + 1)
            elif after != before + 1:
                assert after == restored[key]
                jumps[revision] = key
    return jumps


def _whole_history_of(bucket: Bucket, added: Set[int]) -> dict[str, list[tuple[int, Decimal]]]:
    """Read the history until it has all of these revisions: the server may be slightly behind."""
    found: dict[str, list[tuple[int, Decimal]]] = {}

    def is_whole() -> bool:
        found.clear()
        found.update(history_of(bucket, "usage.>"))
        return added <= {revision for each in found.values() for revision, _ in each}

    wait_until(is_whole)
    return found
