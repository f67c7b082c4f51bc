"""Deliberate resets: that an operator has lowered or cleared counters, and when.

A restore takes the highest usage that was ever recorded, so without this it would bring back what
was taken away on purpose. A reset says of which usages the older records are not to be used.

Of one entity, a record is eligible wherever an older one is. That is why a record that covers the
eligible usages of those before it goes on covering them, whatever resets are recorded later.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from budget_recovery_dagster.domain.counters import BudgetWindow, Entity, Usages, check_name
from budget_recovery_dagster.domain.windows import Window, require_aware


class Everyone(Enum):
    """All entities of a budget, its aggregate among them; no name can be mistaken for it."""

    EVERYONE = "everyone"

    def __repr__(self) -> str:
        return self.name


EVERYONE: Final = Everyone.EVERYONE


@dataclass(frozen=True, slots=True)
class Reset:
    """That counters were lowered or cleared on purpose, at ``at`` (aware; kept in UTC).

    Records captured at ``at`` or before are not eligible for the usages that it is about: those of
    ``entity``, None the aggregate, or of EVERYONE, in the window of the token ``window``, None
    every window of the budget. ``by`` and ``reason`` are for people.
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
        """Refuse what names nothing, and a time to come.

        Raises:
            ValueError: a name is empty or holds NUL, the window is none of the calendar, a moment
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
            raise ValueError(f"a reset at {self.at} that is recorded earlier, {self.recorded_at}")

    @property
    def is_of_everyone(self) -> bool:
        """Whether it is about all entities of the budget."""
        return self.entity is EVERYONE

    def is_about(self, of: BudgetWindow) -> bool:
        """Whether it is about usages of a budget and window of its tenant."""
        return self.budget == of.budget and self.window in (None, of.window.token)


def concerning(of: BudgetWindow, resets: Iterable[Reset]) -> tuple[Reset, ...]:
    """Choose those of a tenant's resets that are about a budget and window."""
    return tuple(reset for reset in resets if reset.is_about(of))


def newest_at(resets: Iterable[Reset]) -> datetime | None:
    """Return the time after which every record is eligible; None: always."""
    return max((reset.at for reset in resets), default=None)


def keeping_out(
    usages: Usages, captured_at: datetime, of: BudgetWindow, resets: Iterable[Reset]
) -> tuple[Reset, ...]:
    """Choose those of a tenant's resets for which some usage of a record is not eligible."""
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
    """Leave out of a record what the tenant's resets make ineligible.

    Where that is nothing, the usages are given back as they are, without a look at each.
    """
    against = keeping_out(usages, captured_at, of, resets)
    if not against:
        return usages
    if any(reset.is_of_everyone for reset in against):
        return {}
    named = {reset.entity for reset in against}
    return {entity: usage for entity, usage in usages.items() if entity not in named}
