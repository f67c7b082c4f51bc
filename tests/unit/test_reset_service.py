"""Recording resets and restoring after them, with an in-memory control plane."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from budget_recovery_dagster.domain import EVERYONE, Entity, Everyone, Outcome, RecoveryState
from budget_recovery_dagster.errors import ChoiceError
from budget_recovery_dagster.presentation import reset_report
from budget_recovery_dagster.services import RecordedReset, ResetRequest, record_reset
from budget_recovery_dagster.services.restore import Recovered
from tests.unit.capture_harness import NOW
from tests.unit.manual_harness import captured_manual_harness
from tests.unit.recovery_harness import RecoveryHarness, captured_harness

SECOND = timedelta(seconds=1)
REQUEST = ResetRequest("a", "spend", None, "alice", None, "ann", "pardoned")


@pytest.fixture
def harness() -> RecoveryHarness:
    """Return a store captured ten minutes ago: tenant a had used 80, alice 30 of it, and b 5."""
    return captured_harness()


def record(harness: RecoveryHarness, request: ResetRequest = REQUEST) -> RecordedReset:
    return record_reset(harness.plane, request, lambda: nullcontext(harness.store))


# What is recorded


def test_a_reset_applies_from_now_unless_a_time_is_given(harness: RecoveryHarness) -> None:
    now = harness.clock.now()
    reset = record(harness).reset
    assert (reset.at, reset.recorded_at) == (now, now)
    earlier = record(harness, replace(REQUEST, at=NOW - SECOND)).reset
    assert (earlier.at, earlier.recorded_at) == (NOW - SECOND, now)
    assert harness.plane.state.resets == [reset, earlier]


def test_a_reset_lists_the_open_windows_with_excluded_usage(harness: RecoveryHarness) -> None:
    harness.store.put_usage("a", "spend", "2026-11", "alice", "7")
    harness.store.put_usage("a", "spend", "2026-11-24", "alice", "7")
    harness.clock.advance(SECOND)
    harness.capture("another run")
    assert [of.window.token for of in record(harness).windows] == ["2026-11", "lifetime"]
    of_month = record(harness, replace(REQUEST, window="2026-11"))
    assert [of.window.token for of in of_month.windows] == ["2026-11"]
    # The window of yesterday has closed, and no snapshot has an entity 'alise'.
    assert record(harness, replace(REQUEST, window="2026-11-24")).windows == ()
    assert record(harness, replace(REQUEST, entity="alise")).windows == ()


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"tenant": "c"}, "tenant 'c'", "choose one of the tenants: 'a', 'b'."),
        ({"tenant": "*"}, "tenant '*' stands for all", "choose one of the tenants: 'a', 'b'."),
        ({"tenant": "=2A"}, "tenant '*' is retained", "choose one of the tenants: 'a', 'b'."),
        ({"budget": "spent"}, "budget 'spent' of tenant 'a'", "one of its budgets: 'spend'."),
        ({"window": "2026-13"}, "'2026-13' is not a budget window", "correct"),
        ({"entity": ""}, "an empty name", "correct"),
        ({"reason": " \n"}, "The reason is empty.", "give a reason"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_valid_ones(
    harness: RecoveryHarness, change: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ChoiceError) as refused:
        record(harness, replace(REQUEST, **change))
    assert message in refused.value.message
    assert hint in refused.value.hint
    assert harness.plane.state.resets == []


def test_a_time_in_the_future_is_refused(harness: RecoveryHarness) -> None:
    with pytest.raises(ChoiceError) as refused:
        record(harness, replace(REQUEST, at=harness.clock.now() + SECOND))
    assert refused.value.message == (
        "The time of the reset is in the future: 2026-11-25 12:15:01 UTC; it is"
        " 2026-11-25 12:15:00 UTC."
    )
    assert harness.plane.state.resets == []


def test_a_long_list_of_choices_is_cut() -> None:
    harness = RecoveryHarness()
    for number in range(1200):
        harness.spend(f"t{number:04}", "1")
    harness.capture()
    with pytest.raises(ChoiceError) as refused:
        record(harness)
    assert refused.value.hint.endswith(", 't0018', 't0019' and 1,180 more.")


def test_a_reset_without_snapshots_is_refused() -> None:
    with pytest.raises(ChoiceError) as refused:
        record(RecoveryHarness())
    assert refused.value.hint == "take a snapshot first; no tenant has one."


# The report


@pytest.mark.parametrize(
    ("who", "window", "message"),
    [
        ("alice", None, "entity 'alice' in all windows of budget 'spend' of tenant 'a'"),
        (None, "lifetime", "the aggregate in lifetime of budget 'spend' of tenant 'a'"),
        (EVERYONE, None, "every entity and the aggregate in all windows of budget 'spend'"),
    ],
)
def test_the_report_shows_what_was_recorded_and_what_must_precede_it(
    harness: RecoveryHarness, who: Entity | Everyone, window: str | None, message: str
) -> None:
    what, left_out, warning = reset_report(
        record(harness, replace(REQUEST, entity=who, window=window))
    )
    assert what.startswith(f"Recorded: {message}")
    assert "reset at 2026-11-25 12:15:00 UTC." in what
    assert left_out == "The reset excludes recorded usage in these open windows: lifetime."
    assert "the gateway must have lowered" in warning


def test_the_report_says_if_the_reset_excludes_nothing(harness: RecoveryHarness) -> None:
    _, left_out, _ = reset_report(record(harness, replace(REQUEST, entity="alise")))
    assert left_out.startswith(
        "The reset excludes nothing yet: no snapshot has such usage in an open window"
    )


def test_the_report_warns_if_a_restore_may_have_read_earlier_resets(
    harness: RecoveryHarness,
) -> None:
    assert len(reset_report(record(harness))) == 3
    harness.wipe()
    assert harness.state is RecoveryState.RECOVERING
    assert reset_report(record(harness))[3].startswith("A restore is running")


def test_a_reset_during_a_manual_restore_of_a_healthy_store_is_warned_about() -> None:
    harness = captured_manual_harness()
    harness.store.purge("usage.a")
    recorded: list[RecordedReset] = []
    harness.before_write(1, lambda: recorded.append(record(harness)))
    harness.apply()
    # The restore had read its recovery point, so it revived what was reset.
    assert harness.usage("a", "alice") == "30"
    assert [each.is_restoring for each in recorded] == [True]
    assert reset_report(recorded[0])[3].startswith("A restore is running")


# Recoveries


def test_a_reset_survives_a_wipe_and_an_automatic_restore(harness: RecoveryHarness) -> None:
    harness.spend("a", "0", "alice")
    record(harness)
    harness.wipe()
    assert isinstance(harness.recover(), Recovered)
    assert harness.usage("a", "alice") is None
    assert (harness.usage("a"), harness.usage("b")) == ("80", "5")


def test_a_reset_recorded_after_the_loss_is_effective(harness: RecoveryHarness) -> None:
    harness.wipe()
    record(harness)
    assert isinstance(harness.recover(), Recovered)
    assert (harness.usage("a", "alice"), harness.usage("a")) == (None, "80")


def test_usage_after_the_reset_is_restored(harness: RecoveryHarness) -> None:
    harness.spend("a", "0", "alice")
    record(harness)
    harness.clock.advance(SECOND)
    harness.spend("a", "2", "alice")
    captured = harness.capture("another run")
    assert [stored.drops for stored in captured.stored] == [0, 0]
    harness.wipe()
    assert isinstance(harness.recover(), Recovered)
    assert harness.usage("a", "alice") == "2"


def test_a_restore_raises_nothing_if_all_usage_was_reset() -> None:
    harness = RecoveryHarness()
    harness.spend("a", "80")
    harness.capture()
    harness.check()
    harness.clock.advance(timedelta(minutes=10))
    harness.store.recreate(NOW)
    record(harness, replace(REQUEST, entity=EVERYONE))
    harness.check()
    result = harness.recover()
    assert isinstance(result, Recovered)
    assert result.incident.ended is not None
    assert result.incident.ended.outcome is not Outcome.RESTORED
    assert harness.state is RecoveryState.HEALTHY
    assert harness.usage("a") is None
