"""The derivation: keeps leaderboards and blocked keys consistent with the counters.

It watches the whole bucket and compares the derived keys with the counters, whichever program
changes them; it also removes every key of a closed window. It remembers no earlier decision, so
nothing is lost while it does not run. It writes nothing before it has read all keys, about 12,000
per second. After that, an entity is blocked within a second of reaching its limit, even among
100,000 counters.
"""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from budget_recovery_dagster.adapters.nats.codec import (
    BOARDS,
    COUNTERS,
    BoardKey,
    CounterKey,
    UnreadableKeyError,
    decode_board_key,
    decode_value,
)
from budget_recovery_dagster.domain.counters import (
    BudgetDefinition,
    Entity,
    UnreadableUsageError,
    format_usage,
    parse_usage,
    rank,
)
from budget_recovery_dagster.sandbox.gateway.aggregator import written_at
from budget_recovery_dagster.sandbox.gateway.requests import Budgets, Clock
from budget_recovery_dagster.sandbox.gateway.store import (
    BLOCKED,
    NOTHING,
    Seen,
    Store,
    counter_of,
    described,
)
from budget_recovery_dagster.sandbox.gateway.watching import follow

log = logging.getLogger("derivation")

Result = TypeVar("Result")

# Changes arrive in bursts: one charge raises several counters.
_GATHER_SECONDS = 0.1
# Windows close without any change.
_CLOCK_SECONDS = 0.3
# The number of keys written at the same time before other work continues; about 25 ms locally.
_SLICE = 100


class Standing(NamedTuple):
    """The usage of a counter; None if its value is unreadable."""

    counter: CounterKey
    usage: Decimal | None
    revision: int


@dataclass(slots=True)
class Group:
    """The known keys of one window of one budget; entities are identified by their tokens."""

    of: BoardKey
    counters: dict[str, Standing] = field(default_factory=dict)
    blocked: dict[str, Seen] = field(default_factory=dict)
    board: Seen = NOTHING

    def is_closed(self, now: datetime) -> bool:
        """Whether its window has ended at ``now`` (aware)."""
        end = self.of.of.window.end
        return end is not None and end <= now

    @property
    def is_empty(self) -> bool:
        """Whether none of its keys is known to exist."""
        others = (self.board, *self.blocked.values())
        return not self.counters and all(seen.data is None for seen in others)


def board_entries(usages: Iterable[tuple[Entity, Decimal]]) -> list[dict[str, str | None]]:
    """Return the entries of a leaderboard: most usage first, ties by the names' code points."""
    return [{"entity": entity, "usage": format_usage(usage)} for entity, usage in rank(usages)]


