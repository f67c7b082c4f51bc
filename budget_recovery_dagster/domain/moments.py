"""Moments and the UTC hours that name captures. Every moment here is aware; no clock is read."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

_KEY_FORMAT = "%Y-%m-%d-%H:%M"

MAX_CLOCK_SKEW = timedelta(minutes=1)
"""How far apart two clocks may be and both be taken for right."""

RESTORE_CLOCK_SKEW = timedelta(seconds=5)
"""The same for a restore, which writes into windows as long as they are open."""


def require_aware(moment: datetime) -> datetime:
    """Return ``moment`` unchanged.

    Raises:
        ValueError: it carries no time zone, so it names no moment.
    """
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise ValueError(f"{moment!r} has no time zone")
    return moment


def parse_moment(text: str) -> datetime:
    """Read a moment such as ``2026-11-29T14:00``, in UTC unless it names another zone.

    Raises:
        ValueError: it is none; the message says so in words for people.
    """
    written = text.strip().removesuffix("UTC").rstrip()
    try:
        moment = datetime.fromisoformat(written)
        return (moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is no moment such as 2026-11-29T14:00") from error


@dataclass(frozen=True, slots=True, order=True)
class Hour:
    """A UTC hour ``[start, end)``, the partition in which a capture happens."""

    start: datetime

    def __post_init__(self) -> None:
        start = require_aware(self.start).astimezone(UTC)
        if start.replace(minute=0, second=0, microsecond=0) != start:
            raise ValueError(f"{self.start.isoformat()} is not the start of an hour")
        object.__setattr__(self, "start", start)

    @classmethod
    def containing(cls, moment: datetime) -> Self:
        """Return the hour that ``moment`` (aware) falls into."""
        utc = require_aware(moment).astimezone(UTC)
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
