"""Recording resets, and recoveries after them, with everything in memory."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from budget_recovery_dagster.domain import EVERYONE, Entity, Everyone, Outcome, RecoveryState
from budget_recovery_dagster.errors import ChoiceError
from budget_recovery_dagster.presentation import reset_report
from budget_recovery_dagster.services import RecordedReset, ResetRequest, record_reset
from budget_recovery_dagster.services.restore import Recovered
from tests.unit.capture_house import NOW
from tests.unit.recovery_house import RecoveryHouse, captured_house

SECOND = timedelta(seconds=1)
REQUEST = ResetRequest("a", "spend", None, "alice", None, "ann", "pardoned")


@pytest.fixture
def house() -> RecoveryHouse:
    """Tenant a has used 80, alice 30 of it, and b 5, ten minutes ago."""
    return captured_house()


def record(house: RecoveryHouse, request: ResetRequest = REQUEST) -> RecordedReset:
    return record_reset(house.plane, request)


# What is recorded


def test_a_reset_is_of_now_unless_another_time_is_named(house: RecoveryHouse) -> None:
    now = house.clock.now()
    reset = record(house).reset
    assert (reset.at, reset.recorded_at) == (now, now)
    earlier = record(house, replace(REQUEST, at=NOW - SECOND)).reset
    assert (earlier.at, earlier.recorded_at) == (NOW - SECOND, now)
    assert house.plane.resets.of_tenant("a") == (reset, earlier)


def test_a_reset_tells_which_windows_it_leaves_something_out_of(house: RecoveryHouse) -> None:
    house.store.put_usage("a", "spend", "2026-11", "alice", "7")
    house.store.put_usage("a", "spend", "2026-11-24", "alice", "7")
    house.clock.advance(SECOND)
    house.capture("another run")
    assert [of.window.token for of in record(house).windows] == ["2026-11", "lifetime"]
    of_month = record(house, replace(REQUEST, window="2026-11"))
    assert [of.window.token for of in of_month.windows] == ["2026-11"]
    # Yesterday has closed, and of nobody is there anything.
    assert record(house, replace(REQUEST, window="2026-11-24")).windows == ()
    assert record(house, replace(REQUEST, entity="alise")).windows == ()


@pytest.mark.parametrize(
    ("change", "said", "hint"),
    [
        ({"tenant": "c"}, "tenant 'c'", "choose one of the tenants: 'a', 'b'."),
        ({"tenant": "*"}, "tenant '*'", "choose one of the tenants: 'a', 'b'."),
        ({"budget": "spent"}, "budget 'spent' of tenant 'a'", "one of its budgets: 'spend'."),
        ({"window": "2026-13"}, "'2026-13' is not a budget window", "correct"),
        ({"entity": ""}, "an empty name", "correct"),
        ({"reason": " \n"}, "The reason is empty.", "give the reason"),
    ],
)
def test_what_no_snapshot_has_is_refused_with_the_choices(
    house: RecoveryHouse, change: dict[str, Any], said: str, hint: str
) -> None:
    with pytest.raises(ChoiceError) as refused:
        record(house, replace(REQUEST, **change))
    assert said in refused.value.message
    assert hint in refused.value.hint
    assert house.plane.resets.recent(1) == ()


def test_a_time_to_come_is_refused(house: RecoveryHouse) -> None:
    with pytest.raises(ChoiceError) as refused:
        record(house, replace(REQUEST, at=house.clock.now() + SECOND))
    assert refused.value.message == (
        "The time of the reset is in the future: 2026-11-25 12:15:01 UTC; it is"
        " 2026-11-25 12:15:00 UTC."
    )
    assert house.plane.resets.recent(1) == ()


def test_of_very_many_names_the_first_are_told() -> None:
    house = RecoveryHouse()
    for number in range(1200):
        house.spend(f"t{number:04}", "1")
    house.capture()
    with pytest.raises(ChoiceError) as refused:
        record(house)
    assert refused.value.hint.endswith(", 't0018', 't0019' and 1,180 more.")


def test_without_any_snapshot_there_is_nothing_to_choose() -> None:
    with pytest.raises(ChoiceError) as refused:
        record(RecoveryHouse())
    assert refused.value.hint == "take a snapshot first; no tenant has one."


# What people are told


@pytest.mark.parametrize(
    ("who", "window", "said"),
    [
        ("alice", None, "entity 'alice' in all windows of budget 'spend' of tenant 'a'"),
        (None, "lifetime", "the aggregate in lifetime of budget 'spend' of tenant 'a'"),
        (EVERYONE, None, "every entity and the aggregate in all windows of budget 'spend'"),
    ],
)
def test_people_are_told_what_was_recorded_and_what_must_have_come_first(
    house: RecoveryHouse, who: Entity | Everyone, window: str | None, said: str
) -> None:
    what, left_out, warning = reset_report(
        record(house, replace(REQUEST, entity=who, window=window))
    )
    assert what.startswith(f"Recorded: {said}")
    assert "reset at 2026-11-25 12:15:00 UTC." in what
    assert left_out == "The reset excludes recorded usage in these open windows: lifetime."
    assert "the gateway must have lowered" in warning


def test_people_are_told_where_nothing_is_left_out(house: RecoveryHouse) -> None:
    _, left_out, _ = reset_report(record(house, replace(REQUEST, entity="alise")))
    assert left_out.startswith(
        "The reset excludes nothing yet: no snapshot has such usage in an open window"
    )


def test_people_are_told_while_a_restore_may_have_read_the_old_ones(house: RecoveryHouse) -> None:
    assert len(reset_report(record(house))) == 3
    house.wipe()
    assert house.state is RecoveryState.RECOVERING
    assert reset_report(record(house))[3].startswith("A restore is running")


# Recoveries


def test_reset_wipe_automatic_restore_the_reset_stands(house: RecoveryHouse) -> None:
    house.spend("a", "0", "alice")
    record(house)
    house.wipe()
    assert isinstance(house.recover(), Recovered)
    assert house.usage("a", "alice") is None
    assert (house.usage("a"), house.usage("b")) == ("80", "5")


def test_a_reset_that_is_recorded_after_the_loss_stands_too(house: RecoveryHouse) -> None:
    house.wipe()
    record(house)
    assert isinstance(house.recover(), Recovered)
    assert (house.usage("a", "alice"), house.usage("a")) == (None, "80")


def test_what_was_used_after_the_reset_comes_back(house: RecoveryHouse) -> None:
    house.spend("a", "0", "alice")
    record(house)
    house.clock.advance(SECOND)
    house.spend("a", "2", "alice")
    captured = house.capture("another run")
    assert [stored.drops for stored in captured.stored] == [0, 0]
    house.wipe()
    assert isinstance(house.recover(), Recovered)
    assert house.usage("a", "alice") == "2"


def test_where_everything_was_reset_a_loss_ends_with_nothing_to_raise() -> None:
    house = RecoveryHouse()
    house.spend("a", "80")
    house.capture()
    house.check()
    house.clock.advance(timedelta(minutes=10))
    house.store.recreate(NOW)
    record(house, replace(REQUEST, entity=EVERYONE))
    house.check()
    result = house.recover()
    assert isinstance(result, Recovered)
    assert result.incident.ended is not None
    assert result.incident.ended.outcome is not Outcome.RESTORED
    assert house.state is RecoveryState.HEALTHY
    assert house.usage("a") is None