def wanted_board(group: Group) -> list[dict[str, str | None]]:
    """Return the entries that the leaderboard of a group must have; none if it must not exist.

    An entity with an unreadable counter keeps its present entry: a leaderboard that is not full
    states that every other entity has no counter.
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
    """Iterate over the readable entries of a present leaderboard, one for each entity."""
    entries = shown_entries(board)
    seen = set()
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {"entity": str() | None as entity, "usage": str(usage)} if entity not in seen:
                seen.add(entity)
                with contextlib.suppress(UnreadableUsageError):
                    yield entity, parse_usage(usage)


def shown_entries(board: Seen) -> object:
    """Return the entries of a present leaderboard; None if it is unreadable."""
    if board.data is None:
        return []
    try:
        content = json.loads(board.data)
    except (ValueError, RecursionError):
        return None
    return content.get("entries") if isinstance(content, dict) else None


def write_board(entries: list[dict[str, str | None]], written: datetime) -> bytes:
    """Return the value of a leaderboard as of ``written`` (aware)."""
    content = {"entries": entries, "updated_at": written_at(written)}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


class Blocks(NamedTuple):
    """The blocks of a group to set and to lift, by the tokens of their entities."""

    to_set: list[str]
    to_lift: list[str]


def wanted_blocks(group: Group, definition: BudgetDefinition | None, value: bytes) -> Blocks:
    """Compare the present blocks with the required ones, which have this value.

    The block of an entity with an unreadable counter stays as it is, because its usage is unknown.
    """
    unknown = {token for token, each in group.counters.items() if each.usage is None}
    exhausted = {
        token
        for token, each in group.counters.items()
        if each.usage is not None and definition is not None
        if definition.is_exhausted_at(each.counter.entity, each.usage)
    }
    present: Mapping[str, bytes] = {
        token: seen.data for token, seen in group.blocked.items() if seen.data is not None
    }
    return Blocks(
        sorted(token for token in exhausted if present.get(token) != value),
        sorted(present.keys() - exhausted - unknown),
    )


async def derive(store: Store, budgets: Budgets, clock: Clock) -> None:
    """Maintain leaderboards and blocked keys, and purge closed windows, forever.

    Several may run at the same time: each write requires the revision that was read.

    Raises:
        ExceptionGroup: of errors that end the work on a store.
    """
    derivation = Derivation(store, budgets, clock)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow(store, "", derivation))
        tasks.create_task(derivation.keep_consistent())


class Derivation:
    """A view of the whole bucket that acts on its changes."""

    def __init__(self, store: Store, budgets: Budgets, clock: Clock) -> None:
        self._store = store
        self._budgets = budgets
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._changed: set[str] = set()
        self._has_changed = asyncio.Event()
        self._removed: Counter[str] = Counter()

    def replace(self, found: Mapping[str, Seen]) -> None:
        """Take all existing keys; called once, at the start."""
        self.change(found)

    def change(self, changes: Mapping[str, Seen]) -> None:
        """Take keys; ``keep_consistent`` acts on them soon after."""
        for key, seen in changes.items():
            self._change(key, seen)

    def _change(self, key: str, seen: Seen) -> None:
        kind, _, suffix = key.partition(".")
        try:
            if kind == COUNTERS:
                name = self._change_counter(suffix, seen)
            elif kind == BLOCKED:
                name = self._change_block(suffix, seen)
            elif kind == BOARDS:
                name = self._change_board(suffix, seen)
            else:
                return
        except UnreadableKeyError:
            return  # another program's key: the gateway writes no such name
        self._changed.add(name)
        self._has_changed.set()

    async def keep_consistent(self) -> None:
        """Act on all changes and on the clock, forever.

        Open windows come first, again after every slice of a large write. So neither a closing
        window nor a budget that many entities exhaust at once delays the blocks of another budget.
        """
        is_done = True
        while True:
            if is_done:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOCK_SECONDS):
                        await self._has_changed.wait()
                    await asyncio.sleep(_GATHER_SECONDS)
            self._has_changed.clear()
            is_done = True
            now = self._clock()
            for name, group in list(self._groups.items()):
                if name in self._changed and not group.is_closed(now):
                    self._changed.discard(name)
                    is_done &= await self._settle(name, group, now)
            is_done &= await self._close_some(now)

    def _group(self, name: str) -> Group:
        if name not in self._groups:
            self._groups[name] = Group(decode_board_key(f"{BOARDS}.{name}"))
        return self._groups[name]

    def _change_counter(self, suffix: str, seen: Seen) -> str:
        counter = counter_of(suffix)
        name, _, entity = suffix.rpartition(".")
        group = self._group(name)
        if seen.data is None:
            group.counters.pop(entity, None)
            return name
        try:
            usage, _ = decode_value(seen.data)
        except UnreadableUsageError as error:
            log.warning("Nothing is derived from %s: %s.", described(suffix), error)
            usage = None
        group.counters[entity] = Standing(counter, usage, seen.revision)
        return name

    def _change_block(self, suffix: str, seen: Seen) -> str:
        counter_of(suffix)
        name, _, entity = suffix.rpartition(".")
        group = self._group(name)
        if _is_new(seen, group.blocked.get(entity, NOTHING)):
            group.blocked[entity] = seen
        return name

    def _change_board(self, name: str, seen: Seen) -> str:
        group = self._group(name)
        if _is_new(seen, group.board):
            group.board = seen
        return name

    async def _settle(self, name: str, group: Group, now: datetime) -> bool:
        """Write a slice of the derived keys of a group; return False if more remain."""
        definition = self._budgets.definition_of(group.of)
        enforcement = definition.enforcement.value if definition else ""
        value = json.dumps({"enforcement": enforcement}).encode()
        blocks = wanted_blocks(group, definition, value)
        to_write = [
            *((each, value) for each in blocks.to_set),
            *((each, None) for each in blocks.to_lift),
        ]

        async def write(entity: str, data: bytes | None) -> None:
            if not await self._put(group, entity, f"{BLOCKED}.{name}.{entity}", data):
                return
            of = described(f"{name}.{entity}")
            if data is None:
                log.info("No longer exhausted: %s.", of)
            else:
                log.info("Exhausted, %s: %s.", enforcement, of)

        await _all(write(*each) for each in to_write[:_SLICE])
        if len(to_write) > _SLICE:
            self._changed.add(name)
            return False
        # The blocks come first; a leaderboard can wait.
        entries = wanted_board(group)
        if shown_entries(group.board) != entries:
            board = write_board(entries, now) if entries else None
            await self._put(group, None, f"{BOARDS}.{name}", board)
        return True

    async def _close_some(self, now: datetime) -> bool:
        """Purge a slice of the keys of closed windows; return False if more may remain.

        A late write brings a window back here.
        """
        room = _SLICE
        removed = 0
        for name, group in list(self._groups.items()):
            if not group.is_closed(now):
                continue
            removals = list(islice(self._removals(name, group), room))
            room -= len(removals)
            removed += (gone := sum(await _all(removals)))
            self._removed[name] += gone
            if group.is_empty:
                self._forget(name, group)
            if not room:
                return not removed  # if none succeeded, their changes by others arrive later
        return True

    def _removals(self, name: str, group: Group) -> Iterator[Coroutine[Any, Any, bool]]:
        """Return the removal of each key of a group: the counters, their blocks, the board."""
        for entity, standing in group.counters.items():
            yield self._remove_counter(name, group, entity, standing)
        for entity, seen in group.blocked.items():
            if seen.data is not None:
                yield self._put(group, entity, f"{BLOCKED}.{name}.{entity}", None)
        if group.board.data is not None:
            yield self._put(group, None, f"{BOARDS}.{name}", None)

    async def _remove_counter(
        self, name: str, group: Group, entity: str, standing: Standing
    ) -> bool:
        key = f"{COUNTERS}.{name}.{entity}"
        if await self._store.remove(key, expecting=standing.revision) is None:
            return False
        if group.counters.get(entity) is standing:
            del group.counters[entity]
        return True

    def _forget(self, name: str, group: Group) -> None:
        removed = self._removed.pop(name)
        del self._groups[name]
        self._changed.discard(name)
        if removed:
            log.info(
                "Closed: budget %r of %r, %s; %d keys removed.",
                group.of.of.budget,
                group.of.tenant,
                group.of.of.window.token,
                removed,
            )

    async def _put(self, group: Group, entity: str | None, key: str, data: bytes | None) -> bool:
        """Write or remove a block, or without an entity the board; return False if it has changed.

        The change arrives as a message, and ``keep_consistent`` then acts again.
        """
        seen = group.board if entity is None else group.blocked.get(entity, NOTHING)
        if data is None:
            revision = await self._store.remove(key, expecting=seen.revision)
        else:
            revision = await self._store.write(key, data, expecting=seen.revision)
        if revision is None:
            return False
        if entity is None:
            group.board = Seen(revision, data)
        else:
            group.blocked[entity] = Seen(revision, data)
        return True


def _is_new(seen: Seen, known: Seen) -> bool:
    """Whether it is neither the echo of an own write nor an older state."""
    return seen == NOTHING or seen.revision > known.revision


async def _all(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Do all work at the same time; unlike with asyncio.gather, one failure ends the rest."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each) for each in work]
    return [task.result() for task in running]
