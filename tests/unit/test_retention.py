import weakref
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.domain import (
    DatedUsages,
    Entity,
    RetentionPolicy,
    max_merge,
    needed_past_retention,
)

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
CUTOFF = NOW - timedelta(days=7)


def hours_ago(hours: int, **usages: str) -> DatedUsages:
    return DatedUsages(
        1000 - hours,
        NOW - timedelta(hours=hours),
        {name: Decimal(usage) for name, usage in usages.items()},
    )


@pytest.mark.parametrize("days", [0, -1, 3661])
def test_a_retention_outside_its_bounds_is_refused(days: int) -> None:
    with pytest.raises(ValueError, match=f"{days} days"):
        RetentionPolicy(days)


def test_the_cutoff_is_whole_days_of_24_hours() -> None:
    assert RetentionPolicy(7).cutoff(NOW) == datetime(2026, 11, 23, 12, tzinfo=UTC)


def test_a_record_covered_by_newer_ones_is_not_needed() -> None:
    records = [hours_ago(1, a="3", b="2"), hours_ago(190, a="2", b="2"), hours_ago(200, a="1")]
    assert needed_past_retention(records, CUTOFF) == set()


def test_the_newest_record_of_an_entity_missing_since_is_kept() -> None:
    with_b = hours_ago(195, a="2", b="7")
    records = [hours_ago(1, a="4"), hours_ago(190, a="3"), with_b, hours_ago(200, a="1", b="6")]
    assert needed_past_retention(records, CUTOFF) == {with_b.captured_at}


def test_the_newest_expired_record_is_kept_if_no_other_is_retained() -> None:
    newest = hours_ago(190, a="3")
    assert needed_past_retention([newest, hours_ago(200, a="1")], CUTOFF) == {newest.captured_at}


def test_a_record_exactly_as_old_as_the_retention_is_not_past_it() -> None:
    assert needed_past_retention([DatedUsages(1, CUTOFF, {"a": Decimal(1)})], CUTOFF) == set()


def damaged_hours_ago(hours: int) -> DatedUsages:
    return DatedUsages(1000 - hours, NOW - timedelta(hours=hours), None)


def test_a_damaged_record_covers_no_older_one() -> None:
    intact = hours_ago(200, a="1")
    assert needed_past_retention([damaged_hours_ago(1), intact], CUTOFF) == {intact.captured_at}


def test_a_damaged_record_is_kept_until_an_intact_one_covers_it() -> None:
    records = [hours_ago(1, b="1"), damaged_hours_ago(190), hours_ago(195, a="1")]
    kept = {each.captured_at for each in records[1:]}
    assert needed_past_retention(records, CUTOFF) == kept
    covered = hours_ago(195, a="1").number
    assert needed_past_retention(records, CUTOFF, covered_since=covered) == kept
    covered = hours_ago(1).number
    assert needed_past_retention([*records[:2]], CUTOFF, covered_since=covered) == set()


def test_records_in_another_order_are_refused() -> None:
    with pytest.raises(ValueError, match="follows an older one"):
        needed_past_retention([hours_ago(200, a="1"), hours_ago(190, a="1")], CUTOFF)


def test_records_are_read_one_by_one() -> None:
    taken = 0
    given: list[weakref.ref[Content]] = []

    def records() -> Iterator[DatedUsages]:
        nonlocal taken
        for hours in range(100):
            assert sum(each() is not None for each in given) <= 1, "all of them are held"
            content = Content({"a": Decimal(hours)})
            given.append(weakref.ref(content))
            taken += 1
            yield DatedUsages(1000 - hours, NOW - timedelta(hours=hours), content)

    needed_past_retention(records(), CUTOFF)
    assert taken == 100


class Content(dict[Entity, Decimal]):
    """Usages with weak references."""


contents: st.SearchStrategy[dict[Entity, Decimal]] = st.dictionaries(
    st.one_of(st.none(), st.sampled_from("abc")),
    st.decimals(min_value=0, max_value=9, places=0, allow_nan=False),
)


@given(st.lists(contents, max_size=8), st.lists(contents, max_size=3))
def test_the_kept_records_have_the_same_maximum_as_all_records(
    old: list[dict[Entity, Decimal]], retained: list[dict[Entity, Decimal]]
) -> None:
    hours = (*range(len(retained)), *range(200, 200 + len(old)))
    records = [
        DatedUsages(1000 - at, NOW - timedelta(hours=at), usages)
        for at, usages in zip(hours, (*retained, *old), strict=True)
    ]
    needed = needed_past_retention(records, CUTOFF)
    kept = [
        usages
        for dated, usages in zip(records, (*retained, *old), strict=True)
        if dated.captured_at >= CUTOFF or dated.captured_at in needed
    ]
    assert max_merge(*kept) == max_merge(*retained, *old)
    assert all(at < CUTOFF for at in needed)
