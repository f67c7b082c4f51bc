"""Launches and attempts of restores: each is counted once and delayed by the backoff."""

from dataclasses import replace
from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import Attempt, FailureReason, Incident, Waiting
from budget_recovery_dagster.errors import (
    AttemptNotDueError,
    AttemptsUsedUpError,
    IncidentMovedError,
)
from tests.contract.control_planes import NOON, ControlPlane
from tests.contract.incident_scene import (
    GONE,
    MARKED_TARGET,
    claim_attempt,
    close,
    give_up,
    open_one,
    wait,
)

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
WAITED = Waiting(NOON - MINUTE, "no room", 2)


def launch(plane: ControlPlane, incident: Incident) -> Incident:
    """Claim a launch as soon as it is due."""
    plane.clock.set(incident.next_launch_at or plane.clock.now())
    launched = plane.incidents.claim_launch(judged=incident)
    assert launched is not None
    assert plane.incidents.recovery().incident == launched
    return launched


def pause(plane: ControlPlane, incident: Incident) -> int:
    """Return the seconds until the next launch is due."""
    assert incident.next_launch_at is not None
    return round((incident.next_launch_at - plane.clock.now()) / SECOND)


# Launches


def test_a_launch_is_counted_and_delays_the_next(plane: ControlPlane) -> None:
    incident = open_one(plane)
    launched = launch(plane, incident)
    assert launched == replace(incident, launches=1, next_launch_at=NOON + 30 * SECOND)


def test_launches_without_an_attempt_are_delayed_by_a_growing_backoff(plane: ControlPlane) -> None:
    incident = open_one(plane)
    pauses = []
    for _ in range(7):
        incident = launch(plane, incident)
        pauses.append(pause(plane, incident))
    assert pauses == [30, 60, 120, 240, 300, 300, 300]
    assert incident.launches == 7


def test_a_launch_is_claimed_only_when_due(plane: ControlPlane) -> None:
    launched = launch(plane, open_one(plane))
    plane.clock.set(NOON + 30 * SECOND - timedelta(microseconds=1))
    assert plane.incidents.claim_launch(judged=launched) is None
    assert plane.incidents.recovery().incident == launched
    plane.clock.set(NOON + 30 * SECOND)
    assert plane.incidents.claim_launch(judged=launched) is not None


def test_a_launch_is_counted_only_once(plane: ControlPlane) -> None:
    incident = open_one(plane)
    launched = launch(plane, incident)
    plane.clock.advance(timedelta(hours=1))
    assert plane.incidents.claim_launch(judged=incident) is None
    assert plane.incidents.recovery().incident == launched


def test_a_new_restore_target_does_not_prevent_a_launch(plane: ControlPlane) -> None:
    incident = open_one(plane)
    plane.incidents.adopt_target(MARKED_TARGET, judged=incident)
    launched = plane.incidents.claim_launch(judged=incident)
    assert launched == replace(
        incident, target=MARKED_TARGET, launches=1, next_launch_at=NOON + 30 * SECOND
    )


def test_no_launch_is_claimed_for_a_failed_or_closed_incident(plane: ControlPlane) -> None:
    closed = open_one(plane)
    close(plane, closed)
    assert plane.incidents.claim_launch(judged=closed) is None
    incident = open_one(plane)
    assert plane.incidents.claim_launch(judged=closed) is None
    with plane.restore_lease() as lease:
        plane.incidents.give_up(FailureReason.NO_SNAPSHOTS, "none", judged=incident, lease=lease)
    assert plane.incidents.claim_launch(judged=incident) is None


def test_an_attempt_or_a_further_loss_resets_the_backoff(plane: ControlPlane) -> None:
    incident = open_one(plane)
    for _ in range(3):
        incident = launch(plane, incident)
    incident = claim_attempt(plane, incident)
    assert incident.next_launch_at is None
    plane.clock.advance(MINUTE)
    incident = launch(plane, incident)
    assert (incident.launches, pause(plane, incident)) == (4, 30)
    incident = launch(plane, incident)
    assert (incident.launches, pause(plane, incident)) == (5, 60)
    incident = plane.incidents.join(GONE, target=None, judged=incident)
    assert incident.next_launch_at is None
    incident = launch(plane, incident)
    assert (incident.launches, pause(plane, incident)) == (6, 30)


