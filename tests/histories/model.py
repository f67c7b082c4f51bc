"""What is true in a history, and what a service may have changed.

The model knows the true spend, every capture and every reset. A world shows what the store holds.
``judge`` compares the store before and after the work of a service.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

from budget_recovery_dagster.adapters.nats import (
    BoardKey,
    CounterKey,
    UnreadableKeyError,
    decode_board_key,
    decode_key,
    encode_key,
)
from budget_recovery_dagster.domain import BudgetWindow, Entity
from tests.histories.worlds import Raw

Values = Mapping[CounterKey, Decimal]
ZERO = Decimal(0)


@dataclass(frozen=True)
class CaptureNote:
    """A tenant's snapshot: the counters of the store before its capture, and after it."""

    event: int
    tenant: str
    captured_at: datetime
    before: Values
    after: Values


@dataclass(frozen=True)
class ResetNote:
    """A recorded reset; ``window`` None: every window; ``entities`` None: everyone."""

    event: int
    tenant: str
    budget: str
    window: str | None
    entities: frozenset[Entity] | None

    def is_about(self, key: CounterKey) -> bool:
        return (
            key.tenant == self.tenant
            and key.of.budget == self.budget
            and self.window in (None, key.of.window.token)
            and (self.entities is None or key.entity in self.entities)
        )


@dataclass
class Database:
    """What the control-plane database knows; an older copy knows less."""

    captures: list[CaptureNote] = field(default_factory=list)
    resets: list[ResetNote] = field(default_factory=list)

    def copy(self) -> "Database":
        return Database(list(self.captures), list(self.resets))

    def highest(
        self, resets: Collection[ResetNote], *, is_upper: bool
    ) -> dict[CounterKey, Decimal]:
        """Return the highest captured usages that these resets do not exclude.

        A counter can rise during its capture; ``is_upper``: count what it had afterwards.
        """
        found: dict[CounterKey, Decimal] = {}
        for note in self.captures:
            later = [each for each in resets if each.event > note.event]
            for key, usage in (note.after if is_upper else note.before).items():
                if usage > found.get(key, -1) and not any(each.is_about(key) for each in later):
                    found[key] = usage
        return found


@dataclass
class Model:
    """The truth of a history.

    ``resets`` are all that were recorded, even if an older copy of the database lacks them.
    ``revivable`` are those whose usage may come back: a person decided so, or a residual risk of
    the design has become real.
    """

    truth: dict[CounterKey, Decimal] = field(default_factory=dict)
    database: Database = field(default_factory=Database)
    resets: list[ResetNote] = field(default_factory=list)
    revivable: set[int] = field(default_factory=set)
    events: int = 0

    def next_event(self) -> int:
        self.events += 1
        return self.events

    @property
    def forgotten(self) -> set[int]:
        """The resets that the database does not know any more."""
        return {each.event for each in self.resets} - {each.event for each in self.database.resets}

    def reset(self, note: ResetNote) -> None:
        self.resets.append(note)
        self.database.resets.append(note)

    def bounds(self, *, despite_resets: bool) -> dict[CounterKey, Decimal]:
        """Return up to which usage a counter may be raised: the true, or an eligible captured one.

        A captured usage is higher than the true one only if an older or another store was captured.
        """
        is_heeded = not despite_resets
        heeded = [each for each in self.resets if is_heeded and each.event not in self.revivable]
        bounds = self.database.highest(heeded, is_upper=True)
        for key, usage in self.truth.items():
            bounds[key] = max(usage, bounds.get(key, ZERO))
        return bounds

    def due(self, now: datetime) -> dict[CounterKey, Decimal]:
        """Return what a restore of everything has to bring back in the open windows."""
        known = self.database.highest([*self.resets, *self.database.resets], is_upper=False)
        return {key: usage for key, usage in known.items() if key.of.window.is_current(now)}


# Values, decoded without the project's code


def usage_of(data: bytes) -> Decimal | None:
    """Return the usage of a counter; None: it is unreadable."""
    try:
        value = json.loads(data, parse_float=Decimal, parse_int=Decimal)
        usage = Decimal(value["usage"] if isinstance(value, dict) else value)
        return usage if usage.is_finite() and usage >= 0 else None
    except (ValueError, ArithmeticError, KeyError, TypeError):
        return None


def counters_of(keys: Mapping[str, Raw]) -> dict[CounterKey, Decimal]:
    """Return the readable counters of a store."""
    found = {}
    for key, raw in keys.items():
        counter = counter_of(key)
        if counter is not None and (usage := usage_of(raw.data)) is not None:
            found[counter] = usage
    return found


def counter_of(key: str) -> CounterKey | None:
    """Return the counter that a key names; None: it names none."""
    try:
        return decode_key(key)
    except UnreadableKeyError:
        return None


def board_of(data: bytes) -> dict[Entity, Decimal]:
    """Return the entries of a leaderboard."""
    entries: list[dict[str, Any]] = json.loads(data)["entries"]
    return {each["entity"]: Decimal(each["usage"]) for each in entries}


def _board_named(key: str) -> BoardKey | None:
    try:
        return decode_board_key(key)
    except UnreadableKeyError:
        return None


def _other_members(data: bytes) -> object:
    value = json.loads(data)
    if not isinstance(value, dict):
        return None
    return {name: each for name, each in value.items() if name not in ("usage", "updated_at")}


# Judging the work of a service


