"""Requests, budgets and hostile messages for a simulated gateway, and its bucket's contents."""

import asyncio
import contextlib
import json
import math
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

from budget_recovery_dagster.adapters.nats import CounterKey, decode_key, decode_value
from budget_recovery_dagster.domain import (
    BudgetDefinition,
    Enforcement,
    Period,
    SplitBy,
    UnreadableUsageError,
)
from budget_recovery_dagster.sandbox.gateway import (
    Budgets,
    Charge,
    Ledger,
    Place,
    Request,
    board_entries,
    cost_subject,
)

TENANT = "team a / 東京"
ALICE = "user:alice@example.com"
BOB = "bob"
MODEL = "openai-main/gpt-4o"

_AT_ONCE = 1000


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
    """A clock that changes only when a test sets it."""

    now: datetime

    def __call__(self) -> datetime:
        return self.now


@dataclass
class Contents:
    """The contents of a bucket when it was read."""

    usages: dict[CounterKey, Decimal] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)

    def of(self, kind: str) -> set[str]:
        return {key for key in self.values if key.startswith(f"{kind}.")}

    @property
    def blocked(self) -> set[CounterKey]:
        return {decode_key(key.replace("blocked.", "usage.", 1)) for key in self.of("blocked")}

    @property
    def boards(self) -> dict[str, list[Any]]:
        """Return the entries of each leaderboard, by tenant, budget and window as in its key."""
        return {
            key.removeprefix("leaderboard."): json.loads(self.values[key])["entries"]
            for key in self.of("leaderboard")
        }

    @property
    def boards_of_the_counters(self) -> dict[str, list[Any]]:
        """Return the leaderboards that match the counters."""
        groups: defaultdict[str, list[tuple[str | None, Decimal]]] = defaultdict(list)
        for key in self.of("usage"):
            counter = decode_key(key)
            group = key.removeprefix("usage.").rpartition(".")[0]
            groups[group].append((counter.entity, self.usages[counter]))
        return {group: board_entries(usages) for group, usages in groups.items()}


def contents(place: Place) -> Contents:
    """Read all keys of the bucket; return none if it does not exist."""
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
    """Yield the newest message of each subject; the driver's watch may miss the last ones."""
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
    outstanding = 0
    while True:
        if not outstanding:
            request = {"batch": _AT_ONCE, "no_wait": True}
            await client.publish(next_ones, json.dumps(request).encode(), reply=inbox)
            outstanding = _AT_ONCE
        message = await asyncio.wait_for(messages.get(), 5)
        if message.reply:
            outstanding -= 1  # after a full batch the server reports no end
            yield message
        elif (message.headers or {}).get("Status") == "404":
            return
        else:
            outstanding = 0


def spent(ledger_file: Path, budgets: Budgets, now: datetime | None = None) -> dict[Any, Decimal]:
    """Return the true spend in a ledger."""
    with Ledger(ledger_file) as ledger:
        return ledger.true_spend(budgets, now or datetime.now(UTC))


def is_counted(place: Place, ledger_file: Path, budgets: Budgets) -> bool:
    """Return whether counters and leaderboards match the true spend."""
    found = contents(place)
    return (
        found.usages == spent(ledger_file, budgets) != {}
        and found.boards == found.boards_of_the_counters
    )


def publish_cost(place: Place, *messages: bytes) -> None:
    """Publish messages to the stream of costs, without ids."""

    async def publish() -> None:
        client = await nats.connect(place.url)
        for message in messages:
            await client.jetstream().publish(cost_subject(place.bucket), message)
        await client.close()

    asyncio.run(publish())


CHARGE = Charge("another", 1, datetime(2026, 11, 29, tzinfo=UTC), costing("1"))
FIELDS = json.loads(CHARGE.to_json())


def charge_with(**fields: object) -> bytes:
    """Return the message of another ledger's charge with these fields replaced."""
    return json.dumps({**FIELDS, **fields}).encode()


# Messages that are not charges, by their defect.
NO_COSTS: dict[str, list[bytes]] = {
    "nonsense": [b"nonsense", b"\xff", b"[" * 100_000],
    "empty": [b""],
    "another shape": [b"[]", b"{}", b"7", b"null"],
    "empty name": [charge_with(**{name: ""}) for name in ("tenant", "user", "model", "ledger")],
    "NUL": [charge_with(user="a\0b"), charge_with(agent="\0"), charge_with(metadata={"k": "\0"})],
    "surrogate": [charge_with(user="\ud800"), charge_with(metadata={"\udfff": "v"})],
    "ledger": [charge_with(ledger="x" * 900_000), charge_with(ledger="a b")],
    "number": [charge_with(number=each) for each in (0, -1, 1.5, True, "1", None, 10**30)],
    "type": [
        *(charge_with(user=user) for user in (5, None, ["x"], [])),
        *(charge_with(metadata=each) for each in (None, "x", {"k": 5})),
        *(charge_with(**{name: 5}) for name in ("tenant", "model", "virtual_account", "agent")),
    ],
    "cost": [
        charge_with(cost=each)
        for each in (1, math.nan, "NaN", "Infinity", "-1", "1e20", "1" * 90_000, "1e-19")
    ],
    "missing": [
        json.dumps({name: FIELDS[name] for name in FIELDS.keys() - {left_out}}).encode()
        for left_out in FIELDS
    ],
    "moment": [
        charge_with(moment=each)
        for each in (
            "2026-11-29T12:00:00",
            "soon",
            5,
            "9999-12-31T12:00:00+00:00",
            "0001-01-01T00:00:00+12:00",
        )
    ],
}

# Hostile values of a counter, and their usage after a cost of 1; None if they must stay unchanged.
HOSTILE_VALUES: dict[str, tuple[bytes, str | None]] = {
    "long number": (b'{"usage":"1","x":' + b"9" * 5000 + b"}", "2"),
    "long usage": (b'{"usage":' + b"9" * 5000 + b"}", None),
    "long bare number": (b"9" * 5000, None),
    "long mark": (b'{"usage":"1","applied":"a:' + b"9" * 5000 + b'"}', "2"),
    "large exponent": (b'{"usage":1e999999999}', None),
    "nested field": (b'{"usage":"1","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "nested": (b"[" * 100_000, None),
    "near the limit": (b'{"usage":"99999999999999999999.9"}', None),
    "19 decimals": (b'{"usage":"7.0000000000000000001"}', None),
}
HOSTILE_BOARDS: dict[str, bytes] = {
    "nested": b"[" * 100_000,
    "nested entries": b'{"entries":' + b"[" * 400 + b"]" * 400 + b"}",
    "long number": b'{"entries":[' + b"9" * 5000 + b"]}",
    "surrogate": b'{"entries":[{"entity":"\\ud800","usage":"1"}]}',
    "no UTF-8": b"\xff",
    "empty": b"",
    "odd entries": b'{"entries":[null,[],{"entity":[],"usage":"1"},{"entity":"e","usage":{}}]}',
}