# Waiting


def test_waiting_records_reason_and_start_and_uses_no_attempt(
    plane: ControlPlane,
) -> None:
    incident = open_one(plane)
    waiting = wait(plane, incident, reason="no leader")
    assert waiting == replace(
        incident, waiting=Waiting(NOON, "no leader", 1), next_launch_at=NOON + 30 * SECOND
    )
    plane.clock.set(NOON + 40 * SECOND)
    still = wait(plane, waiting, reason="a follower lags")
    assert still == replace(
        incident,
        waiting=Waiting(NOON, "a follower lags", 2),
        next_launch_at=NOON + 100 * SECOND,
    )
    assert plane.incidents.recovery().incident == still


def test_the_backoff_of_waiting_grows_up_to_five_minutes(plane: ControlPlane) -> None:
    incident = open_one(plane)
    pauses = []
    for _ in range(6):
        incident = wait(plane, incident)
        pauses.append(pause(plane, incident))
    assert pauses == [30, 60, 120, 240, 300, 300]


def test_an_attempt_ends_waiting(plane: ControlPlane) -> None:
    incident = claim_attempt(plane, wait(plane, open_one(plane)))
    assert (incident.waiting, incident.next_launch_at, incident.attempts) == (None, None, 1)
    assert wait(plane, incident).waiting == Waiting(NOON, "no leader", 1)


# Attempts


def test_an_attempt_is_recorded_at_its_start_and_ended_once(plane: ControlPlane) -> None:
    incident = open_one(plane)
    with plane.restore_lease() as lease:
        claimed = plane.incidents.claim_attempt(
            judged=incident, run_id="run 1", holder="a host", lease=lease
        )
        assert claimed == replace(incident, attempts=1, next_attempt_at=NOON + MINUTE)
        begun = Attempt(incident.incident_id, 1, 1, "run 1", "a host", NOON, None, None)
        assert plane.incidents.attempts_of(incident.incident_id) == (begun,)
        plane.clock.advance(SECOND)
        plane.incidents.end_attempt("it refused", judged=claimed, lease=lease)
        ended = replace(begun, ended_at=NOON + SECOND, outcome="it refused")
        assert plane.incidents.attempts_of(incident.incident_id) == (ended,)
        plane.incidents.end_attempt("something else", judged=claimed, lease=lease)
    assert plane.incidents.attempts_of(incident.incident_id) == (ended,)
    assert plane.incidents.recovery().incident == claimed


def test_a_failed_attempt_is_ended_and_delays_the_next(plane: ControlPlane) -> None:
    claimed = claim_attempt(plane, open_one(plane))
    assert plane.incidents.recovery().incident == claimed
    plane.clock.advance(7 * MINUTE)
    with plane.restore_lease() as lease:
        plane.incidents.fail_attempt("it refused", judged=claimed, lease=lease)
    failed = plane.incidents.recovery().incident
    assert failed == replace(claimed, next_attempt_at=NOON + 8 * MINUTE)
    (attempt,) = plane.incidents.attempts_of(claimed.incident_id)
    assert (attempt.ended_at, attempt.outcome) == (NOON + 7 * MINUTE, "it refused")
    with plane.restore_lease() as lease, pytest.raises(AttemptNotDueError, match="Attempt 2 of 3"):
        plane.incidents.claim_attempt(judged=failed, run_id="2", holder="h", lease=lease)
    assert plane.incidents.claim_launch(judged=failed) is None
    plane.clock.advance(MINUTE)
    second = claim_attempt(plane, failed)
    assert second.next_attempt_at == NOON + 13 * MINUTE
    third = claim_attempt(plane, second)
    assert (third.attempts, third.next_attempt_at) == (3, None)


def test_an_attempt_that_failed_before_a_further_loss_delays_no_attempt(
    plane: ControlPlane,
) -> None:
    claimed = claim_attempt(plane, open_one(plane))
    joined = plane.incidents.join(GONE, target=None, judged=claimed)
    with plane.restore_lease() as lease:
        plane.incidents.fail_attempt("it refused", judged=claimed, lease=lease)
    assert plane.incidents.recovery().incident == joined
    (attempt,) = plane.incidents.attempts_of(claimed.incident_id)
    assert attempt.outcome == "it refused"


