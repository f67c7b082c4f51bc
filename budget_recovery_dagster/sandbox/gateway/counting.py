"""Adds costs to counters: each at most once, whoever else writes, and however often it comes.

A counter's ``applied`` names the charge that raised it last. Costs come in the order of their
numbers, so one that is not later than that has been added before: the process was killed between
two counters of the same charge, or the message came twice.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from budget_recovery_dagster.adapters.nats_codec import CounterKey, encode_key
from budget_recovery_dagster.adapters.nats_values import decode_value
from budget_recovery_dagster.domain.counters import UnreadableUsageError, format_usage
from budget_recovery_dagster.sandbox.gateway.amounts import plus
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.requests import Charge, Watermark
from budget_recovery_dagster.sandbox.gateway.store import NOTHING, Seen, Store

log = logging.getLogger("aggregator")


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter's value, with the fields that are not ours."""

    usage: Decimal
    applied: Watermark | None
    others: dict[str, Any]

    @classmethod
    def parse(cls, value: bytes) -> "Counter":
        """Read a value.

        Raises:
            UnreadableUsageError: it holds no usage.
        """
        usage, _ = decode_value(value)
        content = json.loads(value)
        fields = content if isinstance(content, dict) else {}
        return cls(usage, Watermark.parse(fields.get("applied")), fields)

    def raised(self, charge: Charge) -> "Counter":
        """Return the counter after this charge."""
        return Counter(plus(self.usage, charge.request.cost), charge.watermark, self.others)

    def to_json(self, written: datetime) -> bytes:
        """Write the value at this moment (aware)."""
        ours = {
            "usage": format_usage(self.usage),
            "updated_at": written_at(written),
            "applied": str(self.applied),
        }
        return json.dumps({**self.others, **ours}, separators=(",", ":")).encode()


UNUSED = Counter(Decimal(0), None, {})


def written_at(moment: datetime) -> str:
    """Write a moment (aware) as it stands in values: in UTC, to the millisecond."""
    text = moment.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class Counting:
    """Adds charges to the counters of one store, and remembers what it has written there."""

    def __init__(self, store: Store, budgets: Budgets, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._budgets = budgets
        self._clock = clock
        self._known: dict[str, Seen] = {}
        self._named: set[str] = set()

    async def add(self, charge: Charge) -> None:
        """Raise every counter that this charge counts into and is not in yet.

        A counter whose value cannot be read is left as it is, and named once.

        Raises:
            ExceptionGroup: of what ends the work on a store.
        """
        async with asyncio.TaskGroup() as tasks:
            for _, counter in self._budgets.raised_by(charge.request, charge.moment):
                tasks.create_task(self._raise(counter, charge))

    async def _raise(self, counter: CounterKey, charge: Charge) -> None:
        key = encode_key(counter)
        seen = self._known.get(key)
        while True:
            if seen is None:
                seen = await self._store.read(key)
            try:
                before = UNUSED if seen.data is None else Counter.parse(seen.data)
            except UnreadableUsageError as error:
                self._name(key, error)
                return
            if before.applied is not None and before.applied.covers(charge):
                self._known[key] = seen
                return
            data = before.raised(charge).to_json(self._clock())
            revision = await self._store.write(key, data, expecting=seen.revision)
            if revision is not None:
                self._known[key] = Seen(revision, data)
                return
            seen = None  # somebody else has written it

    def _name(self, key: str, error: UnreadableUsageError) -> None:
        self._known.pop(key, None)
        if key not in self._named:
            self._named.add(key)
            log.warning("Costs of %s are not counted: %s.", key, error)


async def create_counters(
    store: Store, usages: dict[CounterKey, Decimal], applied: Watermark, written: datetime
) -> None:
    """Create those of the counters that do not exist.

    Raises:
        ExceptionGroup: of what ends the work on a store.
    """
    async with asyncio.TaskGroup() as tasks:
        for counter, usage in usages.items():
            data = Counter(usage, applied, {}).to_json(written)
            tasks.create_task(store.write(encode_key(counter), data, expecting=NOTHING.revision))
