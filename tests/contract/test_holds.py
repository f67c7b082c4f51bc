"""Holds: an operator stops the restore of an incident and releases it again."""

import logging
from dataclasses import replace
from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import ITSELF, Held, Incident, Recovery, RecoveryState, Verdict
from budget_recovery_dagster.errors import IncidentHeldError, IncidentMovedError
from tests.contract.control_planes import NOON, ControlPlane
from tests.contract.incident_scene import (
    GONE,
    LOSS,
    MARKED_TARGET,
    TARGET,
    claim_attempt,
    close,
    give_up,
    open_one,
    wait,
)

MINUTE = timedelta(minutes=1)
HELD = Held(NOON, "ann", "the disk is changed")
OTHER = replace(LOSS, verdict=Verdict.OTHER_STORE, reason="The store is another one.")


def hold(plane: ControlPlane, incident: Incident) -> Incident:
    """Put an incident on hold; require that the result is what is stored."""
    held = plane.incidents.hold("the disk is changed", "ann", judged=incident)
    assert plane.incidents.recovery() == Recovery(RecoveryState.RECOVERING, held)
    return held


def test_a_hold_is_stored_with_time_operator_and_reason(plane: ControlPlane) -> None:
    incident = wait(plane, claim_attempt(plane, open_one(plane)))
    held = hold(plane, incident)
    assert held == replace(incident, held=HELD)
    assert plane.incidents.recent(1) == (held,)


def test_a_second_hold_does_not_replace_the_first(plane: ControlPlane) -> None:
    held = hold(plane, open_one(plane))
    plane.clock.advance(MINUTE)
    assert plane.incidents.hold("me too", "bob", judged=held) == held
    assert plane.incidents.recovery().incident == held


def test_a_hold_prevents_launches_and_attempts(plane: ControlPlane) -> None:
    held = hold(plane, open_one(plane))
    plane.clock.advance(timedelta(days=1))
    assert plane.incidents.claim_launch(judged=held) is None
    with pytest.raises(IncidentHeldError) as refused:
        claim_attempt(plane, held)
    assert refused.value.message == (
        f"Incident {held.short_id} has been on hold since 2026-11-25 12:00:00 UTC, by ann: "
        "the disk is changed."
    )
    assert "budget-recovery release" in refused.value.hint
    assert plane.incidents.recovery().incident == held
    assert plane.incidents.attempts_of(held.incident_id) == ()


def test_a_release_resets_attempts_and_backoff(plane: ControlPlane) -> None:
    incident = open_one(plane)
    for _ in range(3):
        plane.clock.advance(timedelta(hours=1))
        launched = plane.incidents.claim_launch(judged=incident)
        assert launched is not None
        incident = launched
    for _ in range(3):
        incident = claim_attempt(plane, incident)
    held = hold(plane, wait(plane, incident))
    plane.clock.advance(MINUTE)
    now = plane.clock.now()

    released = plane.incidents.release("bob", judged=held)

    assert released == replace(held, released_at=now, attempts=0, waiting=None, next_launch_at=None)
    assert plane.incidents.recovery() == Recovery(RecoveryState.RECOVERING, released)
    launched = plane.incidents.claim_launch(judged=released)
    assert launched is not None
    assert launched.next_launch_at == now + timedelta(seconds=30)


def test_numbers_of_attempts_continue_after_a_release(plane: ControlPlane) -> None:
    incident = open_one(plane)
    for _ in range(2):
        incident = claim_attempt(plane, incident)
    incident = plane.incidents.release("ann", judged=hold(plane, incident))
    for counted in (1, 2, 3):
        incident = claim_attempt(plane, incident, run_id="later")
        assert incident.attempts == counted
    incident = plane.incidents.join(GONE, target=None, judged=incident)
    incident = claim_attempt(plane, incident)
    with plane.restore_lease() as lease:
        plane.incidents.end_attempt("done", judged=incident, lease=lease)
    attempts = [
        (each.loss, each.number, each.outcome)
        for each in plane.incidents.attempts_of(incident.incident_id)
    ]
    assert attempts == [
        (1, 1, None),
        (1, 2, None),
        (1, 3, None),
        (1, 4, None),
        (1, 5, None),
        (2, 1, "done"),
    ]


