"""Retention: how long snapshots are kept, and which outlive it because a restore needs them."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from budget_recovery_dagster.domain.moments import require_aware
from budget_recovery_dagster.domain.recovery_point import Usages, covers, max_merge

DEFAULT_RETENTION_DAYS = 7
MAX_RETENTION_DAYS = 3660

CHECKS_KEPT_FOR = timedelta(days=30)
"""How long checks of the store are kept; the newest that found it whole is kept in any case."""


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


def needed_past_retention(records: Iterable[DatedUsages], cutoff: datetime) -> frozenset[datetime]:
    """Say which records older than ``cutoff`` the recovery point of their window cannot do without.

    ``records`` are those of one still-current window, newest first; they are looked at one by one,
    so they need not fit into memory together. Going back in time, an old record is needed if it
    still raises some entity; the maximum over what is kept is then the maximum over all, however
    long the budget's entities have been missing.

    Raises:
        ValueError: a record is newer than the one before it.
    """
    best: Usages = {}
    needed: set[datetime] = set()
    last: datetime | None = None
    for record in records:
        if last is not None and record.captured_at > last:
            raise ValueError(f"a record of {record.captured_at} follows an older one, of {last}")
        last = record.captured_at
        if covers(best, record.usages):
            continue
        if record.captured_at < cutoff:
            needed.add(record.captured_at)
        best = max_merge(best, record.usages)
    return frozenset(needed)
