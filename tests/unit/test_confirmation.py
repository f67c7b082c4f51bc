"""Observations that confirm an alarm, or do not, and what a restore does without a marker."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from budget_recovery_dagster.domain import (
    Outcome,
    RecoveryState,
    StoreIdentity,
    Verdict,
)
from budget_recovery_dagster.errors import AttemptFailedError
from budget_recovery_dagster.ports import UsageStore
from budget_recovery_dagster.services import Checked, check_store
from budget_recovery_dagster.services.restore import GaveUp, Recovered, StillWaiting
from tests.fakes.usage_store import MemoryUsageStore
from tests.unit.capture_harness import BORN, REBORN
from tests.unit.recovery_harness import FULL, RecoveryHarness, captured_harness

UNREADABLE = b'{"usage":"a lot"}'


@pytest.fixture
def harness() -> RecoveryHarness:
    return captured_harness()


def check_in_turn(harness: RecoveryHarness, stores: Sequence[UsageStore]) -> Checked:
    """Check the store; each connection leads to the next one."""
    turns: Iterator[UsageStore] = iter(stores)
    return check_store(harness.plane, lambda: nullcontext(next(turns)), checked_by="a check")


def empty_store(created_at: object = REBORN, sequence: int = 0) -> MemoryUsageStore:
    store = MemoryUsageStore()
    store.stream = StoreIdentity(created_at, sequence)  # type: ignore[arg-type]
    return store


def test_losses_of_different_kinds_confirm_each_other(harness: RecoveryHarness) -> None:
    """The sequence is back; then traffic overtakes it, and the marker is gone."""
    back, overtaken = empty_store(BORN, 2), empty_store(BORN, 400)
    checked = check_in_turn(harness, [back, overtaken])
    assert checked.check.verdict is Verdict.LOST
    assert checked.recovery.state is RecoveryState.RECOVERING


def test_two_of_three_observations_confirm_an_alarm(harness: RecoveryHarness) -> None:
    other, newer = empty_store(), empty_store(REBORN + timedelta(minutes=1))
    checked = check_in_turn(harness, [other, newer, other])
    assert checked.recovery.state is RecoveryState.RECOVERING


@pytest.mark.parametrize("created_at", [REBORN, BORN])
def test_the_accepted_store_between_two_others_is_no_loss(
    harness: RecoveryHarness, created_at: datetime
) -> None:
    """Two servers answer in turn at one address, whatever the other one is."""
    for _ in range(3):
        other = empty_store(created_at)
        checked = check_in_turn(harness, [other, harness.store, other])
        assert checked.check.verdict is Verdict.UNKNOWN
        assert "Two observations of the store disagree" in checked.check.reason
        assert checked.recovery.state is RecoveryState.HEALTHY


def test_one_of_three_observations_opens_no_incident(harness: RecoveryHarness) -> None:
    checked = check_in_turn(harness, [empty_store(), harness.store, harness.store])
    assert checked.check.verdict is Verdict.UNKNOWN
    assert "Two observations of the store disagree" in checked.check.reason
    assert checked.recovery.state is RecoveryState.HEALTHY


def test_a_store_that_goes_back_between_observations_is_no_confirmation(
    harness: RecoveryHarness,
) -> None:
    stores = [empty_store(sequence=sequence) for sequence in (9, 8, 7)]
    checked = check_in_turn(harness, stores)
    incident = checked.recovery.incident
    assert incident is not None
    assert incident.target is None


def test_three_observations_that_differ_open_an_incident_that_waits_until_a_pair_agrees(
    harness: RecoveryHarness,
) -> None:
    stores = [empty_store(REBORN + timedelta(minutes=minutes)) for minutes in range(3)]
    checked = check_in_turn(harness, stores)
    incident = checked.recovery.incident
    assert incident is not None
    assert checked.recovery.state is RecoveryState.RECOVERING
    assert (incident.target, incident.losses[0].after, incident.losses[0].evidence) == (None,) * 3
    assert "Three observations of the store differ" in incident.losses[0].reason

    settled = harness.store
    settled.recreate(REBORN)
    result = harness.recover()
    assert isinstance(result, Recovered)
    assert harness.usage("a") == "80"


# Nothing to raise, and no marker


def test_a_loss_with_nothing_to_raise_closes_although_the_full_store_refuses_the_marker(
    harness: RecoveryHarness,
) -> None:
    harness.store.stream = replace(harness.store.stream, created_at=REBORN)
    harness.check()
    harness.store.marker_failure = FULL
    result = harness.recover()
    assert isinstance(result, Recovered)
    assert result.incident.ended is not None
    assert result.incident.ended.outcome is Outcome.NOTHING_LOST
    assert result.incident.attempts == 0
    assert harness.store.writes == 0
    # Detection goes on without a new marker, and says so.
    checked = harness.check()
    assert checked.check.verdict is Verdict.SAME
    assert "The marker was not renewed" in checked.check.reason
    harness.store.marker_failure = None
    assert harness.check().hint == ""


def test_unreadable_counters_keep_such_an_incident_open(harness: RecoveryHarness) -> None:
    harness.store.put("usage.a.spend.lifetime.alice", UNREADABLE)
    harness.store.stream = replace(harness.store.stream, created_at=REBORN)
    harness.check()
    harness.store.marker_failure = FULL
    result = harness.recover()
    assert isinstance(result, StillWaiting)
    assert "1 live counter cannot be read" in result.reason
    assert harness.incident.attempts == 0

    harness.store.marker_failure = None
    for _ in range(2):
        with pytest.raises(AttemptFailedError, match="cannot be read"):
            harness.recover()
    given_up = harness.recover()
    assert isinstance(given_up, GaveUp)
    assert "cannot be read" in given_up.detail
    assert harness.state is RecoveryState.FAILED
