"""Restores tenants: plan, raise, read back, rebuild leaderboards, and report."""

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from budget_recovery_dagster.domain.audits import (
    AuditEntry,
)
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    TenantUsages,
    ValueShape,
)
from budget_recovery_dagster.domain.plan import (
    MARKER_ROOM,
    Action,
    BoardOrder,
    BoardResult,
    RaiseOrder,
    RaiseResult,
    RecoveryPlan,
    Room,
    StoreLimits,
    plan_restore,
)
from budget_recovery_dagster.domain.recovery_point import TenantPoint
from budget_recovery_dagster.domain.snapshots import TenantReading
from budget_recovery_dagster.domain.windows import Window
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    BudgetRecoveryError,
    StoreError,
    StoreFullError,
    describe_error,
)
from budget_recovery_dagster.ports import Clock, LiveTenant, UsageStore
from budget_recovery_dagster.services.restore.report import (
    Earlier,
    RestoreReport,
    counted,
    find_missing,
    planned_entries,
)
from budget_recovery_dagster.stopwatch import Stopwatch


def lacking_room(limits: StoreLimits, needed: Room, whose: str) -> StoreFullError | None:
    """Return an error if a restore could make the store delete other keys; None if it cannot.

    ``whose`` names what needs the room, such as "the restore".
    """
    shortages = limits.shortages(needed)
    if not shortages:
        return None
    enough = " and ".join(f"{each.setting} to at least {each.enough}" for each in shortages)
    return StoreFullError(
        f"The bucket has no room for {whose}: {'; '.join(map(str, shortages))}. "
        "With discard=old, a full bucket deletes the oldest keys of all writers.",
        f"raise {enough}. An automatic restore then starts by itself; repeat a manual one.",
    )


def with_marker(needed: Room) -> Room:
    """Add the room of our marker, which a restore that writes anything writes first."""
    return needed + MARKER_ROOM if needed != Room() else needed


@dataclass(frozen=True, slots=True)
class TenantRestored:
    """What a restore did to a tenant; ``failure`` is why it is not restored, None if it is.

    ``plan`` is the plan that followed from the reading; None if there was none. ``missing`` counts
    the counters that were raised or kept, and were missing when they were read back.
    """

    tenant: str
    entries: tuple[AuditEntry, ...]
    failure: BudgetRecoveryError | None = None
    plan: RecoveryPlan | None = None
    missing: int = 0

    @property
    def raised(self) -> int:
        """How many counters were raised."""
        return sum(entry.raised for entry in self.entries)

    @property
    def boards(self) -> int:
        """How many leaderboards were written."""
        return sum(entry.wrote_board for entry in self.entries)


