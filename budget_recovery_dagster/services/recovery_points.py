"""What a restore would bring back now, tenant by tenant, and how old that is."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from budget_recovery_dagster.domain.counters import BudgetWindow, budget_usage, count_from_earlier
from budget_recovery_dagster.domain.recovery_point import (
    PointRecord,
    age,
    is_of_the_future,
    is_too_old,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.ports import ControlPlane


@dataclass(frozen=True, slots=True)
class PointWindow:
    """What a restore would bring back of one current window of one budget.

    ``captured_at``, ``source`` and the marks are those of the newest snapshot that has the window.
    ``usage`` is the aggregate's, or else the sum over the entities. ``from_earlier`` of the
    entities are missing from that snapshot, or lower in it: theirs come from older ones.
    """

    tenant: str
    of: BudgetWindow
    captured_at: datetime
    source: CaptureSource
    entities: int
    usage: Decimal
    is_truncated: bool
    is_partial: bool
    omitted: int
    from_earlier: int

    @classmethod
    def of_record(cls, tenant: str, record: PointRecord) -> "PointWindow":
        """Sum up a window; its usages, of which there may be very many, are not kept."""
        newest = record.newest
        return cls(
            tenant=tenant,
            of=newest.of,
            captured_at=newest.captured_at,
            source=newest.source,
            entities=len(record.usages),
            usage=budget_usage(record.usages),
            is_truncated=newest.is_truncated,
            is_partial=newest.is_partial,
            omitted=newest.omitted_count,
            from_earlier=count_from_earlier(record.usages, newest.usages),
        )


@dataclass(frozen=True, slots=True)
class PointSurvey:
    """The recovery points of all tenants at ``now``, the oldest windows first.

    ``newest_snapshots`` has every tenant with a stored snapshot; one without a window here has
    none that is still current, so that there is nothing to bring back.
    """

    now: datetime
    newest_snapshots: Mapping[str, datetime]
    windows: tuple[PointWindow, ...]
    seconds: float

    @property
    def without_window(self) -> tuple[str, ...]:
        """The tenants of which no window is current, by name."""
        return tuple(sorted(self.newest_snapshots.keys() - self.newest_points.keys()))

    @property
    def newest_points(self) -> Mapping[str, datetime]:
        """When the newest snapshot of a still-current window was taken, of each tenant with one."""
        newest: dict[str, datetime] = {}
        for window in self.windows:
            known = newest.get(window.tenant)
            if known is None or known < window.captured_at:
                newest[window.tenant] = window.captured_at
        return newest

    def age_of(self, captured_at: datetime) -> timedelta:
        """Return how old a snapshot is."""
        return age(captured_at, self.now)


@dataclass(frozen=True, slots=True)
class PointAges:
    """How old the newest snapshots are, at ``now``.

    ``too_old`` has, of each tenant whose newest snapshot of a still-current window is too old,
    when that was taken; and the tenants whose captures fail and whose newest snapshot is too old,
    whatever windows it has, or that have none (None). ``newest_snapshot`` is that of any tenant,
    None where there is none at all.
    """

    now: datetime
    newest_snapshot: datetime | None
    tenants: int
    too_old: Mapping[str, datetime | None]

    @property
    def is_sound(self) -> bool:
        """Whether a capture has come lately, and to every tenant that has something to restore."""
        return (
            self.newest_snapshot is not None
            and not is_too_old(self.newest_snapshot, self.now)
            and not self.is_of_the_future
            and not self.too_old
        )

    @property
    def is_of_the_future(self) -> bool:
        """Whether the newest snapshot bears a time that has not come: no age can be told."""
        return self.newest_snapshot is not None and is_of_the_future(self.newest_snapshot, self.now)


def survey_points(plane: ControlPlane) -> PointSurvey:
    """Sum up the recovery point of every tenant.

    Raises:
        DatabaseError: the database failed.
    """
    started = time.monotonic()
    now = plane.clock.now()
    newest = plane.points.newest_snapshots()
    windows = [
        PointWindow.of_record(tenant, record)
        for tenant in newest
        for record in plane.points.windows_of(tenant, now)
    ]
    windows.sort(key=_oldest_first)
    return PointSurvey(now, newest, tuple(windows), time.monotonic() - started)


def judge_point_ages(plane: ControlPlane) -> PointAges:
    """Judge the age of every tenant's newest snapshot of a still-current window.

    Raises:
        DatabaseError: the database failed.
    """
    now = plane.clock.now()
    newest = plane.points.newest_points(now)
    # If captures of a tenant fail, its last windows may have closed, and new ones be unseen.
    watched: dict[str, datetime | None] = {**plane.points.failing(), **newest}
    return PointAges(
        now=now,
        newest_snapshot=max(plane.points.newest_snapshots().values(), default=None),
        tenants=len(watched),
        too_old={
            tenant: captured_at
            for tenant, captured_at in watched.items()
            if captured_at is None or is_too_old(captured_at, now)
        },
    )


def _oldest_first(window: PointWindow) -> tuple[datetime, str, str, str]:
    return window.captured_at, window.tenant, window.of.budget, window.of.window.token
