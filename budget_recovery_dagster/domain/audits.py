"""Audits of restores: what became of each budget and window, and what an incident cost there.

A restore raises a counter to the recovery point and never adds to it. So what the gateway counted
after the loss is in no counter, up to the recovery point: it is the lower of the recovery point and
the live usage before the first write. Usage above the recovery point is in the counter, but then
that of the recovery point is not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    Usages,
    budget_usage,
    exact_difference,
    increased,
)
from budget_recovery_dagster.domain.plan import Action, PlannedEntry, RaiseResult, Written

_NOTHING = Decimal(0)


class Bound(StrEnum):
    """What is known of an amount.

    AT_MOST: the store may not have begun empty, so part of its usage may be from before the loss.
    AT_LEAST: some counters are unknown. ESTIMATE: both. UNKNOWN: there is no amount.
    """

    EXACT = "exact"
    AT_MOST = "at_most"
    AT_LEAST = "at_least"
    ESTIMATE = "estimate"
    UNKNOWN = "unknown"

    @property
    def may_be_less(self) -> bool:
        """Whether the true amount may be lower."""
        return self in (Bound.AT_MOST, Bound.ESTIMATE)

    @property
    def may_be_more(self) -> bool:
        """Whether the true amount may be higher."""
        return self in (Bound.AT_LEAST, Bound.ESTIMATE)

    @property
    def from_below(self) -> "Bound":
        """The bound of the same amount if it may be higher, too."""
        return _BOUNDS[self.may_be_less, True] if self is not Bound.UNKNOWN else self


_BOUNDS: Mapping[tuple[bool, bool], Bound] = {
    (False, False): Bound.EXACT,
    (True, False): Bound.AT_MOST,
    (False, True): Bound.AT_LEAST,
    (True, True): Bound.ESTIMATE,
}


@dataclass(frozen=True, slots=True)
class LossFacts:
    """What the amounts of an incident depend on, besides the counters.

    ``began_empty``: the store was provably created empty after the loss. ``losses`` counts the
    losses that were found. ``is_latest``: the restore raises all counters to the recovery point.
    """

    began_empty: bool
    losses: int = 1
    is_latest: bool = True


@dataclass(frozen=True, slots=True)
class LossAmounts:
    """What an incident cost in one budget and window, by all its restores so far.

    ``restored`` is by how much they raised the usage, ``counted`` what the gateway had counted
    after the loss and is not added, each as by ``budget_usage``. ``counted`` is None only if it is
    UNKNOWN.

    The rest is for the next restore, which reads counters that this one has raised. ``shares`` are
    the parts of ``counted`` of raised counters; None: all are raised to the recovery point, or as
    high. ``is_begun``: the restore has not ended, so it is unknown which ones were raised; the
    amounts are the planned ones, and ``shares`` are those of all counters, without zeros.
    ``losses`` counts the losses of the incident that were found by then.
    """

    restored: Decimal
    counted: Decimal | None
    bound: Bound
    shares: Usages | None = None
    is_begun: bool = False
    losses: int = 1


UNKNOWN_AMOUNTS = LossAmounts(_NOTHING, None, Bound.UNKNOWN)


@dataclass(slots=True)
class _Sum:
    """Adds up the counters of one budget and window.

    ``known`` are the amounts of the newest earlier restore, None if there was none. ``shares`` are
    those of all readable counters, ``again`` those since the newest loss of the ones that this
    restore raised, and ``raised`` those of the ones that any restore raised. ``rises`` is by how
    much this restore raised them. ``undone`` are the rises that one which died had only planned.
    """

    known: LossAmounts | None
    facts: LossFacts
    is_begun: bool
    shares: dict[Entity, Decimal] = field(default_factory=dict)
    again: dict[Entity, Decimal] = field(default_factory=dict)
    raised: dict[Entity, Decimal] = field(default_factory=dict)
    rises: dict[Entity, Decimal] = field(default_factory=dict)
    undone: dict[Entity, Decimal] = field(default_factory=dict)
    is_least: bool = False
    are_all_high: bool = True

    def add(self, entry: PlannedEntry, result: RaiseResult | None, after: Decimal | None) -> None:
        """Add a counter; ``after`` is its usage when it was read back, None if it is missing."""
        known, written = self._known_share(entry), None if result is None else result.written
        if entry.action is Action.SKIP_UNREADABLE or written is Written.UNREADABLE:
            self._add_unreadable(entry.entity, known)
            return
        is_unsure = entry.action is Action.RAISE and result is None
        is_there = self.is_begun or (after is not None and after >= entry.recorded)
        is_raised = written is Written.RAISED or (is_unsure and is_there)
        is_kept = entry.action is Action.KEEP or written is Written.KEPT
        # The write knows the newest usage: the gateway may have counted since the reading.
        is_seen = result is not None and written in (Written.RAISED, Written.KEPT)
        before = result.before if result is not None and is_seen else entry.live
        now = min(entry.recorded, before or _NOTHING)
        share = now if known is None else known
        if known is not None and not is_kept:
            # Without a further loss, it was raised to less than now, and what it has counted on top
            # of that is not known.
            share = increased(known, now) if self.is_lost_again else known
            self.is_least |= not self.is_lost_again
        self.shares[entry.entity] = share
        self._note_raised(entry.entity, share if is_raised else known)
        self.are_all_high &= is_raised or is_kept
        if is_raised:
            self.again[entry.entity] = now
            # A counter that was deleted after the write is not restored, but what it had is gone.
            if self.is_begun or after is not None:
                self.rises[entry.entity] = exact_difference(entry.recorded, now)
            self.is_least |= is_unsure and not self.is_begun
        if self.known is not None and self.known.is_begun:
            planned = (self.known.shares or {}).get(entry.entity, _NOTHING)
            if not is_kept:
                self.undone[entry.entity] = exact_difference(
                    entry.recorded, min(planned, entry.recorded)
                )
            # It may have been raised later than it was read, or not at all.
            self.is_least |= is_kept and share < entry.recorded

    @property
    def is_lost_again(self) -> bool:
        """Whether a further loss was found since, so that raised counters were lost as well."""
        return self.known is not None and self.known.losses < self.facts.losses

    def _known_share(self, entry: PlannedEntry) -> Decimal | None:
        """Return the share of a counter that an earlier restore raised; None: none did."""
        known = self.known
        if known is None or known.shares is None:
            return None
        if known.is_begun:
            is_high = entry.action is Action.KEEP
            return known.shares.get(entry.entity, _NOTHING) if is_high else None
        return known.shares.get(entry.entity)

    def _add_unreadable(self, entity: Entity, known: Decimal | None) -> None:
        self.are_all_high = False
        self._note_raised(entity, known)
        if known is None:
            self.is_least = True
        else:
            self.shares[entity] = known

    def _note_raised(self, entity: Entity, share: Decimal | None) -> None:
        if share is not None:
            self.raised[entity] = share

    @property
    def restored(self) -> Decimal:
        """By how much all restores raised the usage; what was lost again counts once."""
        rise = _rise(self.rises)
        if self.known is None:
            return rise
        if self.is_lost_again:
            return max(self.known.restored, rise)
        before = exact_difference(self.known.restored, self._further(self.undone))
        return increased(max(before, _NOTHING), self._further(self.rises))

    def _further(self, rises: Usages) -> Decimal:
        """Return a part of the restored amount: entities below an aggregate are in that already."""
        return rises.get(None, _NOTHING) if None in self.shares else _rise(rises)

    def bound(self, *, is_least: bool) -> Bound:
        """Return the bound of what was counted."""
        known = self.known
        may_be_less = not self.facts.began_empty or (known is not None and known.bound.may_be_less)
        return _BOUNDS[may_be_less, is_least or (known is not None and known.bound.may_be_more)]


def loss_amounts(
    planned: Iterable[PlannedEntry],
    known: LossAmounts | None,
    facts: LossFacts,
    *,
    results: Mapping[Entity, RaiseResult] | None = None,
    after: Usages | None = None,
) -> LossAmounts:
    """Return what an incident cost in one budget and window, by all its restores so far.

    ``known`` are the amounts of the newest earlier restore, None if there was none. ``results`` are
    those of this restore, None if it is about to begin; ``after`` are the usages read afterwards.
    """
    entries, known = tuple(planned), None if known is None or known.counted is None else known
    if all(entry.action is Action.SKIP_CLOSED for entry in entries):
        # What it counts now is of no use to anyone, and nothing is withheld from it.
        known = known or LossAmounts(_NOTHING, _NOTHING, Bound.EXACT, losses=facts.losses)
        return replace(known, bound=shown_bound(known), is_begun=False)
    total = _Sum(known, facts, is_begun=results is None)
    for entry in entries:
        total.add(entry, (results or {}).get(entry.entity), (after or {}).get(entry.entity))
    if known is not None and known.counted is not None and known.shares is None:
        return _after_all(known, known.counted, total)
    if not total.shares:
        return UNKNOWN_AMOUNTS
    shares: Usages | None = total.raised
    if total.is_begun:
        shares = {entity: share for entity, share in total.shares.items() if share}
    elif total.are_all_high and facts.is_latest:
        shares = None
    return LossAmounts(
        restored=total.restored,
        counted=budget_usage(total.shares),
        bound=total.bound(is_least=total.is_least),
        shares=shares,
        is_begun=total.is_begun,
        losses=facts.losses,
    )


def _after_all(known: LossAmounts, counted: Decimal, total: _Sum) -> LossAmounts:
    """Return the amounts after one more restore of what an earlier one had raised completely.

    A counter that is raised again was lost once more, or something else lowered it. While that
    restore runs, the amounts stay: which counters it raised is known only at its end.
    """
    if not total.again:
        return known
    if total.is_begun:
        return replace(known, bound=known.bound.from_below)
    if total.is_lost_again:
        counted = increased(counted, budget_usage(total.again))
    is_least = total.is_least or not total.is_lost_again
    bound, losses = total.bound(is_least=is_least), total.facts.losses
    return LossAmounts(total.restored, counted, bound, losses=losses)


def _rise(rises: Usages) -> Decimal:
    return budget_usage({entity: rise for entity, rise in rises.items() if rise})


def shown_bound(amounts: LossAmounts) -> Bound:
    """Return the bound of amounts, which may be higher while it is unknown what was written."""
    return amounts.bound.from_below if amounts.is_begun else amounts.bound


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What one restore plans for, or did to, one budget and window of a tenant.

    ``point_at`` is the newest source snapshot. ``entries`` counts the counters, ``planned`` those
    to raise, and ``raised`` those that were raised. ``before`` and ``after`` are its usage, as by
    ``budget_usage``, that was read before and after; ``after`` is the planned one until the restore
    ends.
    ``notes`` name the counters that were skipped, and why. ``wrote_board``: its leaderboard was
    updated or created. ``amounts`` are those of the incident by the end of this restore; None:
    unknown, or no incident was open.
    """

    tenant: str
    of: BudgetWindow
    point_at: datetime
    entries: int
    planned: int
    raised: int
    kept: int
    skipped: int
    before: Decimal
    after: Decimal
    notes: tuple[str, ...]
    wrote_board: bool = False
    amounts: LossAmounts | None = None


