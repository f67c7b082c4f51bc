"""Restores tenants: plan, raise, read back, rebuild leaderboards, and report."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import islice

from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    TenantUsages,
    ValueShape,
    exact_sum,
    shown_entity,
)
from budget_recovery_dagster.domain.plan import (
    Action,
    AuditEntry,
    BoardOrder,
    BoardResult,
    IsOpen,
    PlannedEntry,
    RaiseOrder,
    RaiseResult,
    RecoveryPlan,
    Written,
    plan_restore,
)
from budget_recovery_dagster.domain.recovery_point import TenantPoint, WindowPoint
from budget_recovery_dagster.domain.snapshots import TenantReading
from budget_recovery_dagster.domain.windows import Window
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    BudgetRecoveryError,
    StoreError,
    describe_error,
)
from budget_recovery_dagster.ports import Clock, UsageStore

WRITTEN: Mapping[Written, str] = {
    Written.RAISED: "raised",
    Written.KEPT: "kept: the live value is not lower",
    Written.CLOSED: "skipped: the window has closed",
    Written.UNREADABLE: "skipped: the live value is unreadable",
    Written.EXPIRED: "skipped: the key would have expired by now",
    Written.REFUSED: "skipped: the store refuses the value",
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


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What was found and done for a tenant, for a report by budget and window."""

    point: TenantPoint
    plan: RecoveryPlan
    live: TenantReading
    results: tuple[RaiseResult, ...]
    after: TenantUsages

    def shortfall(self, is_open: IsOpen) -> BudgetRecoveryError | None:
        """Return an error if counters are lower than they were written; None if none is."""
        low = [
            result
            for result in self.results
            if result.written in (Written.RAISED, Written.KEPT)
            and is_open(result.order.of.window)
            and (usage := self._usage_after(result.order)) is not None
            and usage < result.order.usage
        ]
        if not low:
            return None
        order = max((each.order for each in low), key=lambda order: order.usage)
        first = f"{shown_entity(order.entity)} of {order.of}"
        return AttemptFailedError(
            f"{counted(len(low), 'counter')} of tenant {self.point.tenant!r} fell below the "
            f"restored usage, the largest {first}.",
            "find out what lowers the counters, such as a reset by the gateway.",
        )

    def entries(self, boards: tuple[BoardResult, ...]) -> tuple[AuditEntry, ...]:
        """Report each budget and window with a planned change or a note."""
        planned = self.plan.by_window()
        results: defaultdict[BudgetWindow, list[RaiseResult]] = defaultdict(list)
        for result in self.results:
            results[result.order.of].append(result)
        left = {board.of: board.reason for board in boards if board.reason}
        entries = (
            self._entry(window, planned[window.of], results[window.of], left.get(window.of))
            for window in self.point.windows
        )
        return tuple(entry for entry in entries if entry.planned or entry.notes)

    def _entry(
        self,
        window: WindowPoint,
        planned: list[PlannedEntry],
        results: list[RaiseResult],
        board: str | None,
    ) -> AuditEntry:
        """Account for a window by what was read after the write, not by what was sent."""
        # Notes name the first few counters.
        planned = sorted(planned, key=lambda entry: entry.recorded, reverse=True)
        results = sorted(results, key=lambda result: result.order.usage, reverse=True)
        after = self.after.get(window.of, {})
        written = {result.order.entity: result.written for result in results}
        raised = sum(
            _is_raised(entry, written.get(entry.entity), after.get(entry.entity))
            for entry in planned
        )
        kept = sum(
            entry.action is Action.KEEP or written.get(entry.entity) is Written.KEPT
            for entry in planned
        )
        return replace(
            _planned_entry(self.point.tenant, window, planned),
            raised=raised,
            kept=kept,
            skipped=len(planned) - raised - kept,
            after=exact_sum(
                after[entity] for entity in {entry.entity for entry in planned} & after.keys()
            ),
            notes=tuple(self._notes(window, planned, results, board)),
        )

    def _notes(
        self,
        window: WindowPoint,
        planned: list[PlannedEntry],
        results: list[RaiseResult],
        board: str | None,
    ) -> Iterator[str]:
        if window.corrupt:
            times = listed(f"{at:%Y-%m-%d %H:%M:%S} UTC" for at in window.corrupt)
            yield (
                f"{counted(len(window.corrupt), 'record')} damaged (checksum mismatch) and not "
                f"used: {times}"
            )
        if any(entry.action is Action.SKIP_CLOSED for entry in planned):
            yield "skipped, the window has closed"
        yield from self._unreadable(planned, results)
        yield from _with_reasons(Written.REFUSED, _left_as(Written.REFUSED, results))
        for written in (Written.CLOSED, Written.EXPIRED):
            if count := sum(result.written is written for result in results):
                yield f"{counted(count, 'counter')} {WRITTEN[written]}"
        if gone := [result.order.entity for result in results if self._is_gone(result)]:
            yield (
                f"{counted(len(gone), 'counter')} missing from the store after the write: "
                f"{listed(map(shown_entity, gone))}"
            )
        if board is not None:
            yield f"leaderboard not rebuilt: {board}"

    def _unreadable(self, planned: list[PlannedEntry], results: list[RaiseResult]) -> Iterator[str]:
        reasons = {(omitted.of, omitted.entity): omitted.reason for omitted in self.live.omitted}
        at_reading = [
            (entry.entity, reasons[entry.of, entry.entity])
            for entry in planned
            if entry.action is Action.SKIP_UNREADABLE
        ]
        at_writing = _left_as(Written.UNREADABLE, results)
        yield from _with_reasons(Written.UNREADABLE, at_reading + at_writing)

    def _is_gone(self, result: RaiseResult) -> bool:
        was_there = result.written in (Written.RAISED, Written.KEPT)
        return was_there and self._usage_after(result.order) is None

    def _usage_after(self, order: RaiseOrder) -> Decimal | None:
        return self.after.get(order.of, {}).get(order.entity)


