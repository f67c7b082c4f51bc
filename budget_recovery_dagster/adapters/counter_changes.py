"""Raising counters: what is written over a counter as it stands, if anything is.

A live value keeps every byte except its usage and the time of its writing, and a live key the
moment at which it expires. A usage can only go up, and an unreadable value is left alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal

from budget_recovery_dagster.adapters.live_keys import (
    Decision,
    LiveKey,
    Write,
    WritingTerms,
    nanoseconds,
    written_at,
)
from budget_recovery_dagster.adapters.nats_codec import CounterKey, encode_key
from budget_recovery_dagster.adapters.nats_ttl import (
    ExpiredKeyError,
    remaining_ttl,
    ttl_of_new_key,
)
from budget_recovery_dagster.adapters.nats_values import decode_value
from budget_recovery_dagster.adapters.value_text import replace_all, replace_members
from budget_recovery_dagster.domain.counters import (
    UnreadableUsageError,
    UnusableNameError,
    ValueShape,
    format_usage,
    parse_usage,
)
from budget_recovery_dagster.errors import StoreWriteError
from budget_recovery_dagster.restore_ports import RaiseOrder, RaiseResult, Written


@dataclass(frozen=True, slots=True)
class CounterChange:
    """An order to raise the counter under a key."""

    key: str
    order: RaiseOrder
    terms: WritingTerms

    def decide(self, live: LiveKey) -> Decision[RaiseResult]:
        """Raise the counter, or say why it is left."""
        before, shape, reason = _read(live)
        if not self.terms.is_open(self.order.of.window):
            return self._left(Written.CLOSED, before)
        if reason:
            return self._left(Written.UNREADABLE, before, reason)
        if before is not None and before >= self.order.usage:
            return self._left(Written.KEPT, before)
        try:
            write = self._write(live, shape)
        except ExpiredKeyError:
            return self._left(Written.EXPIRED, before)
        return Decision(RaiseResult(self.order, Written.RAISED, before), write)

    def refused(self, outcome: RaiseResult, reason: str) -> RaiseResult:
        """Say that the store refuses the value."""
        return replace(outcome, written=Written.REFUSED, reason=reason)

    def _left(
        self, written: Written, before: Decimal | None, reason: str = ""
    ) -> Decision[RaiseResult]:
        return Decision(RaiseResult(self.order, written, before, reason))

    def _write(self, live: LiveKey, shape: ValueShape | None) -> Write:
        now = self.terms.now()
        if live.value is None or shape is None:
            ttl = ttl_of_new_key(self.order.expiry_seconds, self.order.of.window, nanoseconds(now))
            text = _new_text(self.order, written_at(now))
        else:
            ttl = remaining_ttl(live.value.ttl, live.value.written_ns, nanoseconds(now))
            text = _raised_text(live.value.data.decode(), shape, self.order.usage, written_at(now))
        return Write(text.encode(), ttl if self.terms.keeps_ttl else None)


def counter_changes(
    tenant: str, orders: Iterable[RaiseOrder], terms: WritingTerms
) -> list[CounterChange]:
    """Turn orders into changes of keys.

    Raises:
        StoreWriteError: a counter of that name can have no key.
    """
    return [CounterChange(_key(tenant, order), order, terms) for order in orders]


def _key(tenant: str, order: RaiseOrder) -> str:
    try:
        return encode_key(CounterKey(tenant, order.of, order.entity))
    except UnusableNameError as error:
        raise StoreWriteError(
            f"No key can hold the counter of {order.entity!a} in {str(order.of)!a}: {error}.",
            "restore the tenant's other budgets by name; see where this name came from.",
        ) from error


def _read(live: LiveKey) -> tuple[Decimal | None, ValueShape | None, str]:
    """Return a live counter's usage and shape, if there is one, or why it is unreadable."""
    if live.value is None:
        return None, None, ""
    if live.value.fault is not None:
        return None, None, live.value.fault
    try:
        usage, shape = decode_value(live.value.data)
    except UnreadableUsageError as error:
        return None, None, str(error)
    return usage, shape, ""


def _new_text(order: RaiseOrder, now: str) -> str:
    digits = _digits(order.usage)
    match order.shape:
        case ValueShape.BARE:
            return digits
        case ValueShape.NUMBER:
            return f'{{"usage":{digits},"updated_at":"{now}"}}'
        case ValueShape.TEXT:
            return f'{{"usage":"{digits}","updated_at":"{now}"}}'


def _raised_text(text: str, shape: ValueShape, usage: Decimal, now: str) -> str:
    digits = _digits(usage)
    if shape is ValueShape.BARE:
        return replace_all(text, digits)
    usage_text = f'"{digits}"' if shape is ValueShape.TEXT else digits
    return replace_members(text, {"usage": usage_text}, {"updated_at": f'"{now}"'})


def _digits(usage: Decimal) -> str:
    """Write a usage in plain digits, without zeros at its end; see that it can be read again."""
    return format_usage(parse_usage(format_usage(usage)))
