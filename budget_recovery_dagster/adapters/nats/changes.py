"""Decides how a live counter or leaderboard changes, and collects the results. No I/O."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Generic

from budget_recovery_dagster.adapters.nats.boards import Board, read_board
from budget_recovery_dagster.adapters.nats.codec import (
    BoardKey,
    CounterKey,
    ExpiredKeyError,
    decode_value,
    encode_board_key,
    encode_key,
    remaining_ttl,
    replace_all,
    replace_members,
    ttl_of_new_key,
)
from budget_recovery_dagster.adapters.nats.stream import (
    Change,
    Decision,
    LiveKey,
    Outcome,
    Write,
    WriteTerms,
    format_updated_at,
    nanoseconds,
)
from budget_recovery_dagster.domain.counters import (
    Entity,
    UnreadableUsageError,
    UnusableNameError,
    Usages,
    ValueShape,
    format_usage,
    max_merge,
    parse_usage,
    rank,
)
from budget_recovery_dagster.errors import StoreWriteError
from budget_recovery_dagster.ports import BoardOrder, BoardResult, RaiseOrder, RaiseResult, Written

MAX_REJECTIONS = 100
"""After so many rejected writes in a row the remaining changes are not tried."""
_NOT_TRIED = f"Not tried: the store rejected {MAX_REJECTIONS} writes in a row."
Ranking = list[tuple[Entity, Decimal]]
WriteBoards = Callable[[Sequence["BoardChange"]], Sequence[BoardResult | str]]
"""Carries out changes; returns the result of each, or the reason of its failure."""


@dataclass(frozen=True, slots=True)
class CounterChange:
    """Raises the counter under a key, as ordered."""

    key: str
    order: RaiseOrder
    terms: WriteTerms

    def decide(self, live: LiveKey) -> Decision[RaiseResult]:
        """Return the raised counter, or the reason to leave the live one."""
        before, shape, reason = _read(live)
        if not self.terms.is_open(self.order.of.window):
            return self._skipped(Written.CLOSED, before)
        if reason:
            return self._skipped(Written.UNREADABLE, before, reason)
        if before is not None and before >= self.order.usage:
            return self._skipped(Written.KEPT, before)
        try:
            write = self._write(live, shape)
        except ExpiredKeyError:
            return self._skipped(Written.EXPIRED, before)
        return Decision(RaiseResult(self.order, Written.RAISED, before), write)

    def rejected(self, outcome: RaiseResult, reason: str) -> RaiseResult:
        """Return the result for a value that the store rejected."""
        return replace(outcome, written=Written.REFUSED, reason=reason)

    def _skipped(
        self, written: Written, before: Decimal | None, reason: str = ""
    ) -> Decision[RaiseResult]:
        return Decision(RaiseResult(self.order, written, before, reason))

    def _write(self, live: LiveKey, shape: ValueShape | None) -> Write:
        now = self.terms.now()
        if live.value is None or shape is None:
            ttl = ttl_of_new_key(self.order.expiry_seconds, self.order.of.window, nanoseconds(now))
            text = _new_text(self.order, format_updated_at(now))
        else:
            ttl = remaining_ttl(live.value.ttl, live.value.written_ns, nanoseconds(now))
            text = _raised_text(
                live.value.data.decode(), shape, self.order.usage, format_updated_at(now)
            )
        return Write(text.encode(), ttl if self.terms.supports_ttl else None)


def counter_changes(
    tenant: str, orders: Iterable[RaiseOrder], terms: WriteTerms
) -> list[CounterChange]:
    """Return the changes that carry out orders.

    Raises:
        StoreWriteError: no key can contain a counter's name.
    """
    return [CounterChange(_key(tenant, order), order, terms) for order in orders]


@dataclass(frozen=True, slots=True)
class BoardChange:
    """Updates the leaderboard under a key, as ordered; ``usages`` are the order's, normalized."""

    tenant: str
    key: str
    order: BoardOrder
    usages: Usages
    terms: WriteTerms

    def decide(self, live: LiveKey) -> Decision[BoardResult]:
        """Return the rewritten leaderboard, or the reason to leave the live one."""
        board = Board(self.tenant, self.order.of, self.key)
        if live.value is not None:
            board = read_board(self.tenant, self.order.of, self.key, live.value)
        ranking = rank(max_merge(board.usages, self.usages).items())
        if not board.omitted and _is_up_to_date(board, ranking):
            return self._skipped("")
        if not self.terms.is_open(self.order.of.window):
            return self._skipped(Written.CLOSED)
        if board.omitted:
            # A rewrite would drop the unreadable entries.
            return self._skipped(f"it is unreadable: {board.omitted[0].reason}")
        try:
            return Decision(BoardResult(self.order.of, is_written=True), self._write(live, ranking))
        except ExpiredKeyError:
            return self._skipped(Written.EXPIRED)

    def rejected(self, outcome: BoardResult, reason: str) -> BoardResult:
        """Return the result for a value that the store rejected."""
        return replace(outcome, is_written=False, reason=reason)

    def _skipped(self, reason: str) -> Decision[BoardResult]:
        return Decision(BoardResult(self.order.of, is_written=False, reason=str(reason)))

    def _write(self, live: LiveKey, ranking: Ranking) -> Write:
        now = self.terms.now()
        if live.value is None:
            text = f'{{"entries":{_entries(ranking)},"updated_at":"{format_updated_at(now)}"}}'
            ttl = ttl_of_new_key(self.order.expiry_seconds, self.order.of.window, nanoseconds(now))
        else:
            updated_at = f'"{format_updated_at(now)}"'
            text = replace_members(
                live.value.data.decode(),
                {"entries": _entries(ranking)},
                {"updated_at": updated_at},
            )
            ttl = remaining_ttl(live.value.ttl, live.value.written_ns, nanoseconds(now))
        return Write(text.encode(), ttl if self.terms.supports_ttl else None)


