from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import (
    RUNS_KEPT,
    RUNS_KEPT_FOR,
    CaptureFailure,
    Hour,
    OmittedCounter,
    RecordedRun,
    RunOutcome,
    RunResult,
    Stopped,
    UnreadableKey,
)
from budget_recovery_dagster.errors import LeaseLostError
from tests.contract.control_planes import NOON, ControlPlane, Counters, of, reading

HOUR = Hour(NOON)
TEAM: Counters = {("team", "lifetime"): {"alice": "1.5", None: "7"}}


def test_failures_are_recorded_by_run_and_tenant(plane: ControlPlane) -> None:
    failures = [CaptureFailure(tenant, HOUR, "no answer", "look") for tenant in ("b", "a")]
    plane.snapshots.record_failures(failures, run_id="run 1")
    plane.snapshots.record_failures([CaptureFailure("a", HOUR, "lost", "")], run_id="run 2")
    assert plane.reports.failures_of("run 1") == (failures[1], failures[0])
    assert plane.reports.failures_of("run 2") == (CaptureFailure("a", HOUR, "lost", ""),)
    assert plane.reports.failures_of("run 3") == ()


def test_a_failure_recorded_again_replaces_the_first(plane: ControlPlane) -> None:
    for reason in ("first try", "second try"):
        plane.snapshots.record_failures([CaptureFailure("a", HOUR, reason, "")], run_id="run")
    assert [each.reason for each in plane.reports.failures_of("run")] == ["second try"]


def test_the_newest_run_of_an_hour_is_the_last_to_record_a_snapshot_or_failure(
    plane: ControlPlane,
) -> None:
    assert plane.reports.newest_run(HOUR) is None
    plane.capture("a", TEAM, run_id="run 1")
    assert plane.reports.newest_run(HOUR) == "run 1"
    plane.clock.advance(timedelta(minutes=1))
    plane.snapshots.record_failures([CaptureFailure("a", HOUR, "x", "")], run_id="run 2")
    assert plane.reports.newest_run(HOUR) == "run 2"
    plane.capture("a", TEAM, at=NOON + timedelta(minutes=30), run_id="run 3")
    assert plane.reports.newest_run(HOUR) == "run 3"


def test_runs_of_other_hours_are_not_the_newest_run(plane: ControlPlane) -> None:
    plane.capture("a", TEAM, at=NOON + timedelta(minutes=59), run_id="run 1")
    plane.capture("a", TEAM, at=HOUR.end, run_id="run 2")
    assert plane.reports.newest_run(HOUR) == "run 1"
    assert plane.reports.newest_run(Hour(HOUR.end)) == "run 2"
    # A failure recorded after the hour has closed still belongs to that hour.
    plane.clock.set(HOUR.end + timedelta(minutes=5))
    plane.snapshots.record_failures([CaptureFailure("a", HOUR, "x", "")], run_id="run 3")
    assert plane.reports.newest_run(HOUR) == "run 3"
    assert plane.reports.newest_run(Hour(HOUR.end)) == "run 2"


def test_the_newest_run_is_the_last_to_commit_even_with_an_older_snapshot(
    plane: ControlPlane,
) -> None:
    slow = plane.take(reading("slow", TEAM), at=NOON + timedelta(minutes=1))
    plane.capture("quick", TEAM, at=NOON + timedelta(minutes=2), run_id="run 2")
    plane.clock.advance(timedelta(minutes=1))
    plane.commit(slow, run_id="run 1")
    assert plane.reports.newest_run(HOUR) == "run 1"


@pytest.mark.parametrize(
    "text", ["NUL \0 byte", "half a pair \ud83d", "\\u0000", "x" * 1_000_000, ""]
)
def test_unusual_texts_do_not_prevent_a_snapshot(plane: ControlPlane, text: str) -> None:
    plane.snapshots.record_failures([CaptureFailure("a", HOUR, text, text)], run_id=text)
    (failure,) = plane.reports.failures_of(text)
    assert failure.reason[:4] == text[:4].replace("\0", "\\x00")
    snapshot = plane.take(
        reading(
            "acme",
            TEAM,
            unreadable=(UnreadableKey(text, text),),
            omitted=(OmittedCounter(of("x", "lifetime"), "bo", text, text),),
        )
    )
    plane.commit(snapshot, run_id=text)
    assert [each.tenant for each in plane.reports.captured_by(text)] == ["acme"]


STORED = RunResult(RunOutcome.STORED, 3, 1, 0, None, None)
SKEWED = RunResult(
    RunOutcome.FAILED,
    0,
    0,
    2,
    Stopped("clock_skew", "The clocks differ.", "use NTP."),
    timedelta(seconds=-70, microseconds=5),
)


def begin(plane: ControlPlane, run_id: str, hour: Hour = HOUR) -> int:
    with plane.lease() as lease:
        return plane.snapshots.begin_run(run_id, hour, started_at=plane.clock.now(), lease=lease)


def test_captures_are_recorded_from_their_begin_and_with_their_end(plane: ControlPlane) -> None:
    assert plane.reports.newest_runs(5) == ()
    first = begin(plane, "run 1")
    assert plane.reports.newest_runs(5) == (RecordedRun("run 1", HOUR, NOON),)
    plane.clock.advance(timedelta(minutes=2))
    plane.snapshots.end_run(first, SKEWED)
    second = begin(plane, "run 2")
    assert second > first
    plane.snapshots.end_run(second, STORED)
    ended = NOON + timedelta(minutes=2)
    assert plane.reports.newest_runs(5) == (
        RecordedRun("run 2", HOUR, ended, ended, STORED),
        RecordedRun("run 1", HOUR, NOON, ended, SKEWED),
    )
    assert [run.run_id for run in plane.reports.newest_runs(1)] == ["run 2"]


