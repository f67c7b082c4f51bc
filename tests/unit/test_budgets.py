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
    exhausted = [defined().is_exhausted_at(None, Decimal(usage)) for usage in usages]
    assert exhausted == [False, True, True]


def test_a_limit_applies_to_what_a_budget_is_split_by() -> None:
    whole, split = defined(), defined(split_by=SplitBy.USER)
    for entity, of_whole, of_split in ((None, True, False), ("alice", False, True)):
        assert whole.is_exhausted_at(entity, Decimal(11)) is of_whole
        assert split.is_exhausted_at(entity, Decimal(11)) is of_split
        assert not split.is_exhausted_at(entity, Decimal(9))


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
