"""When a capture may run, and what stops it; with fakes that pass the contract tests."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest

from budget_recovery_dagster.domain import CAPTURE_LEASE, Hour, RecoveryState
from budget_recovery_dagster.errors import (
    CapturesPausedError,
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
from budget_recovery_dagster.services import Captured, Paused, Verified
from tests.fakes.incidents import MemoryStoreRegistry
from tests.unit.capture_house import DENIED, House, RefusingSnapshots, UnprunableSnapshots, names


def test_a_store_that_goes_down_is_not_tried_for_the_remaining_tenants(house: House) -> None:
    gone = StoreUnreachableError("No answer.", "see whether NATS runs.")

    def go_down() -> None:
        house.store.identity_failure = gone
        house.store.failures = {"b": gone, "c": DENIED}

    house.while_reading("a", go_down)
    captured = house.capture()

    # "c" was not read: its own failure has another message.
    assert [f.reason for f in captured.failed] == ["No answer."] * 3
    assert captured.stopped_by is gone


def test_an_unreachable_store_is_recorded_as_a_failure_of_every_known_tenant(house: House) -> None:
    house.capture()
    house.store.identity_failure = StoreUnreachableError("No answer.", "see whether NATS runs.")
    captured = house.capture("later")
    assert [f.name for f in house.plane.reports.failures_of("later")] == ["a", "b", "c"]
    assert captured.read == frozenset()


def test_a_capture_waits_for_its_hour_if_the_scheduler_is_slightly_ahead(house: House) -> None:
    next_hour = Hour(house.hour.end)
    house.clock.set(next_hour.start - timedelta(seconds=8))
    captured = house.run(hour=next_hour)
    assert isinstance(captured, Captured)
    assert next_hour.start <= captured.captured_at < next_hour.end


def test_a_capture_stops_after_three_commits_that_the_database_refuses(house: House) -> None:
    for tenant in "defgh":
        house.spend(tenant, "10")
    refused = DatabaseError("The database refused: disk full.", "free disk space.")
    house.plane = replace(house.plane, snapshots=RefusingSnapshots(house.plane.state, refused))
    captured = house.capture()
    assert captured.stopped_by is refused
    assert [f.seconds > 0 for f in captured.failed] == [True] * 3 + [False] * 5


def test_snapshots_are_reported_even_if_pruning_fails(house: House) -> None:
    failure = DatabaseError("The database refused: too slow.", "look in pg_stat_activity.")
    house.plane = replace(house.plane, snapshots=UnprunableSnapshots(house.plane.state, failure))
    captured = house.capture()
    assert names(captured.stored) == ["a", "b", "c"]
    assert captured.prune_failure is failure


def test_an_unreachable_database_ends_the_capture(house: House) -> None:
    gone = DatabaseUnreachableError("No connection.", "see whether PostgreSQL runs.")
    house.plane = replace(house.plane, snapshots=RefusingSnapshots(house.plane.state, gone))
    with pytest.raises(DatabaseUnreachableError):
        house.run()
    assert house.outcomes == []


def test_a_second_capture_is_refused_with_the_lease_holder(house: House) -> None:
    with (
        house.plane.leases.hold(CAPTURE_LEASE, "run 1234 on host-a (pid 7)"),
        pytest.raises(LeaseHeldError, match=r"run 1234 on host-a \(pid 7\)"),
    ):
        house.run()
    assert names(house.capture().stored) == ["a", "b", "c"]


def test_nothing_is_stored_after_the_lease_is_lost(house: House) -> None:
    house.while_reading("b", lambda: house.plane.leases.lose(CAPTURE_LEASE))
    captured = house.capture()
    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, LeaseLostError)
    assert captured.pruned is None


def test_nothing_is_stored_after_the_hour_has_closed(house: House) -> None:
    house.while_reading("b", lambda: house.clock.set(house.hour.end))
    captured = house.capture()
    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, HourClosedError)


def test_nothing_is_stored_after_captures_are_paused(house: House) -> None:
    house.while_reading("b", lambda: house.plane.registry.set_state(RecoveryState.RECOVERING))
    captured = house.capture()
    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, CapturesPausedError)


@pytest.mark.parametrize("state", [RecoveryState.RECOVERING, RecoveryState.FAILED])
def test_nothing_is_read_while_captures_are_paused(state: RecoveryState, house: House) -> None:
    house.plane.registry.claim()
    house.plane.registry.set_state(state)
    assert house.run() == Paused(state)
    assert house.outcomes == []


def test_a_past_hour_is_verified_if_captured_and_refused_if_not(house: House) -> None:
    stored_hour = house.hour
    house.capture("stored")
    house.clock.advance(timedelta(hours=3))
    house.spend("a", "99")

    verified = house.run(hour=stored_hour)
    assert isinstance(verified, Verified)
    assert [s.tenant for s in verified.snapshots] == ["a", "b", "c"]
    assert verified.damage == ()
    with pytest.raises(HourNotCapturedError, match=r"2026-11-25-13:00 UTC.*2026-11-25-15:00"):
        house.run(hour=Hour.parse("2026-11-25-13:00"))
    assert house.known("a") == Decimal(10)


def test_a_future_hour_is_refused(house: House) -> None:
    with pytest.raises(HourNotReachedError, match="has not begun"):
        house.run(hour=Hour(house.hour.end))


def test_a_current_hour_can_be_captured_again(house: House) -> None:
    house.capture("first")
    house.clock.advance(timedelta(minutes=10))
    house.spend("a", "11")
    house.capture("second")
    assert [s.run_id for s in house.plane.reports.captured_in(house.hour) if s.tenant == "a"] == [
        "first",
        "second",
    ]


def test_the_database_of_another_bucket_is_refused(house: House) -> None:
    MemoryStoreRegistry(house.plane.state, "other-bucket").claim()
    with pytest.raises(SettingsError, match="BUDGET_RECOVERY_BUCKET"):
        house.run()


def test_the_night_of_the_autumn_clock_change_has_25_snapshots(house: House) -> None:
    new_york = ZoneInfo("America/New_York")
    house.clock.set(datetime(2026, 11, 1, 0, 0, 30, tzinfo=new_york).astimezone(UTC))
    hours = []
    while house.clock.now() < datetime(2026, 11, 2, tzinfo=new_york):
        hours.append(house.hour)
        house.capture(f"run {len(hours)}")
        house.clock.advance(timedelta(hours=1))
    assert len(hours) == 25
    assert all(len(house.plane.reports.captured_in(hour)) == 3 for hour in hours)
