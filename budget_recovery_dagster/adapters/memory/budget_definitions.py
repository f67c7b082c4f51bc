"""Budget definitions in memory."""

from collections.abc import Collection

from budget_recovery_dagster.domain.budgets import BudgetDefinition
from budget_recovery_dagster.domain.windows import Period


class MemoryBudgets:
    """The definitions, by tenant, budget and period."""

    def __init__(self) -> None:
        self._defined: dict[tuple[str, str, Period], BudgetDefinition] = {}

    def define(self, definitions: Collection[BudgetDefinition]) -> None:
        """Add definitions, or replace those of the same tenant, budget and period."""
        for each in definitions:
            self._defined[each.tenant, each.budget, each.period] = each

    def of_tenant(self, tenant: str) -> tuple[BudgetDefinition, ...]:
        """Return the definitions of a tenant's budgets, by budget and period."""
        found = [each for each in self._defined.values() if each.tenant == tenant]
        return tuple(sorted(found, key=lambda each: (each.budget, each.period)))
