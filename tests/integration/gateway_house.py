"""A small simulated gateway of a test's own, and what its bucket holds."""

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import nats
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from budget_recovery_dagster.adapters.nats_codec import CounterKey, decode_key
from budget_recovery_dagster.adapters.nats_values import decode_value
from budget_recovery_dagster.domain.budgets import BudgetDefinition, Enforcement, SplitBy
from budget_recovery_dagster.domain.counters import UnreadableUsageError
from budget_recovery_dagster.domain.windows import Period
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place
from budget_recovery_dagster.sandbox.gateway.requests import Request
from budget_recovery_dagster.sandbox.gateway.standings import board_entries
from budget_recovery_dagster.sandbox.gateway.store import cost_subject

TENANT = "team a / 東京"
ALICE = "user:alice@example.com"
BOB = "bob"
MODEL = "openai-main/gpt-4o"


def definition(
    budget: str,
    limit: str,
    *,
    split_by: SplitBy = SplitBy.USER,
    period: Period = Period.LIFETIME,
    enforcement: Enforcement = Enforcement.ENFORCE,
    metadata_key: str | None = None,
) -> BudgetDefinition:
    return BudgetDefinition(
        TENANT, budget, period, Decimal(limit), split_by, enforcement, metadata_key
    )


def costing(cost: str, user: str = ALICE, **metadata: str) -> Request:
    return Request(TENANT, user, MODEL, Decimal(cost), metadata=metadata)


@dataclass
class SteppedClock:
    """Stands still until it is set."""

    now: datetime

    def __call__(self) -> datetime:
        return self.now


@dataclass
class Contents:
    """What a bucket held when it was read."""

    usages: dict[CounterKey, Decimal] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)

    def of(self, kind: str) -> set[str]:
        return {key for key in self.values if key.startswith(f"{kind}.")}

    @property
    def blocked(self) -> set[CounterKey]:
        return {decode_key(key.replace("blocked.", "usage.", 1)) for key in self.of("blocked")}

    @property
    def boards(self) -> dict[str, list[Any]]:
        """The entries of each leaderboard, by tenant, budget and window as in the keys."""
        return {
            key.removeprefix("leaderboard."): json.loads(self.values[key])["entries"]
            for key in self.of("leaderboard")
        }

    @property
    def boards_of_the_counters(self) -> dict[str, list[Any]]:
        """What the leaderboards should be."""
        groups: defaultdict[str, list[tuple[str | None, Decimal]]] = defaultdict(list)
        for key in self.of("usage"):
            counter = decode_key(key)
            group = key.removeprefix("usage.").rpartition(".")[0]
            groups[group].append((counter.entity, self.usages[counter]))
        return {group: board_entries(usages) for group, usages in groups.items()}


def contents(place: Place) -> Contents:
    """Read all keys of the bucket; nothing if there is no bucket."""
    return asyncio.run(_read(place))


async def _read(place: Place) -> Contents:
    client = await nats.connect(place.url)
    found = Contents()
    try:
        prefix = f"$KV.{place.bucket}."
        async for message in _newest(client, f"KV_{place.bucket}"):
            if "KV-Operation" in (message.headers or {}):
                found.values.pop(message.subject.removeprefix(prefix), None)
            else:
                found.values[message.subject.removeprefix(prefix)] = message.data
    except nats.js.errors.NotFoundError:
        pass
    finally:
        await client.close()
    for key in found.of("usage"):
        with contextlib.suppress(UnreadableUsageError):
            found.usages[decode_key(key)] = decode_value(found.values[key])[0]
    return found


async def _newest(client: Client, stream: str) -> AsyncIterator[Msg]:
    """The newest message of each subject, to the end, which the driver's own watch may miss."""
    config = ConsumerConfig(
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
        filter_subject=">",
        mem_storage=True,
        inactive_threshold=5,
    )
    consumer = await client.jetstream().add_consumer(stream, config)
    inbox = client.new_inbox()
    messages: asyncio.Queue[Msg] = asyncio.Queue()
    await client.subscribe(inbox, cb=messages.put)
    next_ones = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer.name}"
    while True:
        await client.publish(next_ones, b'{"batch":1000,"no_wait":true}', reply=inbox)
        while (message := await asyncio.wait_for(messages.get(), 5)).reply:
            yield message
        if (message.headers or {}).get("Status") == "404":
            return


def spent(ledger_file: Path, budgets: Budgets, now: datetime | None = None) -> dict[Any, Decimal]:
    """The true spend that a ledger tells of."""
    with Ledger(ledger_file) as ledger:
        return ledger.true_spend(budgets, now or datetime.now(UTC))


def is_counted(place: Place, ledger_file: Path, budgets: Budgets) -> bool:
    """Whether true spend is what the counters say, and the leaderboards say the same."""
    found = contents(place)
    return (
        found.usages == spent(ledger_file, budgets) != {}
        and found.boards == found.boards_of_the_counters
    )


def publish_cost(place: Place, message: bytes) -> None:
    """Put a message into the stream of costs, without an id."""

    async def publish() -> None:
        client = await nats.connect(place.url)
        await client.jetstream().publish(cost_subject(place.bucket), message)
        await client.close()

    asyncio.run(publish())
