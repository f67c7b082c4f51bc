"""Holds and releases of an incident, compared with literal values."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from budget_recovery_dagster.domain import (
    ITSELF,
    FailureReason,
    GivenUp,
    Held,
    IntendedMarker,
    Move,
    Recovery,
    Standing,
    Verdict,
    Waiting,
    may_launch,
    moves,
)
from budget_recovery_dagster.errors import IncidentHeldError, IncidentMovedError
from tests.unit.test_moves import (
    BASELINE,
    ENDED,
    FAILED,
    GONE,
    HEALTHY,
    LOSS,
    NOW,
    OPENED,
    RECOVERING,
    SECOND,
    TARGET,
    standing,
)

HELD = Held(NOW - 90 * SECOND, "ann", "the disk is changed")
LATER = Held(NOW, "bob", "me too")
ON_HOLD = (
    "Incident 11111111 has been on hold since 2026-11-25 11:58:30 UTC, by ann: the disk is changed."
)
USED: dict[str, Any] = {
    "attempts": 3,
    "launches": 5,
    "waiting": Waiting(NOW, "why", 4),
    "next_launch_at": NOW + 240 * SECOND,
    "next_attempt_at": NOW + 300 * SECOND,
}


def test_a_hold_changes_only_the_hold() -> None:
    before = standing(launches_before=2, released_at=NOW - 91 * SECOND, **USED)
    assert before.incident is not None
    held = replace(before.incident, held=HELD)
    assert moves.hold(before, HELD, judged=OPENED) == Move(RECOVERING, BASELINE, held, 2)


@pytest.mark.parametrize("ahead", [0 * SECOND, 3600 * SECOND])
def test_a_hold_after_a_release_under_a_clock_that_was_ahead_holds(ahead: timedelta) -> None:
    before = standing(released_at=LATER.at + ahead)
    assert moves.hold(before, LATER, judged=OPENED).incident.is_held
    joined = moves.join(before, GONE, target=None, judged=OPENED, held=LATER)
    assert joined.incident.is_held


def test_a_hold_under_a_clock_that_was_ahead_can_be_released() -> None:
    ahead = replace(HELD, at=NOW + 3600 * SECOND)
    released = moves.release(standing(held=ahead), judged=OPENED, now=NOW).incident
    assert not released.is_held
    assert (released.held, released.released_at) == (replace(HELD, at=NOW), NOW)


def test_a_second_hold_does_not_replace_the_first() -> None:
    before = standing(held=HELD)
    assert moves.hold(before, LATER, judged=OPENED).incident.held == HELD


def test_a_release_resets_attempts_waiting_and_backoff() -> None:
    before = standing(launches_before=2, held=HELD, **USED)
    released = replace(OPENED, launches=5, held=HELD, released_at=NOW)
    assert moves.release(before, judged=OPENED, now=NOW) == Move(RECOVERING, BASELINE, released, 5)
    # The backoff starts again at 30 seconds.
    again = Standing(RECOVERING, BASELINE, released, 5)
    launched = moves.claim_launch(again, judged=released, now=NOW)
    assert launched is not None
    assert launched.incident.next_launch_at == NOW + 30 * SECOND


def test_releasing_an_incident_that_is_not_on_hold_changes_nothing() -> None:
    before = standing(launches_before=2, **USED)
    assert before.incident is not None
    move = moves.release(before, judged=OPENED, now=NOW)
    assert move == Move(RECOVERING, BASELINE, before.incident, 2)


@pytest.mark.parametrize(
    "found",
    [
        standing(target=None),
        standing(target=replace(TARGET, intended=IntendedMarker("n"))),
    ],
)
def test_a_new_restore_target_prevents_neither_hold_nor_release(
    found: Standing,
) -> None:
    held = moves.hold(found, HELD, judged=OPENED)
    assert held.incident.held == HELD
    released = moves.release(Standing(RECOVERING, BASELINE, held.incident), judged=OPENED, now=NOW)
    assert not released.incident.is_held
    # The holder and the reason are kept.
    assert released.incident.held == HELD
    assert (released.incident.target, released.incident.losses) == (
        held.incident.target,
        held.incident.losses,
    )


def test_a_release_judged_before_a_further_loss_is_refused() -> None:
    found = standing(held=HELD, losses=(LOSS, GONE))
    with pytest.raises(IncidentMovedError, match="a further loss joined it"):
        moves.release(found, judged=OPENED, now=NOW)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Standing(HEALTHY, BASELINE), "11111111 has changed: it is closed"),
        (standing(incident_id="22222222-b"), "it is closed, and 22222222 is open"),
        (standing(FAILED), "the store is FAILED"),
        (standing(FAILED, held=HELD), "the store is FAILED"),
    ],
)
def test_only_a_recovering_incident_can_be_held_and_released(found: Standing, why: str) -> None:
    with pytest.raises(IncidentMovedError, match=why):
        moves.hold(found, HELD, judged=OPENED)
    with pytest.raises(IncidentMovedError, match=why):
        moves.release(found, judged=OPENED, now=NOW)


# What a hold prevents, and what it does not


@pytest.mark.parametrize("attempts", [0, 3])
def test_a_hold_refuses_an_attempt_with_its_holder_and_reason(attempts: int) -> None:
    with pytest.raises(IncidentHeldError) as refused:
        moves.claim_attempt(standing(held=HELD, attempts=attempts), judged=OPENED, now=NOW)
    assert refused.value.message == ON_HOLD
    assert "`budget-recovery release`" in refused.value.hint
    moves.require_not_held(OPENED)


def test_a_hold_prevents_launches() -> None:
    found = standing(held=HELD)
    assert moves.claim_launch(found, judged=OPENED, now=NOW) is None
    assert may_launch(Recovery(found.state, found.incident), NOW) == ON_HOLD


def test_a_further_loss_keeps_the_hold() -> None:
    joined = moves.join(standing(held=HELD, released_at=NOW), GONE, target=None, judged=OPENED)
    assert (joined.incident.held, joined.incident.released_at) == (HELD, NOW)


CHOICE = Held(NOW, ITSELF, "The server shows another store.")


def test_an_alarm_that_needs_a_choice_replaces_the_hold_of_a_person_and_names_it() -> None:
    other = replace(GONE, verdict=Verdict.OTHER_STORE)
    found = standing(held=HELD)
    joined = moves.join(found, other, target=TARGET, judged=OPENED, held=CHOICE).incident
    assert joined.awaits_choice
    assert joined.held == replace(
        CHOICE,
        reason="The server shows another store. It was already on hold, by ann: the disk is"
        " changed",
    )
    # A hold that already awaits the choice stays as it is.
    again = replace(CHOICE, reason="once more")
    found = Standing(RECOVERING, BASELINE, joined)
    assert moves.join(found, other, target=None, judged=joined, held=again).incident.held == (
        joined.held
    )


def test_an_alarm_that_needs_a_choice_holds_again_after_a_release() -> None:
    found = standing(held=HELD, released_at=NOW + 90 * SECOND)
    joined = moves.join(found, GONE, target=None, judged=OPENED, held=CHOICE).incident
    assert (joined.held, joined.released_at, joined.is_held) == (CHOICE, None, True)


def test_a_hold_does_not_prevent_a_worker_from_ending_the_incident() -> None:
    found = standing(held=HELD)
    assert moves.close(found, ENDED, baseline=TARGET, judged=OPENED).incident == replace(
        OPENED, held=HELD, ended=ENDED
    )
    given_up = GivenUp(NOW, FailureReason.NOT_WRITTEN, "no")
    failed = moves.give_up(found, given_up, judged=OPENED)
    assert failed.incident == replace(OPENED, held=HELD, given_up=given_up)
    waited = moves.wait(found, "why", judged=OPENED, now=NOW)
    assert waited.incident.held == HELD
