from dataclasses import replace
from decimal import Decimal

import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import Database, PostgresBudgets
from budget_recovery_dagster.domain import BudgetDefinition, Enforcement, Period, SplitBy

MONTH = BudgetDefinition(
    "team a / 東京",
    "per user",
    Period.MONTH,
    Decimal("12345678901234567890.123456789012345678"),
    SplitBy.USER,
    Enforcement.ENFORCE,
)
DAY = replace(MONTH, period=Period.DAY, limit=Decimal(0), enforcement=Enforcement.AUDIT)
BY_METADATA = BudgetDefinition(
    MONTH.tenant,
    "cost centres",
    Period.LIFETIME,
    Decimal(5),
    SplitBy.METADATA,
    Enforcement.AUDIT,
    metadata_key="cost_centre",
)


def rows(admin: psycopg.Connection) -> list[tuple[object, ...]]:
    return admin.execute(
        "select * from budget_recovery.budget order by tenant, budget_id, period"
    ).fetchall()


def row_of(definition: BudgetDefinition) -> tuple[object, ...]:
    return (
        definition.tenant,
        definition.budget,
        definition.period.value,
        definition.limit,
        definition.split_by.value,
        definition.metadata_key,
        definition.enforcement.value,
    )


def test_definitions_are_stored_exactly(database: Database, admin: psycopg.Connection) -> None:
    PostgresBudgets(database).define([MONTH, BY_METADATA])
    assert rows(admin) == [
        (
            "team a / 東京",
            "cost centres",
            "lifetime",
            Decimal(5),
            "metadata",
            "cost_centre",
            "audit",
        ),
        (
            "team a / 東京",
            "per user",
            "month",
            Decimal("12345678901234567890.123456789012345678"),
            "user",
            None,
            "enforce",
        ),
    ]


@pytest.mark.parametrize("split_by", [each for each in SplitBy if each is not SplitBy.METADATA])
def test_every_split_is_stored(
    database: Database, admin: psycopg.Connection, split_by: SplitBy
) -> None:
    definition = replace(MONTH, split_by=split_by)
    PostgresBudgets(database).define([definition])
    assert rows(admin) == [row_of(definition)]


@pytest.mark.parametrize("period", Period)
def test_every_period_is_stored(
    database: Database, admin: psycopg.Connection, period: Period
) -> None:
    definition = replace(MONTH, period=period)
    PostgresBudgets(database).define([definition])
    assert rows(admin) == [row_of(definition)]


def test_a_later_definition_replaces_the_earlier_one(
    database: Database, admin: psycopg.Connection
) -> None:
    budgets = PostgresBudgets(database)
    budgets.define([MONTH, DAY])
    budgets.define([replace(DAY, limit=Decimal(7))])
    assert rows(admin) == [row_of(replace(DAY, limit=Decimal(7))), row_of(MONTH)]


@pytest.mark.parametrize(
    ("column", "value", "constraint"),
    [
        ("period", "'year'", "budget_period_is_known"),
        ("limit_amount", "'NaN'", "budget_limit_is_in_bounds"),
        ("limit_amount", "-1", "budget_limit_is_in_bounds"),
        ("split_by", "'team'", "budget_split_is_known"),
        ("metadata_key", "'team'", "budget_metadata_key_is_of_metadata"),
        ("enforcement", "'warn'", "budget_enforcement_is_known"),
        ("budget_id", "''", "budget_names_are_not_empty"),
    ],
)
def test_the_table_refuses_an_invalid_definition(
    database: Database, admin: psycopg.Connection, column: str, value: str, constraint: str
) -> None:
    PostgresBudgets(database).define([MONTH])
    with pytest.raises(psycopg.errors.CheckViolation, match=constraint):
        admin.execute(f"update budget_recovery.budget set {column} = {value}".encode())
