from decimal import Decimal
from typing import Any

import pytest

from budget_recovery_dagster.domain import BudgetDefinition, Enforcement, Period, SplitBy


def defined(**changes: Any) -> BudgetDefinition:
    values: dict[str, Any] = {
        "tenant": "acme",
        "budget": "company",
        "period": Period.MONTH,
        "limit": Decimal(10),
        "split_by": SplitBy.NOTHING,
        "enforcement": Enforcement.ENFORCE,
    }
    return BudgetDefinition(**values | changes)


def test_a_budget_is_exhausted_once_its_limit_is_reached() -> None:
    usages = ("9.999999999999999999", "10", "10.01")
    exhausted = [defined().is_exhausted_at(Decimal(usage)) for usage in usages]
    assert exhausted == [False, True, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": ""},
        {"budget": "a\0b"},
        {"limit": Decimal(-1)},
        {"limit": Decimal("Infinity")},
        {"limit": Decimal(10) ** 20},
        {"metadata_key": "team"},
        {"split_by": SplitBy.METADATA},
    ],
    ids=str,
)
def test_an_invalid_definition_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"name|limit|metadata"):
        defined(**changes)


def test_a_limit_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        defined(limit=Decimal("NaN"))