def test_only_the_newest_attempt_is_ended(plane: ControlPlane) -> None:
    incident = claim_attempt(plane, claim_attempt(plane, open_one(plane)))
    with plane.restore_lease() as lease:
        plane.incidents.end_attempt("done", judged=incident, lease=lease)
    attempts = [(a.number, a.outcome) for a in plane.incidents.attempts_of(incident.incident_id)]
    assert attempts == [(1, None), (2, "done")]


def test_the_last_attempt_of_an_earlier_loss_can_still_be_ended(plane: ControlPlane) -> None:
    incident = claim_attempt(plane, open_one(plane))
    joined = plane.incidents.join(GONE, target=None, judged=incident)
    with plane.restore_lease() as lease:
        plane.incidents.end_attempt("lost once more", judged=joined, lease=lease)
    (attempt,) = plane.incidents.attempts_of(incident.incident_id)
    assert attempt.outcome == "lost once more"


def test_ending_a_missing_attempt_does_nothing(plane: ControlPlane) -> None:
    incident = open_one(plane)
    with plane.restore_lease() as lease:
        plane.incidents.end_attempt("done", judged=incident, lease=lease)
    assert plane.incidents.attempts_of(incident.incident_id) == ()
    assert plane.incidents.attempts_of("no incident") == ()


def test_a_returned_attempt_is_ended_and_not_counted(plane: ControlPlane) -> None:
    incident = claim_attempt(plane, open_one(plane))
    second = claim_attempt(plane, incident)
    with plane.restore_lease() as lease:
        returned = plane.incidents.return_attempt(
            "no room", judged=second, lease=lease, waited=WAITED
        )
    assert returned == replace(second, attempts=1, next_attempt_at=None, waiting=WAITED)
    assert plane.incidents.recovery().incident == returned
    attempts = [(a.number, a.outcome) for a in plane.incidents.attempts_of(incident.incident_id)]
    assert attempts == [(1, None), (2, "no room")]
    # The numbers of recorded attempts go on, but two more count.
    for _ in range(2):
        returned = claim_attempt(plane, returned)
    assert returned.attempts == 3
    numbers = [attempt.number for attempt in plane.incidents.attempts_of(incident.incident_id)]
    assert numbers == [1, 2, 3, 4]


def test_an_attempt_of_a_closed_or_failed_incident_is_not_returned(plane: ControlPlane) -> None:
    incident = claim_attempt(plane, open_one(plane))
    give_up(plane, incident)
    with plane.restore_lease() as lease, pytest.raises(IncidentMovedError):
        plane.incidents.return_attempt("no room", judged=incident, lease=lease, waited=None)
    (attempt,) = plane.incidents.attempts_of(incident.incident_id)
    assert attempt.outcome is None


def test_a_loss_has_three_attempts(plane: ControlPlane) -> None:
    incident = open_one(plane)
    for _ in range(3):
        incident = claim_attempt(plane, incident)
    with pytest.raises(AttemptsUsedUpError, match="3 attempts") as refused:
        claim_attempt(plane, incident)
    assert refused.value.hint
    assert plane.incidents.recovery().incident == incident
    assert len(plane.incidents.attempts_of(incident.incident_id)) == 3


def test_the_third_attempt_is_claimed_only_once(plane: ControlPlane) -> None:
    incident = open_one(plane)
    for _ in range(2):
        incident = claim_attempt(plane, incident)
    claim_attempt(plane, incident, run_id="first")
    with pytest.raises(AttemptsUsedUpError):
        claim_attempt(plane, incident, run_id="second")
    runs = [attempt.run_id for attempt in plane.incidents.attempts_of(incident.incident_id)]
    assert runs == ["run 1", "run 1", "first"]


def test_a_launch_for_the_final_check_follows_three_attempts(plane: ControlPlane) -> None:
    incident = open_one(plane)
    for _ in range(3):
        incident = claim_attempt(plane, incident)
    assert launch(plane, incident).launches == 1
