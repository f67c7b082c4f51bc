"""What must be derived from the counters of one budget's window: a leaderboard, and blocks.

Pure: what is known of the bucket goes in, what should stand there comes out.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple

from budget_recovery_dagster.adapters.nats.codec import CounterKey
from budget_recovery_dagster.domain.budgets import BudgetDefinition
from budget_recovery_dagster.domain.counters import (
    Entity,
    UnreadableUsageError,
    format_usage,
    parse_usage,
    rank,
)
from budget_recovery_dagster.sandbox.gateway.counting import written_at
from budget_recovery_dagster.sandbox.gateway.store import NOTHING, Seen


class Standing(NamedTuple):
    """A counter's usage; None where its value cannot be read."""

    counter: CounterKey
    usage: Decimal | None
    revision: int


@dataclass(slots=True)
class Group:
    """All that is known of one window of one budget; entities by their tokens."""

    of: CounterKey
    counters: dict[str, Standing] = field(default_factory=dict)
    blocked: dict[str, Seen] = field(default_factory=dict)
    board: Seen = NOTHING

    def is_closed(self, now: datetime) -> bool:
        """Whether its window has ended at ``now`` (aware)."""
        end = self.of.of.window.end
        return end is not None and end <= now

    @property
    def is_empty(self) -> bool:
        """Whether no key of it is there, as far as is known."""
        others = (self.board, *self.blocked.values())
        return not self.counters and all(seen.data is None for seen in others)


def board_entries(usages: Iterable[tuple[Entity, Decimal]]) -> list[dict[str, str | None]]:
    """Return a leaderboard's entries: most usage first, equal ones by their names' code points."""
    return [{"entity": entity, "usage": format_usage(usage)} for entity, usage in rank(usages)]


def wanted_board(group: Group) -> list[dict[str, str | None]]:
    """Return the entries that a group's leaderboard must have; none where there must be none.

    Whoever has a counter that cannot be read keeps the entry that stands there, if there is one: a
    board that is not full says of everybody else that they have no counter.
    """
    unknown = {each.counter.entity for each in group.counters.values() if each.usage is None}
    usages = [
        (each.counter.entity, each.usage)
        for each in group.counters.values()
        if each.usage is not None
    ]
    kept = [each for each in _shown_usages(group.board) if each[0] in unknown] if unknown else []
    return board_entries([*usages, *kept])


def _shown_usages(board: Seen) -> Iterator[tuple[Entity, Decimal]]:
    """Go through the entries of a leaderboard as it stands that can be read, one of each entity."""
    entries = shown_entries(board)
    seen = set()
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {"entity": str() | None as entity, "usage": str(usage)} if entity not in seen:
                seen.add(entity)
                with contextlib.suppress(UnreadableUsageError):
                    yield entity, parse_usage(usage)


def shown_entries(board: Seen) -> object:
    """Return the entries of a leaderboard as it stands; None where it cannot be read."""
    if board.data is None:
        return []
    try:
        content = json.loads(board.data)
    except (ValueError, RecursionError):
        return None
    return content.get("entries") if isinstance(content, dict) else None


def write_board(entries: list[dict[str, str | None]], written: datetime) -> bytes:
    """Write a leaderboard at a moment (aware)."""
    content = {"entries": entries, "updated_at": written_at(written)}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


class Blocks(NamedTuple):
    """What is to be done about a group's blocks, by entities' tokens."""

    to_set: list[str]
    to_lift: list[str]


def wanted_blocks(group: Group, definition: BudgetDefinition | None, value: bytes) -> Blocks:
    """Compare the blocks that there are with those that there must be, with this value.

    Whoever has a counter that cannot be read stays as they are: nothing is known of them.
    """
    unknown = {token for token, each in group.counters.items() if each.usage is None}
    exhausted = {
        token
        for token, each in group.counters.items()
        if each.usage is not None and definition is not None
        if definition.is_exhausted_at(each.usage)
    }
    standing: Mapping[str, bytes] = {
        token: seen.data for token, seen in group.blocked.items() if seen.data is not None
    }
    return Blocks(
        sorted(token for token in exhausted if standing.get(token) != value),
        sorted(standing.keys() - exhausted - unknown),
    )
