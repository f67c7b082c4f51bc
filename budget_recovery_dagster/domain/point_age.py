"""How old the newest snapshot of a tenant may be before somebody should look."""

from datetime import datetime, timedelta

from budget_recovery_dagster.domain.moments import MAX_CLOCK_SKEW, require_aware

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
