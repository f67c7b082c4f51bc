"""Recovery points: what a restore would bring back now, and its age; and deliberate resets.

One rule decides which records count, for every reader: a record whose usages do not match the hash
of the capture is damaged. It adds no usage to a point, covers no other record, and is reported.
Shape and expiry of the keys come from the newest record that has them, even from a damaged one.

A restore takes the highest recorded usage, so without resets it would bring back usage that an
operator removed on purpose. A reset excludes usages of older records. If a record is eligible for
an entity, every newer record is, too. So a record that covers the eligible usages of older records
still covers them after any later reset.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Final

from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    OmittedCounter,
    UnreadableKey,
    Usages,
    ValueShape,
    check_name,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, Window, require_aware
from budget_recovery_dagster.errors import DatabaseError


class Everyone(Enum):
    """All entities of a budget, including its aggregate; an own type, so that no name equals it."""

    EVERYONE = "everyone"

    def __repr__(self) -> str:
        return self.name


EVERYONE: Final = Everyone.EVERYONE


@dataclass(frozen=True, slots=True)
class Reset:
    """A deliberate reset of counters at ``at`` (aware; converted to UTC).

    It excludes usages in records captured until ``at``: those of ``entity`` (None: the aggregate),
    of a set of entities, or of EVERYONE, in the window with the token ``window`` (None: every
    window of the budget). ``by`` and ``reason`` are for people.
    """

    tenant: str
    budget: str
    window: str | None
    entity: Entity | Everyone | frozenset[Entity]
    at: datetime
    by: str
    reason: str
    recorded_at: datetime

    def __post_init__(self) -> None:
        """Refuse invalid names, windows and times.

        Raises:
            ValueError: a name is empty or contains NUL, the window is not in the calendar, a time
                has no time zone, or ``at`` is after ``recorded_at``.
        """
        check_name(self.tenant)
        check_name(self.budget)
        if self.entity == frozenset():
            raise ValueError("a reset of no entity")
        for entity in self.names:
            if entity is not None:
                check_name(entity)
        if self.window is not None:
            Window.parse(self.window)
        for name in ("at", "recorded_at"):
            object.__setattr__(self, name, require_aware(getattr(self, name)).astimezone(UTC))
        if self.at > self.recorded_at:
            raise ValueError(f"a reset at {self.at} was recorded earlier, at {self.recorded_at}")

    @property
    def is_of_everyone(self) -> bool:
        """Whether it is about all entities of the budget."""
        return self.entity is EVERYONE

    @property
    def names(self) -> frozenset[Entity]:
        """The entities that it names; none if it is of EVERYONE."""
        if isinstance(self.entity, Everyone):
            return frozenset()
        return self.entity if isinstance(self.entity, frozenset) else frozenset({self.entity})

    def excludes_any(self, usages: Usages) -> bool:
        """Whether it is about any entity of these usages."""
        if self.is_of_everyone:
            return bool(usages)
        return not usages.keys().isdisjoint(self.names)

    def is_about(self, of: BudgetWindow) -> bool:
        """Whether it is about usages of a budget and window of its tenant."""
        return self.budget == of.budget and self.window in (None, of.window.token)


def concerning(of: BudgetWindow, resets: Iterable[Reset]) -> tuple[Reset, ...]:
    """Return a tenant's resets that are about a budget and window."""
    return tuple(reset for reset in resets if reset.is_about(of))


def newest_at(resets: Iterable[Reset]) -> datetime | None:
    """Return the time after which every record is eligible; None: always."""
    return max((reset.at for reset in resets), default=None)


def keeping_out(
    usages: Usages, captured_at: datetime, of: BudgetWindow, resets: Iterable[Reset]
) -> tuple[Reset, ...]:
    """Return a tenant's resets that exclude any usage of a record."""
    return tuple(
        reset
        for reset in resets
        if captured_at <= reset.at and reset.is_about(of) and reset.excludes_any(usages)
    )


def eligible(
    usages: Usages, captured_at: datetime, of: BudgetWindow, resets: Sequence[Reset]
) -> Usages:
    """Return the usages of a record that no reset of the tenant excludes.

    If no reset excludes any, the same mapping is returned, without a loop over its entities.
    """
    against = keeping_out(usages, captured_at, of, resets)
    if not against:
        return usages
    if any(reset.is_of_everyone for reset in against):
        return {}
    named = frozenset[Entity]().union(*(reset.names for reset in against))
    return {entity: usage for entity, usage in usages.items() if entity not in named}


@dataclass(frozen=True, slots=True)
class RecordMarks:
    """The stored facts about one record, in addition to its usages.

    ``omitted`` has the first omitted counters; ``omitted_count`` counts all.
    """

    source: CaptureSource
    is_truncated: bool
    is_partial: bool
    omitted: tuple[OmittedCounter, ...]
    omitted_count: int


@dataclass(frozen=True, slots=True)
class WindowPoint:
    """What a restore would bring back in one budget and window, from its intact records.

    ``newest_at`` is the time of the newest intact record, or of the newest record if all are
    damaged. ``shape`` and ``expiry_seconds`` are those of the newest record that has them; a shape
    of None means that no record has it. ``corrupt`` are the times of damaged records.

    ``sources`` has, for every entity of the usages, the newest snapshot with that usage. ``source``
    and the marks (see RecordMarks) are those of the newest intact record; without one, ``source``
    is None. ``resets`` are those that exclude usages of older records, in the order of recording.
    """

    of: BudgetWindow
    usages: Usages
    newest_at: datetime
    shape: ValueShape | None
    expiry_seconds: int | None
    corrupt: tuple[datetime, ...] = ()
    sources: Mapping[Entity, datetime] = field(default_factory=dict)
    source: CaptureSource | None = None
    is_truncated: bool = False
    is_partial: bool = False
    omitted: tuple[OmittedCounter, ...] = ()
    omitted_count: int = 0
    resets: tuple[Reset, ...] = ()

    @property
    def has_intact_record(self) -> bool:
        """Whether any record counts; if not, the usage of the window is unknown."""
        return self.newest_at not in self.corrupt

    @property
    def from_earlier(self) -> int:
        """How many entities are missing or lower in the newest intact record."""
        return sum(captured_at < self.newest_at for captured_at in self.sources.values())