def test_the_first_result_of_a_capture_stays(plane: ControlPlane) -> None:
    number = begin(plane, "run")
    plane.snapshots.end_run(number, STORED)
    plane.clock.advance(timedelta(minutes=2))
    plane.snapshots.end_run(number, SKEWED)
    assert plane.reports.newest_runs(5) == (RecordedRun("run", HOUR, NOON, NOON, STORED),)


def test_the_newest_capture_is_the_last_that_began_even_if_its_clock_was_behind(
    plane: ControlPlane,
) -> None:
    begin(plane, "of a clock that was ahead")
    plane.clock.set(NOON - timedelta(hours=5))
    begin(plane, "later", Hour(NOON - timedelta(hours=5)))
    assert [run.run_id for run in plane.reports.newest_runs(5)] == [
        "later",
        "of a clock that was ahead",
    ]


def test_captures_are_kept_for_thirty_days(plane: ControlPlane) -> None:
    begin(plane, "old")
    plane.clock.set(NOON + RUNS_KEPT_FOR)
    for number in range(RUNS_KEPT):
        begin(plane, str(number))
    assert plane.reports.newest_runs(1000)[-1].run_id == "old"
    plane.clock.advance(timedelta(seconds=1))
    begin(plane, "newest")
    assert [run.run_id for run in plane.reports.newest_runs(1000)[-2:]] == ["1", "0"]


def test_a_clock_that_is_ahead_removes_none_of_the_newest_captures(plane: ControlPlane) -> None:
    for number in range(RUNS_KEPT + 1):
        begin(plane, str(number))
    plane.clock.advance(timedelta(days=40))
    begin(plane, "ahead")
    assert len(plane.reports.newest_runs(1000)) == RUNS_KEPT + 1


def test_a_capture_without_its_lease_is_not_recorded(plane: ControlPlane) -> None:
    with plane.lease() as lease:
        plane.lose_lease(lease)
        with pytest.raises(LeaseLostError):
            plane.snapshots.begin_run("run", HOUR, started_at=NOON, lease=lease)
    assert plane.reports.newest_runs(5) == ()


@pytest.mark.parametrize("text", ["NUL \0 byte", "half a pair \ud83d", "x" * 1_000_000])
def test_unusual_texts_do_not_prevent_a_result(plane: ControlPlane, text: str) -> None:
    number = begin(plane, text)
    error = Stopped("unexpected_error", text, text)
    plane.snapshots.end_run(number, RunResult(RunOutcome.FAILED, 0, 0, 0, error, None))
    (run,) = plane.reports.newest_runs(5)
    assert run.result is not None
    assert run.result.error is not None
    assert run.result.error.message[:4] == text[:4].replace("\0", "\\x00")


def fail(plane: ControlPlane, tenant: str, run_id: str = "failed") -> None:
    failure = CaptureFailure(tenant, HOUR, "no answer", "look")
    plane.snapshots.record_failures([failure], run_id=run_id)


def test_a_tenant_that_failed_and_then_left_is_not_failing(plane: ControlPlane) -> None:
    plane.capture("acme", {("team", "2026-11-25"): {"alice": "1"}})
    plane.clock.set(NOON + timedelta(days=1))
    fail(plane, "acme")
    fail(plane, "never seen")
    assert list(plane.reports.failing()) == ["acme", "never seen"]
    for tenant in ("acme", "never seen"):
        # Its windows have closed, and nothing of it is in the store.
        plane.commit(plane.take(reading(tenant, {})))
    assert plane.reports.failing() == {}
    assert plane.reports.absent() == {"acme", "never seen"}
    plane.capture("acme", TEAM)
    assert plane.reports.absent() == {"never seen"}
    fail(plane, "never seen")
    assert plane.reports.absent() == frozenset()


def test_a_failure_of_a_clock_that_was_ahead_ends_with_the_next_snapshot(
    plane: ControlPlane,
) -> None:
    plane.clock.set(NOON + timedelta(days=3))
    fail(plane, "acme")
    plane.capture("acme", TEAM, at=NOON)
    assert plane.reports.failing() == {}


def test_a_run_that_lost_its_lease_does_not_make_a_captured_tenant_fail(
    plane: ControlPlane,
) -> None:
    begin(plane, "slow")
    begin(plane, "next")
    plane.capture("acme", TEAM, run_id="next")
    plane.clock.advance(timedelta(minutes=1))
    fail(plane, "acme", run_id="slow")
    assert plane.reports.failing() == {}
    fail(plane, "acme", run_id="next")
    assert list(plane.reports.failing()) == ["acme"]


def test_outcomes_of_tenants_are_removed_by_age(plane: ControlPlane) -> None:
    fail(plane, "gone")
    plane.commit(plane.take(reading("left", {})))
    plane.clock.set(NOON + timedelta(days=7))
    plane.prune()
    assert (list(plane.reports.failing()), list(plane.reports.absent())) == (["gone"], ["left"])
    plane.clock.advance(timedelta(seconds=1))
    plane.prune()
    assert (plane.reports.failing(), plane.reports.absent()) == ({}, frozenset())
