"""Writers that count into keys by compare-and-set, like a gateway."""

import asyncio
import json
import random
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from decimal import Decimal

from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError

from tests.nats_servers import Bucket

EXPECTED = "Nats-Expected-Last-Subject-Sequence"
WRONG_REVISION = {10071, 10164}


class RacingWriters:
    """Writers on one connection that add one to random keys, half of the time to a hot one.

    ``added`` contains the revisions of all acknowledged additions.
    """

    def __init__(self, bucket: Bucket, hot: list[str], others: list[str], count: int) -> None:
        self._bucket = bucket
        self._hot = hot
        self._others = others
        self._count = count
        self._is_over = False
        self.added: dict[int, str] = {}

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let them write until the context ends; then raise the error of one that failed."""
        futures: list[Future[None]] = [
            self._bucket._portal.start_task_soon(self._write, chance)
            for chance in map(random.Random, range(self._count))
        ]
        try:
            yield
        finally:
            self._is_over = True
            for future in futures:
                future.result()

    async def _write(self, chance: random.Random) -> None:
        while not self._is_over:
            key = chance.choice(self._hot if chance.random() < 0.5 else self._others)
            revision = await self._add_one(key)
            if revision is not None:
                self.added[revision] = key
            await asyncio.sleep(0)

    async def _add_one(self, key: str) -> int | None:
        bucket = self._bucket
        subject = bucket.subject(key)
        try:
            found = await bucket._js.get_msg(bucket.stream, subject=subject, direct=False)
            usage, revision = Decimal(json.loads(found.data or b"")["usage"]), found.seq or 0
        except NotFoundError:
            usage, revision = Decimal(0), 0
        value = json.dumps({"usage": str(usage + 1), "by": "gateway"}).encode()
        try:
            ack = await bucket._js.publish(subject, value, headers={EXPECTED: str(revision)})
        except APIError as error:
            if error.err_code in WRONG_REVISION:
                return None
            raise
        return ack.seq


def history_of(bucket: Bucket, keys: str = ">") -> dict[str, list[tuple[int, Decimal]]]:
    """Return the revisions of keys with their usages, oldest first."""

    async def read() -> dict[str, list[tuple[int, Decimal]]]:
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL, mem_storage=True
        )
        reader = await bucket._js.pull_subscribe(
            bucket.subject(keys), stream=bucket.stream, config=config
        )
        pending = (await reader.consumer_info()).num_pending or 0
        history: dict[str, list[tuple[int, Decimal]]] = {}
        while pending > 0:
            for message in await reader.fetch(1000, timeout=10):
                pending -= 1
                key = message.subject.removeprefix(bucket.subject(""))
                usage = Decimal(json.loads(message.data)["usage"])
                history.setdefault(key, []).append((message.metadata.sequence.stream, usage))
        await reader.unsubscribe()
        return history

    return bucket._portal.call(read)