def test_the_newest_attempt_is_ended_after_a_release(plane: ControlPlane) -> None:
    incident = claim_attempt(plane, claim_attempt(plane, open_one(plane)))
    incident = plane.incidents.release("ann", judged=hold(plane, incident))
    incident = claim_attempt(plane, incident)
    with plane.restore_lease() as lease:
        plane.incidents.end_attempt("done", judged=incident, lease=lease)
    outcomes = [each.outcome for each in plane.incidents.attempts_of(incident.incident_id)]
    assert outcomes == [None, None, "done"]


def test_releasing_an_incident_that_is_not_on_hold_changes_nothing(plane: ControlPlane) -> None:
    incident = wait(plane, claim_attempt(plane, open_one(plane)))
    assert plane.incidents.release("ann", judged=incident) == incident
    assert plane.incidents.recovery().incident == incident


def test_a_release_is_logged_with_its_operator(
    plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        held = hold(plane, plane.incidents.release("carl", judged=open_one(plane)))
        plane.incidents.release("bob", judged=held)
    assert f"Incident {held.short_id} was released by bob." in caplog.text
    assert "carl" not in caplog.text


def test_a_hold_after_a_release_keeps_the_time_of_the_release(plane: ControlPlane) -> None:
    released = plane.incidents.release("ann", judged=hold(plane, open_one(plane)))
    plane.clock.advance(MINUTE)
    again = plane.incidents.hold("once more", "bob", judged=released)
    assert again == replace(released, held=Held(NOON + MINUTE, "bob", "once more"))
    assert again.released_at == NOON


def test_a_hold_under_a_clock_that_was_ahead_can_be_released(plane: ControlPlane) -> None:
    incident = open_one(plane)
    plane.clock.advance(timedelta(hours=30))
    held = hold(plane, incident)
    plane.clock.set(NOON + MINUTE)
    released = plane.incidents.release("ann", judged=held)
    assert not released.is_held
    assert plane.incidents.recovery().incident == released


def test_a_hold_for_another_store_replaces_that_of_a_person(plane: ControlPlane) -> None:
    held = hold(plane, open_one(plane))
    joined = plane.incidents.join(OTHER, target=TARGET, judged=held, hold="Another store.")
    assert joined.held == Held(
        NOON, ITSELF, "Another store. It was already on hold, by ann: the disk is changed"
    )
    assert joined.awaits_choice
    assert plane.incidents.recovery().incident == joined
    # A release that was judged before is none of this hold.
    with pytest.raises(IncidentMovedError, match="a further loss joined it"):
        plane.incidents.release("ann", judged=held)
    assert plane.incidents.recovery().incident == joined
    released = plane.incidents.release("ann", judged=joined)
    assert (released.is_held, released.awaits_choice) == (False, False)


def test_a_new_restore_target_prevents_neither_hold_nor_release_and_a_loss_no_hold(
    plane: ControlPlane,
) -> None:
    first = open_one(plane)
    plane.incidents.adopt_target(MARKED_TARGET, judged=first)
    held = hold(plane, first)
    joined = plane.incidents.join(GONE, target=None, judged=held)
    assert joined.held == HELD
    released = plane.incidents.release("ann", judged=joined)
    assert released == replace(joined, released_at=NOON)


def test_a_hold_does_not_prevent_a_worker_from_ending_the_incident(plane: ControlPlane) -> None:
    held = wait(plane, hold(plane, open_one(plane)))
    closed = close(plane, held)
    assert closed.held == HELD
    assert plane.incidents.recovery() == Recovery(RecoveryState.HEALTHY, None)
    assert plane.incidents.recent(1) == (closed,)
    failed = give_up(plane, hold(plane, open_one(plane)))
    assert failed.held == HELD
    assert plane.incidents.recovery() == Recovery(RecoveryState.FAILED, failed)


def test_any_operator_and_reason_can_be_stored(plane: ControlPlane) -> None:
    ugly, escaped = "NUL \0, half a pair \ud83d", "NUL \\x00, half a pair \\ud83d"
    held = plane.incidents.hold(ugly, ugly, judged=open_one(plane))
    assert held.held == Held(NOON, escaped, escaped)
    assert plane.incidents.recovery().incident == held
    plane.incidents.release(ugly, judged=held)