def planned_entries(point: TenantPoint, plan: RecoveryPlan) -> tuple[AuditEntry, ...]:
    """Report each budget and window in which a counter is about to be raised."""
    planned = plan.by_window()
    entries = (_planned_entry(point.tenant, window, planned[window.of]) for window in point.windows)
    return tuple(entry for entry in entries if entry.planned)


def left_entries(point: TenantPoint, plan: RecoveryPlan) -> tuple[AuditEntry, ...]:
    """Report each budget and window in which counters stay below the snapshots."""
    return tuple(
        replace(
            entry,
            skipped=entry.entries - entry.kept,
            after=entry.before,
            notes=(f"{counted(entry.planned, 'counter')} still lower than in the snapshots",),
        )
        for entry in planned_entries(point, plan)
    )


def _planned_entry(tenant: str, window: WindowPoint, planned: list[PlannedEntry]) -> AuditEntry:
    actions = Counter(entry.action for entry in planned)
    to_raise, kept = actions[Action.RAISE], actions[Action.KEEP]
    return AuditEntry(
        tenant=tenant,
        of=window.of,
        point_at=window.newest_at,
        entries=len(planned),
        planned=to_raise,
        raised=0,
        kept=kept,
        skipped=len(planned) - to_raise - kept,
        before=exact_sum(entry.live for entry in planned if entry.live is not None),
        after=exact_sum(entry.result for entry in planned if entry.result is not None),
        notes=(),
    )


def _is_raised(entry: PlannedEntry, written: Written | None, after: Decimal | None) -> bool:
    if entry.action is not Action.RAISE or after is None:
        return False
    if written is None:
        # The write was interrupted, and only the present usage of the counter is known.
        return after > (entry.live or Decimal(0))
    return written is Written.RAISED


def _left_as(written: Written, results: list[RaiseResult]) -> list[tuple[Entity, str]]:
    return [(each.order.entity, each.reason) for each in results if each.written is written]


def _with_reasons(written: Written, left: list[tuple[Entity, str]]) -> Iterator[str]:
    if left:
        yield f"{counted(len(left), 'counter')} {WRITTEN[written]}: " + listed(
            f"{shown_entity(entity)} ({reason})" for entity, reason in left
        )


@dataclass(frozen=True, slots=True)
class TenantRestored:
    """What a restore did to a tenant; ``failure`` is why it is not restored, None if it is.

    ``plan`` is the plan that followed from the reading; None if there was none.
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
    """The database's clock without a query: one reading, and the time that passed since."""

    asked: datetime
    at: float

    @classmethod
    def by(cls, clock: Clock) -> "RunningClock":
        """Read a clock once. The duration of the query counts as passed, so it is never late."""
        at = time.monotonic()
        return cls(clock.now(), at)

    def now(self) -> datetime:
        """Return the present time."""
        return self.asked + timedelta(seconds=time.monotonic() - self.at)

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
    store: UsageStore, point: TenantPoint, clock: Clock, guards: Guards
) -> TenantRestored:
    """Raise a tenant's counters to its point, and rebuild its leaderboards from them.

    The result has every change, even if the rest failed.

    Raises:
        StoreError: the tenant could not be read. Raised counters stay raised; the entries that
            ``begin`` received list them.
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
        failure = partial_error(after.reading) or report.shortfall(running.is_open)
    boards: tuple[BoardResult, ...] = ()
    if failure is None:
        orders = _board_orders(point, report.after, running)
        try:
            # A refused leaderboard is noted but no failure: the gateway derives it anyway.
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
    return TenantRestored(tenant, (), 0, error)


def _orders(plan: RecoveryPlan, point: TenantPoint) -> list[RaiseOrder]:
    windows = {window.of: window for window in point.windows}
    return [
        RaiseOrder(
            entry.of,
            entry.entity,
            entry.recorded,
            # Leaderboards have no shape; the contract writes a value as text.
            windows[entry.of].shape or ValueShape.TEXT,
            windows[entry.of].expiry_seconds,
        )
        for entry in plan.that(Action.RAISE)
    ]


def _board_orders(
    point: TenantPoint, live: TenantUsages, running: RunningClock
) -> list[BoardOrder]:
    return [
        BoardOrder(window.of, live[window.of], window.expiry_seconds)
        for window in point.windows
        if live.get(window.of) and running.is_open(window.of.window)
    ]


def undone_error(undone: list[TenantRestored]) -> AttemptFailedError:
    """Return an error that names the first tenant that is not restored, and counts the others."""
    first = undone[0]
    message, hint = describe_error(first.failure) if first.failure else ("", "")
    others = f" {counted(len(undone) - 1, 'other tenant')} failed." if len(undone) > 1 else ""
    return AttemptFailedError(f"Tenant {first.tenant!r} is not restored: {message}{others}", hint)