def rebuild(
    tenant: str, orders: Sequence[BoardOrder], terms: WriteTerms, write: WriteBoards
) -> tuple[BoardResult, ...]:
    """Carry out orders with ``write``; return the results in the order of the orders."""
    changes: dict[int, BoardChange] = {}
    results: dict[int, BoardResult | str] = {}
    for number, order in enumerate(orders):
        try:
            key = encode_board_key(BoardKey(tenant, order.of))
        except UnusableNameError as error:
            results[number] = f"No valid key: {error}."
        else:
            changes[number] = BoardChange(tenant, key, order, _normalized(order.usages), terms)
    results.update(zip(changes, write(list(changes.values())), strict=True))
    return tuple(
        BoardResult(order.of, is_written=False, reason=result)
        if isinstance(result := results[number], str)
        else result
        for number, order in enumerate(orders)
    )


class ChangeResults(Generic[Outcome]):
    """The results of changes so far, by the number of the change."""

    def __init__(self, changes: Sequence[Change[Outcome]]) -> None:
        self._changes = changes
        self._outcomes: dict[int, Outcome] = {}
        self._rejections: dict[int, StoreWriteError] = {}
        self._rejected_in_a_row = 0
        self._is_given_up = False

    @property
    def is_given_up(self) -> bool:
        """Whether to stop, because the store rejects one write after another."""
        return self._is_given_up

    def skip(self, number: int, outcome: Outcome) -> None:
        """Record a change that needs no write."""
        self._outcomes[number] = outcome

    def store(self, number: int, outcome: Outcome) -> None:
        """Record a write that the store accepted."""
        self._outcomes[number] = outcome
        self._rejected_in_a_row = 0

    def reject_value(self, number: int, outcome: Outcome, reason: str) -> None:
        """Record a rejected value; writes with other values may still succeed."""
        self._outcomes[number] = self._changes[number].rejected(outcome, reason)

    def reject(self, number: int, error: StoreWriteError) -> None:
        """Record a write that the store rejects whatever the value."""
        self._rejections[number] = error
        self._rejected_in_a_row += 1
        if self._rejected_in_a_row >= MAX_REJECTIONS:
            self._is_given_up = True

    def all(self) -> list[Outcome]:
        """Return the results in the order of the changes.

        Raises:
            StoreWriteError: the first write that was rejected whatever the value.
        """
        for error in self._rejections.values():
            raise error
        return [self._outcomes[number] for number in range(len(self._changes))]

    def all_or_reasons(self) -> list[Outcome | str]:
        """Return the results in the order of the changes; a failed one is its reason."""
        return [
            self._outcomes[number] if number in self._outcomes else self._reason(number)
            for number in range(len(self._changes))
        ]

    def _reason(self, number: int) -> str:
        error = self._rejections.get(number)
        return _NOT_TRIED if error is None else error.message


def _key(tenant: str, order: RaiseOrder) -> str:
    try:
        return encode_key(CounterKey(tenant, order.of, order.entity))
    except UnusableNameError as error:
        raise StoreWriteError(
            f"The counter of {order.entity!a} in {str(order.of)!a} has no valid key: {error}.",
            "restore the tenant's other budgets by name, and find the origin of this name.",
        ) from error


def _read(live: LiveKey) -> tuple[Decimal | None, ValueShape | None, str]:
    """Return a live counter's usage and shape, if it exists, or why it is unreadable."""
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
    """Format a usage without exponent and trailing zeros, after checking that it parses."""
    return format_usage(parse_usage(format_usage(usage)))


def _entries(ranking: Ranking) -> str:
    entries = [{"entity": entity, "usage": format_usage(usage)} for entity, usage in ranking]
    return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))


def _normalized(usages: Usages) -> Usages:
    """Remove trailing zeros, as a reader of counters does."""
    return {entity: parse_usage(format_usage(usage)) for entity, usage in usages.items()}


def _is_up_to_date(board: Board, ranking: Ranking) -> bool:
    return board.length == len(ranking) and list(board.usages.items()) == ranking
