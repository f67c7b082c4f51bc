"""What lies under a prefix of the bucket, followed from a first complete view on."""

import asyncio
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


class View(Protocol):
    """Who wants to know what lies under a prefix."""

    def replace(self, found: Mapping[str, Seen]) -> None:
        """Take over all that is there; markers of removed keys may be among it."""

    def change(self, key: str, seen: Seen) -> None:
        """Take over one key that was written or removed."""


async def follow(store: Store, prefix: str, view: View) -> None:
    """Tell ``view`` what lies under ``prefix``, which is ``''`` or ends in a dot, for ever.

    ``replace`` is called once, with all that an existing bucket was proven to hold; where that
    cannot be proven, it is not called at all.

    Raises:
        StoreLostError, nats.errors.Error, OSError, ExceptionGroup of these: it must begin anew.
    """
    stream = bucket_stream(store.bucket)
    before = await store.existing(prefix)
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
        found = await reading.all()
        announced = consumer.num_pending or 0
        _require_whole(found, announced, before, await store.existing(prefix))
        view.replace(found)
        known = {key: seen.revision for key, seen in found.items()}
        tasks.create_task(_look_for_vanished(store, prefix, view, known))
        while True:
            if (message := await pull.next()) is not None:
                key, seen = reading.key_of(message)
                known[key] = seen.revision
                view.change(key, seen)


async def read_whole(store: Store, prefix: str) -> Mapping[str, Seen]:
    """Return all that lies under ``prefix``, which is as in ``follow``, without removed keys.

    Raises:
        StoreLostError, nats.errors.Error, OSError, ExceptionGroup of these: it could not be proven.
    """
    view = _WholeView()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow(store, prefix, view))
        found = await view.found
        following.cancel()
    return {key: seen for key, seen in found.items() if seen.data is not None}


class _WholeView:
    """Takes the first complete view, and heeds no change."""

    def __init__(self) -> None:
        self.found: asyncio.Future[Mapping[str, Seen]] = asyncio.Future()

    def replace(self, found: Mapping[str, Seen]) -> None:
        self.found.set_result(found)

    def change(self, key: str, seen: Seen) -> None:
        pass


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


def _require_whole(
    found: Mapping[str, Seen],
    announced: int,
    before: frozenset[str] | None,
    after: frozenset[str] | None,
) -> None:
    """Compare what was read with what existed before and after it.

    Of a consumer that is held up, a server says that nothing is left while everything is.

    Raises:
        StoreLostError: something was not read.
    """
    if before is None or after is None:  # too many for the server to name
        missing = announced - len(found)
    else:
        missing = len((before & after) - found.keys())
    if missing > 0:
        raise StoreLostError(f"{missing} keys were missed")


class _Reading:
    """Reads a consumer's messages and misses none of them unnoticed."""

    def __init__(self, store: Store, pull: Pull) -> None:
        self._prefix = len(store.subject(""))
        self._pull = pull
        self._delivered = 0

    async def all(self) -> dict[str, Seen]:
        """Read until the server says that nothing is left.

        Neither a count nor a message with nothing behind it is the end: a key that is written
        meanwhile is passed over where it was, and comes last, behind those that are new.

        Raises:
            StoreLostError: the server broke it off.
        """
        found: dict[str, Seen] = {}
        while (message := await self._pull.next_that_is_there()) is not None:
            key, seen = self.key_of(message)
            found[key] = seen
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
