"""Keeps what is derived from the counters in line with them, whoever changes them.

It watches the whole bucket and compares what stands there with what should: leaderboards, blocked
keys, and no key at all of a window that has closed. Nothing is remembered of earlier decisions, so
it does not matter what it missed while it did not run. Nothing is written before it has seen all,
which takes as long as reading does: some 12,000 keys a second. After that an entity is blocked
within a second of its limit, among 100,000 counters too.
"""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

from budget_recovery_dagster.adapters.nats.codec import (
    BOARDS,
    COUNTERS,
    UnreadableKeyError,
    decode_value,
)
from budget_recovery_dagster.domain.counters import UnreadableUsageError
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.keys import (
    BLOCKED,
    board_of,
    counter_of,
    described,
)
from budget_recovery_dagster.sandbox.gateway.standings import (
    Group,
    Standing,
    shown_entries,
    wanted_blocks,
    wanted_board,
    write_board,
)
from budget_recovery_dagster.sandbox.gateway.store import NOTHING, Seen, Store
from budget_recovery_dagster.sandbox.gateway.watching import follow

log = logging.getLogger("derivation")

Result = TypeVar("Result")

# Changes come in bursts: one charge raises several counters.
_GATHER_SECONDS = 0.1
# Windows close without any change.
_CLOCK_SECONDS = 0.3
# Written at the same time; then everything else has its turn. Some 50 ms at a server nearby.
_SLICE = 200


async def derive(store: Store, budgets: Budgets, clock: Callable[[], datetime]) -> None:
    """Keep the bucket's leaderboards and blocked keys, and purge closed windows, for ever.

    Several may do it at the same time: each write is conditional on what was seen.

    Raises:
        ExceptionGroup: of what ends the work on a store.
    """
    derivation = Derivation(store, budgets, clock)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow(store, "", derivation))
        tasks.create_task(derivation.keep_in_line())


class Derivation:
    """A view of the whole bucket that acts on what it sees."""

    def __init__(self, store: Store, budgets: Budgets, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._budgets = budgets
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._changed: set[str] = set()
        self._has_changed = asyncio.Event()
        self._removed: Counter[str] = Counter()

    def replace(self, found: Mapping[str, Seen]) -> None:
        """Begin anew with all that is there."""
        self._groups.clear()
        self._changed.clear()
        self._removed.clear()
        for key, seen in found.items():
            self.change(key, seen)

    def change(self, key: str, seen: Seen) -> None:
        """Take over a key; it is acted upon a little later."""
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
            return  # not ours: no counter of the gateway bears such a name
        self._changed.add(name)
        self._has_changed.set()

    async def keep_in_line(self) -> None:
        """Act on all changes and on the clock, for ever.

        What is open comes first, and again after every slice of much that is to be written: neither
        a window that closes nor a budget that many exhaust at once holds up the blocks of another.
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
            self._groups[name] = Group(board_of(name))
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
        if _is_news(seen, group.blocked.get(entity, NOTHING)):
            group.blocked[entity] = seen
        return name

    def _change_board(self, name: str, seen: Seen) -> str:
        group = self._group(name)
        if _is_news(seen, group.board):
            group.board = seen
        return name

    async def _settle(self, name: str, group: Group, now: datetime) -> bool:
        """Write a slice of what is derived from a group; return False if there is more."""
        definition = self._budgets.behind(group.of)
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
        # The blocks first: a board can wait.
        entries = wanted_board(group)
        if shown_entries(group.board) != entries:
            board = write_board(entries, now) if entries else None
            await self._put(group, None, f"{BOARDS}.{name}", board)
        return True

    async def _close_some(self, now: datetime) -> bool:
        """Purge a slice of the keys of windows that have ended; return False if there may be more.

        What is written late brings a window back here.
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
                return not removed  # if none went, others have written them: that will be told
        return True

    def _removals(self, name: str, group: Group) -> Iterator[Coroutine[Any, Any, bool]]:
        """Say how to remove each key of a group: the counters, their blocks, the board."""
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
        """Write or remove a block, or without an entity the board; False if it is another by now.

        It is told of what came between, and acts again then.
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


def _is_news(seen: Seen, known: Seen) -> bool:
    """Whether it is not the echo of what was written from here, or of what was there before."""
    return seen == NOTHING or seen.revision > known.revision


async def _all(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Do all of it at the same time; unlike a gathering, one failure ends the rest."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each) for each in work]
    return [task.result() for task in running]
