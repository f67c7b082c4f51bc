"""Recovery points: what a restore would bring back now, and its age; and deliberate resets.

One rule decides which records count, for every reader: a record whose usages do not match the hash
of the capture is damaged. It adds no usage to a point, covers no other record, and is reported.
The shape of the keys comes from the newest record that has it, even from a damaged one. The expiry
of each key comes from the newest intact record that has the key and knows its expiry.

Order is the order of commits: a record is newer than all that were committed before it. Clocks
can be wrong, so times decide nothing that the order can decide. A record with a time in the future
was captured under a wrong clock: it is newer than no other record and covers none, until its time
has come. Its usages count like all others: they were read from the store.

A restore takes the highest recorded usage, so without resets it would bring back usage that an
operator removed on purpose. A reset excludes usages of older records. Which ones is decided when it
is recorded (``last_excluded``): all up to a commit. A reset for now excludes all commits before it.
A reset for an earlier time excludes all before the first one that was certainly captured after that
time: a commit with a time after the recording proves nothing. Only a capture that runs while a
reset is recorded commits later and is excluded by its time, unless the clock was set back since.

So if a record is eligible for an entity, every newer record is, too, and a record that covers the
eligible usages of older records still covers them after any later reset.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Final

from budget_recovery_dagster.domain.counters import (
    NEVER_EXPIRES,
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
from budget_recovery_dagster.domain.snapshots import CaptureSource, Commit
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

    It excludes usages in records captured until ``at`` (see ``excludes``): those of ``entity``
    (None: the aggregate), of a set of entities, or of EVERYONE, in the window with the token
    ``window`` (None: every window of the budget). ``by`` and ``reason`` are for people.
    ``last_excluded`` is the number of the last commit of those before the reset that it excludes;
    0: it excludes none of them, or is not recorded yet.
    """

    tenant: str
    budget: str
    window: str | None
    entity: Entity | Everyone | frozenset[Entity]
    at: datetime
    by: str
    reason: str
    recorded_at: datetime
    last_excluded: int = 0

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

    def excludes(self, commit: Commit) -> bool:
        """Whether it excludes usages of the records of a commit.

        ``reset_excludes`` is the same rule in SQL.
        """
        was_running = commit.captured_at <= self.at and commit.stored_at >= self.recorded_at
        return commit.number <= self.last_excluded or was_running


def concerning(of: BudgetWindow, resets: Iterable[Reset]) -> tuple[Reset, ...]:
    """Return a tenant's resets that are about a budget and window."""
    return tuple(reset for reset in resets if reset.is_about(of))


def last_excluded(commits: Collection[Commit], at: datetime, recorded_at: datetime) -> int:
    """Return the last of a tenant's commits that a reset at ``at`` excludes; 0: it excludes none.

    ``commits`` are all that precede the reset; ``recorded_at`` is the present time.
    """
    until = max((each.number for each in commits if each.captured_at <= at), default=0)
    surely_later = (
        each.number
        for each in commits
        if each.number > until and at < each.captured_at <= recorded_at
    )
    first_eligible = min(surely_later, default=None)
    return max(
        (each.number for each in commits if first_eligible is None or each.number < first_eligible),
        default=0,
    )


def keeping_out(
    usages: Usages, commit: Commit, of: BudgetWindow, resets: Iterable[Reset]
) -> tuple[Reset, ...]:
    """Return a tenant's resets that exclude any usage of a record."""
    return tuple(
        reset
        for reset in resets
        if reset.excludes(commit) and reset.is_about(of) and reset.excludes_any(usages)
    )


