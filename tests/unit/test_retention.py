from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.domain.counters import Entity
from budget_recovery_dagster.domain.recovery_point import max_merge
from budget_recovery_dagster.domain.retention import (
    DatedUsages,
    RetentionPolicy,
    needed_past_retention,
)

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def hours_ago(hours: int, **usages: str) -> DatedUsages:
    return DatedUsages(
        NOW - timedelta(hours=hours), {name: Decimal(usage) for name, usage in usages.items()}
    )


@pytest.mark.parametrize("days", [0, -1, 3661])
def test_a_retention_outside_its_bounds_is_refused(days: int) -> None:
    with pytest.raises(ValueError, match=f"{days} days"):
        RetentionPolicy(days)


def test_the_cutoff_is_whole_days_of_24_hours() -> None:
    assert RetentionPolicy(7).cutoff(NOW) == datetime(2026, 11, 23, 12, tzinfo=UTC)


def test_what_newer_records_hold_as_high_is_not_needed() -> None:
    expired = [hours_ago(200, a="1", b="1"), hours_ago(190, a="2", b="2")]
    assert needed_past_retention(expired, retained=[{"a": Decimal(3), "b": Decimal(2)}]) == set()


def test_the_last_record_of_an_entity_gone_since_is_kept() -> None:
    with_b = hours_ago(195, a="2", b="7")
    expired = [hours_ago(200, a="1", b="6"), with_b, hours_ago(190, a="3")]
    assert needed_past_retention(expired, retained=[{"a": Decimal(4)}]) == {with_b.captured_at}


def test_without_retained_records_the_newest_expired_one_is_kept() -> None:
    newest = hours_ago(190, a="3")
    assert needed_past_retention([hours_ago(200, a="1"), newest], retained=[]) == {
        newest.captured_at
    }


contents: st.SearchStrategy[dict[Entity, Decimal]] = st.dictionaries(
    st.one_of(st.none(), st.sampled_from("abc")),
    st.decimals(min_value=0, max_value=9, places=0, allow_nan=False),
)


@given(st.lists(contents, max_size=8), st.lists(contents, max_size=3))
def test_what_is_kept_gives_the_same_maximum_as_everything(
    old: list[dict[Entity, Decimal]], retained: list[dict[Entity, Decimal]]
) -> None:
    expired = [DatedUsages(NOW - timedelta(hours=h), u) for h, u in enumerate(old, 200)]
    needed = needed_past_retention(expired, retained)
    kept = [dated.usages for dated in expired if dated.captured_at in needed]
    assert max_merge(*kept, *retained) == max_merge(*[dated.usages for dated in expired], *retained)
