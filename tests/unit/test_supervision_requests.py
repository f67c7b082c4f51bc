"""Decisions about terminated runs and lost launches, compared with literal values."""

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
# Launch 3 is recorded, and launch 4 is not due.
COUNTED = replace(INCIDENT, launches=3, next_launch_at=NOW + 2 * MINUTE)
NOT_DUE = "The next launch for incident 0f8fad5b is due at 12:02:00 UTC."


def canceled(*, requested: float, terminated: float | None = None) -> RunSeen:
    """Return a run that an operator has terminated; both times are minutes ago."""
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


# Terminated runs


def test_a_run_requested_before_a_release_and_terminated_after_it_holds_again() -> None:
    run = canceled(requested=20, terminated=9)
    assert decide(run, incident=RELEASED) == PutOnHold(RELEASED, run)


@pytest.mark.parametrize("terminated", [10, 11])
def test_a_run_terminated_before_a_release_does_not_hold_again(terminated: float) -> None:
    assert decide(canceled(requested=20, terminated=terminated), incident=RELEASED) == Launch(
        RELEASED
    )


def test_a_run_requested_after_a_release_holds_again_even_if_a_slow_clock_dates_its_end() -> None:
    run = canceled(requested=9, terminated=11)
    assert decide(run, incident=RELEASED) == PutOnHold(RELEASED, run)


@pytest.mark.parametrize("phase", [Phase.OVER, Phase.QUEUED, Phase.STARTED])
def test_a_terminated_run_holds_even_if_another_was_requested_before_its_end(phase: Phase) -> None:
    run = canceled(requested=20, terminated=5)
    newer = other(phase, requested=15)
    assert decide(newer, run, incident=INCIDENT) == PutOnHold(INCIDENT, run)


def test_a_terminated_run_does_not_hold_if_another_was_requested_after_its_end() -> None:
    run = canceled(requested=20, terminated=15)
    assert decide(other(Phase.OVER, requested=5), run, incident=INCIDENT) == Launch(INCIDENT)


# Launches without a run


def test_a_launch_without_a_run_is_requested_again_after_a_while() -> None:
    asked = Rest(f"Launch 3 has no run yet. {NOT_DUE}", Suspicion("launch-3", 4, NOW))
    assert decide(incident=COUNTED) == asked
    early = Suspicion("launch-3", 4, NOW - 19 * SECOND)
    decision = decide(incident=COUNTED, suspicion=early)
    assert isinstance(decision, Rest)
    assert decision.suspicion == early
    late = Suspicion("launch-3", 4, NOW - 20 * SECOND)
    assert decide(incident=COUNTED, suspicion=late) == LaunchAgain(COUNTED)
    # Runs of earlier launches and manually started runs do not belong to this launch.
    earlier = (other(Phase.OVER, requested=5), other(Phase.OVER, requested=9, launch=2))
    assert decide(*earlier, incident=COUNTED, suspicion=late) == LaunchAgain(COUNTED)
    for stale in (
        Suspicion("launch-2", 4, NOW - MINUTE),
        Suspicion("launch-3", 3, NOW - MINUTE),
        Suspicion("launch-3", 4, NOW + SECOND),
    ):
        assert decide(incident=COUNTED, suspicion=stale) == asked


def test_a_launch_with_a_run_is_never_requested_again() -> None:
    late = Suspicion("launch-3", 4, NOW - MINUTE)
    run = other(Phase.OVER, requested=1, launch=3)
    assert decide(run, incident=COUNTED, suspicion=late) == Rest(NOT_DUE)


def test_no_launch_is_missing_if_none_is_recorded_or_expected() -> None:
    late = Suspicion("launch-3", 4, NOW - MINUTE)
    assert decide(incident=replace(COUNTED, launches=0)) == Rest(NOT_DUE)
    held = replace(COUNTED, held=Held(NOW, "ann", "the disk is changed"))
    assert decide(incident=held, suspicion=late) == Rest(str(held.on_hold))
    failed = decide(incident=COUNTED, state=FAILED, suspicion=late)
    assert isinstance(failed, Rest)
    assert "FAILED" in failed.reason
    working = decide(incident=COUNTED, worker="run 1 on gw-7", suspicion=late)
    assert working == Rest("run 1 on gw-7 is restoring.")
    queued = decide(other(Phase.QUEUED, requested=1), incident=COUNTED, suspicion=late)
    assert queued == Rest("Run run2000- is about to start.")


def test_a_due_launch_replaces_a_missing_one() -> None:
    due = replace(COUNTED, next_launch_at=NOW)
    late = Suspicion("launch-3", 4, NOW - MINUTE)
    assert decide(incident=due, suspicion=late) == Launch(due)
