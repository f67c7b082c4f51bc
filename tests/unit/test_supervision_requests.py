"""Runs that are unwanted or never came, by scenes and decisions worked out by hand."""

from dataclasses import replace
from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import (
    Decision,
    Held,
    Incident,
    Launch,
    LaunchAgain,
    Phase,
    PutOnHold,
    Recovery,
    RecoveryState,
    Rest,
    RunSeen,
    Scene,
    Suspicion,
    supervise,
)
from tests.unit.supervised_incident import INCIDENT, NOW

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HEALTHY, RECOVERING, FAILED = RecoveryState
RELEASED = replace(INCIDENT, released_at=NOW - 10 * MINUTE)
# The third launch has been counted, and the fourth is not due.
COUNTED = replace(INCIDENT, launches=3, next_launch_at=NOW + 2 * MINUTE)
NOT_DUE = "The next launch for incident 0f8fad5b is due at 12:02:00 UTC."


def canceled(*, requested: float, terminated: float | None = None) -> RunSeen:
    """A run that a person has terminated; both so many minutes ago."""
    return RunSeen(
        "run1000-rest",
        Phase.CANCELED,
        NOW - requested * MINUTE,
        None if terminated is None else NOW - terminated * MINUTE,
    )


def other(phase: Phase, *, requested: float, launch: int | None = None) -> RunSeen:
    return RunSeen("run2000-rest", phase, NOW - requested * MINUTE, launch=launch)


def decide(
    *runs: RunSeen,
    incident: Incident,
    state: RecoveryState = RECOVERING,
    worker: str | None = None,
    suspicion: Suspicion | None = None,
) -> Decision:
    return supervise(Scene(Recovery(state, incident), runs, worker, 4, suspicion), NOW)


# When a person wanted the restore to stop


def test_a_run_from_before_a_release_that_is_terminated_after_it_holds_again() -> None:
    run = canceled(requested=20, terminated=9)
    assert decide(run, incident=RELEASED) == PutOnHold(RELEASED, run)


@pytest.mark.parametrize("terminated", [10, 11])
def test_a_run_that_was_terminated_before_a_release_does_not_hold_again(terminated: float) -> None:
    assert decide(canceled(requested=20, terminated=terminated), incident=RELEASED) == Launch(
        RELEASED
    )


def test_a_run_from_after_a_release_holds_again_though_its_end_is_told_by_a_slow_clock() -> None:
    run = canceled(requested=9, terminated=11)
    assert decide(run, incident=RELEASED) == PutOnHold(RELEASED, run)


@pytest.mark.parametrize("phase", [Phase.OVER, Phase.QUEUED, Phase.STARTED])
def test_a_terminated_run_holds_also_where_another_came_while_it_worked(phase: Phase) -> None:
    run = canceled(requested=20, terminated=5)
    beside = other(phase, requested=15)
    assert decide(beside, run, incident=INCIDENT) == PutOnHold(INCIDENT, run)


def test_a_terminated_run_holds_nothing_where_another_was_asked_for_after_that() -> None:
    run = canceled(requested=20, terminated=15)
    assert decide(other(Phase.OVER, requested=5), run, incident=INCIDENT) == Launch(INCIDENT)


# Launches of which there is no run


def test_a_launch_without_a_run_is_given_time_and_then_requested_again() -> None:
    asked = Rest(f"Launch 3 has no run yet. {NOT_DUE}", Suspicion("launch-3", 4, NOW))
    assert decide(incident=COUNTED) == asked
    early = Suspicion("launch-3", 4, NOW - 19 * SECOND)
    decision = decide(incident=COUNTED, suspicion=early)
    assert isinstance(decision, Rest)
    assert decision.suspicion == early
    late = Suspicion("launch-3", 4, NOW - 20 * SECOND)
    assert decide(incident=COUNTED, suspicion=late) == LaunchAgain(COUNTED)
    # Runs of earlier launches, and those started by hand, are no runs of this one.
    earlier = (other(Phase.OVER, requested=5), other(Phase.OVER, requested=9, launch=2))
    assert decide(*earlier, incident=COUNTED, suspicion=late) == LaunchAgain(COUNTED)
    for stale in (
        Suspicion("launch-2", 4, NOW - MINUTE),
        Suspicion("launch-3", 3, NOW - MINUTE),
        Suspicion("launch-3", 4, NOW + SECOND),
    ):
        assert decide(incident=COUNTED, suspicion=stale) == asked


def test_a_launch_with_a_run_is_not_requested_again_whatever_became_of_it() -> None:
    late = Suspicion("launch-3", 4, NOW - MINUTE)
    run = other(Phase.OVER, requested=1, launch=3)
    assert decide(run, incident=COUNTED, suspicion=late) == Rest(NOT_DUE)


def test_where_no_launch_was_counted_or_none_is_to_come_nothing_is_missed() -> None:
    late = Suspicion("launch-3", 4, NOW - MINUTE)
    assert decide(incident=replace(COUNTED, launches=0)) == Rest(NOT_DUE)
    held = replace(COUNTED, held=Held(NOW, "ann", "the disk is changed"))
    assert decide(incident=held, suspicion=late) == Rest(str(held.on_hold))
    failed = decide(incident=COUNTED, state=FAILED, suspicion=late)
    assert isinstance(failed, Rest)
    assert "FAILED" in failed.reason
    beside = decide(incident=COUNTED, worker="run 1 on gw-7", suspicion=late)
    assert beside == Rest("run 1 on gw-7 is restoring.")
    queued = decide(other(Phase.QUEUED, requested=1), incident=COUNTED, suspicion=late)
    assert queued == Rest("Run run2000- is about to start.")


def test_a_launch_that_is_due_is_a_new_one() -> None:
    due = replace(COUNTED, next_launch_at=NOW)
    late = Suspicion("launch-3", 4, NOW - MINUTE)
    assert decide(incident=due, suspicion=late) == Launch(due)
