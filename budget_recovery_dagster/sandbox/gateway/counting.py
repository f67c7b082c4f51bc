"""Adds costs to counters: each at most once, whoever else writes, and however often it comes.

A counter's ``applied`` names the last charge of each ledger that raised it. The costs of a ledger
come in the order of their numbers, so one that is not later than that has been added before: the
process was killed between two counters of the same charge, or the message came twice. With a mark
for each ledger that holds for several of them on one bucket, too; a ledger that was deleted leaves
its mark behind.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from budget_recovery_dagster.adapters.nats.codec import (
    CounterKey,
    decode_json,
    decode_value,
    encode_key,
    is_json_text,
    usage_of,
)
from budget_recovery_dagster.domain.counters import (
    UnreadableUsageError,
    UnusableNameError,
    exact_sum,
    format_usage,
    parse_usage,
)
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.recent import Recent
from budget_recovery_dagster.sandbox.gateway.requests import Applied, Charge, Watermark
from budget_recovery_dagster.sandbox.gateway.store import Seen, Store

log = logging.getLogger("aggregator")

# What is not remembered is read once more: counters of closed windows need not be kept for that.
_REMEMBERED = 10_000
# A server takes 1,048,576 bytes with the headers, and cuts off whoever sends more.
_LARGEST_VALUE = 1_000_000

_USAGE, _UPDATED_AT, _APPLIED = "usage", "updated_at", "applied"


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter's value; ``others`` are the fields that are not ours, as JSON, by name."""

    usage: Decimal
    applied: Applied
    others: Mapping[str, str]

    @classmethod
    def parse(cls, value: bytes) -> "Counter":
        """Read a value.

        Raises:
            UnreadableUsageError: it holds no usage.
        """
        content = decode_json(value)
        if not isinstance(content, dict):
            usage, _ = decode_value(value)
            return cls(usage, Applied({}), {})
        usage, _ = usage_of(content)
        applied = Applied.parse(content.get(_APPLIED))
        ours = (_USAGE, _UPDATED_AT, _APPLIED)
        try:
            others = {name: _json(each) for name, each in content.items() if name not in ours}
        except RecursionError as error:
            raise UnreadableUsageError("the value is nested too deeply") from error
        return cls(usage, applied, others)

    def raised(self, cost: Decimal, charged: Watermark) -> "Counter":
        """Return the counter after this charge.

        Raises:
            UnreadableUsageError: nobody could read the sum.
        """
        usage = parse_usage(format_usage(exact_sum((self.usage, cost))))
        return Counter(usage, self.applied.raised(charged), self.others)

    def to_json(self, written: datetime) -> bytes:
        """Write the value at this moment (aware)."""
        ours = {
            _USAGE: format_usage(self.usage),
            _UPDATED_AT: written_at(written),
            _APPLIED: str(self.applied),
        }
        fields = {name: json.dumps(text) for name, text in ours.items()}
        return _json_object({**fields, **self.others}).encode()


UNUSED = Counter(Decimal(0), Applied({}), {})


def _json(content: object) -> str:
    """Write what ``decode_json`` has read, its numbers with their own text."""
    match content:
        case dict():
            return _json_object({name: _json(each) for name, each in content.items()})
        case list():
            return f"[{','.join(map(_json, content))}]"
        case str() if not is_json_text(content):
            return str(content)
        case _:
            return json.dumps(content)


def _json_object(fields: Mapping[str, str]) -> str:
    members = (f"{json.dumps(name)}:{text}" for name, text in fields.items())
    return f"{{{','.join(members)}}}"


def written_at(moment: datetime) -> str:
    """Write a moment (aware) as it stands in values: in UTC, to the millisecond."""
    text = moment.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class Counting:
    """Adds charges to the counters of one store, and remembers what it has written there lately."""

    def __init__(self, store: Store, budgets: Budgets, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._budgets = budgets
        self._clock = clock
        self._known: Recent[Seen] = Recent(_REMEMBERED)
        self._named: Recent[bool] = Recent(_REMEMBERED)

    async def add(self, charge: Charge) -> None:
        """Raise every counter that this charge counts into and is not in yet.

        A counter that no key can name, or whose value cannot be read or would be out of bounds, is
        left as it is, and named.

        Raises:
            ExceptionGroup: of what ends the work on a store.
        """
        raised_by = self._budgets.raised_by(charge.request, charge.moment)
        cost = charge.request.cost
        await self.add_usages({counter: cost for _, counter in raised_by}, charge.watermark)

    async def add_usages(self, usages: Mapping[CounterKey, Decimal], charged: Watermark) -> None:
        """Raise each counter by its usage, unless it bears this mark already, or a later one.

        Raises:
            ExceptionGroup: of what ends the work on a store.
        """
        async with asyncio.TaskGroup() as tasks:
            for counter, usage in usages.items():
                try:
                    key = encode_key(counter)
                except UnusableNameError as error:
                    log.warning(
                        "Charge %s does not count into budget %r of %r: %s.",
                        charged,
                        counter.of.budget,
                        counter.tenant,
                        error,
                    )
                else:
                    tasks.create_task(self._raise(key, usage, charged))

    async def _raise(self, key: str, usage: Decimal, charged: Watermark) -> None:
        seen = self._known.get(key)
        while True:
            if seen is None:
                seen = await self._store.read(key)
            try:
                before = UNUSED if seen.data is None else Counter.parse(seen.data)
                if before.applied.covers(charged):
                    self._known.put(key, seen)
                    return
                data = before.raised(usage, charged).to_json(self._clock())
            except UnreadableUsageError as error:
                self._name(key, str(error))
                return
            if len(data) > _LARGEST_VALUE:
                self._name(key, f"a value of {len(data)} bytes cannot be written")
                return
            revision = await self._store.write(key, data, expecting=seen.revision)
            if revision is not None:
                self._known.put(key, Seen(revision, data))
                return
            seen = None  # somebody else has written it

    def _name(self, key: str, reason: str) -> None:
        self._known.forget(key)
        if key not in self._named:
            self._named.put(key, value=True)
            log.warning("Costs of %s are not counted: %s.", key, reason)
