"""Keeps what is derived from the counters in line with them, whoever changes them.

It watches the whole bucket and compares what stands there with what should: leaderboards, blocked
keys, and no key at all of a window that has closed. Nothing is remembered of earlier decisions, so
it does not matter what it missed while it did not run.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from datetime import datetime

from budget_recovery_dagster.adapters.nats_codec import BOARDS, COUNTERS, UnreadableKeyError
from budget_recovery_dagster.domain.counters import UnreadableUsageError
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.counting import Counter
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

# Changes come in bursts: one charge raises several counters.
_GATHER_SECONDS = 0.1
# Windows close without any change.
_CLOCK_SECONDS = 0.3


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

    def replace(self, found: Mapping[str, Seen]) -> None:
        """Begin anew with all that is there."""
        self._groups.clear()
        self._changed.clear()
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
        """Act on all changes and on the clock, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOCK_SECONDS):
                    await self._has_changed.wait()
                await asyncio.sleep(_GATHER_SECONDS)
            self._has_changed.clear()
            now = self._clock()
            for name, group in list(self._groups.items()):
                if group.is_closed(now):
                    await self._close(name, group)
                elif name in self._changed:
                    self._changed.discard(name)
                    await self._settle(name, group, now)

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
            usage = Counter.parse(seen.data).usage
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

    async def _settle(self, name: str, group: Group, now: datetime) -> None:
        definition = self._budgets.behind(group.of)
        enforcement = definition.enforcement.value if definition else ""
        value = json.dumps({"enforcement": enforcement}).encode()
        blocks = wanted_blocks(group, definition, value)
        # The blocks first: a board can wait.
        for entity in blocks.to_set:
            key = f"{BLOCKED}.{name}.{entity}"
            if await self._put(group, entity, key, value):
                log.info("Exhausted, %s: %s.", enforcement, described(f"{name}.{entity}"))
        for entity in blocks.to_lift:
            if await self._put(group, entity, f"{BLOCKED}.{name}.{entity}", None):
                log.info("No longer exhausted: %s.", described(f"{name}.{entity}"))
        entries = wanted_board(group)
        if shown_entries(group.board) != entries:
            board = write_board(entries, now) if entries else None
            await self._put(group, None, f"{BOARDS}.{name}", board)

    async def _close(self, name: str, group: Group) -> None:
        """Purge every key of a window that has ended; what is written late brings it back here."""
        removed = 0
        for entity, each in list(group.counters.items()):
            key = f"{COUNTERS}.{name}.{entity}"
            if await self._store.remove(key, expecting=each.revision) is not None:
                removed += 1
                if group.counters.get(entity) is each:
                    del group.counters[entity]
        for entity, seen in list(group.blocked.items()):
            if seen.data is not None:
                removed += await self._put(group, entity, f"{BLOCKED}.{name}.{entity}", None)
        if group.board.data is not None:
            removed += await self._put(group, None, f"{BOARDS}.{name}", None)
        if removed:
            of = group.of
            log.info(
                "Closed: budget %r of %r, %s; %d keys removed.",
                of.of.budget,
                of.tenant,
                of.of.window.token,
                removed,
            )
        elif not group.counters:
            self._groups.pop(name, None)

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
