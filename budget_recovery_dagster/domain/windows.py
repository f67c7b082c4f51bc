"""Time in UTC: hours of capture, budget periods and their windows.

A window is half-open and its token alone gives its period, for example ``2026-W48``.
"""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from typing import Self

_KEY_FORMAT = "%Y-%m-%d-%H:%M"
MAX_CLOCK_SKEW = timedelta(minutes=1)
"""The largest allowed difference between two clocks."""
RESTORE_CLOCK_SKEW = timedelta(seconds=5)
"""The same for a restore, which writes only into open windows."""


def require_aware(at: datetime) -> datetime:
    """Return ``at`` unchanged.

    Raises:
        ValueError: it has no time zone.
    """
    if at.tzinfo is None or at.utcoffset() is None:
        raise ValueError(f"{at!r} has no time zone")
    return at


def parse_time(text: str) -> datetime:
    """Read a time such as ``2026-11-29T14:00``, in UTC unless it has another zone.

    Raises:
        ValueError: it is not a time; the message is for people.
    """
    written = text.strip().removesuffix("UTC").rstrip()
    try:
        at = datetime.fromisoformat(written)
        return (at.replace(tzinfo=UTC) if at.tzinfo is None else at).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a time such as 2026-11-29T14:00") from error


@dataclass(frozen=True, slots=True, order=True)
class Hour:
    """A UTC hour ``[start, end)``, the partition of a capture."""

    start: datetime

    def __post_init__(self) -> None:
        start = require_aware(self.start).astimezone(UTC)
        if start.replace(minute=0, second=0, microsecond=0) != start:
            raise ValueError(f"{self.start.isoformat()} is not the start of an hour")
        object.__setattr__(self, "start", start)

    @classmethod
    def containing(cls, at: datetime) -> Self:
        """Return the hour that ``at`` (aware) falls into."""
        utc = require_aware(at).astimezone(UTC)
        return cls(utc.replace(minute=0, second=0, microsecond=0))

    @classmethod
    def parse(cls, key: str) -> Self:
        """Read a partition key such as ``2026-11-29-14:00``, taken as UTC.

        Raises:
            ValueError: the key has another form.
        """
        return cls(datetime.strptime(key, _KEY_FORMAT).replace(tzinfo=UTC))

    @property
    def key(self) -> str:
        """The partition key, such as ``2026-11-29-14:00``."""
        return self.start.strftime(_KEY_FORMAT)

    @property
    def end(self) -> datetime:
        """The start of the next hour."""
        return self.start + timedelta(hours=1)

    def is_past(self, now: datetime) -> bool:
        """Whether the hour has closed at ``now``."""
        return require_aware(now) >= self.end

    def is_future(self, now: datetime) -> bool:
        """Whether the hour has not begun at ``now``."""
        return require_aware(now) < self.start

    def __str__(self) -> str:
        return f"{self.key} UTC"


class Period(StrEnum):
    """How long a window lasts."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    QUARTER = "quarter"
    LIFETIME = "lifetime"


class InvalidWindowError(ValueError):
    """A token that does not name a window of the calendar."""


LIFETIME_TOKEN = "lifetime"  # noqa: S105 - a window's token, not a secret
# ASCII digits only: `\d` and int() would also take digits of other scripts.
_DAY = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_WEEK = re.compile(r"([0-9]{4})-W([0-9]{2})")
_MONTH = re.compile(r"([0-9]{4})-([0-9]{2})")
_QUARTER = re.compile(r"([0-9]{4})-Q([1-4])")


@dataclass(frozen=True, slots=True)
class Window:
    """One instance of a period: ``[start, end)`` in UTC; both are None for a lifetime.

    Create it with ``parse`` or ``containing``, so that token, period and edges always agree.
    """

    token: str
    period: Period
    start: datetime | None
    end: datetime | None

    @classmethod
    def parse(cls, token: str) -> Self:
        """Read a token.

        Raises:
            InvalidWindowError: the token does not name a window of the calendar.
        """
        if token == LIFETIME_TOKEN:
            return cls(token, Period.LIFETIME, None, None)
        try:
            return cls._parse_calendar(token)
        except (ValueError, OverflowError) as error:
            raise InvalidWindowError(
                f"{token!r} is not a budget window: expected a form such as 2026-11-29, 2026-W48, "
                "2026-11, 2026-Q4 or lifetime"
            ) from error

    @classmethod
    def _parse_calendar(cls, token: str) -> Self:
        if match := _DAY.fullmatch(token):
            first = date(*map(int, match.groups()))
            return cls._between(token, Period.DAY, first, first + timedelta(days=1))
        if match := _WEEK.fullmatch(token):
            first = date.fromisocalendar(int(match[1]), int(match[2]), 1)
            return cls._between(token, Period.WEEK, first, first + timedelta(days=7))
        if match := _MONTH.fullmatch(token):
            first = date(int(match[1]), int(match[2]), 1)
            return cls._between(token, Period.MONTH, first, _months_later(first, 1))
        if match := _QUARTER.fullmatch(token):
            first = date(int(match[1]), 3 * int(match[2]) - 2, 1)
            return cls._between(token, Period.QUARTER, first, _months_later(first, 3))
        raise InvalidWindowError(token)

    @classmethod
    def _between(cls, token: str, period: Period, first: date, after: date) -> Self:
        return cls(token, period, _midnight(first), _midnight(after))

    @classmethod
    def containing(cls, period: Period, at: datetime) -> Self:
        """Return the window of ``period`` that ``at`` (aware) falls into."""
        day = require_aware(at).astimezone(UTC).date()
        match period:
            case Period.DAY:
                token = day.isoformat()
            case Period.WEEK:
                year, week, _ = day.isocalendar()
                token = f"{year:04d}-W{week:02d}"
            case Period.MONTH:
                token = f"{day.year:04d}-{day.month:02d}"
            case Period.QUARTER:
                token = f"{day.year:04d}-Q{(day.month + 2) // 3}"
            case Period.LIFETIME:
                token = LIFETIME_TOKEN
        return cls.parse(token)

    def is_current(self, now: datetime) -> bool:
        """Whether usage still counts into this window at ``now`` (aware)."""
        require_aware(now)
        started = self.start is None or self.start <= now
        return started and (self.end is None or now < self.end)


def tokens_at(now: datetime) -> frozenset[str]:
    """Return the tokens of all windows that are open at ``now`` (aware)."""
    return frozenset(Window.containing(period, now).token for period in Period)


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _months_later(first: date, months: int) -> date:
    index = first.year * 12 + first.month - 1 + months
    return date(index // 12, index % 12 + 1, 1)


def clock_skew(before: datetime, other: datetime, after: datetime) -> timedelta:
    """Return how far another clock is certainly ahead of this one; negative if it is behind.

    It was read between ``before`` and ``after``, so that the time of the answer is no skew.
    """
    return max(other - after, timedelta(0)) + min(other - before, timedelta(0))


def clocks_in_words(skew: timedelta, now: datetime, other: str = "the usage store's") -> str:
    """Write how far the other clock is ahead of the database's, which says ``now``."""
    return (
        f"The clocks differ by {in_words(abs(skew))}: the database's says"
        f" {now:%Y-%m-%d %H:%M:%S}, {other} {now + skew:%Y-%m-%d %H:%M:%S} UTC"
    )


def in_words(span: timedelta) -> str:
    """Write a duration in its largest useful unit."""
    seconds = max(round(span.total_seconds()), 0)
    if seconds < 2 * 60:
        return f"{seconds} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
