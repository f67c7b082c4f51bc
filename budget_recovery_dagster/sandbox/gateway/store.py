"""The bucket and the stream of costs, on one connection that is not repaired.

When the connection breaks, or the bucket or stream is lost, replaced or cannot be asked, everything
that goes on over it ends, and is begun anew on another one, with nothing remembered of the old.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, Header, StreamInfo

ANSWER_SECONDS = 2.0
"""How long the server may take for an answer."""

LOOK_SECONDS = 0.4
"""How often one looks for what nothing tells of."""

# Long enough for whoever watches; one who begins later sees that the key is not there.
_MARKER_SECONDS = 600
# The aggregator that dies with a cost in hand; the cost is given to the next one then.
_ACK_SECONDS = 1.0

# The server tells no more of them in one answer.
_MOST_SUBJECTS = 100_000

_NO_MESSAGE = 10037
_WRONG_REVISION = (10071, 10164)
_AGGREGATOR = "aggregator"


def heed_cancellation() -> None:
    """Stop here if this task was cancelled; to be called after waiting for the driver.

    Where its answer comes at the same moment, a cancellation is swallowed (before Python 3.12).

    Raises:
        asyncio.CancelledError: it was.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class StoreLostError(Exception):
    """What was being worked on is no longer there, or no longer the same; the message says what."""


FAILURES = (StoreLostError, nats.errors.Error, OSError, TimeoutError)
"""What ends the work on a store, so that it must be begun anew."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A key as it was last seen: ``data`` is None where there is no key, or no longer."""

    revision: int
    data: bytes | None

    @classmethod
    def of(cls, revision: int, data: bytes | None, headers: Mapping[str, str] | None) -> "Seen":
        """Read a message of the bucket's stream."""
        is_marker = headers is not None and (
            headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers
        )
        return cls(revision, None if is_marker else data or b"")


NOTHING = Seen(0, None)
"""A key that never was."""


class Store:
    """The bucket and the stream of costs; made by ``opened``.

    Every method that asks the server raises one of FAILURES where that cannot be done.
    """

    def __init__(
        self,
        client: Client,
        bucket: str,
        broken: asyncio.Event,
        infos: tuple[StreamInfo, StreamInfo],
    ) -> None:
        self.client = client
        self.bucket = bucket
        self._js = client.jetstream(timeout=ANSWER_SECONDS)
        self._broken = broken
        of_bucket, of_costs = infos
        self._created: Mapping[str, datetime | None] = {
            bucket_stream(bucket): of_bucket.created,
            cost_stream(bucket): of_costs.created,
        }
        self._marker_headers = (
            {"Nats-TTL": str(_MARKER_SECONDS)} if of_bucket.config.allow_msg_ttl else {}
        )

    @property
    def js(self) -> JetStreamContext:
        """For what is asked in one place only."""
        return self._js

    async def read(self, key: str) -> Seen:
        """Read a key from the leader, which is never behind."""
        try:
            message = await self._js.get_msg(
                bucket_stream(self.bucket), subject=self.subject(key), direct=False
            )
        except nats.js.errors.NotFoundError as error:
            if error.err_code != _NO_MESSAGE:
                raise
            return NOTHING
        finally:
            heed_cancellation()
        return Seen.of(message.seq or 0, message.data, message.headers)

    async def write(self, key: str, data: bytes, *, expecting: int) -> int | None:
        """Write a key whose revision is ``expecting``, 0 for none; None if it is another."""
        return await self._publish(key, data, expecting, {})

    async def remove(self, key: str, *, expecting: int) -> int | None:
        """Purge a key whose revision is ``expecting``; None if it is another."""
        headers = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", **self._marker_headers}
        return await self._publish(key, b"", expecting, headers)

    async def report(self, message: bytes, *, message_id: str) -> None:
        """Put a cost into the stream; one with the same id is not put there twice."""
        await self._js.publish(
            cost_subject(self.bucket), message, headers={Header.MSG_ID: message_id}
        )
        heed_cancellation()

    async def take_costs(self) -> str:
        """Provide the consumer that gives out costs one after the other; return its name."""
        config = ConsumerConfig(
            durable_name=_AGGREGATOR,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=_ACK_SECONDS,
            # The next one only when one is counted: a counter's marks rely on their order.
            max_ack_pending=1,
        )
        await self._js.add_consumer(cost_stream(self.bucket), config)
        return _AGGREGATOR

    async def stand_guard(self) -> None:
        """Fail as soon as anything is wrong with the connection, the bucket or the stream."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._broken.wait()
                raise StoreLostError("the connection broke")
            for stream in self._created:
                await self._look_at(stream)

    async def existing(self, prefix: str) -> frozenset[str] | None:
        """Return all keys under a prefix, markers of removed ones too; None if there are too many.

        Raises:
            StoreLostError: the bucket is gone or was replaced.
        """
        stream = bucket_stream(self.bucket)
        info = await self._look_at(stream, subjects=f"{self.subject(prefix)}>")
        subjects = info.state.subjects or {}
        if len(subjects) >= _MOST_SUBJECTS:
            return None
        return frozenset(each[len(self.subject("")) :] for each in subjects)

    def subject(self, key: str) -> str:
        """Return the subject on which a key is written."""
        return f"$KV.{self.bucket}.{key}"

    async def _look_at(self, stream: str, *, subjects: str | None = None) -> StreamInfo:
        try:
            info = await self._js.stream_info(stream, subjects_filter=subjects)
        except nats.js.errors.NotFoundError as error:
            raise StoreLostError(f"the stream {stream} is gone") from error
        finally:
            heed_cancellation()
        if info.created != self._created[stream]:
            raise StoreLostError(f"the stream {stream} was replaced")
        return info

    async def _publish(
        self, key: str, data: bytes, expecting: int, headers: Mapping[str, str]
    ) -> int | None:
        conditional = {**headers, Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(expecting)}
        try:
            ack = await self._js.publish(self.subject(key), data, headers=conditional)
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_REVISION:
                return None
            raise
        finally:
            heed_cancellation()
        return ack.seq


def bucket_stream(bucket: str) -> str:
    """Return the name of the stream behind a bucket."""
    return f"KV_{bucket}"


def cost_stream(bucket: str) -> str:
    """Return the name of the stream of costs that are to be counted in a bucket."""
    return f"COSTS_{bucket}"


def cost_subject(bucket: str) -> str:
    """Return the subject on which such costs are reported."""
    return f"costs.{bucket}"
