"""Consumers of the bucket's stream: created on the leader, drained by raw pulls, and deleted."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from secrets import token_hex
from typing import NamedTuple

import anyio
from nats.aio.msg import Msg

from budget_recovery_dagster.adapters.nats.connection import ANSWER_TIMEOUT, Exchange
from budget_recovery_dagster.adapters.nats.stream import STATUS, BucketStream
from budget_recovery_dagster.errors import (
    StoreError,
    StoreNoQuorumError,
    StorePermissionError,
    StoreReadError,
    StoreUnreachableError,
)

_log = logging.getLogger(__name__)
BATCH = 5000
MAX_BYTES = 16 * 2**20
"""The limit of one pull; a server disconnects clients with 64 MB (its default) pending."""
CONSUMER_PREFIX = "budget-recovery-"
INACTIVE_SECONDS = 30
"""How long after its last pull the server removes an abandoned consumer."""
_NS_PER_SECOND = 10**9
_RETRY_DELAY_SECONDS = 0.2
_MAX_PLACEMENTS = 30
# Of the time for a response: most consumers that do not respond were placed on a dead server.
_PLACEMENT_SHARE = 0.2
_NO_QUORUM_SECONDS = 3.0
_DELETE_TIMEOUT = 2.0
_NO_MESSAGES = "404"
_TOO_LARGE = "409 message size exceeds maxbytes"
_BATCH_DONE = "409 batch completed"
_PULL = f'{{"batch":{BATCH},"max_bytes":{MAX_BYTES},"no_wait":true}}'.encode()
_PULL_ONE = b'{"batch":1,"no_wait":true}'
Delivery = Mapping[str, object]
"""The part of a consumer's configuration that decides which messages it delivers."""


class ReadInterruptedError(StoreReadError):
    """The server ended a read early, with a status."""


class Drain:
    """Passes all messages of a consumer to ``keep``.

    After ``at_most`` messages or a few more it stops, and ``is_cut``.
    """

    def __init__(
        self, stream: BucketStream, keep: Callable[[Msg], None], at_most: int | None = None
    ) -> None:
        self._stream = stream
        self._keep = keep
        self._at_most = at_most
        self.received = 0
        self.is_cut = False

    async def run(self, consumer: str) -> None:
        """Pull until the server responds that no message is left."""
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream.name}.{consumer}"
        async with self._stream.connection.exchange() as exchange:
            outstanding, request = 0, _PULL
            while True:
                if outstanding <= 0:
                    await exchange.send(subject, request)
                    outstanding = 1 if request == _PULL_ONE else BATCH
                    request, before = _PULL, self.received
                if self._at_most is not None and self.received >= self._at_most:
                    self.is_cut = True
                    return
                for message in await self._receive(exchange, subject):
                    # Only a status has no reply subject.
                    if message.reply:
                        outstanding -= 1
                        self.received += 1
                        self._keep(message)
                        continue
                    status = _status(message).lower()
                    if status == _TOO_LARGE:
                        outstanding = 0
                        # Nothing arrived: the first message alone exceeds the limit of a pull.
                        request = _PULL if self.received > before else _PULL_ONE
                    elif status != _BATCH_DONE:
                        self._require_end(message)
                        return
                    elif self.received > before:
                        # Otherwise the status belongs to the previous pull.
                        outstanding = 0

    async def _receive(self, exchange: Exchange, subject: str) -> list[Msg]:
        answer = self._stream.timeouts.answer
        try:
            with anyio.fail_after(answer):
                with anyio.move_on_after(answer / 2):
                    return await exchange.receive()
                # A pull that ends exactly at its byte limit ends without a status.
                await exchange.send(subject, _PULL)
                return await exchange.receive()
        except TimeoutError as error:
            raise StoreReadError(
                f"The bucket {self._stream.bucket} stopped responding during a read.",
                "check the NATS servers and the stream's leader. A large store may need a longer"
                f" {ANSWER_TIMEOUT}.",
            ) from error

    def _require_end(self, message: Msg) -> None:
        if (message.headers or {}).get(STATUS) != _NO_MESSAGES:
            raise ReadInterruptedError(
                f"Read of the bucket {self._stream.bucket} interrupted: {_status(message)}.",
                "wait until the stream's leader is stable, then retry.",
            )


