"""Moments and spans of time as people read them."""

from datetime import UTC, datetime, timedelta


def clock_time(moment: datetime, now: datetime) -> str:
    """Write a moment in UTC for people, without the date where it is today's."""
    utc = moment.astimezone(UTC)
    day = "" if utc.date() == now.astimezone(UTC).date() else f"{utc:%Y-%m-%d} "
    return f"{day}{utc:%H:%M:%S} UTC"


def since(moment: datetime, now: datetime) -> str:
    """Write how long ago a moment was, and when."""
    return f"{in_words(now - moment)} ago, at {clock_time(moment, now)}"


def in_words(span: timedelta) -> str:
    """Write how long something takes, to the largest units that say enough."""
    seconds = max(round(span.total_seconds()), 0)
    if seconds < 2 * 60:
        return f"{seconds} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
