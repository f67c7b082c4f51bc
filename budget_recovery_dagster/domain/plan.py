"""The plan of a restore: what becomes of each entry, decided before anything is written.

Preview and apply build the same plan. A restore can only raise a counter towards the truth: it
never lowers one, never adds, and never touches a window that has closed.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from budget_recovery_dagster.domain.counters import BudgetWindow, Entity
from budget_recovery_dagster.domain.moments import require_aware
from budget_recovery_dagster.domain.recovery_point import RecoveryPoint


class Action(StrEnum):
    """What a restore does with one entry."""

    RAISE = "raise"
    KEEP = "keep"
    SKIP_CLOSED = "skip, its window has closed"
    SKIP_UNREADABLE = "skip, its live counter is unreadable"


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """One entity in one window of one budget.

    ``live`` is None where the store has no such counter, or none that can be read (then, and of a
    closed window, it is not looked at).
    """

    of: BudgetWindow
    entity: Entity
    recorded: Decimal
    live: Decimal | None
    action: Action

    @property
    def result(self) -> Decimal | None:
        """The usage that the counter has after the restore, if nobody writes it meanwhile."""
        return self.recorded if self.action is Action.RAISE else self.live


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What a restore does to one tenant; entries by budget, window and entity."""

    tenant: str
    entries: tuple[PlannedEntry, ...]

    def that(self, action: Action) -> Iterator[PlannedEntry]:
        """Give the entries with which this is done."""
        return (entry for entry in self.entries if entry.action is action)

    def by_window(self) -> defaultdict[BudgetWindow, list[PlannedEntry]]:
        """Group the entries by budget and window; any other window has none."""
        planned: defaultdict[BudgetWindow, list[PlannedEntry]] = defaultdict(list)
        for entry in self.entries:
            planned[entry.of].append(entry)
        return planned


def plan_restore(
    tenant: str,
    recorded: RecoveryPoint,
    live: RecoveryPoint,
    unreadable: Collection[tuple[BudgetWindow, Entity]],
    now: datetime,
) -> RecoveryPlan:
    """Decide, for each recorded entry, what a restore at ``now`` (aware) does.

    ``live`` are the counters that the store holds and that could be read, ``unreadable`` those
    that could not.
    """
    require_aware(now)
    unjudged = frozenset(unreadable)
    entries: list[PlannedEntry] = []
    for of in sorted(recorded, key=lambda of: (of.budget, of.window.token)):
        for entity in sorted(recorded[of], key=lambda entity: entity or ""):
            usage, known = recorded[of][entity], live.get(of, {}).get(entity)
            if not of.window.is_current(now):
                action = Action.SKIP_CLOSED
            elif (of, entity) in unjudged:
                action = Action.SKIP_UNREADABLE
            else:
                action = Action.RAISE if known is None or known < usage else Action.KEEP
            entries.append(PlannedEntry(of, entity, usage, known, action))
    return RecoveryPlan(tenant, tuple(entries))
