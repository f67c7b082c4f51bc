"""The aggregator: adds each cost to its counters, at most once however often it is delivered.

A counter's ``applied`` holds the number of the last charge of each ledger that it includes. The
costs of a ledger arrive in the order of their numbers. So a charge whose number is not higher is
already included: the message was delivered twice, or a process was killed between two counters of
one charge. With one mark for each ledger, several ledgers on one bucket are exact too. The mark of
a deleted ledger remains.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TypeVar

from budget_recovery_dagster.adapters.nats.codec import (
    CounterKey,
    decode_json,
    decode_value,
    encode_key,
    member_texts,
    usage_of,
)
from budget_recovery_dagster.domain.counters import (
    UnreadableUsageError,
    UnusableNameError,
    exact_sum,
    format_usage,
    parse_usage,
)
from budget_recovery_dagster.sandbox.gateway.requests import (
    Applied,
    Budgets,
    Charge,
    Clock,
    UnreadableChargeError,
    Watermark,
)
from budget_recovery_dagster.sandbox.gateway.store import Seen, Store, cost_stream
from budget_recovery_dagster.sandbox.gateway.watching import Pull

log = logging.getLogger("aggregator")

Value = TypeVar("Value")

# A forgotten counter is read again; the limit keeps counters of closed windows from piling up.
_REMEMBERED = 10_000
# A server accepts 1,048,576 bytes with the headers, and disconnects a client that sends more.
_LARGEST_VALUE = 1_000_000

_OURS = _USAGE, _UPDATED_AT, _APPLIED = "usage", "updated_at", "applied"


@dataclass(frozen=True, slots=True)
class Counter:
    """The value of a counter; ``others`` are fields of other programs, as JSON text by name."""

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
        texts = member_texts(value.decode())
        others = {name: texts[name] for name in texts if name not in _OURS}
        return cls(usage, applied, others)

    def raised(self, cost: Decimal, charged: Watermark) -> "Counter":
        """Return the counter after this charge.

        Raises:
            UnreadableUsageError: the sum is out of bounds.
        """
        usage = parse_usage(format_usage(exact_sum((self.usage, cost))))
        return Counter(usage, self.applied.raised(charged), self.others)

    def to_json(self, written: datetime) -> bytes:
        """Return the value as of ``written`` (aware)."""
        ours = {
            _USAGE: format_usage(self.usage),
            _UPDATED_AT: written_at(written),
            _APPLIED: str(self.applied),
        }
        fields = {name: json.dumps(text) for name, text in ours.items()}
        members = (f"{json.dumps(name)}:{text}" for name, text in {**fields, **self.others}.items())
        return f"{{{','.join(members)}}}".encode()


UNUSED = Counter(Decimal(0), Applied({}), {})


def written_at(time: datetime) -> str:
    """Format a time (aware) for the field ``updated_at``: UTC, in milliseconds."""
    text = time.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class Recent(dict[str, Value]):
    """A dictionary of the last ``size`` values that were put in."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, name: str, value: Value) -> None:
        self.pop(name, None)
        super().__setitem__(name, value)
        if len(self) > self._size:
            del self[next(iter(self))]


class Counting:
    """Adds charges to the counters of one store, and remembers its recent writes."""

    def __init__(self, store: Store, budgets: Budgets, clock: Clock) -> None:
        self._store = store
        self._budgets = budgets
        self._clock = clock
        self._known: Recent[Seen] = Recent(_REMEMBERED)
        self._named: Recent[bool] = Recent(_REMEMBERED)

    async def add(self, charge: Charge) -> None:
        """Raise every counter that this charge counts into and that does not include it.

        If no key can name a counter, or its value is unreadable or would be out of bounds, it
        stays as it is and the log names it.

        Raises:
            ExceptionGroup: of errors that end the work on a store.
        """
        raised_by = self._budgets.raised_by(charge.request, charge.at)
        cost = charge.request.cost
        await self.add_usages({counter: cost for _, counter in raised_by}, charge.watermark)

    async def add_usages(self, usages: Mapping[CounterKey, Decimal], charged: Watermark) -> None:
        """Raise each counter by its usage, unless its mark is this one or a later one.

        Raises:
            ExceptionGroup: of errors that end the work on a store.
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
                    self._known[key] = seen
                    return
                data = before.raised(usage, charged).to_json(self._clock())
            except UnreadableUsageError as error:
                self._leave(key, str(error))
                return
            if len(data) > _LARGEST_VALUE:
                self._leave(key, f"a value of {len(data)} bytes cannot be written")
                return
            revision = await self._store.write(key, data, expecting=seen.revision)
            if revision is not None:
                self._known[key] = Seen(revision, data)
                return
            seen = None  # another program has written it

    def _leave(self, key: str, reason: str) -> None:
        self._known.pop(key, None)
        if key not in self._named:
            self._named[key] = True
            log.warning("Costs of %s are not counted: %s.", key, reason)


async def aggregate(store: Store, budgets: Budgets, clock: Clock) -> None:
    """Count all costs, forever: the stream delivers each at least once, counters add it once.

    Several aggregators may run at the same time; the stream delivers one cost after the other.

    Raises:
        ExceptionGroup, or one of FAILURES: the work must start again.
    """
    counting = Counting(store, budgets, clock)
    async with Pull(store, cost_stream(store.bucket), await store.cost_consumer()) as pull:
        while True:
            message = await pull.next()
            if message is None:
                continue
            try:
                charge = Charge.from_json(message.data)
            except UnreadableChargeError as error:
                number = message.metadata.sequence.stream
                log.warning("Message %d of the costs is skipped: %s.", number, error)
            else:
                await counting.add(charge)
            await message.ack()
