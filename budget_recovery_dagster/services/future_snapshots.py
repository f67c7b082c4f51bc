"""Discarding snapshots dated in the future: a clock was wrong when they were captured."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from budget_recovery_dagster.domain.admission import CAPTURE_LEASE
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Drop,
    TenantUsages,
    find_drops,
    missing_usage,
    order_of,
)
from budget_recovery_dagster.domain.falls import (
    ComparedUsages,
    EndedFall,
    Fall,
    JudgedFalls,
    TenantWindow,
    judge_discard,
)
from budget_recovery_dagster.domain.recovery_point import WindowPoint
from budget_recovery_dagster.domain.snapshots import ListedSnapshot
from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, clocks_in_words
from budget_recovery_dagster.errors import ChoiceError, ClockSkewError, StoreError
from budget_recovery_dagster.ports import ControlPlane, OpenStore
from budget_recovery_dagster.services.store_watch import measure_clock_skew, measure_host_skew


@dataclass(frozen=True, slots=True)
class LostUsage:
    """What the recovery point of an open window loses by discarding snapshots.

    ``counters`` are lower or missing afterwards, and ``usage`` is what the budget lacks then: of
    the entities, or of the aggregate if that is more.
    """

    at: TenantWindow
    counters: int
    usage: Decimal


@dataclass(frozen=True, slots=True)
class FutureSnapshots:
    """Snapshots dated in the future at ``at``, newest first, and what discarding them changes.

    ``lost`` is the usage of open windows that only they hold, the largest first. ``falls`` are the
    open falls that change. ``unmeasured`` is why the store's clock was not compared; None: it was.
    """

    found: tuple[ListedSnapshot, ...]
    at: datetime
    lost: tuple[LostUsage, ...]
    falls: JudgedFalls
    unmeasured: str | None

    @property
    def lost_counters(self) -> int:
        """How many counters of the recovery points are lower or missing without them."""
        return sum(each.counters for each in self.lost)


def list_future(
    plane: ControlPlane,
    open_store: OpenStore | None,
    *,
    only: Collection[ListedSnapshot] | None = None,
) -> FutureSnapshots:
    """Return the snapshots dated in the future, and what discarding them changes.

    ``only`` restricts them to those of these times. ``open_store`` None: no store is configured.

    With a clock that is behind, good snapshots would look as if they were dated in the future.
    PostgreSQL and this host may share one clock, so the store's is compared as well.

    Raises:
        ClockSkewError: the database's clock and this host's or the store's disagree.
        ChoiceError: no snapshot is dated in the future.
    """
    now = plane.clock.now()
    _require_agreement(measure_host_skew(plane.clock), now, "this host's")
    unmeasured = _require_agreeing_store(plane, open_store)
    found = plane.snapshots.in_future(now)
    if not found:
        raise ChoiceError(
            "No snapshot is dated in the future, so there is nothing to discard.",
            "list the snapshots with `budget-recovery snapshots`.",
        )
    if only is not None:
        chosen = {each.captured_at for each in only}
        found = tuple(each for each in found if each.captured_at in chosen)
    lost, falls = _compare_without(plane, {each.captured_at for each in found}, now)
    return FutureSnapshots(found, now, lost, falls, unmeasured)


def _compare_without(
    plane: ControlPlane, times: Collection[datetime], now: datetime
) -> tuple[tuple[LostUsage, ...], JudgedFalls]:
    """Compare the recovery points of all tenants with those without the snapshots of these times.

    Only what such a snapshot alone holds can be lost, so falls of other windows do not change.
    """
    falls = {fall.at: fall for fall in plane.falls.open()}
    lost: list[LostUsage] = []
    judged: list[Fall | EndedFall] = []
    for tenant in sorted(plane.snapshots.tenants()):
        # In this order, a capture in between can hide no loss: what it adds is held afterwards.
        held = plane.points.current_usages(tenant, now)
        rest = plane.points.current_usages(tenant, now, without=times)
        drops = _by_window(held, rest)
        lost += (
            LostUsage(TenantWindow(tenant, of), len(each), missing_usage(each))
            for of, each in drops.items()
        )
        concerned = [fall for of in drops if (fall := falls.get(TenantWindow(tenant, of)))]
        for fall, compared in _compared(plane, tenant, concerned):
            of = fall.at.of
            judged.append(judge_discard(fall, now, drops[of], rest.get(of, {}), compared))
    # A stable sort, also in reverse: equal losses stay in order of name.
    lost.sort(key=lambda each: (each.usage, each.counters), reverse=True)
    return tuple(lost), JudgedFalls(
        tuple(each for each in judged if isinstance(each, Fall) and each != falls[each.at]),
        tuple(each for each in judged if isinstance(each, EndedFall)),
    )


def _by_window(held: TenantUsages, rest: TenantUsages) -> Mapping[BudgetWindow, Sequence[Drop]]:
    """Return what ``rest`` lacks; windows in order of name."""
    windows: defaultdict[BudgetWindow, list[Drop]] = defaultdict(list)
    for drop in find_drops(held, rest, (), ()):
        windows[drop.of].append(drop)
    return {of: windows[of] for of in sorted(windows, key=order_of)}


def _compared(
    plane: ControlPlane, tenant: str, falls: Collection[Fall]
) -> Iterator[tuple[Fall, ComparedUsages]]:
    """Return the falls of a tenant, each with the snapshot that last compared it."""
    # Usually one snapshot compared all of them.
    for captured_at in sorted({fall.judged_at for fall in falls}):
        point = plane.points.despite_resets().snapshot_of(tenant, captured_at)
        windows = {each.of: each for each in point.windows} if point else {}
        listed = [
            each for each in plane.snapshots.listed(tenant) if each.captured_at == captured_at
        ]
        is_whole = bool(listed) and not any(each.partial or each.is_pruned for each in listed)
        for fall in falls:
            if fall.judged_at == captured_at:
                yield fall, _usages_in(windows.get(fall.at.of), is_whole=is_whole)


def _usages_in(window: WindowPoint | None, *, is_whole: bool) -> ComparedUsages:
    """Return the usages of a window in a snapshot; None: it has no record of the window."""
    if window is None:
        return ComparedUsages({}, is_complete=is_whole)
    is_complete = (
        is_whole
        and window.has_intact_record
        and not window.omitted_count
        and not window.is_truncated
    )
    return ComparedUsages(window.usages, is_complete=is_complete)


def _require_agreeing_store(plane: ControlPlane, open_store: OpenStore | None) -> str | None:
    """Return why the store's clock could not be compared with the database's; None: they agree."""
    if open_store is None:
        return "No NATS server is configured."
    try:
        with open_store() as store:
            skew = measure_clock_skew(plane.clock, store)
    except StoreError as error:
        return error.message
    if skew is None:
        return "The usage store does not report its time."
    _require_agreement(skew, plane.clock.now(), "the usage store's")
    return None


def _require_agreement(skew: timedelta, now: datetime, other: str) -> None:
    if abs(skew) > MAX_CLOCK_SKEW:
        raise ClockSkewError(
            clocks_in_words(skew, now, other) + ". Nothing was discarded.",
            "synchronize the clocks with NTP first: with a clock that is behind, good snapshots"
            " look as if they were dated in the future.",
        )


def discard_future(  # noqa: PLR0913 - by keyword, each the caller's own
    plane: ControlPlane,
    confirmed: Sequence[ListedSnapshot],
    open_store: OpenStore | None,
    *,
    by: str,
    reason: str,
    holder: str,
) -> FutureSnapshots:
    """Discard those of the confirmed snapshots that are still dated in the future; return them.

    Each is recorded. ``confirmed`` is what ``list_future`` returned and a person saw. ``by``
    and ``reason`` are recorded with them; ``holder`` identifies this work to captures. What only
    they held is compared under the lease, so that no capture changes it before they are discarded.

    Raises:
        ClockSkewError, ChoiceError: as ``list_future``; nothing is discarded.
        LeaseHeldError: a capture is running.
        CapturesPausedError: the store is not HEALTHY.
    """
    with plane.leases.hold(CAPTURE_LEASE, holder) as lease:
        future = list_future(plane, open_store, only=confirmed)
        plane.snapshots.discard_future(
            {each.captured_at for each in future.found},
            falls=future.falls,
            now=future.at,
            by=by,
            reason=reason,
            lease=lease,
        )
        return future
