from decimal import Decimal

from budget_recovery_dagster.domain import budget_usage, exact_sum, format_usage


def test_sums_are_exact_beyond_the_digits_of_one_usage() -> None:
    largest = Decimal("99999999999999999999.999999999999999999")
    total = exact_sum([largest] * 11)
    assert format_usage(total) == "1099999999999999999999.999999999999999989"
    assert exact_sum([]) == 0


def test_the_usage_of_a_budget_is_its_aggregate_or_the_sum_of_its_entities() -> None:
    assert budget_usage({"alice": Decimal("1.5"), "bo": Decimal("0.25")}) == Decimal("1.75")
    assert budget_usage({"alice": Decimal("1.5"), None: Decimal("1.75")}) == Decimal("1.75")
    assert budget_usage({None: Decimal(0), "alice": Decimal(0)}) == 0
    assert budget_usage({}) == 0
