"""Reports of a restore: the audit of a tenant's budgets and windows, and what an incident cost."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import islice

from budget_recovery_dagster.domain.audits import (
    UNKNOWN_AMOUNTS,
    AuditEntry,
    Bound,
    IncidentAmounts,
    LossAmounts,
    LossFacts,
    loss_amounts,
)
from budget_recovery_dagster.domain.counters import (
    UNKNOWN_EXPIRY,
    BudgetWindow,
    Entity,
    TenantUsages,
    Usages,
    budget_usage,
    format_usage,
    shown_entity,
)
from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.domain.plan import (
    Action,
    BoardResult,
    IsOpen,
    PlannedEntry,
    RaiseOrder,
    RaiseResult,
    RecoveryPlan,
    StoreLimits,
    Written,
    planned_amounts,
)
from budget_recovery_dagster.domain.recovery_point import TenantPoint, WindowPoint
from budget_recovery_dagster.domain.windows import RESTORE_CLOCK_SKEW, in_words
from budget_recovery_dagster.errors import AttemptFailedError, BudgetRecoveryError
from budget_recovery_dagster.ports import LiveTenant

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


_NO_TRACE = "without a delete marker"


@dataclass(frozen=True, slots=True)
class MissingCounter:
    """A counter that was raised or kept, and is missing when the counters are read back.

    ``cause`` is why it may be missing, such as a delete marker; None: there is no trace of a cause.
    """

    of: BudgetWindow
    entity: Entity
    cause: str | None


def find_missing(
    plan: RecoveryPlan,
    results: Iterable[RaiseResult],
    live: LiveTenant,
    after: LiveTenant,
    now: datetime,
) -> Iterator[MissingCounter]:
    """Find the counters of a plan that were raised or kept, and are missing at ``now``.

    ``live`` was read before the writes, ``after`` after them. A counter that has become unreadable
    is not missing.
    """
    by_counter = {(result.order.of, result.order.entity): result for result in results}
    present = {(each.of, each.entity) for each in after.reading.counters}
    present |= {(each.of, each.entity) for each in after.reading.omitted}
    for entry in plan.entries:
        result = by_counter.get((entry.of, entry.entity))
        is_due = entry.action is Action.KEEP or (
            result is not None and result.written in (Written.RAISED, Written.KEPT)
        )
        if is_due and (entry.of, entry.entity) not in present:
            cause = _cause_of_missing(entry, result, live, after, now)
            yield MissingCounter(entry.of, entry.entity, cause)


def _cause_of_missing(
    entry: PlannedEntry,
    result: RaiseResult | None,
    live: LiveTenant,
    after: LiveTenant,
    now: datetime,
) -> str | None:
    deleted = after.deletion_of(entry.of, entry.entity)
    if deleted is not None and deleted > (result.revision if result else 0):
        return "deleted since"
    if not entry.of.window.is_current(now):
        return "the window has closed"
    if result is not None and result.written is Written.RAISED:
        drops = [result.expires_at, result.ages_out_at]
    else:
        drops = [live.dropped_at(entry.of, entry.entity)]
    if any(at is not None and at <= now + RESTORE_CLOCK_SKEW for at in drops):
        return "expired since"
    return None


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an incident's earlier restores did to a tenant.

    ``raised`` are the windows that they raised: their leaderboards may not be updated yet.
    ``amounts`` are what the incident cost in the windows by then, and ``facts`` what that depends
    on now.
    """

    raised: Collection[BudgetWindow]
    amounts: Mapping[BudgetWindow, LossAmounts]
    facts: LossFacts