@dataclass(frozen=True, slots=True)
class TenantPoint:
    """The recovery point of a tenant; windows by budget and token.

    In addition to the open windows, it has those that were open at the tenant's newest snapshot
    and have closed since, so that a restore can report that it skips them.

    The point of one named snapshot has the time of that snapshot as ``newest_at``, and all its
    windows. ``unreadable`` are the first keys that the newest, or the named, snapshot could not
    read; ``unreadable_count`` counts all.
    """

    tenant: str
    newest_at: datetime
    windows: tuple[WindowPoint, ...]
    unreadable: tuple[UnreadableKey, ...] = ()
    unreadable_count: int = 0


@dataclass(frozen=True, slots=True)
class Damage:
    """How many damaged records the points of tenants list in their open windows.

    ``records`` has no tenant without any. ``unverified`` are the tenants, by name, whose records
    were not all verified, so that they may have more; ``failure`` is why, None: the time was up.
    """

    records: Mapping[str, int]
    unverified: tuple[str, ...] = ()
    failure: DatabaseError | None = None


class WindowMerge:
    """Merges the records of one budget and window, added in any order and any number of times.

    Usages that ``resets`` exclude are left out; resets of other windows of the tenant have no
    effect. ``newest_at`` is the time of the newest record, intact or damaged.
    """

    def __init__(
        self,
        of: BudgetWindow,
        *,
        newest_at: datetime,
        shape: ValueShape | None,
        expiry_seconds: int | None,
        resets: Sequence[Reset] = (),
    ) -> None:
        self.of = of
        self._newest_at = newest_at
        self._shape = shape
        self._expiry_seconds = expiry_seconds
        self._resets = concerning(of, resets)
        self._excluding: set[Reset] = set()
        self._usages: dict[Entity, Decimal] = {}
        self._sources: dict[Entity, datetime] = {}
        self._intact: set[datetime] = set()
        self._corrupt: set[datetime] = set()

    @property
    def needs_all_records(self) -> bool:
        """Whether a damaged record was added, so that it covers no earlier one."""
        return bool(self._corrupt)

    @property
    def newest_intact(self) -> datetime | None:
        """The time of the newest intact record that was added; None: none was."""
        return max(self._intact, default=None)

    def add(self, captured_at: datetime, usages: Usages | None) -> None:
        """Add a record; ``usages`` None: it is damaged."""
        if usages is None:
            self._corrupt.add(captured_at)
            return
        self._intact.add(captured_at)
        if self._resets:
            self._excluding.update(keeping_out(usages, captured_at, self.of, self._resets))
            usages = eligible(usages, captured_at, self.of, self._resets)
        self._merge(captured_at, usages)

    def add_excluding(self, reset: Reset) -> None:
        """Note that a reset excludes usages of records that need not be added."""
        self._excluding.add(reset)

    def _merge(self, captured_at: datetime, usages: Usages) -> None:
        best, sources = self._usages, self._sources
        if not best:
            best.update(usages)
            self._sources = dict.fromkeys(usages, captured_at)
            return
        for entity, usage in usages.items():
            known = best.get(entity)
            if known is None or usage > known:
                best[entity] = usage
                sources[entity] = captured_at
            elif captured_at > sources[entity] and usage == known:
                sources[entity] = captured_at

    def merged(self, marks: RecordMarks | None) -> WindowPoint:
        """Return the point of the added records; ``marks`` are those of the newest intact one."""
        return WindowPoint(
            of=self.of,
            usages=self._usages,
            newest_at=self.newest_intact or self._newest_at,
            shape=self._shape,
            expiry_seconds=self._expiry_seconds,
            corrupt=tuple(sorted(self._corrupt)),
            sources=self._sources,
            source=marks.source if marks else None,
            is_truncated=marks.is_truncated if marks else False,
            is_partial=marks.is_partial if marks else False,
            omitted=marks.omitted if marks else (),
            omitted_count=marks.omitted_count if marks else 0,
            resets=tuple(reset for reset in self._resets if reset in self._excluding),
        )


MAX_POINT_AGE = timedelta(minutes=90)
"""One hour between captures, and half an hour for a capture that is late or slow. An older point
means that a capture was missed, so that a restore would bring back less than it should."""


def age(captured_at: datetime, now: datetime) -> timedelta:
    """Return how long ago a snapshot was taken; never negative, because clocks can be set back."""
    return max(require_aware(now) - require_aware(captured_at), timedelta(0))


def is_in_the_future(captured_at: datetime, now: datetime) -> bool:
    """Whether the time of a snapshot is in the future: a clock was wrong, or is wrong now."""
    return require_aware(captured_at) - require_aware(now) > MAX_CLOCK_SKEW


def is_too_old(captured_at: datetime, now: datetime) -> bool:
    """Whether a capture must have been missed since a tenant's newest snapshot."""
    return age(captured_at, now) > MAX_POINT_AGE