@dataclass(frozen=True)
class Work:
    """What a store held before and after some work, which began at ``began``.

    ``raced`` are the keys that the gateway wrote meanwhile, each with its last value. ``bounds``
    returns up to which usage counters may be raised. ``raised_before`` are the windows that earlier
    work of the same incident raised, whose leaderboards may still follow. ``is_limited``: the
    gateway's writes make the bucket delete old keys. ``is_disturbed``: the store lost counters
    meanwhile, which the service had read. ``protects``: the gateway protects lifetime counters, and
    no others, from a maximum age.
    """

    before: Mapping[str, Raw]
    after: Mapping[str, Raw]
    began: datetime
    marker: str
    raced: Mapping[str, bytes]
    bounds: Callable[[], Values]
    raised_before: frozenset[tuple[str, BudgetWindow]]
    is_limited: bool
    is_disturbed: bool
    protects: bool

    def raised(self) -> frozenset[CounterKey]:
        """Return the counters that the service wrote."""
        return frozenset(
            counter
            for key in self._changed()
            if key in self.after and not self._is_by_gateway(key)
            if (counter := counter_of(key)) is not None
        )

    def _written(self) -> Iterator[CounterKey]:
        """Yield the counters that the service wrote, and those that the gateway wrote after it."""
        yield from self.raised()
        yield from (counter for key in self.raced if (counter := counter_of(key)) is not None)

    def faults(self) -> Iterator[str]:
        """Yield what the work must not have done, in sentences."""
        raised_in = self.raised_before | {(each.tenant, each.of) for each in self._written()}
        for key in sorted(self._changed()):
            if key == self.marker or self._is_by_gateway(key) or self._is_evicted(key):
                continue
            if (counter := counter_of(key)) is not None:
                yield from self._faults_of_counter(key, counter)
            elif (board := _board_named(key)) is not None:
                yield from self._faults_of_board(key, board, raised_in)
            else:
                yield f"{key} is not ours, and was changed: {self._change(key)}"

    def changed_by_us(self) -> frozenset[str]:
        """Return the keys that the service wrote."""
        gone = {key for key in self.before if self._is_evicted(key)}
        return frozenset(k for k in self._changed() - gone if not self._is_by_gateway(k))

    def _changed(self) -> set[str]:
        return {
            key
            for key in self.before.keys() | self.after.keys()
            if self.before.get(key) != self.after.get(key)
        }

    def _is_by_gateway(self, key: str) -> bool:
        """Whether the last write of a key was the gateway's."""
        return key in self.raced and key in self.after and self.after[key].data == self.raced[key]

    def _is_evicted(self, key: str) -> bool:
        return self.is_limited and bool(self.raced) and key not in self.after

    def _change(self, key: str) -> str:
        return f"{self.before.get(key)} -> {self.after.get(key)}"

    def _faults_of_counter(self, key: str, counter: CounterKey) -> Iterator[str]:
        if key not in self.after:
            yield f"{key} was removed: {self._change(key)}"
            return
        after = usage_of(self.after[key].data)
        if after is None:
            yield f"{key} was made unreadable: {self._change(key)}"
        elif after > (bound := self.bounds().get(counter, ZERO)):
            yield f"{key} was raised above {bound}: {self._change(key)}"
        if not counter.of.window.is_current(self.began):
            yield f"{key} was written although its window had closed: {self._change(key)}"
        if self.after[key].is_protected != (self.protects and counter.of.window.end is None):
            yield f"{key} is not protected as the gateway did it: {self._change(key)}"
        if (earlier := self._earlier(key)) is not None:
            yield from self._faults_of_raise(key, earlier, after)

    def _earlier(self, key: str) -> bytes | None:
        """Return what the gateway last wrote before the service; None: nothing."""
        return self.raced.get(key) or (self.before[key].data if key in self.before else None)

    def _faults_of_raise(self, key: str, earlier: bytes, after: Decimal | None) -> Iterator[str]:
        before = usage_of(earlier)
        if before is None:
            yield f"{key} was unreadable, and was overwritten: {self._change(key)}"
            return
        if after is not None and after <= before:
            yield f"{key} was written, and not raised: {self._change(key)}"
        if _other_members(earlier) != _other_members(self.after[key].data):
            yield f"{key} lost other members: {self._change(key)}"

    def _faults_of_board(
        self, key: str, of: BoardKey, raised_in: Collection[tuple[str, Any]]
    ) -> Iterator[str]:
        if key not in self.after:
            yield f"{key} was removed: {self._change(key)}"
            return
        if (of.tenant, of.of) not in raised_in:
            yield f"{key} was written, and no counter of it was raised: {self._change(key)}"
        if not of.of.window.is_current(self.began):
            yield f"{key} was written although its window had closed: {self._change(key)}"
        earlier = self._earlier(key)
        before = {} if earlier is None else board_of(earlier)
        after = board_of(self.after[key].data)
        for entity in before.keys() | after.keys():
            if after.get(entity, -1) < before.get(entity, -1):
                yield f"{key} was lowered at {entity}: {self._change(key)}"
            if not self.is_disturbed and after.get(entity, ZERO) > max(
                before.get(entity, ZERO), self._live(of, entity)
            ):
                yield f"{key} is above the counter of {entity}: {self._change(key)}"

    def _live(self, of: BoardKey, entity: Entity) -> Decimal:
        raw = self.after.get(encode_key(CounterKey(of.tenant, of.of, entity)))
        return ZERO if raw is None else usage_of(raw.data) or ZERO
