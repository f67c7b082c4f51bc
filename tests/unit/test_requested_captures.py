"""Captures that cannot wait for the next hour: after an incident, and at the first start."""

from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import CAPTURE_LEASE, RunOutcome
from budget_recovery_dagster.services.falls import CaptureRequest, requested_capture
from budget_recovery_dagster.services.restore import Recovered
from tests.unit.manual_harness import ManualHarness, captured_manual_harness, failed_manual_harness
from tests.unit.recovery_harness import AWAY

SECOND = timedelta(seconds=1)


@pytest.fixture
def harness() -> ManualHarness:
    return captured_manual_harness()


def lose(harness: ManualHarness) -> ManualHarness:
    harness.wipe()
    return harness


def request_of(harness: ManualHarness) -> CaptureRequest:
    request = requested_capture(harness.plane)
    assert request is not None
    assert request.hour == harness.hour
    return request


def is_requested(harness: ManualHarness) -> bool:
    return requested_capture(harness.plane) is not None


def test_nothing_is_requested_while_captures_are_paused(harness: ManualHarness) -> None:
    assert not is_requested(harness)
    assert not is_requested(lose(harness))
    assert not is_requested(failed_manual_harness())


def test_an_automatic_restore_requests_one_capture(harness: ManualHarness) -> None:
    assert isinstance(lose(harness).recover(), Recovered)
    first = request_of(harness)
    harness.clock.advance(30 * SECOND)
    # The same key, so that Dagster launches one run.
    assert request_of(harness) == first
    harness.clock.advance(SECOND)
    harness.capture("the requested run")
    assert not is_requested(harness)


def test_the_next_incident_has_a_request_of_its_own(harness: ManualHarness) -> None:
    lose(harness).recover()
    first = request_of(harness)
    harness.clock.advance(timedelta(minutes=1))
    harness.store.recreate(harness.clock.now())
    harness.check()
    assert not is_requested(harness)
    harness.recover()
    assert request_of(harness).key != first.key


def test_a_manual_restore_that_closes_the_incident_requests_a_capture() -> None:
    harness = failed_manual_harness()
    harness.apply()
    assert is_requested(harness)


def test_a_restore_without_an_incident_requests_nothing(harness: ManualHarness) -> None:
    harness.apply()
    assert not is_requested(harness)


def test_resolve_has_seconds_to_capture_by_itself(harness: ManualHarness) -> None:
    lose(harness).resolve()
    assert not is_requested(harness)
    # Its capture has failed, or its process has died.
    harness.clock.advance(10 * SECOND)
    assert is_requested(harness)


def test_a_capture_that_failed_is_requested_again_with_another_key(harness: ManualHarness) -> None:
    lose(harness).recover()
    first = request_of(harness)
    harness.clock.advance(SECOND)
    harness.store.observe_failure = AWAY
    captured = harness.capture("the requested run")
    assert captured.result.outcome is RunOutcome.FAILED
    harness.store.observe_failure = None
    assert request_of(harness) == first
    # Dagster launches nothing for a key that had a run.
    harness.clock.advance(timedelta(minutes=10))
    assert request_of(harness).key != first.key
    harness.capture("the next run")
    assert not is_requested(harness)


def test_nothing_is_requested_while_a_capture_runs(harness: ManualHarness) -> None:
    lose(harness).recover()
    with harness.plane.leases.hold(CAPTURE_LEASE, "another"):
        assert not is_requested(harness)
    assert is_requested(harness)


def test_nothing_is_requested_at_the_end_of_an_hour(harness: ManualHarness) -> None:
    lose(harness).recover()
    harness.clock.set(harness.hour.end - 30 * SECOND)
    assert not is_requested(harness)
    # The scheduled capture of the next hour is the next snapshot.
    harness.clock.advance(31 * SECOND)
    assert is_requested(harness)
    harness.capture("the hourly run")
    assert not is_requested(harness)


def test_the_first_capture_is_requested_once_a_check_has_found_the_store() -> None:
    harness = ManualHarness()
    assert not is_requested(harness)
    harness.store.observe_failure = AWAY
    harness.check()
    assert not is_requested(harness)
    harness.store.observe_failure = None
    harness.check()
    first = request_of(harness)
    assert request_of(harness) == first
    # It finds nothing to store yet; the next one is the hourly capture.
    harness.capture("the first run")
    assert not is_requested(harness)