def _status(message: Msg) -> str:
    headers = message.headers or {}
    # The driver may return a description of several lines.
    return " ".join(f"{headers.get(STATUS)} {headers.get('Description', '')}".split())


class Consumer(NamedTuple):
    """A consumer: its name, the server it is on, and how many messages it announced at first."""

    name: str
    placed_on: str | None
    pending: int


@contextlib.asynccontextmanager
async def opened_consumer(
    stream: BucketStream, key_filter: str, leader: str | None, delivers: Delivery
) -> AsyncIterator[Consumer]:
    """Provide a consumer on the leader's server; it is deleted at the end in any case."""
    consumer = await _create_on_leader(stream, key_filter, leader, delivers)
    try:
        yield consumer
    except BaseException:
        await _delete_after_failure(stream, consumer.name)
        raise
    await _delete(stream, consumer.name)


async def _create_on_leader(
    stream: BucketStream, key_filter: str, leader: str | None, delivers: Delivery
) -> Consumer:
    """Create a consumer on the leader's server.

    The cluster places a consumer on any server with a replica: also on one that is catching up,
    whose reads are incomplete without a sign of it, or on one that has just died. So this creates
    consumers until one is on the leader. Right after an election of the meta leader, creation
    fails for a short time.
    """
    failure: StoreError | None = None
    give_up_at = anyio.current_time() + _NO_QUORUM_SECONDS
    for _ in range(1 if leader is None else _MAX_PLACEMENTS):
        name = f"{CONSUMER_PREFIX}{token_hex(8)}"
        is_unwanted = True
        try:
            created = await _create(stream, key_filter, name, delivers, is_replicated=bool(leader))
            if leader in (None, created.placed_on):
                is_unwanted = False
                return created
        except StoreNoQuorumError as error:
            is_unwanted = False
            if leader is None or anyio.current_time() > give_up_at:
                raise
            failure = error
            await anyio.sleep(_RETRY_DELAY_SECONDS)
        except StoreUnreachableError as error:
            failure = error
        finally:
            if is_unwanted:
                await _delete_after_failure(stream, name)
    raise failure or StoreReadError(
        f"Could not create a consumer on the leader of the bucket {stream.bucket}.",
        "wait until the stream's leader is stable, then retry.",
    )


async def _create(
    stream: BucketStream, key_filter: str, name: str, delivers: Delivery, *, is_replicated: bool
) -> Consumer:
    subjects = f"{stream.subject_prefix}{key_filter}"
    created = await stream.ask(
        # With the filter in the subject, permissions can restrict a user to some tenants.
        f"CONSUMER.CREATE.{stream.name}.{name}.{subjects}",
        {
            "stream_name": stream.name,
            "config": {
                "name": name,
                "ack_policy": "none",
                **delivers,
                "filter_subject": subjects,
                "replay_policy": "instant",
                "inactive_threshold": INACTIVE_SECONDS * _NS_PER_SECOND,
                "mem_storage": True,
                "num_replicas": 1,
            },
        },
        within=_PLACEMENT_SHARE * stream.timeouts.answer if is_replicated else None,
    )
    with stream.parsing():
        placed_on = (created.get("cluster") or {}).get("leader")
        return Consumer(name, placed_on, int(created["num_pending"]))


async def _delete(stream: BucketStream, name: str) -> None:
    try:
        with anyio.fail_after(_DELETE_TIMEOUT, shield=True):
            await stream.ask(f"CONSUMER.DELETE.{stream.name}.{name}", {})
    except StorePermissionError:
        raise
    except (StoreError, TimeoutError) as error:
        _log.warning(
            "Could not delete consumer %s of %s; the server removes it in %d s. %s",
            name,
            stream.name,
            INACTIVE_SECONDS,
            error,
        )


async def _delete_after_failure(stream: BucketStream, name: str) -> None:
    """Delete a consumer after another failure, which is the one to report."""
    with contextlib.suppress(StorePermissionError):
        await _delete(stream, name)
