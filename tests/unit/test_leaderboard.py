from decimal import Decimal
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.domain import BOARD_SIZE, Entity, rank

USAGES = st.dictionaries(
    st.none() | st.text(min_size=1), st.decimals(0, 10**20, places=18), max_size=20
)


@given(USAGES)
def test_usages_are_ranked_by_size_and_then_by_name(usages: dict[Entity, Decimal]) -> None:
    ranking = rank(usages.items())
    assert dict(ranking) == usages
    assert rank(reversed(list(usages.items()))) == ranking
    for (name, usage), (next_name, next_usage) in pairwise(ranking):
        assert usage > next_usage or (usage == next_usage and (name or "") < (next_name or ""))


def test_usages_that_differ_in_the_last_of_38_digits_are_ranked_correctly() -> None:
    lower, higher = Decimal("9" * 20 + "." + "9" * 17 + "8"), Decimal("9" * 20 + "." + "9" * 18)
    assert rank([("a", lower), ("b", higher)]) == [("b", higher), ("a", lower)]


def test_only_the_500_largest_are_kept() -> None:
    usages = [(str(number), Decimal(number)) for number in range(1001)]
    ranking = rank(usages)
    assert len(ranking) == BOARD_SIZE == 500
    assert ranking[-1] == ("501", Decimal(501))
