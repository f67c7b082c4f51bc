"""Budget definitions in PostgreSQL."""

from collections.abc import Collection

from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.domain.budgets import BudgetDefinition, Enforcement, SplitBy
from budget_recovery_dagster.domain.windows import Period

_DEFINE = """
insert into budget_recovery.budget (
    tenant, budget_id, period, limit_amount, split_by, metadata_key, enforcement
) values (%s, %s, %s, %s, %s, %s, %s)
on conflict (tenant, budget_id, period) do update
set limit_amount = excluded.limit_amount, split_by = excluded.split_by,
    metadata_key = excluded.metadata_key, enforcement = excluded.enforcement
"""

_OF_TENANT = """
select budget_id, period, limit_amount, split_by, enforcement, metadata_key
from budget_recovery.budget
where tenant = %s
order by budget_id, period
"""


class PostgresBudgets:
    """The table of budget definitions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def define(self, definitions: Collection[BudgetDefinition]) -> None:
        """Add definitions, or replace those of the same tenant, budget and period."""
        with self._database.writing() as connection, connection.cursor() as cursor:
            cursor.executemany(
                _DEFINE,
                [
                    (
                        each.tenant,
                        each.budget,
                        each.period.value,
                        each.limit,
                        each.split_by.value,
                        each.metadata_key,
                        each.enforcement.value,
                    )
                    for each in definitions
                ],
            )

    def of_tenant(self, tenant: str) -> tuple[BudgetDefinition, ...]:
        """Return the definitions of a tenant's budgets, by budget and period."""
        with self._database.reading() as connection:
            rows = connection.execute(_OF_TENANT, (tenant,)).fetchall()
        return tuple(
            BudgetDefinition(
                tenant,
                budget,
                Period(period),
                limit,
                SplitBy(split_by),
                Enforcement(enforcement),
                metadata_key,
            )
            for budget, period, limit, split_by, enforcement, metadata_key in rows
        )