def eligible(usages: Usages, commit: Commit, of: BudgetWindow, resets: Sequence[Reset]) -> Usages:
    """Return the usages of a record that no reset of the tenant excludes.

    If no reset excludes any, the same mapping is returned, without a loop over its entities.
    """
    against = keeping_out(usages, commit, of, resets)
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
        if that is later. A key of a lifetime has no expiry.
        """
        if self.of.window.end is None:
            return NO_EXPIRY
        known = [expiry for expiry in self.expiries.values() if isinstance(expiry, int)]
        return max([int(UNKNOWN_EXPIRY.total_seconds()), *known])

    @property
    def expiry_of_board(self) -> KnownExpiry:
        """When a leaderboard expires that a restore creates: with the last of its counters."""
        unknown = self.unknown_expiry
        expiries = [self.expiries.get(entity, unknown) for entity in self.usages]
        if NEVER_EXPIRES in expiries:
            return NEVER_EXPIRES
        if NO_EXPIRY in expiries:
            return NO_EXPIRY
        return max((each for each in expiries if isinstance(each, int)), default=unknown)

    @property
    def is_protected(self) -> bool:
        """Whether no maximum age drops any of the keys, if the bucket has times to live."""
        return all(self.expiries.get(entity) is NEVER_EXPIRES for entity in self.usages)

    @property
    def from_earlier(self) -> int:
        """How many entities are missing or lower in the newest intact record."""
        return sum(captured_at != self.newest_at for captured_at in self.sources.values())


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
    effect. ``newest_at`` is the time of the newest record, intact or damaged. ``shape`` and
    ``has_board`` are those of the point. What is in the future depends on ``now``.
    """

    def __init__(  # noqa: PLR0913 - by keyword, each the caller's own
        self,
        of: BudgetWindow,
        *,
        now: datetime,
        newest_at: datetime,
        shape: ValueShape | None,
        has_board: bool | None,
        resets: Sequence[Reset] = (),
    ) -> None:
        self.of = of
        self._now = now
        self._newest_at = newest_at
        self._shape = shape
        self._has_board = has_board
        self._expiries: dict[Entity, KnownExpiry] = {}
        self._expiries_of: dict[Entity, int] = {}
        self._oldest_expiries: int | None = None
        self._resets = concerning(of, resets)
        self._excluding: set[Reset] = set()
        self._usages: dict[Entity, Decimal] = {}
        self._sources: dict[Entity, Commit] = {}
        self._newest_intact: Commit | None = None
        self._corrupt: set[datetime] = set()

    @property
    def needs_all_records(self) -> bool:
        """Whether a damaged record was added, so that it covers no earlier one."""
        return bool(self._corrupt)

    @property
    def newest_intact(self) -> datetime | None:
        """The time of the newest intact record that was added; None: none was."""
        return None if self._newest_intact is None else self._newest_intact.captured_at

    @property
    def lacks_expiries(self) -> bool:
        """Whether the expiry of any key is unknown to the records that were added."""
        return not self._usages.keys() <= self._expiries.keys()

    def add(self, commit: Commit, usages: Usages | None, expiries: Expiries) -> None:
        """Add a record with the known expiries of its keys; ``usages`` None: it is damaged."""
        if usages is None:
            self._corrupt.add(commit.captured_at)
            return
        if self._newest_intact is None or self._is_newer(commit, self._newest_intact):
            self._newest_intact = commit
        self.add_expiries(commit.number, expiries)
        if self._resets:
            against = keeping_out(usages, commit, self.of, self._resets)
            self._excluding.update(against)
            usages = eligible(usages, commit, self.of, against)
        self._merge(commit, usages)

    def add_expiries(self, number: int, expiries: Expiries) -> None:
        """Add only the expiries of an intact record; of each key, the newest known one counts.

        ``number`` is that of the record's commit.
        """
        oldest = self._oldest_expiries
        is_oldest = oldest is not None and number < oldest
        self._oldest_expiries = number if oldest is None else min(number, oldest)
        if not self._expiries:
            self._expiries = dict(expiries)
            self._expiries_of = dict.fromkeys(expiries, number)
            return
        # The usual case: an older record has no other keys.
        if is_oldest and expiries.keys() <= self._expiries.keys():
            return
        for entity, expiry in expiries.items():
            if number >= self._expiries_of.get(entity, number):
                self._expiries[entity] = expiry
                self._expiries_of[entity] = number

    def add_excluding(self, reset: Reset) -> None:
        """Note that a reset excludes usages of records that need not be added."""
        self._excluding.add(reset)

    def _is_newer(self, commit: Commit, than: Commit) -> bool:
        is_future = is_in_the_future(commit.captured_at, self._now)
        if is_future != is_in_the_future(than.captured_at, self._now):
            return not is_future
        return commit.number > than.number

    def _merge(self, commit: Commit, usages: Usages) -> None:
        best, sources = self._usages, self._sources
        if not best:
            best.update(usages)
            self._sources = dict.fromkeys(usages, commit)
            return
        for entity, usage in usages.items():
            known = best.get(entity)
            if known is None or usage > known:
                best[entity] = usage
                sources[entity] = commit
            elif usage == known and self._is_newer(commit, sources[entity]):
                sources[entity] = commit

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
            sources={entity: commit.captured_at for entity, commit in self._sources.items()},
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
    return require_aware(captured_at) > latest_time(now)


def latest_time(now: datetime) -> datetime:
    """Return the latest time that is not in the future: clocks may differ a little."""
    return require_aware(now) + MAX_CLOCK_SKEW


def is_too_old(captured_at: datetime, now: datetime) -> bool:
    """Whether a capture must have been missed since a tenant's newest snapshot."""
    return age(captured_at, now) > MAX_POINT_AGE
