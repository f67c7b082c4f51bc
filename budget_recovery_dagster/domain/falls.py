"""What is missing from a store whose identity is unchanged.

A purge of single keys, an expiry and records that a crash has lost leave the creation time, the
sequence and the marker as they were. Checks count the keys of each budget and window, and request a
capture if some are gone. The capture names what is missing or lower, which opens falls.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import NamedTuple

from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Drop,
    Usages,
    find_drops,
    missing_usage,
)
from budget_recovery_dagster.domain.recovery_point import Reset, concerning
from budget_recovery_dagster.domain.snapshots import CaptureSource, TenantSnapshot


class TenantWindow(NamedTuple):
    """A budget and window of a tenant."""

    tenant: str
    of: BudgetWindow


@dataclass(frozen=True, slots=True)
class Deletions:
    """The counters that were deleted or have expired, each with the sequence of its delete mark.

    All of them up to the sequence ``until`` are found, from the sequence that was asked for.
    """

    found: tuple[tuple[TenantWindow, int], ...]
    until: int


@dataclass(frozen=True, slots=True)
class KeyCount:
    """How many keys of counters a budget and window had when it was last counted.

    A delete mark is a key as well, so deletions are counted apart; those up to ``sequence`` are
    accounted for. ``missing`` is how many counters are gone since the tenant's newest snapshot; the
    last of them were found gone at ``missing_since``. ``is_outdated``: an incident ended since, so
    this says nothing about the store that is accepted now.
    """

    at: TenantWindow
    keys: int
    sequence: int
    counted_at: datetime
    missing: int = 0
    missing_since: datetime | None = None
    is_outdated: bool = False

    def counted(self, keys: int | None, deleted: int, now: datetime) -> "KeyCount":
        """Return the count after a check found ``keys`` (None: not counted) and new delete marks.

        New counters in the same interval can hide as many that are gone. A delete mark that
        expires counts once more: a needless capture does no harm, and a hidden loss does.
        """
        gone = deleted + (0 if keys is None else max(self.keys - keys, 0))
        return replace(
            self,
            keys=self.keys if keys is None else keys,
            counted_at=now,
            missing=self.missing + gone,
            missing_since=now if gone else self.missing_since,
        )

    def restarted(self, keys: int, sequence: int, now: datetime) -> "KeyCount":
        """Return the count of a store that was accepted anew, from which nothing is missing yet."""
        return KeyCount(self.at, keys, sequence, counted_at=now)

    def equals(self, other: "KeyCount") -> bool:
        """Whether it differs from another count at most in the time of counting."""
        return self == replace(other, counted_at=self.counted_at)


def counts_of(
    snapshot: TenantSnapshot,
    known: Mapping[BudgetWindow, KeyCount],
    *,
    restored: Mapping[BudgetWindow, datetime],
    resets: Iterable[Reset],
) -> tuple[KeyCount, ...]:
    """Return the counts of a tenant's open windows after its capture.

    A capture of counters names what is missing, so nothing is missing then. Leaderboards and a
    partial snapshot do not show whether all counters are still there: a count by a check stays,
    with what it found missing, until the window is ``restored`` (when it last was) or one of the
    ``resets`` is about it.
    """
    recorded = tuple(resets)
    is_complete = snapshot.source is CaptureSource.COUNTERS and not snapshot.is_partial
    # The identity was observed after the read, which may have missed deletions before it.
    last = snapshot.identity.last_sequence
    before = last if snapshot.read_after is None else min(snapshot.read_after, last)
    open_ones = (
        each for each in snapshot.records if each.of.window.is_current(snapshot.captured_at)
    )
    return tuple(
        KeyCount(
            TenantWindow(snapshot.tenant, record.of),
            keys=len(record.usages) + len(record.omitted) + snapshot.other_keys.get(record.of, 0),
            sequence=before,
            counted_at=snapshot.captured_at,
        )
        if is_complete or record.of not in known
        else _carried_on(known[record.of], snapshot.captured_at, restored, recorded)
        for record in open_ones
    )


def _carried_on(
    count: KeyCount,
    at: datetime,
    restored: Mapping[BudgetWindow, datetime],
    resets: Sequence[Reset],
) -> KeyCount:
    of, since = count.at.of, count.missing_since
    ends = [reset.recorded_at for reset in concerning(of, resets)]
    if of in restored:
        ends.append(restored[of])
    if since is None or all(end < since for end in ends):
        # A time in the future is of a clock that was ahead, and no end would ever be later.
        return replace(count, counted_at=at, missing_since=since and min(since, at))
    return replace(count, counted_at=at, missing=0, missing_since=None)


@dataclass(frozen=True, slots=True)
class Fall:
    """Counters of a budget and window that are missing or lower in the store than in snapshots.

    The snapshot of ``found_at`` found it, that of ``judged_at`` last compared it. ``counters`` and
    ``usage`` (as by ``budget_usage``) are what the store lacked then, without what only discarded
    snapshots held. ``resets_before`` is how many resets of the tenant were recorded before it was
    found: times cannot tell, because a clock may have been wrong.
    """

    at: TenantWindow
    found_at: datetime
    judged_at: datetime
    counters: int
    usage: Decimal
    resets_before: int = 0


class FallOutcome(StrEnum):
    """How a fall ended.

    DISCARDED: the snapshots that alone held its missing usage were discarded before a capture
    found it restored.
    """

    RESTORED = "restored"
    RESET = "reset"
    WINDOW_ENDED = "window_ended"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True)
class EndedFall:
    """A fall that ended: the snapshot of ``ended_at`` found it, or snapshots were discarded."""

    fall: Fall
    ended_at: datetime
    outcome: FallOutcome


class JudgedFalls(NamedTuple):
    """Falls as they are after they were judged."""

    still_open: tuple[Fall, ...] = ()
    ended: tuple[EndedFall, ...] = ()


def judge_falls(
    known: Iterable[Fall], snapshot: TenantSnapshot, resets: Sequence[Reset]
) -> JudgedFalls:
    """Return the falls of a tenant that are open after its capture, and those that ended.

    ``resets`` are all that were ever recorded for the tenant, in the order of recording. The
    snapshot was compared with the recovery point, which keeps the highest usage. So a fall is open
    until each counter is as high as before, its window has ended, or resets cover it. A counter
    that the snapshot could not read ends nothing, nor does a partial snapshot.
    """
    at, known = snapshot.captured_at, tuple(known)
    drops: defaultdict[BudgetWindow, list[Drop]] = defaultdict(list)
    for drop in snapshot.drops:
        drops[drop.of].append(drop)
    unjudged = {each.of for each in snapshot.records if each.omitted or each.is_truncated}
    if snapshot.is_partial:
        unjudged.update(drops, (fall.at.of for fall in known))
    before = {fall.at.of: fall for fall in known}
    fallen = []
    for of, found in drops.items():
        where = TenantWindow(snapshot.tenant, of)
        new = Fall(where, at, at, len(found), missing_usage(found), resets_before=len(resets))
        fallen.append(_carried(before[of], new, is_least=of in unjudged) if of in before else new)
    ended: list[EndedFall] = []
    for of, fall in before.items():
        if of in drops:
            continue
        if not of.window.is_current(at):
            ended.append(EndedFall(fall, at, FallOutcome.WINDOW_ENDED))
        elif of in unjudged:
            fallen.append(replace(fall, judged_at=at))
        elif concerning(of, resets[fall.resets_before :]):
            ended.append(EndedFall(fall, at, FallOutcome.RESET))
        else:
            ended.append(EndedFall(fall, at, FallOutcome.RESTORED))
    return JudgedFalls(tuple(fallen), tuple(ended))


@dataclass(frozen=True, slots=True)
class ComparedUsages:
    """The usages of a budget and window in a snapshot that compared them with a recovery point.

    ``is_complete``: a counter that is not in them was missing from the store.
    """

    usages: Usages
    is_complete: bool


def judge_discard(
    fall: Fall, at: datetime, lost: Iterable[Drop], rest: Usages, compared: ComparedUsages
) -> Fall | EndedFall:
    """Return an open fall as it is after snapshots are discarded at ``at``.

    Of its window, ``lost`` is what the recovery point loses and ``rest`` what it still holds.
    ``compared`` is the snapshot that last compared the fall. If that one shows nothing that is
    still missing, the fall ends: no snapshot can show any more that its usage is back. A counter
    that it could not read is unknown; if it is missing, the next capture opens another fall.
    """
    in_store = compared.usages
    if all(drop.before <= in_store.get(drop.entity, Decimal(-1)) for drop in lost):
        return fall
    of = fall.at.of
    missing = [
        drop
        for drop in find_drops({of: rest}, {of: in_store}, (), ())
        if drop.after is not None or compared.is_complete
    ]
    if not missing:
        return EndedFall(fall, at, FallOutcome.DISCARDED)
    return replace(fall, counters=len(missing), usage=missing_usage(missing))


def _carried(known: Fall, new: Fall, *, is_least: bool) -> Fall:
    """Return a fall as ``new`` shows it; ``is_least``: further counters could not be judged."""
    counters, usage = new.counters, new.usage
    if is_least:
        counters, usage = max(counters, known.counters), max(usage, known.usage)
    return replace(known, judged_at=new.judged_at, counters=counters, usage=usage)


FALLS_KEPT_FOR = timedelta(days=30)
"""How long falls that ended, and earlier configurations of the bucket, are kept."""
CHANGES_SHOWN_FOR = timedelta(days=1)
"""How long a changed configuration of the bucket needs attention."""

Configuration = Mapping[str, str]
"""Settings of the bucket that decide what it keeps, as text, by the names of NATS."""


@dataclass(frozen=True, slots=True)
class ConfigurationChange:
    """A setting of the bucket that a check found changed at ``found_at``."""

    setting: str
    before: str
    after: str
    found_at: datetime

    def __str__(self) -> str:
        return f"{self.setting} from {self.before} to {self.after}"


def changes_between(
    before: Configuration, after: Configuration, found_at: datetime
) -> tuple[ConfigurationChange, ...]:
    """Return the settings that differ, by name; one that either lacks is not compared."""
    return tuple(
        ConfigurationChange(name, before[name], after[name], found_at)
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name]
    )
