"""The recovery points of all tenants: what a restore would bring back now, and its age."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal

from budget_recovery_dagster.domain.counters import budget_usage
from budget_recovery_dagster.domain.recovery_point import (
    Damage,
    WindowPoint,
    is_in_the_future,
    is_too_old,
)
from budget_recovery_dagster.domain.snapshots import FailingTenant
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.ports import ControlPlane

VERIFY_WITHIN = timedelta(seconds=5)
"""How long a command verifies records; the check of ``recovery_points`` verifies all of them."""


@dataclass(frozen=True, slots=True)
class PointWindow:
    """What a restore would bring back in one open window of one budget.

    ``usage`` is the aggregate's, or else the sum over the entities. ``from_earlier`` of the
    entities are missing or lower in the newest intact record: their usages come from older ones.
    ``point`` has the rest, without the usages, because there may be very many.
    """

    tenant: str
    point: WindowPoint
    entities: int
    usage: Decimal
    from_earlier: int

    @property
    def is_unknown(self) -> bool:
        """Whether no record is intact or no counter could be read; a usage that was reset is 0."""
        return not self.point.has_intact_record or bool(
            self.point.omitted_count and not self.entities
        )

    @classmethod
    def of_point(cls, tenant: str, point: WindowPoint) -> "PointWindow":
        """Sum up a window."""
        return cls(
            tenant=tenant,
            point=replace(point, usages={}, sources={}),
            entities=len(point.usages),
            usage=budget_usage(point.usages),
            from_earlier=point.from_earlier,
        )


@dataclass(frozen=True, slots=True)
class PointSurvey:
    """The recovery points of all tenants at ``now``, the oldest windows first.

    ``newest_snapshots`` has every tenant with a stored snapshot. A tenant without a window here has
    no open window, so a restore would bring back nothing.
    """

    now: datetime
    newest_snapshots: Mapping[str, datetime]
    windows: tuple[PointWindow, ...]
    seconds: float

    def is_gone(self, window: PointWindow) -> bool:
        """Whether the tenant was read since, and the store held nothing of what a window has."""
        point = window.point
        # A newer record that is damaged does not count into `newest_at`.
        has_something = bool(window.entities) and not point.corrupt
        return has_something and point.newest_at < self.newest_snapshots[window.tenant]

    @property
    def without_window(self) -> tuple[str, ...]:
        """The tenants without an open window, by name."""
        return tuple(sorted(self.newest_snapshots.keys() - {each.tenant for each in self.windows}))


@dataclass(frozen=True, slots=True)
class PointAges:
    """How old the newest snapshots are, at ``now``, and which records are damaged.

    ``newest_points`` has the newest intact record of an open window of each tenant that has one,
    except tenants for which the last capture found and expected nothing. ``newest_snapshot``
    is the newest snapshot of all tenants, None if there is none. ``newest_capture`` is the newest
    capture that stored a snapshot, or found that there was nothing to store. ``failing`` are the
    tenants whose last capture failed. All of them were read before ``now``. ``future`` is the
    latest time of a snapshot dated in the future; None: none is.

    ``read`` is when the tenants of ``newest_points`` were last read: the time of their newest
    snapshot, even if the store held nothing. ``emptied`` are those of which it held nothing of an
    open window, although a restore would bring usage back.
    """

    now: datetime
    newest_points: Mapping[str, datetime]
    newest_snapshot: datetime | None
    newest_capture: datetime | None
    failing: Mapping[str, FailingTenant]
    damage: Damage
    future: datetime | None = None
    read: Mapping[str, datetime] = field(default_factory=dict)
    emptied: frozenset[str] = frozenset()

    @property
    def watched(self) -> Mapping[str, datetime | None]:
        """When each tenant with a point was last read, and those whose captures fail.

        If captures of a tenant fail, its last windows may have closed, and new ones are unknown.
        The age of the data would not do: a tenant may hold nothing any more.
        """
        failing = {tenant: each.newest_snapshot for tenant, each in self.failing.items()}
        return {**failing, **self.newest_points, **self.read}

    @property
    def too_old(self) -> Mapping[str, datetime | None]:
        """The watched tenants whose time is too old, or missing (None)."""
        return {
            tenant: captured_at
            for tenant, captured_at in self.watched.items()
            if captured_at is None or is_too_old(captured_at, self.now)
        }

    @property
    def is_sound(self) -> bool:
        """Whether every tenant with something to restore has a recent, undamaged point."""
        return (
            self.newest_snapshot is not None
            and not self.is_behind
            and self.future is None
            and not self.too_old
            and not self.emptied
            and not self.damage.records
            and not self.damage.unverified
        )

    @property
    def is_behind(self) -> bool:
        """Whether captures were missed: the newest one is too old, or there is none."""
        return self.newest_capture is None or is_too_old(self.newest_capture, self.now)


def survey_points(
    plane: ControlPlane, *, on_progress: Callable[[str], None] = lambda _: None
) -> PointSurvey:
    """Sum up the recovery point of every tenant; ``on_progress`` receives a sentence for each.

    Raises:
        DatabaseError: the database failed.
    """
    started = time.monotonic()
    now = plane.clock.now()
    newest = plane.reports.newest_snapshots()
    windows: list[PointWindow] = []
    for number, tenant in enumerate(newest, 1):
        on_progress(f"Recovery points: tenant {tenant!r}, {number} of {len(newest)}.")
        windows += (
            PointWindow.of_point(tenant, window) for window in _current_windows(plane, tenant, now)
        )
    windows.sort(key=_oldest_first)
    return PointSurvey(now, newest, tuple(windows), time.monotonic() - started)


def _current_windows(plane: ControlPlane, tenant: str, now: datetime) -> Iterator[WindowPoint]:
    point = plane.points.point_of(tenant, now)
    windows = () if point is None else point.windows
    return (window for window in windows if window.of.window.is_current(now))


def judge_point_ages(
    plane: ControlPlane,
    *,
    within: timedelta | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> PointAges:
    """Read the age of every tenant's newest intact record of an open window.

    All records are verified; with a limit ``within`` as by ``verify_within``. ``on_progress``
    receives sentences meanwhile.

    Raises:
        DatabaseError: the database failed.
    """
    # Before the points: a capture that commits in between would look like one without them.
    snapshots = plane.reports.newest_snapshots()
    newest_points = plane.points.newest_points(plane.clock.now())
    failing, absent = plane.reports.failing(), plane.reports.absent()
    newest_run = next((run for run in plane.reports.newest_runs(2) if run.result is not None), None)
    # After what it is compared with: none of it is in the future. Before the slow verification.
    now = plane.clock.now()
    future = plane.snapshots.in_future(now)
    captures = list(snapshots.values())
    if newest_run and newest_run.found_nothing and not is_in_the_future(newest_run.started_at, now):
        captures.append(newest_run.started_at)
    newest_points = {each: at for each, at in newest_points.items() if each not in absent}
    read = {each: max(at, snapshots.get(each, at)) for each, at in newest_points.items()}
    damage = (
        plane.points.damaged(now, on_progress=on_progress)
        if within is None
        else verify_within(plane, within, now, snapshots)
    )
    return PointAges(
        now=now,
        newest_points=newest_points,
        newest_snapshot=_newest(snapshots.values(), now),
        newest_capture=_newest(captures, now),
        future=future[0].captured_at if future else None,
        failing=failing,
        damage=damage,
        read=read,
        emptied=frozenset(
            tenant
            for tenant, at in newest_points.items()
            if at < read[tenant]
            and tenant not in failing
            and tenant not in damage.records
            and tenant not in damage.unverified
            # A reset may have left nothing to restore.
            and plane.points.current_usages(tenant, now)
        ),
    )


def _newest(times: Collection[datetime], now: datetime) -> datetime | None:
    """Return the latest time that is not in the future, or the latest if all are."""
    past = [at for at in times if not is_in_the_future(at, now)]
    return max(past or times, default=None)


def verify_within(
    plane: ControlPlane,
    within: timedelta,
    now: datetime,
    tenants: Collection[str],
    *,
    tenant: str | None = None,
) -> Damage:
    """Verify the records that a restore would read; if the database fails, no tenant is verified.

    Of all ``tenants``, or only of one.
    """
    try:
        return plane.points.damaged(now, tenant=tenant, within=within)
    except DatabaseError as error:
        return Damage({}, tuple(sorted(tenants)) if tenant is None else (tenant,), error)


def _oldest_first(window: PointWindow) -> tuple[datetime, str, str, str]:
    of = window.point.of
    return window.point.newest_at, window.tenant, of.budget, of.window.token
