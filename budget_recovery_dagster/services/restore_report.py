"""What a restore did to a tenant, told by budget and window."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal

from budget_recovery_dagster.audit_ports import (
    AuditEntry,
)
from budget_recovery_dagster.domain.counters import BudgetWindow, Entity
from budget_recovery_dagster.domain.plan import Action, PlannedEntry, RecoveryPlan
from budget_recovery_dagster.domain.recovery_point import RecoveryPoint
from budget_recovery_dagster.domain.snapshots import TenantReading
from budget_recovery_dagster.domain.usage_sums import exact_sum
from budget_recovery_dagster.errors import AttemptFailedError, BudgetRecoveryError
from budget_recovery_dagster.restore_ports import (
    BoardResult,
    IsOpen,
    RaiseOrder,
    RaiseResult,
    TenantPoint,
    WindowPoint,
    Written,
)
from budget_recovery_dagster.services.count_words import counted
from budget_recovery_dagster.services.name_words import listed, shown_entity


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What was found and done, to be told by budget and window."""

    point: TenantPoint
    plan: RecoveryPlan
    live: TenantReading
    results: tuple[RaiseResult, ...]
    after: RecoveryPoint

    def shortfall(self, is_open: IsOpen) -> BudgetRecoveryError | None:
        """Say what is lower than it was written, though it is there; None if nothing is."""
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
        order = low[0].order
        return AttemptFailedError(
            f"Of tenant {self.point.tenant!r}, {counted(len(low), 'counter')} fell again below "
            f"what was written, the first {_named(order.of, order.entity)}.",
            "see what lowers the counters, such as a reset by the gateway.",
        )

    def entries(self, boards: tuple[BoardResult, ...]) -> tuple[AuditEntry, ...]:
        """Tell what became of each budget and window in which something was to be done or said."""
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
        return AuditEntry(
            tenant=self.point.tenant,
            of=window.of,
            point_at=window.newest_at,
            entries=len(planned),
            planned=sum(entry.action is Action.RAISE for entry in planned),
            raised=raised,
            kept=kept,
            skipped=len(planned) - raised - kept,
            before=_sum_before(planned),
            after=exact_sum(after[entity] for entity in _entities(planned) & after.keys()),
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
                f"nothing was taken from {counted(len(window.corrupt), 'record')} that is not as "
                f"it was captured: {times}"
            )
        if any(entry.action is Action.SKIP_CLOSED for entry in planned):
            yield "left, its window has closed"
        yield from self._unreadable(planned, results)
        yield from _with_reasons(Written.REFUSED, _left_as(Written.REFUSED, results))
        for written in (Written.CLOSED, Written.EXPIRED):
            if count := sum(result.written is written for result in results):
                yield f"{counted(count, 'counter')} {written}"
        if gone := [result.order.entity for result in results if self._is_gone(result)]:
            yield (
                f"{counted(len(gone), 'counter')} no longer in the store after the writing: "
                f"{listed(map(shown_entity, gone))}"
            )
        if board is not None:
            yield f"its leaderboard is left: {board}"

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
    """Tell what is about to be done, of each budget and window in which a counter is raised."""
    planned = plan.by_window()
    entries = (_planned_entry(point.tenant, window, planned[window.of]) for window in point.windows)
    return tuple(entry for entry in entries if entry.planned)


def left_entries(point: TenantPoint, plan: RecoveryPlan) -> tuple[AuditEntry, ...]:
    """Tell what is left to be raised, and will not be, of each budget and window that has such."""
    return tuple(
        replace(
            entry,
            skipped=entry.entries - entry.kept,
            after=entry.before,
            notes=(f"{counted(entry.planned, 'counter')} still lower than the snapshots say",),
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
        before=_sum_before(planned),
        after=exact_sum(entry.result for entry in planned if entry.result is not None),
        notes=(),
    )


def _sum_before(planned: list[PlannedEntry]) -> Decimal:
    return exact_sum(entry.live for entry in planned if entry.live is not None)


def _is_raised(entry: PlannedEntry, written: Written | None, after: Decimal | None) -> bool:
    if entry.action is not Action.RAISE or after is None:
        return False
    if written is None:
        # The writing was cut short, and how the counter stands is all that is known.
        return after > (entry.live or Decimal(0))
    return written is Written.RAISED


def _left_as(written: Written, results: list[RaiseResult]) -> list[tuple[Entity, str]]:
    return [(each.order.entity, each.reason) for each in results if each.written is written]


def _with_reasons(written: Written, left: list[tuple[Entity, str]]) -> Iterator[str]:
    if left:
        yield f"{counted(len(left), 'counter')} {written}: " + listed(
            f"{shown_entity(entity)} ({reason})" for entity, reason in left
        )


def _entities(planned: Collection[PlannedEntry]) -> set[Entity]:
    return {entry.entity for entry in planned}


def _named(of: BudgetWindow, entity: Entity) -> str:
    return f"{shown_entity(entity)} of {of}"
