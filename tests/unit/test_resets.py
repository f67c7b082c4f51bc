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
    Commit,
    Entity,
    Everyone,
    Reset,
    Usages,
    Window,
    concerning,
    covers,
    eligible,
    keeping_out,
    last_excluded,
    max_merge,
)

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MONTH = BudgetWindow("team", Window.parse("2026-11"))
LIFETIME = BudgetWindow("team", Window.parse("lifetime"))
OTHER = BudgetWindow("other", Window.parse("2026-11"))
USAGES: Usages = {"alice": Decimal(5), "bob": Decimal(3), None: Decimal(8)}


NINE_DAYS = timedelta(days=9)


def at_second(second: int) -> Commit:
    """Return the commit of a capture so many seconds after noon; one second has one commit."""
    at = NOON + second * SECOND
    return Commit(number=1000 + second, captured_at=at, stored_at=at)


def reset(
    who: Entity | Everyone | frozenset[Entity],
    *,
    second: int = 0,
    window: str | None = None,
    budget: str = "team",
) -> Reset:
    """Return a reset that excludes what was captured until so many seconds after noon."""
    at = NOON + second * SECOND
    last = 1000 + second
    return Reset("acme", budget, window, who, at, "ann", "pardoned", NOON + NINE_DAYS, last)


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
    assert eligible(USAGES, at_second(0), MONTH, [reset(who)]) == left


def test_a_reset_excludes_usages_up_to_and_including_its_time() -> None:
    assert eligible(USAGES, at_second(0), MONTH, [ALICE]).keys() == {"bob", None}
    assert eligible(USAGES, at_second(-1), MONTH, [ALICE]).keys() == {"bob", None}
    assert eligible(USAGES, at_second(1), MONTH, [ALICE]) is USAGES


def test_a_reset_does_not_affect_other_budgets_and_windows() -> None:
    assert eligible(USAGES, at_second(0), OTHER, [ALICE]) is USAGES
    assert eligible(USAGES, at_second(0), LIFETIME, [reset(EVERYONE, window="2026-11")]) is USAGES
    assert eligible(USAGES, at_second(0), MONTH, []) is USAGES


def test_each_reset_excludes_its_own_usages() -> None:
    resets = [ALICE, reset("bob", second=-1), reset("alice", second=-1)]
    assert eligible(USAGES, at_second(-1), MONTH, resets) == {None: Decimal(8)}
    assert eligible(USAGES, at_second(0), MONTH, resets) == {"bob": Decimal(3), None: Decimal(8)}


def test_only_resets_that_exclude_something_are_listed() -> None:
    everyone, late = reset(EVERYONE), reset("bob", second=1)
    resets = [reset("nobody"), everyone, late, ALICE, reset("bob", budget="other")]
    assert keeping_out(USAGES, at_second(0), MONTH, resets) == (everyone, late, ALICE)
    assert keeping_out(USAGES, at_second(1), MONTH, resets) == (late,)
    # No reset excludes anything from a record without usages.
    assert keeping_out({}, at_second(0), MONTH, resets) == ()


# Which commits a reset excludes


def commit(number: int, captured: float, *, stored: float | None = None) -> Commit:
    """Return a commit with its times in hours after noon."""
    hour = timedelta(hours=1)
    return Commit(number, NOON + captured * hour, NOON + (stored or captured) * hour)


WRONG = 40 * 24.0  # by a clock that is 40 days ahead


@pytest.mark.parametrize(
    ("commits", "at", "recorded_at", "excluded"),
    [
        pytest.param([], 3, 3, 0, id="no snapshot"),
        pytest.param([commit(1, 1), commit(2, 2)], 3, 3, 2, id="for now"),
        pytest.param([commit(1, 1), commit(2, WRONG)], 3, 3, 2, id="for now, after a wrong clock"),
        pytest.param([commit(1, WRONG), commit(2, 2)], 3, 3, 2, id="for now, before it was right"),
        pytest.param([commit(1, 1), commit(2, 2), commit(3, 3)], 2, 4, 2, id="earlier"),
        pytest.param([commit(1, 1), commit(2, 2)], 0.5, 4, 0, id="before all"),
        pytest.param(
            [commit(1, 1), commit(2, WRONG), commit(3, 3)], 1, 4, 2, id="perhaps before the time"
        ),
        pytest.param(
            [commit(1, 1), commit(2, 2), commit(3, WRONG)], 1, 4, 1, id="surely after the time"
        ),
        pytest.param([commit(1, 1), commit(2, WRONG)], 1, 4, 2, id="of an unknown time"),
        pytest.param([commit(1, 2), commit(2, 1), commit(3, 3)], 1, 4, 2, id="clock set back"),
    ],
)
def test_a_reset_excludes_commits_until_one_is_surely_later(
    commits: list[Commit], at: float, recorded_at: float, excluded: int
) -> None:
    hour = timedelta(hours=1)
    for order in (commits, commits[::-1]):
        assert last_excluded(order, NOON + at * hour, NOON + recorded_at * hour) == excluded


def test_a_capture_that_ran_while_a_reset_was_recorded_is_excluded() -> None:
    recorded = replace(ALICE, at=NOON, recorded_at=NOON, last_excluded=7)
    assert recorded.excludes(commit(8, -0.5, stored=0.5))
    assert not recorded.excludes(commit(8, 0.5))


def test_a_reset_under_a_clock_that_was_ahead_excludes_nothing_committed_later() -> None:
    at = NOON + timedelta(days=40)
    recorded = replace(ALICE, at=at, recorded_at=at, last_excluded=7)
    assert recorded.excludes(commit(7, 1))
    assert not recorded.excludes(commit(8, 2))


# Why `covers_earlier` stays valid after later resets

usages = st.dictionaries(
    st.one_of(st.none(), st.sampled_from("ab")),
    st.decimals(min_value=0, max_value=9, places=0, allow_nan=False),
)
seconds = st.integers(min_value=-1, max_value=8)
resets = st.builds(
    lambda who, second: reset(who, second=second),
    st.sampled_from(["a", "b", None, EVERYONE]),
    seconds,
)


def merged(records: Sequence[Usages], recorded: Sequence[Reset]) -> Usages:
    """Merge the eligible usages of records captured second by second."""
    return max_merge(
        *[eligible(each, at_second(second), MONTH, recorded) for second, each in enumerate(records)]
    )


@given(st.lists(usages, max_size=6), st.lists(resets, max_size=3), st.lists(resets, max_size=3))
def test_a_record_that_covers_the_eligible_usages_still_covers_them_after_later_resets(
    records: list[dict[Entity, Decimal]], before: list[Reset], later: list[Reset]
) -> None:
    *earlier, newest = records or [{}]
    if covers(newest, merged(earlier, before)):
        last = at_second(len(earlier))
        recorded = [*before, *later]
        assert merged(records, recorded) == eligible(newest, last, MONTH, recorded)
