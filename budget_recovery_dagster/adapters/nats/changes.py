"""What a write does to a counter or a leaderboard, given its live value. No I/O."""

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
    WritingTerms,
    nanoseconds,
    written_at,
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

REFUSALS_IN_A_ROW = 100
"""So many refused writings with none stored between them show that no more need to be tried."""
_GIVEN_UP = f"It was given up, as the store refused {REFUSALS_IN_A_ROW} writings in a row."


class Outcomes(Generic[Outcome]):
    """What has become of changes so far, each known by its number."""

    def __init__(self, changes: Sequence[Change[Outcome]]) -> None:
        self._changes = changes
        self._outcomes: dict[int, Outcome] = {}
        self._refusals: dict[int, StoreWriteError] = {}
        self._in_a_row = 0
        self._is_given_up = False

    @property
    def is_given_up(self) -> bool:
        """Whether nothing more is to be written, for all that the store refuses."""
        return self._is_given_up

    def leave(self, number: int, outcome: Outcome) -> None:
        """Note that nothing is written."""
        self._outcomes[number] = outcome

    def store(self, number: int, outcome: Outcome) -> None:
        """Note that the store has taken the writing."""
        self._outcomes[number] = outcome
        self._in_a_row = 0

    def refuse_value(self, number: int, outcome: Outcome, reason: str) -> None:
        """Note that the store takes no such value, which says nothing about any other."""
        self._outcomes[number] = self._changes[number].refused(outcome, reason)

    def refuse(self, number: int, error: StoreWriteError) -> None:
        """Note that the store refuses the writing, whatever its value."""
        self._refusals[number] = error
        self._in_a_row += 1
        if self._in_a_row >= REFUSALS_IN_A_ROW:
            self._is_given_up = True

    def all(self) -> list[Outcome]:
        """Return what became of each change, in their order.

        Raises:
            StoreWriteError: the first refusal that was for no value's sake.
        """
        for error in self._refusals.values():
            raise error
        return [self._outcomes[number] for number in range(len(self._changes))]

    def all_or_why(self) -> list[Outcome | str]:
        """Return what became of each change; of those that were not brought about, why not."""
        return [
            self._outcomes[number] if number in self._outcomes else self._why(number)
            for number in range(len(self._changes))
        ]

    def _why(self, number: int) -> str:
        error = self._refusals.get(number)
        return _GIVEN_UP if error is None else error.message


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


Ranking = list[tuple[Entity, Decimal]]
WriteBoards = Callable[[Sequence["BoardChange"]], Sequence[BoardResult | str]]
"""Brings changes about, and gives what became of each, or why it was not brought about."""


@dataclass(frozen=True, slots=True)
class BoardChange:
    """An order to bring the leaderboard under a key in line; ``usages`` are its, normalized."""

    tenant: str
    key: str
    order: BoardOrder
    usages: Usages
    terms: WritingTerms

    def decide(self, live: LiveKey) -> Decision[BoardResult]:
        """Write the leaderboard anew, or say why it is left."""
        board = Board(self.tenant, self.order.of, self.key)
        if live.value is not None:
            board = read_board(self.tenant, self.order.of, self.key, live.value)
        ranking = rank(max_merge(board.usages, self.usages).items())
        if not board.omitted and _is_in_line(board, ranking):
            return self._left("")
        if not self.terms.is_open(self.order.of.window):
            return self._left(Written.CLOSED)
        if board.omitted:
            # To write it anew would drop what it says there.
            return self._left(f"left, it is unreadable: {board.omitted[0].reason}")
        try:
            return Decision(BoardResult(self.order.of, is_written=True), self._write(live, ranking))
        except ExpiredKeyError:
            return self._left(Written.EXPIRED)

    def refused(self, outcome: BoardResult, reason: str) -> BoardResult:
        """Say that the store refuses the value."""
        return replace(outcome, is_written=False, reason=reason)

    def _left(self, reason: str) -> Decision[BoardResult]:
        return Decision(BoardResult(self.order.of, is_written=False, reason=str(reason)))

    def _write(self, live: LiveKey, ranking: Ranking) -> Write:
        now = self.terms.now()
        if live.value is None:
            text = f'{{"entries":{_entries(ranking)},"updated_at":"{written_at(now)}"}}'
            ttl = ttl_of_new_key(self.order.expiry_seconds, self.order.of.window, nanoseconds(now))
        else:
            text = _rewritten(live.value.data.decode(), ranking, written_at(now))
            ttl = remaining_ttl(live.value.ttl, live.value.written_ns, nanoseconds(now))
        return Write(text.encode(), ttl if self.terms.keeps_ttl else None)


def rebuild(
    tenant: str, orders: Sequence[BoardOrder], terms: WritingTerms, write: WriteBoards
) -> tuple[BoardResult, ...]:
    """Turn orders into changes of keys, have them written, and give the orders' results."""
    changes: dict[int, BoardChange] = {}
    results: dict[int, BoardResult | str] = {}
    for number, order in enumerate(orders):
        try:
            key = encode_board_key(BoardKey(tenant, order.of))
        except UnusableNameError as error:
            results[number] = f"No key can hold it: {error}."
        else:
            changes[number] = BoardChange(tenant, key, order, _normalized(order.usages), terms)
    results.update(zip(changes, write(list(changes.values())), strict=True))
    return tuple(_result(order, results[number]) for number, order in enumerate(orders))


def _result(order: BoardOrder, found: BoardResult | str) -> BoardResult:
    if isinstance(found, str):
        return BoardResult(order.of, is_written=False, reason=found)
    return found


def _normalized(usages: Usages) -> Usages:
    """Take the zeros at the end away, as whoever reads a counter does."""
    return {entity: parse_usage(format_usage(usage)) for entity, usage in usages.items()}


def _is_in_line(board: Board, ranking: Ranking) -> bool:
    return board.length == len(ranking) and list(board.usages.items()) == ranking


def _entries(ranking: Ranking) -> str:
    entries = [{"entity": entity, "usage": format_usage(usage)} for entity, usage in ranking]
    return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))


def _rewritten(text: str, ranking: Ranking, now: str) -> str:
    return replace_members(text, {"entries": _entries(ranking)}, {"updated_at": f'"{now}"'})
