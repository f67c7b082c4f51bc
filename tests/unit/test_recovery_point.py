from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.recovery_point import (
    Drop,
    RecoveryPoint,
    covers,
    find_drops,
    max_merge,
)
from budget_recovery_dagster.domain.windows import Window

MONTH = BudgetWindow("spend", Window.parse("2026-11"))
LIFETIME = BudgetWindow("spend", Window.parse("lifetime"))

usages = st.dictionaries(
    st.one_of(st.none(), st.sampled_from(["a", "b", "c"])),
    st.decimals(min_value=0, max_value=100, places=2, allow_nan=False),
)


def test_the_higher_value_wins_entity_by_entity() -> None:
    merged = max_merge(
        {None: Decimal(5), "a": Decimal(1)}, {"a": Decimal(3), "b": Decimal(2)}, {None: Decimal(4)}
    )
    assert merged == {None: Decimal(5), "a": Decimal(3), "b": Decimal(2)}


@given(usages, usages, usages)
def test_merging_is_associative_commutative_and_idempotent(
    one: dict[str | None, Decimal], two: dict[str | None, Decimal], three: dict[str | None, Decimal]
) -> None:
    assert max_merge(one, two) == max_merge(two, one)
    assert max_merge(max_merge(one, two), three) == max_merge(one, max_merge(two, three))
    assert max_merge(one, one) == one
    assert covers(max_merge(one, two), one)


def test_covering_means_nothing_missing_and_nothing_lower() -> None:
    earlier = {None: Decimal(5), "a": Decimal(1)}
    assert covers({None: Decimal(5), "a": Decimal(2), "new": Decimal(0)}, earlier)
    assert not covers({None: Decimal(5)}, earlier)
    assert not covers({None: Decimal("4.99"), "a": Decimal(1)}, earlier)


def test_missing_and_lower_counters_are_named() -> None:
    point: RecoveryPoint = {
        MONTH: {"gone": Decimal(5), "lower": Decimal(3), "same": Decimal(1)},
        LIFETIME: {None: Decimal(9)},
    }
    observed: RecoveryPoint = {MONTH: {"lower": Decimal(2), "same": Decimal(1), "new": Decimal(0)}}
    assert find_drops(point, observed, unknown=[]) == (
        Drop(MONTH, "gone", Decimal(5), None),
        Drop(MONTH, "lower", Decimal(3), Decimal(2)),
        Drop(LIFETIME, None, Decimal(9), None),
    )


def test_an_unreadable_counter_is_not_called_missing() -> None:
    point: RecoveryPoint = {MONTH: {"a": Decimal(5), "b": Decimal(5)}}
    assert find_drops(point, {}, unknown=[(MONTH, "a")]) == (Drop(MONTH, "b", Decimal(5), None),)