class RunningClock:
    """The database's clock without a query: its last reading, and the time that passed since.

    It is never set back: a window that it found closed stays closed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # The duration of the query counts as passed, so it is never late.
        self._since = Stopwatch()
        self._read = clock.now()

    def read_again(self) -> None:
        """Read the clock again: it may have been set forward."""
        since = Stopwatch()
        read = self._clock.now()
        self._read, self._since = max(read, self.now() - timedelta(seconds=since.seconds())), since

    def now(self) -> datetime:
        """Return the present time."""
        return self._read + timedelta(seconds=self._since.seconds())

    def is_open(self, window: Window) -> bool:
        """Whether usage counts into a window now."""
        return window.is_current(self.now())


def live_usages(reading: TenantReading) -> TenantUsages:
    """Return the usages of a reading, by budget and window."""
    usages: defaultdict[BudgetWindow, dict[Entity, Decimal]] = defaultdict(dict)
    for counter in reading.counters:
        usages[counter.of][counter.entity] = counter.usage
    return usages


def plan_tenant(point: TenantPoint, live: TenantReading, now: datetime) -> RecoveryPlan:
    """Plan what a restore at ``now`` does to a tenant whose counters were read as ``live``."""
    return plan_restore(
        point.tenant,
        {window.of: window.usages for window in point.windows},
        live_usages(live),
        [(omitted.of, omitted.entity) for omitted in live.omitted],
        now,
    )


@dataclass(frozen=True, slots=True)
class Guards:
    """Callbacks around the writes of a tenant; an exception from them stops the writing.

    ``begin`` receives the planned changes before the first write; ``keep_going`` is called before
    each write.
    """

    keep_going: Callable[[], None]
    begin: Callable[[tuple[AuditEntry, ...]], None]


def restore_tenant(
    store: UsageStore,
    point: TenantPoint,
    running: RunningClock,
    guards: Guards,
    earlier: Earlier | None = None,
) -> TenantRestored:
    """Raise a tenant's counters to its point, and update the leaderboards of what was raised.

    ``earlier`` is None if no incident is open. The result has every change, even if the rest
    failed.

    Raises:
        StoreError: the tenant could not be read. Raised counters stay raised; the entries that
            ``begin`` received list them.
    """
    running.read_again()

    def may_write(window: Window) -> bool:
        guards.keep_going()
        return running.is_open(window)

    live = store.open_tenant(point.tenant)
    plan = plan_tenant(point, live.reading, running.now())
    limits = store.limits()
    if limits.may_evict:
        needed = room_for_tenant(live, point, plan, running)
        if refusal := lacking_room(limits, needed, f"tenant {point.tenant!r}"):
            return TenantRestored(point.tenant, (), refusal, plan)
    if begun := planned_entries(point, plan, earlier):
        guards.begin(begun)
    results: tuple[RaiseResult, ...] = ()
    failure: BudgetRecoveryError | None = None
    try:
        results = live.raise_counters(_orders(plan, point), is_open=may_write)
    except StoreError as error:
        failure = error
    after = store.open_tenant(point.tenant)
    missing = tuple(find_missing(plan, results, live, after, running.now()))
    usages = live_usages(after.reading)
    report = RestoreReport(
        point,
        plan,
        live.reading.reasons,
        results,
        usages,
        after.reading.reasons,
        missing,
        limits,
        earlier,
    )
    if failure is None:
        failure = partial_error(after.reading) or report.shortfall(running.is_open)
    boards: tuple[BoardResult, ...] = ()
    if failure is None:
        windows = report.raised_windows | frozenset(earlier.raised if earlier else ())
        orders = _board_orders(point, report.after, windows, running)
        try:
            # A refused leaderboard is noted but no failure: the gateway derives it anyway.
            if orders and limits.may_evict:
                boards = _without_room(store, after, orders, running)
            boards = boards or after.rebuild_boards(orders, is_open=may_write)
        except StoreError as error:
            failure = error
    return TenantRestored(
        tenant=point.tenant,
        entries=report.entries(boards),
        failure=failure,
        plan=plan,
        missing=len(missing),
    )


def room_for_tenant(
    live: LiveTenant, point: TenantPoint, plan: RecoveryPlan, running: RunningClock
) -> Room:
    """Return the room that the planned counters of a tenant take, and then its leaderboards.

    A plan that raises nothing needs none: leaderboards alone never keep a restore waiting.
    """
    orders = _orders(plan, point)
    if not orders:
        return Room()
    usages = {of: dict(each) for of, each in live_usages(live.reading).items()}
    for order in orders:
        usages.setdefault(order.of, {})[order.entity] = order.usage
    boards = _board_orders(point, usages, {order.of for order in orders}, running)
    return live.room_for(orders, boards, is_open=running.is_open)


def _without_room(
    store: UsageStore, live: LiveTenant, orders: list[BoardOrder], running: RunningClock
) -> tuple[BoardResult, ...]:
    """Return the results of leaderboards that could take the place of counters; none: they fit."""
    shortages = store.limits().shortages(live.room_for((), orders, is_open=running.is_open))
    reason = f"the bucket has no room: {'; '.join(map(str, shortages))}"
    return (
        tuple(BoardResult(order.of, is_written=False, reason=reason) for order in orders)
        if shortages
        else ()
    )


def partial_error(reading: TenantReading) -> BudgetRecoveryError | None:
    """Return an error if the counters could not be read completely; None if they could."""
    if not reading.is_partial:
        return None
    return AttemptFailedError(
        f"Fewer counters of tenant {reading.tenant!r} could be read than the store announces.",
        "check whether keys are purged from the gateway's bucket.",
    )


def failed(tenant: str, error: Exception) -> TenantRestored:
    """Return the result for a tenant that could not be read."""
    if not isinstance(error, BudgetRecoveryError):
        error = AttemptFailedError(*describe_error(error))
    return TenantRestored(tenant, (), error)


def _orders(plan: RecoveryPlan, point: TenantPoint) -> list[RaiseOrder]:
    windows = {window.of: window for window in point.windows}
    unknown = {window.of: window.unknown_expiry for window in point.windows}
    return [
        RaiseOrder(
            entry.of,
            entry.entity,
            entry.recorded,
            # Leaderboards have no shape; the contract writes a value as text.
            windows[entry.of].shape or ValueShape.TEXT,
            windows[entry.of].expiries.get(entry.entity, unknown[entry.of]),
        )
        for entry in plan.that(Action.RAISE)
    ]


def _board_orders(
    point: TenantPoint, live: TenantUsages, raised: Collection[BudgetWindow], running: RunningClock
) -> list[BoardOrder]:
    """Return the orders for leaderboards of raised windows; the others belong to the gateway."""
    return [
        BoardOrder(
            window.of,
            live[window.of],
            window.expiry_of_board,
            may_create=window.has_board is True,
        )
        for window in point.windows
        if window.of in raised and live.get(window.of) and running.is_open(window.of.window)
    ]


def undone_error(undone: list[TenantRestored]) -> AttemptFailedError:
    """Return an error that names the first tenant that is not restored, and counts the others."""
    first = undone[0]
    message, hint = describe_error(first.failure) if first.failure else ("", "")
    others = f" {counted(len(undone) - 1, 'other tenant')} failed." if len(undone) > 1 else ""
    return AttemptFailedError(f"Tenant {first.tenant!r} is not restored: {message}{others}", hint)
