from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.domain import (
    Action,
    BudgetWindow,
    Entity,
    PlannedEntry,
    RecoveryPlan,
    TenantUsages,
    Window,
    plan_restore,
)

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
INSTANT = timedelta(microseconds=1)
MONTH = BudgetWindow("team", Window.parse("2026-11"))
EVER = BudgetWindow("team", Window.parse("lifetime"))


def usages(text: Mapping[Entity, str]) -> dict[Entity, Decimal]:
    return {entity: Decimal(usage) for entity, usage in text.items()}


def planned(plan: RecoveryPlan) -> dict[Entity, Action]:
    return {entry.entity: entry.action for entry in plan.entries}


def test_lower_and_missing_counters_are_raised_and_the_others_kept() -> None:
    recorded = {EVER: usages({"lower": "5", "missing": "3", "equal": "2", "higher": "1"})}
    live = {EVER: usages({"lower": "4.5", "equal": "2", "higher": "7", "new": "9"})}
    plan = plan_restore("acme", recorded, live, (), NOW)
    assert plan.entries == (
        PlannedEntry(EVER, "equal", Decimal(2), Decimal(2), Action.KEEP),
        PlannedEntry(EVER, "higher", Decimal(1), Decimal(7), Action.KEEP),
        PlannedEntry(EVER, "lower", Decimal(5), Decimal("4.5"), Action.RAISE),
        PlannedEntry(EVER, "missing", Decimal(3), None, Action.RAISE),
    )
    assert [entry.result for entry in plan.entries] == [2, 7, 5, 3]
    assert any(plan.that(Action.RAISE))
    assert [entry.entity for entry in plan.that(Action.RAISE)] == ["lower", "missing"]


def test_an_unreadable_live_counter_is_skipped_without_affecting_others() -> None:
    recorded = {EVER: usages({"bad": "5", None: "6"})}
    plan = plan_restore("acme", recorded, {}, {(EVER, "bad")}, NOW)
    assert planned(plan) == {"bad": Action.SKIP_UNREADABLE, None: Action.RAISE}


@pytest.mark.parametrize(
    ("captured", "now", "closed", "open_still"),
    [
        # Captured on 31 May, restored on 1 June: the month has closed, the quarter has not.
        (
            ("2026-05-31", "2026-05", "2026-Q2", "lifetime"),
            datetime(2026, 6, 1, 0, 5, tzinfo=UTC),
            {"2026-05-31", "2026-05"},
            {"2026-Q2", "lifetime"},
        ),
        # From Sunday to Monday.
        (
            ("2026-W48", "2026-11"),
            datetime(2026, 11, 30, tzinfo=UTC),
            {"2026-W48"},
            {"2026-11"},
        ),
        # Week 53 ends in the next year.
        (
            ("2026-W53", "2026-12", "2026-Q4"),
            datetime(2027, 1, 1, tzinfo=UTC),
            {"2026-12", "2026-Q4"},
            {"2026-W53"},
        ),
        # A leap day belongs to February.
        (
            ("2028-02-28", "2028-02"),
            datetime(2028, 2, 29, tzinfo=UTC),
            {"2028-02-28"},
            {"2028-02"},
        ),
    ],
)
def test_a_closed_window_is_never_written(
    captured: tuple[str, ...], now: datetime, closed: set[str], open_still: set[str]
) -> None:
    recorded: TenantUsages = {
        BudgetWindow("team", Window.parse(token)): usages({"alice": "5"}) for token in captured
    }
    plan = plan_restore("acme", recorded, {}, (), now)
    assert {e.of.window.token for e in plan.that(Action.SKIP_CLOSED)} == closed
    assert {e.of.window.token for e in plan.that(Action.RAISE)} == open_still


def test_a_window_is_open_until_its_last_instant() -> None:
    end = datetime(2026, 12, 1, tzinfo=UTC)
    recorded = {MONTH: usages({"alice": "5"})}
    before = plan_restore("acme", recorded, {}, (), end - INSTANT)
    assert planned(before) == {"alice": Action.RAISE}
    assert planned(plan_restore("acme", recorded, {}, (), end)) == {"alice": Action.SKIP_CLOSED}


def test_a_plan_needs_a_time_zone() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        plan_restore("acme", {}, {}, (), NOW.replace(tzinfo=None))


def test_a_plan_without_records_raises_nothing() -> None:
    plan = plan_restore("acme", {}, {EVER: usages({"alice": "5"})}, (), NOW)
    assert plan.entries == ()
    assert not any(plan.that(Action.RAISE))


entities = st.none() | st.sampled_from("abcd")
points = st.dictionaries(
    st.sampled_from([MONTH, EVER]),
    st.dictionaries(entities, st.decimals(0, 100, places=2), max_size=5),
)


@given(points, points)
def test_a_restore_is_the_maximum_and_a_second_one_does_nothing(
    recorded: TenantUsages, live: TenantUsages
) -> None:
    plan = plan_restore("acme", recorded, live, (), NOW)
    after = {of: dict(each) for of, each in live.items()}
    for entry in plan.that(Action.RAISE):
        after.setdefault(entry.of, {})[entry.entity] = entry.recorded
    for of in recorded.keys() | live.keys():
        for entity in recorded.get(of, {}).keys() | live.get(of, {}).keys():
            both = [each[of][entity] for each in (recorded, live) if entity in each.get(of, {})]
            assert after[of][entity] == max(both)
    again = plan_restore("acme", recorded, after, (), NOW)
    assert not any(again.that(Action.RAISE))
