"""Budget definitions, in memory."""

from collections.abc import Collection

from budget_recovery_dagster.domain.budgets import BudgetDefinition
from budget_recovery_dagster.domain.windows import Period


class MemoryBudgets:
    """Definitions that are forgotten with the object."""

    def __init__(self) -> None:
        self._definitions: dict[tuple[str, str, Period], BudgetDefinition] = {}

    def define(self, definitions: Collection[BudgetDefinition]) -> None:
        """Add definitions, or replace those of the same tenant, budget and period."""
        for each in definitions:
            self._definitions[each.tenant, each.budget, each.period] = each

    def definitions_of(self, tenant: str) -> tuple[BudgetDefinition, ...]:
        """Return a tenant's definitions, by budget and period."""
        keys = sorted(key for key in self._definitions if key[0] == tenant)
        return tuple(self._definitions[key] for key in keys)