def _amounts(
    earlier: Earlier | None,
    window: WindowPoint,
    planned: list[PlannedEntry],
    results: Mapping[Entity, RaiseResult] | None = None,
    after: Usages | None = None,
) -> LossAmounts | None:
    """Return what an incident cost in a window; see ``loss_amounts``. None: none is open."""
    if earlier is None:
        return None
    if not window.has_intact_record:
        return UNKNOWN_AMOUNTS
    known = earlier.amounts.get(window.of)
    return loss_amounts(planned, known, earlier.facts, results=results, after=after)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What was found and done for a tenant, for a report by budget and window.

    ``after`` are the usages read back. ``unreadable_before`` and ``unreadable_after`` are why
    counters could not be read before and after the restore. ``earlier`` is None if no incident is
    open.
    """

    point: TenantPoint
    plan: RecoveryPlan
    unreadable_before: Mapping[tuple[BudgetWindow, Entity], str]
    results: tuple[RaiseResult, ...]
    after: TenantUsages
    unreadable_after: Mapping[tuple[BudgetWindow, Entity], str]
    missing: tuple[MissingCounter, ...]
    limits: StoreLimits
    earlier: Earlier | None

    def shortfall(self, is_open: IsOpen) -> BudgetRecoveryError | None:
        """Return an error if counters are lower than written, or lost; None if none is.

        A counter is lost if it is missing, and nothing explains why.
        """
        if lost := [each for each in self.missing if each.cause is None]:
            first = f"{shown_entity(lost[0].entity)} of {lost[0].of}"
            return AttemptFailedError(
                f"{counted(len(lost), 'counter')} of tenant {self.point.tenant!r} missing after "
                f"the restore, {_NO_TRACE}, the first {first}.",
                "check whether the bucket is full and has discard=old, and whether keys are purged "
                "from it.",
            )
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
        """Report each budget and window with a planned change, a note, or an amount."""
        planned = self.plan.by_window()
        results: defaultdict[BudgetWindow, list[RaiseResult]] = defaultdict(list)
        for result in self.results:
            results[result.order.of].append(result)
        board_of = {board.of: board for board in boards}
        entries = (
            self._entry(window, planned[window.of], results[window.of], board_of.get(window.of))
            for window in self.point.windows
        )
        return tuple(each for each in entries if self._is_reported(each))

    def _is_reported(self, entry: AuditEntry) -> bool:
        return bool(
            entry.planned or entry.wrote_board or entry.notes or self._has_new_amounts(entry)
        )

    def _has_new_amounts(self, entry: AuditEntry) -> bool:
        """Whether amounts are not those of an earlier restore, whose notes an entry would hide."""
        if self.earlier is None or entry.amounts is None:
            return False
        known = self.earlier.amounts.get(entry.of)
        return entry.amounts.counted != 0 if known is None else entry.amounts != known

    def _entry(
        self,
        window: WindowPoint,
        planned: list[PlannedEntry],
        results: list[RaiseResult],
        board: BoardResult | None,
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
            after=budget_usage(
                {
                    entry.entity: after.get(entry.entity, Decimal(0))
                    for entry in planned
                    if entry.action is not Action.SKIP_UNREADABLE
                }
            ),
            notes=tuple(self._notes(window, planned, results, board)),
            wrote_board=board is not None and board.is_written,
            amounts=_amounts(
                self.earlier,
                window,
                planned,
                {result.order.entity: result for result in results},
                after,
            ),
        )

    def _notes(
        self,
        window: WindowPoint,
        planned: list[PlannedEntry],
        results: list[RaiseResult],
        board: BoardResult | None,
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
        yield from self._unknown_expiries(window, results)
        yield from self._missing(window)
        yield from self._degraded(window, results)
        if board is not None and (reason := _why_left(board, window)):
            yield f"leaderboard not rebuilt: {reason}"

    def _unknown_expiries(self, window: WindowPoint, results: list[RaiseResult]) -> Iterator[str]:
        """Report the created counters whose expiry no snapshot knows."""
        count = sum(
            result.written is Written.RAISED
            and result.before is None
            and result.expires_at is not None
            and result.order.entity not in window.expiries
            for result in results
        )
        seconds = window.unknown_expiry
        if count and isinstance(seconds, int):
            after = timedelta(seconds=seconds)
            span = "one day" if after == UNKNOWN_EXPIRY else in_words(after)
            verb = "expires" if count == 1 else "expire"
            yield f"expiry unknown: {counted(count, 'counter')} {verb} {span} after the window ends"

    def _unreadable(self, planned: list[PlannedEntry], results: list[RaiseResult]) -> Iterator[str]:
        at_reading = [
            (entry.entity, self.unreadable_before[entry.of, entry.entity])
            for entry in planned
            if entry.action is Action.SKIP_UNREADABLE
        ]
        at_writing = _left_as(Written.UNREADABLE, results)
        yield from _with_reasons(Written.UNREADABLE, at_reading + at_writing)
        known = {entity for entity, _ in (*at_reading, *at_writing)}
        if spoiled := [
            f"{shown_entity(entry.entity)} ({reason})"
            for entry in planned
            if entry.entity not in known
            and (reason := self.unreadable_after.get((entry.of, entry.entity)))
        ]:
            number = counted(len(spoiled), "counter")
            yield f"{number} unreadable after the write: {listed(spoiled)}"

    @property
    def raised_windows(self) -> frozenset[BudgetWindow]:
        """The windows in which a counter was raised, and is still as high."""
        return frozenset(
            result.order.of
            for result in self.results
            if result.written is Written.RAISED
            and (usage := self._usage_after(result.order)) is not None
            and usage >= result.order.usage
        )

    def _missing(self, window: WindowPoint) -> Iterator[str]:
        missing: defaultdict[str, list[Entity]] = defaultdict(list)
        for each in self.missing:
            if each.of == window.of:
                missing[each.cause or _NO_TRACE].append(each.entity)
        for cause, entities in missing.items():
            yield (
                f"{counted(len(entities), 'counter')} missing from the store after the write "
                f"({cause}): {listed(map(shown_entity, entities))}"
            )

    def _degraded(self, window: WindowPoint, results: list[RaiseResult]) -> Iterator[str]:
        """Report raised keys that stay too long, or that the store drops too early."""
        raised = [result for result in results if result.written is Written.RAISED]
        had_expiries = any(isinstance(window.expiries.get(r.order.entity), int) for r in raised)
        if had_expiries and not self.limits.supports_ttl:
            yield "keys do not expire: the bucket has no per-key TTLs (allow_msg_ttl)"
        end = window.of.window.end
        early = [
            at
            for result in raised
            if (at := result.ages_out_at) is not None
            and (end is None or at < end)
            and (result.expires_at is None or at < result.expires_at)
        ]
        if early and self.limits.max_age is not None:
            yield (
                f"{counted(len(early), 'counter')} dropped from {min(early):%Y-%m-%d %H:%M:%S} UTC "
                "on unless written again, before the window ends: the bucket has a max_age of "
                f"{in_words(self.limits.max_age)}"
            )

    def _usage_after(self, order: RaiseOrder) -> Decimal | None:
        return self.after.get(order.of, {}).get(order.entity)


def _why_left(board: BoardResult, window: WindowPoint) -> str:
    """Return why a leaderboard was not written; empty if it is not needed."""
    if board.is_missing and window.has_board is None:
        return "it is missing, and no snapshot shows whether the gateway keeps one"
    return board.reason


def planned_entries(
    point: TenantPoint, plan: RecoveryPlan, earlier: Earlier | None = None
) -> tuple[AuditEntry, ...]:
    """Report each budget and window in which a counter is about to be raised."""
    planned = plan.by_window()
    return tuple(
        replace(entry, amounts=_amounts(earlier, window, planned[window.of]))
        for window in point.windows
        if (entry := _planned_entry(point.tenant, window, planned[window.of])).planned
    )


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
    amounts = planned_amounts(planned)
    return AuditEntry(
        tenant=tenant,
        of=window.of,
        point_at=window.newest_at,
        entries=len(planned),
        planned=to_raise,
        raised=0,
        kept=kept,
        skipped=len(planned) - to_raise - kept,
        before=amounts.live,
        after=amounts.result,
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


# So many amounts are in a sentence.
_AMOUNTS = 3
_IN_WORDS: Mapping[Bound, str] = {
    Bound.EXACT: "",
    Bound.AT_MOST: "at most ",
    Bound.AT_LEAST: "at least ",
    Bound.ESTIMATE: "about ",
}


def bounded(amount: Decimal | None, bound: Bound) -> str:
    """Write an amount with what is known of it."""
    if amount is None or bound is Bound.UNKNOWN:
        return "unknown"
    return f"{_IN_WORDS[bound]}{format_usage(amount)}"


def largest_amounts(amounts: Iterable[tuple[str, BudgetWindow, Decimal]]) -> str:
    """List the largest amounts with their tenants, budgets and windows, and count the others.

    They are never added up: one request counts in many of them.
    """
    # A stable sort: equal amounts stay in their order.
    largest = sorted(amounts, key=lambda each: each[2], reverse=True)
    return _first(
        (f"{tenant}, {of}: {format_usage(amount)}" for tenant, of, amount in largest), len(largest)
    )


def restored_amounts(amounts: IncidentAmounts) -> str:
    """List the largest amounts that were restored."""
    return _first(
        (f"{each.tenant}, {each.of}: {format_usage(each.restored)}" for each in amounts.restored),
        amounts.restored_windows,
    )


def amounts_not_added(amounts: IncidentAmounts) -> str:
    """List the largest amounts that were counted after the loss and are not added."""
    known = _first(
        (
            f"{each.tenant}, {each.of}: {bounded(each.counted, each.bound)}"
            for each in amounts.counted
        ),
        amounts.counted_windows,
    )
    if not amounts.unknown_windows:
        return known or "nothing"
    unknown = f"unknown in {counted(amounts.unknown_windows, 'window')}"
    return f"{known}; {unknown}" if known else unknown


def _first(amounts: Iterable[str], number: int) -> str:
    """Join the first amounts of so many, and count the others."""
    shown = [amount for amount, _ in zip(amounts, range(_AMOUNTS), strict=False)]
    if more := number - len(shown):
        shown.append(f"and {counted(more, 'smaller amount')}")
    return "; ".join(shown)


def cost(incident: Incident, amounts: IncidentAmounts) -> Iterator[str]:
    """Describe by amounts what an incident's restores brought back, and what they did not add.

    Nothing is yielded if no restore raised anything, unless it is known that the store was empty:
    else its counters may simply have survived.
    """
    if amounts.restored_windows:
        yield f"Restored: {restored_amounts(amounts)}."
    elif not incident.began_empty or not (amounts.counted_windows or amounts.unknown_windows):
        return
    yield (
        "Counted after the loss and not added, because the higher value counts:"
        f" {amounts_not_added(amounts)}."
    )


def uncovered(incident: Incident) -> str:
    """Describe the usage that no snapshot holds."""
    span, since = incident.uncovered, incident.newest_point_at
    if span is None or since is None:
        return "No intact snapshot existed before the loss, so no usage is restored."
    newest = f"{since:%Y-%m-%d %H:%M:%S} UTC"
    found = f"{incident.lost_at:%Y-%m-%d %H:%M:%S} UTC"
    return (
        f"Usage between the newest snapshot ({newest}) and the loss is not restored: at most"
        f" {in_words(span)}, until the loss was found ({found})."
    )
