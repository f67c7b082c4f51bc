"""Leaderboards: who has used most of a budget in one window of it."""

from collections.abc import Iterable
from decimal import Decimal

from budget_recovery_dagster.domain.counters import Entity

BOARD_SIZE = 500
"""How many entities a leaderboard lists at most."""


def rank(usages: Iterable[tuple[Entity, Decimal]]) -> list[tuple[Entity, Decimal]]:
    """Return the largest usages: most usage first, equal ones by their names' code points."""
    by_name = sorted(usages, key=lambda each: each[0] or "")
    # A stable sort, also in reverse; to sort by the negated usage would round it.
    return sorted(by_name, key=lambda each: each[1], reverse=True)[:BOARD_SIZE]
