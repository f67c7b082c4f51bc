from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.domain import (
    EVERYONE,
    BudgetWindow,
    Entity,
    Everyone,
    Reset,
    Usages,
    Window,
    concerning,
    covers,
    eligible,
    keeping_out,
    max_merge,
    newest_at,
)

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MONTH = BudgetWindow("team", Window.parse("2026-11"))
LIFETIME = BudgetWindow("team", Window.parse("lifetime"))
OTHER = BudgetWindow("other", Window.parse("2026-11"))
USAGES: Usages = {"alice": Decimal(5), "bob": Decimal(3), None: Decimal(8)}


def reset(
    who: Entity | Everyone | frozenset[Entity],
    *,
    at: datetime = NOON,
    window: str | None = None,
    budget: str = "team",
) -> Reset:
    return Reset("acme", budget, window, who, at, "ann", "pardoned", NOON + timedelta(days=9))


ALICE = reset("alice")


# Valid resets


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tenant", "", "an empty name"),
        ("budget", "", "an empty name"),
        ("entity", "", "an empty name"),
        ("entity", "a\0b", "NUL"),
        ("entity", frozenset(), "a reset of no entity"),
        ("entity", frozenset({"a", ""}), "an empty name"),
        ("window", "2026-13", "'2026-13' is not a budget window"),
        ("window", "", "'' is not a budget window"),
        ("at", datetime(2026, 11, 25, 12), "no time zone"),  # noqa: DTZ001 - that is refused
        ("recorded_at", datetime(2026, 11, 25, 12), "no time zone"),  # noqa: DTZ001 - the same
        ("at", NOON + timedelta(days=9) + SECOND, "was recorded earlier"),
    ],
)
def test_an_invalid_name_window_or_time_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(ALICE, **{field: value})


def test_times_are_converted_to_utc() -> None:
    berlin = timezone(timedelta(hours=1))
    converted = replace(ALICE, at=datetime(2026, 11, 25, 13, tzinfo=berlin))
    assert converted == ALICE
    assert converted.at.tzinfo is UTC


def test_aggregate_everyone_and_an_entity_named_everyone_differ() -> None:
    assert not reset(None).is_of_everyone
    assert reset(EVERYONE).is_of_everyone
    assert not reset("EVERYONE").is_of_everyone
    assert not reset("everyone").is_of_everyone
    assert len({reset(None), reset(EVERYONE), reset("everyone")}) == 3


def test_a_reset_concerns_one_window_or_all_windows_of_its_budget() -> None:
    assert [reset("alice").is_about(of) for of in (MONTH, LIFETIME, OTHER)] == [True, True, False]
    of_month = reset("alice", window="2026-11")
    assert [of_month.is_about(of) for of in (MONTH, LIFETIME, OTHER)] == [True, False, False]
    assert concerning(LIFETIME, [of_month, ALICE]) == (ALICE,)


def test_the_newest_reset_has_the_latest_time() -> None:
    assert newest_at([]) is None
    assert newest_at([ALICE, reset("bob", at=NOON + SECOND), reset(None)]) == NOON + SECOND


# Excluded usage


@pytest.mark.parametrize(
    ("who", "left"),
    [
        ("alice", {"bob": Decimal(3), None: Decimal(8)}),
        (None, {"alice": Decimal(5), "bob": Decimal(3)}),
        (EVERYONE, {}),
        (frozenset({"alice", None, "nobody"}), {"bob": Decimal(3)}),
        ("nobody", USAGES),
    ],
)
def test_a_reset_excludes_the_usages_of_one_entity_of_several_or_of_all(
    who: Entity | Everyone | frozenset[Entity], left: Usages
) -> None:
    assert eligible(USAGES, NOON, MONTH, [reset(who)]) == left


def test_a_reset_excludes_usages_up_to_and_including_its_time() -> None:
    assert eligible(USAGES, NOON, MONTH, [ALICE]).keys() == {"bob", None}
    assert eligible(USAGES, NOON - SECOND, MONTH, [ALICE]).keys() == {"bob", None}
    assert eligible(USAGES, NOON + timedelta(microseconds=1), MONTH, [ALICE]) is USAGES


def test_a_reset_does_not_affect_other_budgets_and_windows() -> None:
    assert eligible(USAGES, NOON, OTHER, [ALICE]) is USAGES
    assert eligible(USAGES, NOON, LIFETIME, [reset(EVERYONE, window="2026-11")]) is USAGES
    assert eligible(USAGES, NOON, MONTH, []) is USAGES


def test_each_reset_excludes_its_own_usages() -> None:
    resets = [ALICE, reset("bob", at=NOON - SECOND), reset("alice", at=NOON - SECOND)]
    assert eligible(USAGES, NOON - SECOND, MONTH, resets) == {None: Decimal(8)}
    assert eligible(USAGES, NOON, MONTH, resets) == {"bob": Decimal(3), None: Decimal(8)}


def test_only_resets_that_exclude_something_are_listed() -> None:
    everyone, late = reset(EVERYONE), reset("bob", at=NOON + SECOND)
    resets = [reset("nobody"), everyone, late, ALICE, reset("bob", budget="other")]
    assert keeping_out(USAGES, NOON, MONTH, resets) == (everyone, late, ALICE)
    assert keeping_out(USAGES, NOON + SECOND, MONTH, resets) == (late,)
    # No reset excludes anything from a record without usages.
    assert keeping_out({}, NOON, MONTH, resets) == ()


# Why `covers_earlier` stays valid after later resets

usages = st.dictionaries(
    st.one_of(st.none(), st.sampled_from("ab")),
    st.decimals(min_value=0, max_value=9, places=0, allow_nan=False),
)
hours = st.integers(min_value=-1, max_value=8)
resets = st.builds(
    lambda who, hour: reset(who, at=NOON + timedelta(hours=hour)),
    st.sampled_from(["a", "b", None, EVERYONE]),
    hours,
)


def merged(records: Sequence[Usages], recorded: Sequence[Reset]) -> Usages:
    """Merge the eligible usages of records captured hour by hour."""
    return max_merge(
        *[
            eligible(each, NOON + timedelta(hours=hour), MONTH, recorded)
            for hour, each in enumerate(records)
        ]
    )


@given(st.lists(usages, max_size=6), st.lists(resets, max_size=3), st.lists(resets, max_size=3))
def test_a_record_that_covers_the_eligible_usages_still_covers_them_after_later_resets(
    records: list[dict[Entity, Decimal]], before: list[Reset], later: list[Reset]
) -> None:
    *earlier, newest = records or [{}]
    if covers(newest, merged(earlier, before)):
        at = NOON + timedelta(hours=len(earlier))
        recorded = [*before, *later]
        assert merged(records, recorded) == eligible(newest, at, MONTH, recorded)
