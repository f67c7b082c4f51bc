"""Numbers, names, times and codes as words."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice

from budget_recovery_dagster.domain.counters import Entity
from budget_recovery_dagster.domain.incident import Outcome
from budget_recovery_dagster.ports import Written

OUTCOMES: Mapping[Outcome, str] = {
    Outcome.RESTORED: "restored",
    Outcome.RESTORED_IN_PART: "restored in part",
    Outcome.NOTHING_LOST: "nothing lost",
    Outcome.NOTHING_CURRENT: "nothing current",
    Outcome.RESTORED_MANUALLY: "restored manually",
    Outcome.ACCEPTED: "accepted manually",
}
"""How an incident ended, for people."""

WRITTEN: Mapping[Written, str] = {
    Written.RAISED: "raised",
    Written.KEPT: "kept: the live value is not lower",
    Written.CLOSED: "left: the window has closed",
    Written.UNREADABLE: "left: the live value is unreadable",
    Written.EXPIRED: "left: the key would have expired by now",
    Written.REFUSED: "left: the store refuses the value",
}
"""What became of a counter, for people."""


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# So many names are listed; the caller gives the total.
_NAMED = 5


def listed(names: Iterable[str]) -> str:
    """List the first few names."""
    first = list(islice(names, _NAMED + 1))
    return ", ".join(first) if len(first) <= _NAMED else f"{', '.join(first[:_NAMED])}, ..."


def shown_entity(entity: Entity) -> str:
    """Name an entity; unprintable characters are escaped."""
    return "the aggregate" if entity is None else repr(entity)


def clock_time(moment: datetime, now: datetime) -> str:
    """Write a time in UTC for people, without the date if it is today."""
    utc = moment.astimezone(UTC)
    day = "" if utc.date() == now.astimezone(UTC).date() else f"{utc:%Y-%m-%d} "
    return f"{day}{utc:%H:%M:%S} UTC"


def since(moment: datetime, now: datetime) -> str:
    """Write how long ago a time was, and the time."""
    return f"{in_words(now - moment)} ago, at {clock_time(moment, now)}"


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
