"""Retained snapshots and recovery points as shown to users."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import (
    CaptureFailure,
    CaptureSource,
    FailingTenant,
    Hour,
    OmittedCounter,
    StoredRecord,
    Uncaptured,
    Usages,
)
from tests.contract.control_planes import NOON, ControlPlane, Counters, of, reading

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
MINUTE = timedelta(minutes=1)
TEAM: Counters = {("team", "lifetime"): {"alice": "1.5", None: "7"}}


def record(at: datetime, budget: str, token: str, **usages: str) -> StoredRecord:
    return StoredRecord(
        captured_at=at,
        source=CaptureSource.COUNTERS,
        of=of(budget, token),
        usages={entity: Decimal(usage) for entity, usage in usages.items()},
        is_truncated=False,
        is_partial=False,
        omitted_count=0,
    )


def records(plane: ControlPlane, tenant: str, at: datetime) -> list[StoredRecord] | None:
    with plane.snapshots.records_of(tenant, Hour.containing(at)) as found:
        return None if found is None else list(found)


def test_the_records_of_an_hour_are_ordered_by_time_budget_and_window(plane: ControlPlane) -> None:
    first: Counters = {
        ("b", "lifetime"): {"x": "1"},
        ("a", "2026-11"): {"x": "2"},
        ("a", "2026-Q4"): {"x": "3"},
    }
    plane.capture("acme", first, at=NOON)
    plane.capture("acme", {("a", "2026-11"): {"x": "2"}}, at=NOON + 59 * MINUTE)
    plane.capture("acme", {("a", "2026-11"): {"x": "9"}}, at=NOON + 60 * MINUTE)
    plane.capture("other", TEAM, at=NOON + 61 * MINUTE)
    assert records(plane, "acme", NOON) == [
        record(NOON, "a", "2026-11", x="2"),
        record(NOON, "a", "2026-Q4", x="3"),
        record(NOON, "b", "lifetime", x="1"),
        record(NOON + 59 * MINUTE, "a", "2026-11", x="2"),
    ]
    assert records(plane, "unknown", NOON) is None
    assert plane.snapshots.tenants_in(Hour(NOON)) == ("acme",)
    assert plane.snapshots.tenants_in(Hour(NOON + HOUR)) == ("acme", "other")
    assert plane.snapshots.tenants_in(Hour(NOON - HOUR)) == ()


def test_a_record_has_source_marks_and_omitted_counters(plane: ControlPlane) -> None:
    omitted = tuple(
        OmittedCounter(of("team", "lifetime"), entity, f"key {entity}", "not a number")
        for entity in ("bo", "cy")
    )
    taken = plane.take(reading("acme", TEAM, omitted=omitted, is_partial=True))
    board = replace(taken.records[0], is_truncated=True)
    plane.commit(replace(taken, source=CaptureSource.LEADERBOARDS, records=(board,)))
    (only,) = records(plane, "acme", NOON) or []
    assert only == StoredRecord(
        captured_at=NOON,
        source=CaptureSource.LEADERBOARDS,
        of=of("team", "lifetime"),
        usages={"alice": Decimal("1.5"), None: Decimal(7)},
        is_truncated=True,
        is_partial=True,
        omitted_count=2,
    )
    (window,) = plane.current_windows("acme")
    assert (window.newest_at, window.source, window.of) == (only.captured_at, only.source, only.of)
    assert (window.usages, window.from_earlier) == (only.usages, 0)
    assert (window.is_truncated, window.is_partial, window.omitted_count) == (True, True, 2)


def test_an_empty_snapshot_is_retained_without_records(plane: ControlPlane) -> None:
    plane.capture("acme", TEAM, at=NOON)
    plane.capture("acme", {}, at=NOON + HOUR)
    assert plane.snapshots.tenants_in(Hour(NOON + HOUR)) == ("acme",)
    assert records(plane, "acme", NOON + HOUR) == []


def test_a_snapshot_without_some_of_its_records_is_not_retained(plane: ControlPlane) -> None:
    # From the first hour, the point needs only alice's lifetime.
    plane.capture(
        "acme", {("gone", "lifetime"): {"alice": "5"}, ("stays", "lifetime"): {"bo": "1"}}
    )
    for day in range(1, 6):
        plane.capture("daily", TEAM, at=NOON + day * DAY)
    plane.capture("acme", {("stays", "lifetime"): {"bo": "2"}}, at=NOON + 6 * DAY)
    plane.capture("spared", TEAM, at=NOON + 6 * DAY)
    plane.capture("daily", TEAM, at=NOON + 7 * DAY)
    plane.clock.set(NOON + 7 * DAY + MINUTE)
    assert plane.prune("acme").captures == 0
    late = Hour(NOON + 6 * DAY)
    assert plane.snapshots.tenants_in(Hour(NOON)) == ()
    assert records(plane, "acme", NOON) is None
    assert plane.snapshots.hours_of(["acme", "spared", "unknown"]) == {
        "acme": {late},
        "spared": {late},
    }
    assert plane.snapshots.tenants() == {"acme", "daily", "spared"}


@pytest.mark.parametrize("tenants", [[], ["unknown"]])
def test_unknown_tenants_have_no_retained_hours(plane: ControlPlane, tenants: list[str]) -> None:
    plane.capture("acme", TEAM)
    assert plane.snapshots.hours_of(tenants) == {}


def write_to_full_disk(plane: ControlPlane) -> None:
    with plane.snapshots.records_of("acme", Hour(NOON)) as found:
        assert found is not None
        next(found)
        raise OSError("the disk is full")


def test_a_reader_that_fails_midway_releases_its_connection(plane: ControlPlane) -> None:
    # More records than are fetched at once, and more readers than connections.
    budgets: Counters = {(f"b{number}", "lifetime"): {"x": str(number)} for number in range(600)}
    plane.capture("acme", budgets)
    for _ in range(6):
        with pytest.raises(OSError, match="the disk is full"):
            write_to_full_disk(plane)
    assert len(records(plane, "acme", NOON) or []) == 600


def test_current_windows_have_the_newest_time_and_the_highest_usages(
    plane: ControlPlane,
) -> None:
    plane.capture(
        "acme",
        {
            ("team", "2026-11"): {"alice": "5", "bo": "1"},
            ("team", "2026-11-24"): {"alice": "1"},
            ("left", "lifetime"): {"alice": "8"},
        },
    )
    plane.capture("acme", {("team", "2026-11"): {"alice": "4", "cy": "2"}}, at=NOON + HOUR)
    plane.capture("other", TEAM, at=NOON + HOUR)
    highest: Usages = {"alice": Decimal(5), "bo": Decimal(1), "cy": Decimal(2)}
    assert [
        (each.of, each.newest_at, each.usages, each.from_earlier)
        for each in plane.current_windows("acme")
    ] == [
        (of("left", "lifetime"), NOON, {"alice": Decimal(8)}, 0),
        (of("team", "2026-11"), NOON + HOUR, highest, 2),
    ]
    assert plane.current_windows("unknown") == []


def test_a_window_without_readable_counters_is_listed_without_usages(
    plane: ControlPlane,
) -> None:
    omitted = (OmittedCounter(of("team", "lifetime"), "alice", "key", "not a number"),)
    plane.commit(plane.take(reading("acme", {}, omitted=omitted)))
    (window,) = plane.current_windows("acme")
    assert (window.usages, window.omitted_count) == ({}, 1)


def test_the_newest_points_consider_only_open_windows(plane: ControlPlane) -> None:
    day: Counters = {("team", "2026-11-25"): {"alice": "1"}}
    plane.capture("daily", day, at=NOON)
    plane.capture("acme", {**day, ("team", "2026-11"): {"alice": "1"}}, at=NOON)
    plane.capture("acme", day, at=NOON + HOUR)
    assert plane.points.newest_points(NOON + HOUR) == {"acme": NOON + HOUR, "daily": NOON}
    midnight = datetime(2026, 11, 26, tzinfo=UTC)
    assert plane.points.newest_points(midnight) == {"acme": NOON}
    assert plane.points.newest_points(datetime(2026, 12, 1, tzinfo=UTC)) == {}
    assert plane.reports.newest_snapshots() == {"acme": NOON + HOUR, "daily": NOON}


def test_a_plane_without_snapshots_has_no_points(plane: ControlPlane) -> None:
    assert plane.reports.newest_snapshots() == {}
    assert plane.points.newest_points(NOON) == {}


def test_tenants_that_failed_after_their_last_snapshot_are_failing(plane: ControlPlane) -> None:
    def note(*names: str, kind: Uncaptured = Uncaptured.TENANT) -> None:
        failures = [CaptureFailure(name, Hour(NOON), "why", "hint.", kind) for name in names]
        plane.snapshots.record_failures(failures, run_id=f"run at {plane.clock.now()}")

    assert plane.reports.failing() == {}
    note("mended", "acme", "never")
    note("usage.a key.x", kind=Uncaptured.KEY)
    plane.capture("acme", TEAM, at=NOON + MINUTE)
    plane.capture("mended", TEAM, at=NOON + MINUTE)
    plane.clock.set(NOON + HOUR)
    note("acme")
    assert plane.reports.failing() == {
        "acme": FailingTenant(NOON + MINUTE, NOON + HOUR, "why", "hint."),
        "never": FailingTenant(None, NOON, "why", "hint."),
    }
