"""What lies under a prefix of the bucket, followed from a first complete view on."""

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol
from uuid import uuid4

from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from budget_recovery_dagster.sandbox.gateway.pulling import Pull
from budget_recovery_dagster.sandbox.gateway.store import (
    LOOK_SECONDS,
    NOTHING,
    Seen,
    Store,
    StoreLostError,
    bucket_stream,
)

_ABANDONED_SECONDS = 30.0
# For a count of keys that was too high when the reading began.
_PATIENCE_SECONDS = 2.0


class View(Protocol):
    """Who wants to know what lies under a prefix."""

    def replace(self, found: Mapping[str, Seen]) -> None:
        """Take over all that is there; markers of removed keys may be among it."""

    def change(self, key: str, seen: Seen) -> None:
        """Take over one key that was written or removed."""


async def follow(store: Store, prefix: str, view: View) -> None:
    """Tell ``view`` what lies under ``prefix``, which is ``''`` or ends in a dot, for ever.

    ``replace`` is called once, with what an existing bucket was read to hold, completely.

    Raises:
        ExceptionGroup: of what ends the work on a store.
    """
    stream = bucket_stream(store.bucket)
    name = f"watch-{uuid4().hex}"
    config = ConsumerConfig(
        name=name,
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
        filter_subject=f"{store.subject(prefix)}>",
        mem_storage=True,
        inactive_threshold=_ABANDONED_SECONDS,
    )
    consumer = await store.js.add_consumer(stream, config)
    async with Pull(store, stream, name) as pull, asyncio.TaskGroup() as tasks:
        reading = _Reading(store, pull)
        found = await reading.all(consumer.num_pending or 0)
        view.replace(found)
        known = {key: seen.revision for key, seen in found.items()}
        tasks.create_task(_look_for_vanished(store, prefix, view, known))
        while True:
            if (message := await pull.next()) is not None:
                key, seen = reading.key_of(message)
                known[key] = seen.revision
                view.change(key, seen)


async def _look_for_vanished(store: Store, prefix: str, view: View, known: dict[str, int]) -> None:
    """Find the keys that are removed so that no message tells of it, markers that expire too."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        before = dict(known)
        existing = await store.existing(prefix)
        if existing is None:
            continue
        for key in before.keys() - existing:
            if known[key] == before[key]:  # it was not written anew meanwhile
                del known[key]
                view.change(key, NOTHING)


class _Reading:
    """Reads a consumer's messages and misses none of them unnoticed."""

    def __init__(self, store: Store, pull: Pull) -> None:
        self._prefix = len(store.subject(""))
        self._pull = pull
        self._delivered = 0

    async def all(self, announced: int) -> dict[str, Seen]:
        """Read until everything that was announced is there.

        That nothing is left to deliver is not enough: a key that is written meanwhile is passed
        over where it was, and comes later.
        """
        found: dict[str, Seen] = {}
        begun = time.monotonic()
        while len(found) < announced:
            message = await self._pull.next()
            if message is None:
                break
            key, seen = self.key_of(message)
            found[key] = seen
            is_late = time.monotonic() > begun + _PATIENCE_SECONDS
            if is_late and message.metadata.num_pending == 0:
                break
        return found

    def key_of(self, message: Msg) -> tuple[str, Seen]:
        """Return the key and what it holds.

        Raises:
            StoreLostError: a message before this one was lost.
        """
        sequence = message.metadata.sequence
        self._delivered += 1
        if sequence.consumer != self._delivered:
            raise StoreLostError("messages were lost on the way")
        seen = Seen.of(sequence.stream, message.data, message.headers)
        return message.subject[self._prefix :], seen
