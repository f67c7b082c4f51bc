"""Recovery points: what a restore would bring back now, and its age; and deliberate resets.

One rule decides which records count, for every reader: a record whose usages do not match the hash
of the capture is damaged. It adds no usage to a point, covers no other record, and is reported.
The shape of the keys comes from the newest record that has it, even from a damaged one. The expiry
of each key comes from the newest intact record that has the key and knows its expiry.

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
    NO_EXPIRY,
    UNKNOWN_EXPIRY,
    BudgetWindow,
    Entity,
    Expiries,
    KnownExpiry,
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

    It excludes usages in records captured until ``at``: those of ``entity`` (None: the aggregate)
    or of EVERYONE, in the window with the token ``window`` (None: every window of the budget).
    ``by`` and ``reason`` are for people.
    """

    tenant: str
    budget: str
    window: str | None
    entity: Entity | Everyone
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
        if isinstance(self.entity, str):
            check_name(self.entity)
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
        if captured_at <= reset.at
        and reset.is_about(of)
        and (bool(usages) if reset.is_of_everyone else reset.entity in usages)
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
    named = {reset.entity for reset in against}
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
    damaged. ``shape`` is that of the newest record that has one; None: none has. ``expiries`` are
    those of the entities of the usages, as far as they are known. ``has_board``, whether the
    gateway keeps a leaderboard, is that of the newest record that knows it; None: none does.
    ``corrupt`` are the times of damaged records.

    ``sources`` has, for every entity of the usages, the newest snapshot with that usage. ``source``
    and the marks (see RecordMarks) are those of the newest intact record; without one, ``source``
    is None. ``resets`` are those that exclude usages of older records, in the order of recording.
    """

    of: BudgetWindow
    usages: Usages
    newest_at: datetime
    shape: ValueShape | None
    expiries: Expiries
    has_board: bool | None = None
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
    def unknown_expiry(self) -> KnownExpiry:
        """When a key with an unknown expiry expires.

        That is a day after the window's end, or with the last other key of the window that expires,
        if that is later. A key of a lifetime never expires.
        """
        if self.of.window.end is None:
            return NO_EXPIRY
        known = [expiry for expiry in self.expiries.values() if expiry is not NO_EXPIRY]
        return max([int(UNKNOWN_EXPIRY.total_seconds()), *known])

    @property
    def expiry_of_board(self) -> KnownExpiry:
        """When a leaderboard expires that a restore creates: with the last of its counters."""
        unknown = self.unknown_expiry
        expiries = [self.expiries.get(entity, unknown) for entity in self.usages]
        seconds = [expiry for expiry in expiries if expiry is not NO_EXPIRY]
        if len(seconds) < len(expiries):
            return NO_EXPIRY
        return max(seconds, default=unknown)

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

    def keeps_boards_of(self, budget: str) -> bool | None:
        """Whether the gateway keeps leaderboards of a budget, in any window; None: unknown."""
        known = {window.has_board for window in self.windows if window.of.budget == budget}
        return True if True in known else False if False in known else None


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
    effect. ``newest_at`` is the time of the newest record, intact or damaged. ``shape`` and
    ``has_board`` are those of the point.
    """

    def __init__(
        self,
        of: BudgetWindow,
        *,
        newest_at: datetime,
        shape: ValueShape | None,
        has_board: bool | None,
        resets: Sequence[Reset] = (),
    ) -> None:
        self.of = of
        self._newest_at = newest_at
        self._shape = shape
        self._has_board = has_board
        self._expiries: dict[Entity, KnownExpiry] = {}
        self._expiries_at: dict[Entity, datetime] = {}
        self._expiries_since = newest_at
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

    @property
    def lacks_expiries(self) -> bool:
        """Whether the expiry of any key is unknown to the records that were added."""
        return not self._usages.keys() <= self._expiries.keys()

    def add(self, captured_at: datetime, usages: Usages | None, expiries: Expiries) -> None:
        """Add a record with the known expiries of its keys; ``usages`` None: it is damaged."""
        if usages is None:
            self._corrupt.add(captured_at)
            return
        self._intact.add(captured_at)
        self.add_expiries(captured_at, expiries)
        if self._resets:
            self._excluding.update(keeping_out(usages, captured_at, self.of, self._resets))
            usages = eligible(usages, captured_at, self.of, self._resets)
        self._merge(captured_at, usages)

    def add_expiries(self, captured_at: datetime, expiries: Expiries) -> None:
        """Add only the expiries of an intact record; of each key, the newest known one counts."""
        is_older = captured_at < self._expiries_since
        self._expiries_since = min(self._expiries_since, captured_at)
        if not self._expiries:
            self._expiries = dict(expiries)
            self._expiries_at = dict.fromkeys(expiries, captured_at)
            return
        # The usual case: an older record has no other keys.
        if is_older and expiries.keys() <= self._expiries.keys():
            return
        for entity, expiry in expiries.items():
            if captured_at >= self._expiries_at.get(entity, captured_at):
                self._expiries[entity] = expiry
                self._expiries_at[entity] = captured_at

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
            expiries={
                entity: self._expiries[entity]
                for entity in self._usages
                if entity in self._expiries
            },
            has_board=self._has_board,
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
