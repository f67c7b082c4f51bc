from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import CaptureFailure, Hour, OmittedCounter, UnreadableKey
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
