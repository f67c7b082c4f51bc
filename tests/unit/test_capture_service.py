"""When a capture may run, and what stops it; with fakes that pass the contract tests."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest

from budget_recovery_dagster.domain import (
    CAPTURE_LEASE,
    Hour,
    RecordedRun,
    RecoveryState,
    RunOutcome,
    RunResult,
    Stopped,
)
from budget_recovery_dagster.errors import (
    CapturesPausedError,
    ClockSkewError,
    DatabaseError,
    DatabaseUnreachableError,
    HourClosedError,
    HourNotCapturedError,
    HourNotReachedError,
    LeaseHeldError,
    LeaseLostError,
    SettingsError,
    StoreUnreachableError,
)
from budget_recovery_dagster.services import Captured, Paused, Verified, measure_clock_skew
from tests.fakes.control_plane import ManualClock
from tests.fakes.incidents import MemoryStoreRegistry
from tests.fakes.usage_store import MemoryUsageStore
from tests.unit.capture_harness import (
    BORN,
    DENIED,
    Harness,
    RefusingSnapshots,
    UnprunableSnapshots,
    names,
)


def test_a_store_that_goes_down_is_not_tried_for_the_remaining_tenants(harness: Harness) -> None:
    gone = StoreUnreachableError("No answer.", "see whether NATS runs.")

    def go_down() -> None:
        harness.store.identity_failure = gone
        harness.store.failures = {"b": gone, "c": DENIED}

    harness.while_reading("a", go_down)
    captured = harness.capture()

    # "c" was not read: its own failure has another message.
    assert [f.reason for f in captured.failed] == ["No answer."] * 3
    assert captured.stopped_by is gone


def test_an_unreachable_store_is_recorded_as_a_failure_of_every_known_tenant(
    harness: Harness,
) -> None:
    harness.capture()
    harness.store.identity_failure = StoreUnreachableError("No answer.", "see whether NATS runs.")
    captured = harness.capture("later")
    assert [f.name for f in harness.plane.reports.failures_of("later")] == ["a", "b", "c"]
    assert captured.read == frozenset()


def test_a_capture_waits_for_its_hour_if_the_scheduler_is_slightly_ahead(harness: Harness) -> None:
    next_hour = Hour(harness.hour.end)
    harness.clock.set(next_hour.start - timedelta(seconds=8))
    captured = harness.run(hour=next_hour)
    assert isinstance(captured, Captured)
    assert next_hour.start <= captured.captured_at < next_hour.end


class StandingClock(ManualClock):
    """A clock that stands still while a capture waits."""

    waited = timedelta(0)

    def wait(self, span: timedelta) -> None:
        self.waited += span


def test_a_clock_that_stands_still_ends_the_wait_for_the_hour(harness: Harness) -> None:
    next_hour = Hour(harness.hour.end)
    clock = StandingClock(next_hour.start - timedelta(seconds=8))
    harness.plane = replace(harness.plane, clock=clock)
    with pytest.raises(HourNotReachedError, match="stands still"):
        harness.run(hour=next_hour)
    assert clock.waited <= timedelta(minutes=3)


def test_a_capture_stops_after_three_commits_that_the_database_refuses(harness: Harness) -> None:
    for tenant in "defgh":
        harness.spend(tenant, "10")
    refused = DatabaseError("The database refused: disk full.", "free disk space.")
    harness.plane = replace(
        harness.plane, snapshots=RefusingSnapshots(harness.plane.state, refused)
    )
    captured = harness.capture()
    assert captured.stopped_by is refused
    assert [f.seconds > 0 for f in captured.failed] == [True] * 3 + [False] * 5


def test_snapshots_are_reported_even_if_pruning_fails(harness: Harness) -> None:
    failure = DatabaseError("The database refused: too slow.", "see pg_stat_activity.")
    harness.plane = replace(
        harness.plane, snapshots=UnprunableSnapshots(harness.plane.state, failure)
    )
    captured = harness.capture()
    assert names(captured.stored) == ["a", "b", "c"]
    assert captured.prune_failure is failure


def test_an_unreachable_database_ends_the_capture(harness: Harness) -> None:
    gone = DatabaseUnreachableError("No connection.", "see whether PostgreSQL runs.")
    harness.plane = replace(harness.plane, snapshots=RefusingSnapshots(harness.plane.state, gone))
    with pytest.raises(DatabaseUnreachableError):
        harness.run()
    assert harness.outcomes == []


def test_a_second_capture_is_refused_with_the_lease_holder(harness: Harness) -> None:
    with (
        harness.plane.leases.hold(CAPTURE_LEASE, "run 1234 on host-a (pid 7)"),
        pytest.raises(LeaseHeldError, match=r"run 1234 on host-a \(pid 7\)"),
    ):
        harness.run()
    assert names(harness.capture().stored) == ["a", "b", "c"]


def test_nothing_is_stored_after_the_lease_is_lost(harness: Harness) -> None:
    harness.while_reading("b", lambda: harness.plane.leases.lose(CAPTURE_LEASE))
    captured = harness.capture()
    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, LeaseLostError)
    assert captured.pruned is None


def test_nothing_is_stored_after_the_hour_has_closed(harness: Harness) -> None:
    harness.while_reading("b", lambda: harness.clock.set(harness.hour.end))
    captured = harness.capture()
    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, HourClosedError)


def test_nothing_is_stored_after_captures_are_paused(harness: Harness) -> None:
    harness.while_reading("b", lambda: harness.plane.registry.set_state(RecoveryState.RECOVERING))
    captured = harness.capture()
    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, CapturesPausedError)


@pytest.mark.parametrize("state", [RecoveryState.RECOVERING, RecoveryState.FAILED])
def test_nothing_is_read_while_captures_are_paused(state: RecoveryState, harness: Harness) -> None:
    harness.plane.registry.claim()
    harness.plane.registry.set_state(state)
    assert harness.run() == Paused(state)
    assert harness.outcomes == []


def test_a_past_hour_is_verified_if_captured_and_refused_if_not(harness: Harness) -> None:
    stored_hour = harness.hour
    harness.capture("stored")
    harness.clock.advance(timedelta(hours=3))
    harness.spend("a", "99")

    verified = harness.run(hour=stored_hour)
    assert isinstance(verified, Verified)
    assert [s.tenant for s in verified.snapshots] == ["a", "b", "c"]
    assert verified.damage == ()
    with pytest.raises(HourNotCapturedError, match=r"2026-11-25-13:00 UTC.*2026-11-25-15:00"):
        harness.run(hour=Hour.parse("2026-11-25-13:00"))
    assert harness.known("a") == Decimal(10)


def test_a_future_hour_is_refused(harness: Harness) -> None:
    with pytest.raises(HourNotReachedError, match="has not begun"):
        harness.run(hour=Hour(harness.hour.end))


def test_a_current_hour_can_be_captured_again(harness: Harness) -> None:
    harness.capture("first")
    harness.clock.advance(timedelta(minutes=10))
    harness.spend("a", "11")
    harness.capture("second")
    assert [
        s.run_id for s in harness.plane.reports.captured_in(harness.hour) if s.tenant == "a"
    ] == [
        "first",
        "second",
    ]


def test_the_database_of_another_bucket_is_refused(harness: Harness) -> None:
    MemoryStoreRegistry(harness.plane.state, "other-bucket").claim()
    with pytest.raises(SettingsError, match="BUDGET_RECOVERY_BUCKET"):
        harness.run()


def test_the_night_of_the_autumn_clock_change_has_25_snapshots(harness: Harness) -> None:
    new_york = ZoneInfo("America/New_York")
    harness.clock.set(datetime(2026, 11, 1, 0, 0, 30, tzinfo=new_york).astimezone(UTC))
    hours = []
    while harness.clock.now() < datetime(2026, 11, 2, tzinfo=new_york):
        hours.append(harness.hour)
        harness.capture(f"run {len(hours)}")
        harness.clock.advance(timedelta(hours=1))
    assert len(hours) == 25
    assert all(len(harness.plane.reports.captured_in(hour)) == 3 for hour in hours)


def newest_run(harness: Harness) -> RecordedRun:
    (newest, *_) = harness.plane.reports.newest_runs(1)
    return newest


def newest_result(harness: Harness) -> RunResult:
    result = newest_run(harness).result
    assert result is not None
    return result


def test_every_capture_is_recorded_with_its_end(harness: Harness) -> None:
    harness.capture("a first capture, which waits to confirm what it sees")
    harness.clock.advance(timedelta(seconds=1))
    harness.store.clock = harness.clock.now() + timedelta(seconds=30)
    harness.while_reading("c", lambda: harness.clock.advance(timedelta(seconds=7)))
    began = harness.clock.now()
    harness.capture("first")
    ended = began + timedelta(seconds=7)
    stored = RunResult(RunOutcome.STORED, 3, 0, 0, None, timedelta(seconds=30))
    assert newest_run(harness) == RecordedRun("first", harness.hour, began, ended, stored)

    harness.store.failures["b"] = DENIED
    harness.capture("second")
    denied = Stopped("store_permission", "The user may not read tenant b.", "grant it.")
    assert (newest_run(harness).run_id, newest_result(harness)) == (
        "second",
        RunResult(RunOutcome.STORED_IN_PART, 2, 0, 1, denied, timedelta(seconds=23)),
    )


def test_the_error_of_a_capture_is_that_of_most_tenants(harness: Harness) -> None:
    harness.spend("d", "10")
    alone = StoreUnreachableError("Timed out.", "wait.")
    harness.store.failures = {"a": alone, "b": DENIED, "c": DENIED, "d": DENIED}
    harness.capture()
    result = newest_result(harness)
    assert (result.outcome, result.failed) == (RunOutcome.FAILED, 4)
    assert result.error == Stopped("store_permission", DENIED.message, DENIED.hint)


@pytest.mark.parametrize("seconds", [70, -70])
def test_a_capture_that_a_clock_stopped_is_recorded_with_the_skew(
    harness: Harness, seconds: float
) -> None:
    # A first capture compares the store twice, two seconds apart, before it compares the clocks.
    harness.store.clock = harness.clock.now() + timedelta(seconds=seconds + 2)
    with pytest.raises(ClockSkewError, match="The clocks differ by 70 s"):
        harness.capture()
    result = newest_result(harness)
    assert result.outcome is RunOutcome.FAILED
    assert result.clock_skew == timedelta(seconds=seconds)
    assert result.error is not None
    assert result.error.code == "clock_skew"


def test_a_capture_without_any_known_tenant_is_recorded_if_it_fails(harness: Harness) -> None:
    gone = StoreUnreachableError("No answer.", "see whether NATS runs.")
    harness.store.identity_failure = gone
    with pytest.raises(StoreUnreachableError):
        harness.run()
    stopped = Stopped("store_unreachable", gone.message, gone.hint)
    assert newest_result(harness) == RunResult(RunOutcome.FAILED, 0, 0, 0, stopped, None)


def test_a_capture_of_an_empty_store_found_nothing_to_store() -> None:
    harness = Harness()
    harness.capture()
    assert newest_run(harness).found_nothing
    assert newest_result(harness) == RunResult(RunOutcome.NOTHING_TO_STORE, 0, 0, 0, None, None)


def test_an_unexpected_error_is_the_end_of_a_recorded_capture(harness: Harness) -> None:
    def break_down() -> None:
        raise RuntimeError("out of cheese")

    class BrokenStore(MemoryUsageStore):
        def now(self) -> datetime | None:
            break_down()
            return None

    with pytest.raises(RuntimeError):
        harness.run(store=BrokenStore(BORN))
    error = newest_result(harness).error
    assert error is not None
    assert (error.code, error.message) == (
        "unexpected_error",
        "Unexpected RuntimeError: out of cheese",
    )


def test_a_capture_whose_database_went_away_has_no_end(harness: Harness) -> None:
    gone = DatabaseUnreachableError("No connection.", "see whether PostgreSQL runs.")

    class GoneSnapshots(RefusingSnapshots):
        def end_run(self, *_: object) -> None:
            raise gone

    harness.plane = replace(harness.plane, snapshots=GoneSnapshots(harness.plane.state, gone))
    with pytest.raises(DatabaseUnreachableError) as raised:
        harness.run()
    assert raised.value is gone
    assert newest_run(harness).result is None


def test_captures_that_were_refused_or_are_paused_are_not_recorded(harness: Harness) -> None:
    harness.plane.registry.claim()
    with harness.plane.leases.hold(CAPTURE_LEASE, "another"), pytest.raises(LeaseHeldError):
        harness.run()
    harness.plane.registry.set_state(RecoveryState.RECOVERING)
    harness.run()
    assert harness.plane.reports.newest_runs(1) == ()


def test_a_tenant_that_failed_once_and_then_left_is_not_failing(harness: Harness) -> None:
    harness.store.failures["b"] = DENIED
    harness.capture("one")
    assert list(harness.plane.reports.failing()) == ["b"]
    # It was never captured, so only its failure still names it.
    del harness.store.failures["b"]
    harness.store.purge("usage.b.")
    harness.clock.advance(timedelta(hours=1))
    captured = harness.capture("two")
    assert harness.plane.reports.failing() == {}
    assert [outcome.tenant for outcome in captured.outcomes] == ["b", "a", "c"]
    assert newest_result(harness) == RunResult(RunOutcome.STORED, 2, 1, 0, None, None)
    harness.clock.advance(timedelta(hours=1))
    assert [outcome.tenant for outcome in harness.capture("three").outcomes] == ["a", "c"]


def test_the_time_of_the_answer_is_no_skew(harness: Harness) -> None:
    asked = harness.clock.now()

    class SlowStore(MemoryUsageStore):
        def now(self) -> datetime | None:
            harness.clock.advance(timedelta(seconds=90))
            return super().now()

    slow = SlowStore(BORN)
    for seconds, skew in ((0, 0), (90, 0), (-6, -6), (97, 7)):
        harness.clock.set(asked)
        slow.clock = asked + timedelta(seconds=seconds)
        assert measure_clock_skew(harness.clock, slow) == timedelta(seconds=skew)
    slow.clock = None
    assert measure_clock_skew(harness.clock, slow) is None
