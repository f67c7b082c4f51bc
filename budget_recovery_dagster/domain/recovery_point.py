"""The recovery point of a tenant: what a restore would use now.

Within a window a counter only grows, so the highest value ever recorded for an entity is the best
that is known of it: taking the maximum over all retained records is exact, and neither a partial
nor a low record can do harm.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from budget_recovery_dagster.domain.counters import BudgetWindow, Entity, UnlistedEntities

Usages = Mapping[Entity, Decimal]
"""Usage by entity, of one budget and window."""

RecoveryPoint = Mapping[BudgetWindow, Usages]
"""The best known usages of every still-current window of one tenant."""


def max_merge(*records: Usages) -> dict[Entity, Decimal]:
    """Take, entity by entity, the highest usage: order and repetition change nothing."""
    merged: dict[Entity, Decimal] = {}
    for usages in records:
        for entity, usage in usages.items():
            known = merged.get(entity)
            if known is None or usage > known:
                merged[entity] = usage
    return merged


def covers(later: Usages, earlier: Usages) -> bool:
    """Whether no entity of ``earlier`` is missing from ``later`` or lower in it."""
    return all(entity in later and later[entity] >= usage for entity, usage in earlier.items())


def count_from_earlier(point: Usages, newest: Usages) -> int:
    """Count the entities of a point that its newest record does not hold, or holds lower."""
    return sum(entity not in newest or newest[entity] < usage for entity, usage in point.items())


@dataclass(frozen=True, slots=True)
class Drop:
    """A counter of the recovery point that the store no longer holds, or holds lower.

    ``after`` is None where it is missing: from the store or, of a full leaderboard, from among
    those that have used as much as it had. Purges of single keys change no identity, so this is
    the only trace that they leave.
    """

    of: BudgetWindow
    entity: Entity
    before: Decimal
    after: Decimal | None


def find_drops(
    point: RecoveryPoint,
    observed: RecoveryPoint,
    unknown: Iterable[tuple[BudgetWindow, Entity]],
    unlisted: Iterable[UnlistedEntities],
) -> tuple[Drop, ...]:
    """List what the point holds and the store does not, except what is not known of.

    An ``unknown`` counter, one that is unreadable, is reported as such; it is not known to be lower
    or lost. Neither is one that is not observed where ``unlisted`` tells that not all are, unless
    it had more than any such one has.
    """
    unjudged = frozenset(unknown)
    incomplete = {each.of: each for each in unlisted}
    return tuple(
        Drop(of, entity, before, after)
        for of, usages in point.items()
        for entity, before in usages.items()
        if (of, entity) not in unjudged
        if _is_drop(before, after := observed.get(of, {}).get(entity), incomplete.get(of))
    )


def _is_drop(before: Decimal, after: Decimal | None, unlisted: UnlistedEntities | None) -> bool:
    if after is not None:
        return after < before
    if unlisted is None:
        return True
    return unlisted.at_most is not None and unlisted.at_most < before
