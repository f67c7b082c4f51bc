"""A simulated gateway: creates the usage store's bucket and keeps adding cost to its counters.

Run as ``python -m budget_recovery_dagster.sandbox.gateway`` with BUDGET_RECOVERY_NATS_URL set.
Every request of a tenant's user to a model has a cost; a counter for each of the tenant's budgets,
and each window that is current, grows by exactly that. With ``--with-history`` the counters begin
with the usage of past months; without it a store that was wiped reads as zero, as a real one does.
"""

import asyncio
import json
import logging
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum, auto

import nats
import nats.errors
import nats.js.errors
from nats.js.api import KeyValueConfig, StorageType
from nats.js.kv import KeyValue

from budget_recovery_dagster.adapters.nats_codec import CounterKey, encode_key
from budget_recovery_dagster.adapters.nats_values import decode_value
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    UnreadableUsageError,
    format_usage,
)
from budget_recovery_dagster.domain.windows import Period, Window
from budget_recovery_dagster.settings import load_settings

HISTORY = "--with-history"
REQUESTS_PER_SECOND = 4
RETRY_SECONDS = 1.0

_PAST_REQUESTS = 3000
_PAST_DAYS = 120

log = logging.getLogger("gateway")

Counters = Mapping[CounterKey, Decimal]


class Split(Enum):
    """By what a budget counts separately."""

    NOTHING = auto()
    USER = auto()
    MODEL = auto()


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget that every tenant has."""

    name: str
    split: Split
    periods: tuple[Period, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the gateway has let through, and what it cost."""

    tenant: str
    user: str
    model: str
    cost: Decimal

    def entity(self, split: Split) -> Entity:
        """Whose counter it raises in a budget that is split so."""
        match split:
            case Split.NOTHING:
                return None
            case Split.USER:
                return self.user
            case Split.MODEL:
                return self.model


BUDGETS = (
    Budget("company", Split.NOTHING, (Period.MONTH, Period.QUARTER)),
    Budget("per user", Split.USER, (Period.DAY, Period.WEEK)),
    Budget("per-model", Split.MODEL, (Period.MONTH, Period.LIFETIME)),
)

USERS: Mapping[str, tuple[str, ...]] = {
    "acme": ("user:alice@example.com", "user:bob@example.com", "service:nightly-report"),
    "globex": ("user:hanna@example.org", "user:søren@example.org"),
    "team a / 東京": ("user:yuki@example.jp", "user:ren@example.jp", "user:mei@example.jp"),
}

# Dollars per token.
PRICES: Mapping[str, Decimal] = {
    "openai-main/gpt-4o": Decimal("0.00001"),
    "openai-main/gpt-4o-mini": Decimal("0.0000006"),
    "bedrock/anthropic.claude:0": Decimal("0.000015"),
}


class Traffic:
    """Requests at random, the same sequence for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - traffic, not secrets

    def request(self) -> Request:
        """Make up one request."""
        tenant = self._random.choice(list(USERS))
        model = self._random.choice(list(PRICES))
        tokens = self._random.randint(50, 4000)
        user = self._random.choice(USERS[tenant])
        return Request(tenant, user, model, tokens * PRICES[model])

    def history(self, now: datetime) -> Iterator[tuple[datetime, Request]]:
        """Make up the requests of the past months, in no order, more of them lately."""
        for _ in range(_PAST_REQUESTS):
            age = timedelta(days=_PAST_DAYS * self._random.random() ** 3)
            yield now - age, self.request()


def raises(request: Request, moment: datetime, now: datetime) -> Iterator[CounterKey]:
    """Name the counters, of windows current at ``now``, that a request of ``moment`` raises."""
    for budget in BUDGETS:
        for period in budget.periods:
            window = Window.containing(period, now)
            if window.start is None or window.start <= moment:
                of = BudgetWindow(budget.name, window)
                yield CounterKey(request.tenant, of, request.entity(budget.split))


def past_usage(traffic: Traffic, now: datetime) -> Counters:
    """Add up the requests of the past into counters that agree with one another."""
    counters: defaultdict[CounterKey, Decimal] = defaultdict(Decimal)
    for moment, request in traffic.history(now):
        for key in raises(request, moment, now):
            counters[key] += request.cost
    return counters


class Gateway:
    """Writes counters to the bucket; each write is conditional on the value that it adds to."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    async def seed(self, counters: Counters) -> None:
        """Create the counters that do not exist."""
        await asyncio.gather(*(self._create(key, usage) for key, usage in counters.items()))

    async def _create(self, key: CounterKey, usage: Decimal) -> bool:
        try:
            await self._bucket.create(encode_key(key), _value(usage))
        except nats.js.errors.KeyWrongLastSequenceError:
            return False
        return True

    async def add(self, key: CounterKey, cost: Decimal) -> None:
        """Raise one counter by exactly ``cost``, whoever else writes it."""
        while True:
            try:
                entry = await self._bucket.get(encode_key(key))
            except nats.js.errors.KeyNotFoundError:
                if await self._create(key, cost):
                    return
                continue
            try:
                usage, _ = decode_value(entry.value or b"")
            except UnreadableUsageError as error:
                log.warning("Cost of %s is lost: %s.", key, error)
                return
            try:
                await self._bucket.update(encode_key(key), _value(usage + cost), entry.revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                continue
            return


def _value(usage: Decimal) -> bytes:
    written = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    value = {"usage": format_usage(usage), "updated_at": written}
    return json.dumps(value, separators=(",", ":")).encode()


async def serve(url: str, bucket_name: str, history: dict[CounterKey, Decimal]) -> None:
    """Make traffic on a connection until it breaks; ``history`` is emptied once it is written."""
    client = await asyncio.wait_for(
        nats.connect(url, name="simulated gateway", max_reconnect_attempts=1), timeout=10
    )
    try:
        bucket = await client.jetstream().create_key_value(
            KeyValueConfig(bucket_name, history=1, storage=StorageType.FILE)
        )
        gateway = Gateway(bucket)
        await gateway.seed(history)
        history.clear()
        log.info("Traffic of %d tenants into bucket %s.", len(USERS), bucket_name)
        traffic = Traffic(seed=time.time_ns())
        while True:
            request, now = traffic.request(), datetime.now(UTC)
            for key in raises(request, now, now):
                await gateway.add(key, request.cost)
            await asyncio.sleep(1 / REQUESTS_PER_SECOND)
    finally:
        await client.close()


async def keep_serving(url: str, bucket_name: str, history: Counters) -> None:
    """Make traffic for ever, reconnecting after the server or bucket was lost."""
    unwritten = dict(history)
    while True:
        try:
            await serve(url, bucket_name, unwritten)
        except (nats.errors.Error, OSError) as error:
            log.warning("No traffic: %s. Trying again.", str(error) or type(error).__name__)
        await asyncio.sleep(RETRY_SECONDS)


def main() -> None:
    """Run until it is told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings = load_settings()
    history = past_usage(Traffic(seed=1), datetime.now(UTC)) if HISTORY in sys.argv else {}
    # SIGTERM just ends it: each write is whole by itself, and there is nothing else to keep.
    with suppress(KeyboardInterrupt):
        asyncio.run(keep_serving(settings.require_nats_url(), settings.bucket, history))


if __name__ == "__main__":
    main()
