"""Deliberate resets: an operator lowered or cleared counters in the gateway.

A restore takes the highest recorded usage, so without resets it would bring back usage that was
removed on purpose. A reset excludes usages of older records.

If a record is eligible for an entity, every newer record is, too. So a record that covers the
eligible usages of older records still covers them after any later reset.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from budget_recovery_dagster.domain.counters import BudgetWindow, Entity, Usages, check_name
from budget_recovery_dagster.domain.windows import Window, require_aware


class Everyone(Enum):
    """All entities of a budget, including its aggregate; an own type, so that no name equals it."""

    EVERYONE = "everyone"

    def __repr__(self) -> str:
        return self.name


EVERYONE: Final = Everyone.EVERYONE


@dataclass(frozen=True, slots=True)
class Reset:
    """A deliberate reset of counters at ``at`` (aware; converted to UTC).

    It excludes usages in records captured until ``at``: those of ``entity`` (None: the aggregate)
    or of EVERYONE, in the window with the token ``window`` (None: every window of the budget).
    ``by`` and ``reason`` are for people.
    """

    tenant: str
    budget: str
    window: str | None
    entity: Entity | Everyone
    at: datetime
    by: str
    reason: str
    recorded_at: datetime

    def __post_init__(self) -> None:
        """Refuse invalid names, windows and times.

        Raises:
            ValueError: a name is empty or contains NUL, the window is not in the calendar, a time
                has no time zone, or ``at`` is after ``recorded_at``.
        """
        check_name(self.tenant)
        check_name(self.budget)
        if isinstance(self.entity, str):
            check_name(self.entity)
        if self.window is not None:
            Window.parse(self.window)
        for name in ("at", "recorded_at"):
            object.__setattr__(self, name, require_aware(getattr(self, name)).astimezone(UTC))
        if self.at > self.recorded_at:
            raise ValueError(f"a reset at {self.at} was recorded earlier, at {self.recorded_at}")

    @property
    def is_of_everyone(self) -> bool:
        """Whether it is about all entities of the budget."""
        return self.entity is EVERYONE

    def is_about(self, of: BudgetWindow) -> bool:
        """Whether it is about usages of a budget and window of its tenant."""
        return self.budget == of.budget and self.window in (None, of.window.token)


def concerning(of: BudgetWindow, resets: Iterable[Reset]) -> tuple[Reset, ...]:
    """Return a tenant's resets that are about a budget and window."""
    return tuple(reset for reset in resets if reset.is_about(of))


def newest_at(resets: Iterable[Reset]) -> datetime | None:
    """Return the time after which every record is eligible; None: always."""
    return max((reset.at for reset in resets), default=None)


def keeping_out(
    usages: Usages, captured_at: datetime, of: BudgetWindow, resets: Iterable[Reset]
) -> tuple[Reset, ...]:
    """Return a tenant's resets that exclude any usage of a record."""
    return tuple(
        reset
        for reset in resets
        if captured_at <= reset.at
        and reset.is_about(of)
        and (bool(usages) if reset.is_of_everyone else reset.entity in usages)
    )


def eligible(
    usages: Usages, captured_at: datetime, of: BudgetWindow, resets: Sequence[Reset]
) -> Usages:
    """Return the usages of a record that no reset of the tenant excludes.

    If no reset excludes any, the same mapping is returned, without a loop over its entities.
    """
    against = keeping_out(usages, captured_at, of, resets)
    if not against:
        return usages
    if any(reset.is_of_everyone for reset in against):
        return {}
    named = {reset.entity for reset in against}
    return {entity: usage for entity, usage in usages.items() if entity not in named}
