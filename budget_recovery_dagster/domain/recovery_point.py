"""Recovery points: what a restore would bring back now, and how old that is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    OmittedCounter,
    UnreadableKey,
    Usages,
    ValueShape,
)
from budget_recovery_dagster.domain.resets import Reset
from budget_recovery_dagster.domain.snapshots import StoredRecord
from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, require_aware


@dataclass(frozen=True, slots=True)
class PointRecord:
    """A window of a recovery point: the newest record of it, and what a restore would use.

    ``usages`` may be higher than those of the newest record, and of more entities; they are empty
    where none could be read. What deliberate resets make ineligible is not in them, though the
    newest record may well hold it.
    """

    newest: StoredRecord
    usages: Usages


@dataclass(frozen=True, slots=True)
class WindowPoint:
    """What a restore would bring back of one budget and window.

    ``newest_at`` is the time of the newest sound record of it. ``shape`` and ``expiry_seconds`` are
    those of the newest record that knows them; ``shape`` None: none does. ``corrupt`` are the times
    of records that hold something else than was captured; nothing is taken from them.

    ``sources`` has every entity of the usages, with the newest snapshot that holds it at that
    height. Whether it ``is_truncated`` or ``is_partial``, and what it has ``omitted``, is told of
    the newest sound record; where there is none, nothing is. Of very many omitted counters the
    first are named, and ``omitted_count`` tells how many there are. ``resets`` are those that keep
    usages of older records out, in the order of their recording.
    """

    of: BudgetWindow
    usages: Usages
    newest_at: datetime
    shape: ValueShape | None
    expiry_seconds: int | None
    corrupt: tuple[datetime, ...] = ()
    sources: Mapping[Entity, datetime] = field(default_factory=dict)
    is_truncated: bool = False
    is_partial: bool = False
    omitted: tuple[OmittedCounter, ...] = ()
    omitted_count: int = 0
    resets: tuple[Reset, ...] = ()


@dataclass(frozen=True, slots=True)
class TenantPoint:
    """The recovery point of a tenant for a restore; windows by budget and token.

    Beside the current windows it has those that were current at the tenant's newest snapshot and
    have closed since, so that a restore can say that it leaves them.

    Where it is of one named snapshot, ``newest_at`` is the time of that one, and the windows are
    all that it has. ``unreadable`` are the keys that the newest, or the named, snapshot could not
    read: of very many the first, and ``unreadable_count`` tells how many.
    """

    tenant: str
    newest_at: datetime
    windows: tuple[WindowPoint, ...]
    unreadable: tuple[UnreadableKey, ...] = ()
    unreadable_count: int = 0


MAX_POINT_AGE = timedelta(minutes=90)
"""A capture each hour, and half an hour for one that is late or long: older than that, a capture
was missed, and a restore would give back less than it should."""


def age(captured_at: datetime, now: datetime) -> timedelta:
    """Return how long ago a snapshot was taken; never negative, as clocks can be set back."""
    return max(require_aware(now) - require_aware(captured_at), timedelta(0))


def is_of_the_future(captured_at: datetime, now: datetime) -> bool:
    """Whether a snapshot bears a time that has not come: a clock was wrong, or is wrong now."""
    return require_aware(captured_at) - require_aware(now) > MAX_CLOCK_SKEW


def is_too_old(captured_at: datetime, now: datetime) -> bool:
    """Whether a capture must have been missed since a tenant's newest snapshot."""
    return age(captured_at, now) > MAX_POINT_AGE
