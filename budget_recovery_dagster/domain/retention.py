"""Retention: how long snapshots are kept, and which outlive it because a restore needs them."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from budget_recovery_dagster.domain.moments import require_aware
from budget_recovery_dagster.domain.recovery_point import Usages, covers, max_merge

DEFAULT_RETENTION_DAYS = 7
MAX_RETENTION_DAYS = 3660


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Snapshots are kept for ``days`` whole days of 24 hours, from 1 to 3660."""

    days: int = DEFAULT_RETENTION_DAYS

    def __post_init__(self) -> None:
        if not 1 <= self.days <= MAX_RETENTION_DAYS:
            raise ValueError(f"retention of {self.days} days: from 1 to {MAX_RETENTION_DAYS}")

    def cutoff(self, now: datetime) -> datetime:
        """Return the moment before which a record is past retention."""
        return require_aware(now) - timedelta(days=self.days)


@dataclass(frozen=True, slots=True)
class DatedUsages:
    """The usages that one record of a budget and window holds."""

    captured_at: datetime
    usages: Usages


def needed_past_retention(
    expired: Iterable[DatedUsages], retained: Iterable[Usages]
) -> frozenset[datetime]:
    """Say which expired records of a still-current window its recovery point cannot do without.

    Going back in time, a record is needed if it still raises some entity; the maximum over what is
    kept is then the maximum over all, however long the budget's entities have been missing.
    """
    best = max_merge(*retained)
    needed: set[datetime] = set()
    for record in sorted(expired, key=lambda dated: dated.captured_at, reverse=True):
        if not covers(best, record.usages):
            needed.add(record.captured_at)
            best = max_merge(best, record.usages)
    return frozenset(needed)
