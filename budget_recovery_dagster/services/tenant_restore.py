"""Restoring one tenant: plan, raise, look again, and bring its leaderboards in line."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from budget_recovery_dagster.audit_ports import (
    AuditEntry,
)
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    ValueShape,
)
from budget_recovery_dagster.domain.plan import (
    Action,
    RecoveryPlan,
    plan_restore,
)
from budget_recovery_dagster.domain.recovery_point import RecoveryPoint
from budget_recovery_dagster.domain.snapshots import TenantReading
from budget_recovery_dagster.domain.windows import Window
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    BudgetRecoveryError,
    StoreError,
    put_into_words,
)
from budget_recovery_dagster.ports import Clock
from budget_recovery_dagster.restore_ports import (
    BoardOrder,
    BoardResult,
    RaiseOrder,
    RaiseResult,
    RecoverableStore,
    TenantPoint,
)
from budget_recovery_dagster.services.restore_report import RestoreReport, planned_entries


@dataclass(frozen=True, slots=True)
class TenantRestored:
    """What a restore did to a tenant; ``failure`` is why it is not done, None if it is.

    ``plan`` is what was decided upon the reading; None where there was none.
    """

    tenant: str
    entries: tuple[AuditEntry, ...]
    boards: int
    failure: BudgetRecoveryError | None = None
    plan: RecoveryPlan | None = None

    @property
    def raised(self) -> int:
        """How many counters were raised."""
        return sum(entry.raised for entry in self.entries)


@dataclass(frozen=True, slots=True)
class RunningClock:
    """The database's clock without asking it: one answer, and the time that has passed since."""

    asked: datetime
    at: float

    @classmethod
    def by(cls, clock: Clock) -> "RunningClock":
        """Ask a clock once. What was on its way counts as passed, so this is never behind."""
        at = time.monotonic()
        return cls(clock.now(), at)

    def now(self) -> datetime:
        """Return the present moment."""
        return self.asked + timedelta(seconds=time.monotonic() - self.at)

    def is_open(self, window: Window) -> bool:
        """Whether usage counts into a window now."""
        return window.is_current(self.now())


def live_usages(reading: TenantReading) -> RecoveryPoint:
    """Return what a reading holds, by budget and window."""
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
    """What is asked and told around the writing of a tenant; what they raise breaks it off.

    ``begin`` is told what is about to be done, before the first write; ``keep_going`` is asked
    before each.
    """

    keep_going: Callable[[], None]
    begin: Callable[[tuple[AuditEntry, ...]], None]


def restore_tenant(
    store: RecoverableStore, point: TenantPoint, clock: Clock, guards: Guards
) -> TenantRestored:
    """Raise a tenant's counters to its point, and bring its leaderboards in line with them.

    What was done is in the result, also where the rest failed.

    Raises:
        StoreError: the tenant could not be read; what was raised before stays raised, and is
            known from what was begun.
    """
    running = RunningClock.by(clock)

    def may_write(window: Window) -> bool:
        guards.keep_going()
        return running.is_open(window)

    live = store.open_tenant(point.tenant)
    plan = plan_tenant(point, live.reading, running.now())
    if begun := planned_entries(point, plan):
        guards.begin(begun)
    results: tuple[RaiseResult, ...] = ()
    failure: BudgetRecoveryError | None = None
    try:
        results = live.raise_counters(_orders(plan, point), is_open=may_write)
    except StoreError as error:
        failure = error
    after = store.open_tenant(point.tenant)
    report = RestoreReport(point, plan, live.reading, results, live_usages(after.reading))
    if failure is None:
        failure = _partial(after.reading) or report.shortfall(running.is_open)
    boards: tuple[BoardResult, ...] = ()
    if failure is None:
        orders = _board_orders(point, report.after, running)
        try:
            # Those that are refused are noted and fail nothing: the gateway derives them anyway.
            boards = after.rebuild_boards(orders, is_open=may_write)
        except StoreError as error:
            failure = error
    return TenantRestored(
        tenant=point.tenant,
        entries=report.entries(boards),
        boards=sum(board.is_written for board in boards),
        failure=failure,
        plan=plan,
    )


def _partial(after: TenantReading) -> BudgetRecoveryError | None:
    """Say that what was written could not be seen whole; None if it could."""
    if not after.is_partial:
        return None
    return AttemptFailedError(
        f"Fewer counters of tenant {after.tenant!r} could be read back than the store announces.",
        "see whether keys are purged from the gateway's bucket.",
    )


def failed(tenant: str, error: Exception) -> TenantRestored:
    """Tell of a tenant that could not even be read."""
    if not isinstance(error, BudgetRecoveryError):
        error = AttemptFailedError(*put_into_words(error))
    return TenantRestored(tenant, (), 0, error)


def _orders(plan: RecoveryPlan, point: TenantPoint) -> list[RaiseOrder]:
    windows = {window.of: window for window in point.windows}
    return [
        RaiseOrder(
            entry.of,
            entry.entity,
            entry.recorded,
            # Leaderboards tell no shape; this is how the contract writes a value.
            windows[entry.of].shape or ValueShape.TEXT,
            windows[entry.of].expiry_seconds,
        )
        for entry in plan.that(Action.RAISE)
    ]


def _board_orders(
    point: TenantPoint, live: RecoveryPoint, running: RunningClock
) -> list[BoardOrder]:
    return [
        BoardOrder(window.of, live[window.of], window.expiry_seconds)
        for window in point.windows
        if live.get(window.of) and running.is_open(window.of.window)
    ]
