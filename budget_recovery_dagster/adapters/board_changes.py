"""Rebuilding leaderboards: what is written over a leaderboard as it stands, if anything is.

It lists whoever has most, by the higher of what it says itself and what is known of the counters.
"""

import json
from collections.abc import Callable, Sequence
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
from budget_recovery_dagster.adapters.nats_boards import Board, read_board
from budget_recovery_dagster.adapters.nats_codec import BoardKey, encode_board_key
from budget_recovery_dagster.adapters.nats_ttl import (
    ExpiredKeyError,
    remaining_ttl,
    ttl_of_new_key,
)
from budget_recovery_dagster.adapters.value_text import replace_members
from budget_recovery_dagster.domain.counters import (
    Entity,
    UnusableNameError,
    format_usage,
    parse_usage,
)
from budget_recovery_dagster.domain.leaderboard import rank
from budget_recovery_dagster.domain.recovery_point import Usages, max_merge
from budget_recovery_dagster.restore_ports import BoardOrder, BoardResult, Written

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
