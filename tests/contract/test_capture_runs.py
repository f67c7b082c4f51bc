from datetime import timedelta

import pytest

from budget_recovery_dagster.domain.counters import OmittedCounter, UnreadableKey
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.ports import CaptureFailure
from tests.contract.control_planes import NOON, ControlPlane, Counters, of, reading

HOUR = Hour(NOON)
TEAM: Counters = {("team", "lifetime"): {"alice": "1.5", None: "7"}}


def test_failures_are_noted_by_run_and_tenant(plane: ControlPlane) -> None:
    failures = [CaptureFailure(tenant, HOUR, "no answer", "look") for tenant in ("b", "a")]
    plane.snapshots.record_failures(failures, run_id="run 1")
    plane.snapshots.record_failures([CaptureFailure("a", HOUR, "lost", "")], run_id="run 2")
    assert plane.snapshots.failures_of("run 1") == (failures[1], failures[0])
    assert plane.snapshots.failures_of("run 2") == (CaptureFailure("a", HOUR, "lost", ""),)
    assert plane.snapshots.failures_of("run 3") == ()


def test_a_failure_noted_again_replaces_the_first(plane: ControlPlane) -> None:
    for reason in ("first try", "second try"):
        plane.snapshots.record_failures([CaptureFailure("a", HOUR, reason, "")], run_id="run")
    assert [each.reason for each in plane.snapshots.failures_of("run")] == ["second try"]


def test_the_newest_run_stored_a_snapshot_or_noted_a_failure(plane: ControlPlane) -> None:
    assert plane.snapshots.newest_run() is None
    plane.capture("a", TEAM, run_id="run 1")
    assert plane.snapshots.newest_run() == "run 1"
    plane.clock.advance(timedelta(minutes=1))
    plane.snapshots.record_failures([CaptureFailure("a", HOUR, "x", "")], run_id="run 2")
    assert plane.snapshots.newest_run() == "run 2"
    plane.capture("a", TEAM, at=NOON + timedelta(minutes=30), run_id="run 3")
    assert plane.snapshots.newest_run() == "run 3"


@pytest.mark.parametrize(
    "text", ["NUL \0 byte", "half a pair \ud83d", "\\u0000", "x" * 1_000_000, ""]
)
def test_texts_of_any_kind_cost_no_snapshot(plane: ControlPlane, text: str) -> None:
    plane.snapshots.record_failures([CaptureFailure("a", HOUR, text, text)], run_id=text)
    (failure,) = plane.snapshots.failures_of(text)
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
    assert [each.tenant for each in plane.snapshots.captured_by(text)] == ["acme"]
