"""The keys under a prefix of the bucket: one complete view, and then every change.

A reader of its own, because the driver's ``watch`` may end its first view too early under writes,
and its ``fetch`` waits until its batch is full and may swallow a cancellation.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Protocol, Self
from uuid import uuid4

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from budget_recovery_dagster.sandbox.gateway.store import (
    ANSWER_SECONDS,
    CHECK_SECONDS,
    NOTHING,
    Seen,
    Store,
    WorkInterruptedError,
    bucket_stream,
)

_BATCH = 500
_IDLE_SECONDS = 1.0
# The server removes the consumer of a watcher that is gone for this time.
_ABANDONED_SECONDS = 30.0

_NOTHING_LEFT = "404"
_EXPIRED = "408"

_WAITING = {"batch": _BATCH, "expires": int(_IDLE_SECONDS * 1e9)}
_NOT_WAITING = {"batch": _BATCH, "no_wait": True}


class Pull:
    """Pulls single messages from a consumer; a context manager that ends its subscription.

    A pull that expires does not prove that nothing is left: a server that is held up lets it expire
    with undelivered messages. Only the answer to a pull that does not wait proves the end.
    """

    def __init__(self, store: Store, stream: str, consumer: str) -> None:
        self._client = store.client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = self._client.new_inbox()
        self._subscription: Subscription | None = None
        self._messages: asyncio.Queue[Msg] = asyncio.Queue()
        self._outstanding = 0

    async def __aenter__(self) -> Self:
        self._subscription = await self._client.subscribe(self._inbox, cb=self._messages.put)
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._subscription is not None and not self._client.is_closed:
            await self._subscription.unsubscribe()

    async def next(self) -> Msg | None:
        """Return the next message, or None if none arrives within about a second.

        Raises:
            WorkInterruptedError: the consumer is gone.
            nats.errors.Error, TimeoutError: the server does not answer.
        """
        return await self._next(_WAITING, _EXPIRED)

    async def next_arrived(self) -> list[Msg]:
        """Wait for a message as ``next`` does; return it with those that have arrived meanwhile.

        Raises:
            WorkInterruptedError: the consumer is gone.
            nats.errors.Error, TimeoutError: the server does not answer.
        """
        arrived = []
        while (message := await self.next()) is not None:
            arrived.append(message)
            if self._messages.empty():
                break
        return arrived

    async def next_existing(self) -> Msg | None:
        """Return the next message, or None once the server reports that nothing is left.

        Raises:
            WorkInterruptedError: the server ended it earlier, or the consumer is gone.
            nats.errors.Error, TimeoutError: the server does not answer.
        """
        return await self._next(_NOT_WAITING, _NOTHING_LEFT)

    async def _next(self, request: Mapping[str, object], end: str) -> Msg | None:
        if self._outstanding == 0:
            await self._client.publish(
                self._subject, json.dumps(request).encode(), reply=self._inbox
            )
            self._outstanding = _BATCH
        async with asyncio.timeout(_IDLE_SECONDS + ANSWER_SECONDS):
            message = await self._messages.get()
        if message.reply:  # messages of a stream have a reply subject, status messages have none
            self._outstanding -= 1
            return message
        self._outstanding = 0
        headers = message.headers or {}
        status = headers.get("Status")
        if status != end:
            description = headers.get("Description", "")
            raise WorkInterruptedError(f"the consumer answers {status} {description}")
        return None


class View(Protocol):
    """Receives the keys under a prefix."""

    def replace(self, found: Mapping[str, Seen]) -> None:
        """Take all existing keys; some may be markers of removed keys."""

    def change(self, changes: Mapping[str, Seen]) -> None:
        """Take keys that were written or removed, each in its newest state."""


async def follow(store: Store, prefix: str, view: View) -> None:
    """Keep ``view`` informed about the keys under ``prefix`` (empty, or ending in a dot), forever.

    ``replace`` is called once, with a view that is proven to be complete; without that proof it is
    never called.

    Raises:
        ExceptionGroup, or one of FAILURES: the work must start again.
    """
    async with _complete_view(store, prefix) as (entries, found), asyncio.TaskGroup() as tasks:
        view.replace(found)
        known = {key: seen.revision for key, seen in found.items()}
        tasks.create_task(_find_vanished(store, prefix, view, known))
        while True:
            # A lower limit may block thousands at once: a view takes what arrives together in one.
            if changes := dict(map(entries.read, await entries.pull.next_arrived())):
                known |= {key: seen.revision for key, seen in changes.items()}
                view.change(changes)


async def read_all(store: Store) -> Mapping[str, Seen]:
    """Return all keys of the bucket, without removed ones.

    Raises:
        WorkInterruptedError, nats.errors.Error, OSError: the result could not be proven complete.
    """
    async with _complete_view(store, "") as (_, found):
        return {key: seen for key, seen in found.items() if seen.data is not None}


@contextlib.asynccontextmanager
async def _complete_view(
    store: Store, prefix: str
) -> AsyncIterator[tuple["_Entries", dict[str, Seen]]]:
    """Read all keys under a prefix; the entries then deliver the changes."""
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
    async with Pull(store, stream, name) as pull:
        entries = _Entries(store, pull)
        found = {}
        # Neither a count nor an empty pull proves the end: a key that is written meanwhile is
        # skipped at its old place and comes last, after the new keys.
        while (message := await pull.next_existing()) is not None:
            key, seen = entries.read(message)
            found[key] = seen
        _require_complete(found, consumer.num_pending or 0, before, await store.existing(prefix))
        yield entries, found


def _require_complete(
    found: Mapping[str, Seen],
    announced: int,
    before: frozenset[str] | None,
    after: frozenset[str] | None,
) -> None:
    """Compare the keys that were read with those that existed before and after.

    A server that is held up may report that nothing is left although everything is.

    Raises:
        WorkInterruptedError: a key is missing.
    """
    if before is None or after is None:  # too many for the server to list
        missing = announced - len(found)
    else:
        missing = len((before & after) - found.keys())
    if missing > 0:
        raise WorkInterruptedError(f"{missing} keys were missed")


async def _find_vanished(store: Store, prefix: str, view: View, known: dict[str, int]) -> None:
    """Find keys that were removed without a message, and markers that expired."""
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        before = dict(known)
        existing = await store.existing(prefix)
        if existing is None:
            continue
        # Those that were written again meanwhile exist.
        vanished = {key for key in before.keys() - existing if known[key] == before[key]}
        for key in vanished:
            del known[key]
        view.change(dict.fromkeys(vanished, NOTHING))


class _Entries:
    """The messages of a consumer as keys; a lost message never goes unnoticed."""

    def __init__(self, store: Store, pull: Pull) -> None:
        self.pull = pull
        self._prefix = len(store.subject(""))
        self._delivered = 0

    def read(self, message: Msg) -> tuple[str, Seen]:
        """Return the key and its state.

        Raises:
            WorkInterruptedError: a message before this one was lost.
        """
        sequence = message.metadata.sequence
        self._delivered += 1
        if sequence.consumer != self._delivered:
            raise WorkInterruptedError("messages were lost on the way")
        seen = Seen.of(sequence.stream, message.data, message.headers)
        return message.subject[self._prefix :], seen