@dataclass(frozen=True, slots=True)
class AuditTrail:
    """The entries of one restore, with who restores, why, in which run, and when.

    Each tenant, budget and window has at most one entry.
    """

    at: datetime
    run_id: str
    who: str
    why: str
    incident_id: str | None
    entries: tuple[AuditEntry, ...]


@dataclass(frozen=True, slots=True)
class ManualRestore:
    """A manual restore, by a command or a run, as its audits show it.

    ``at`` is when it began. ``unfinished`` are the tenants whose end is not recorded, by name: the
    restore is running, or its worker died.
    """

    run_id: str
    at: datetime
    who: str
    why: str
    incident_id: str | None
    unfinished: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MergedAudits:
    """What all restores of an incident did together, merged by budget and window.

    ``windows`` counts them, and ``largest`` has those that rose most.
    """

    windows: int
    largest: tuple[AuditEntry, ...]


@dataclass(frozen=True, slots=True)
class WindowAmounts:
    """What an incident cost in one budget and window of a tenant; see LossAmounts."""

    tenant: str
    of: BudgetWindow
    restored: Decimal
    counted: Decimal | None
    bound: Bound


MOST_AMOUNTS = 100
"""How many amounts of each list of an incident are read and shown to programs."""


@dataclass(frozen=True, slots=True)
class IncidentAmounts:
    """What an incident cost, by budget and window, in two lists with the largest amounts first.

    ``restored`` and ``counted`` may be cut; ``restored_windows`` and ``counted_windows`` count all
    with such an amount. ``unknown_windows`` counts those whose ``counted`` is unknown.
    """

    restored_windows: int = 0
    counted_windows: int = 0
    unknown_windows: int = 0
    restored: tuple[WindowAmounts, ...] = ()
    counted: tuple[WindowAmounts, ...] = ()
