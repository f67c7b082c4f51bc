"""Holds and releases of an incident, by values worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from budget_recovery_dagster.domain import (
    FailureReason,
    GivenUp,
    Held,
    Move,
    Recovery,
    Standing,
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
ON_HOLD = "Incident 11111111 is on hold since 2026-11-25 11:58:30 UTC, by ann: the disk is changed"
USED: dict[str, Any] = {
    "attempts": 3,
    "launches": 5,
    "waiting": Waiting(NOW, "why", 4),
    "next_launch_at": NOW + 240 * SECOND,
}


def test_a_hold_changes_nothing_else() -> None:
    before = standing(launches_before=2, released_at=NOW, **USED)
    assert before.incident is not None
    held = replace(before.incident, held=HELD)
    assert moves.hold(before, HELD, judged=OPENED) == Move(RECOVERING, BASELINE, held, 2)


def test_the_first_hold_stays() -> None:
    before = standing(held=HELD)
    assert moves.hold(before, LATER, judged=OPENED).incident.held == HELD


def test_a_release_begins_everything_again() -> None:
    before = standing(launches_before=2, held=HELD, **USED)
    released = replace(OPENED, launches=5, held=HELD, released_at=NOW)
    assert moves.release(before, judged=OPENED, now=NOW) == Move(RECOVERING, BASELINE, released, 5)
    # So the backoff begins with half a minute.
    again = Standing(RECOVERING, BASELINE, released, 5)
    launched = moves.claim_launch(again, judged=released, now=NOW)
    assert launched is not None
    assert launched.incident.next_launch_at == NOW + 30 * SECOND


def test_a_release_of_what_is_not_on_hold_changes_nothing() -> None:
    before = standing(launches_before=2, **USED)
    assert before.incident is not None
    move = moves.release(before, judged=OPENED, now=NOW)
    assert move == Move(RECOVERING, BASELINE, before.incident, 2)


@pytest.mark.parametrize(
    "found",
    [
        standing(target=None),
        standing(target=replace(TARGET, intended="n")),
        standing(losses=(LOSS, GONE)),
    ],
)
def test_neither_a_moving_ground_nor_a_further_loss_gets_in_the_way(found: Standing) -> None:
    held = moves.hold(found, HELD, judged=OPENED)
    assert held.incident.held == HELD
    released = moves.release(Standing(RECOVERING, BASELINE, held.incident), judged=OPENED, now=NOW)
    assert not released.incident.is_held
    # Who held it, and why, stays known.
    assert released.incident.held == HELD
    assert (released.incident.target, released.incident.losses) == (
        held.incident.target,
        held.incident.losses,
    )


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Standing(HEALTHY, BASELINE), "11111111 has changed: it is closed"),
        (standing(incident_id="22222222-b"), "it is closed, and 22222222 is open"),
        (standing(FAILED), "the store is FAILED"),
        (standing(FAILED, held=HELD), "the store is FAILED"),
    ],
)
def test_only_the_restore_of_an_open_incident_is_held_and_released(
    found: Standing, why: str
) -> None:
    with pytest.raises(IncidentMovedError, match=why):
        moves.hold(found, HELD, judged=OPENED)
    with pytest.raises(IncidentMovedError, match=why):
        moves.release(found, judged=OPENED, now=NOW)


# What a hold keeps from happening, and what not


@pytest.mark.parametrize("attempts", [0, 3])
def test_no_attempt_is_claimed_and_the_refusal_says_who_and_why(attempts: int) -> None:
    with pytest.raises(IncidentHeldError) as refused:
        moves.claim_attempt(standing(held=HELD, attempts=attempts), judged=OPENED)
    assert refused.value.message == ON_HOLD
    assert "`budget-recovery release`" in refused.value.hint
    moves.require_not_held(OPENED)


def test_nothing_is_launched() -> None:
    found = standing(held=HELD)
    assert moves.claim_launch(found, judged=OPENED, now=NOW) is None
    assert may_launch(Recovery(found.state, found.incident), NOW) == ON_HOLD


def test_a_further_loss_keeps_the_hold() -> None:
    joined = moves.join(standing(held=HELD, released_at=NOW), GONE, target=None, judged=OPENED)
    assert (joined.incident.held, joined.incident.released_at) == (HELD, NOW)


def test_a_worker_that_was_past_the_check_may_end_it() -> None:
    found = standing(held=HELD)
    assert moves.close(found, ENDED, baseline=TARGET, judged=OPENED).incident == replace(
        OPENED, held=HELD, ended=ENDED
    )
    given_up = moves.give_up(found, FailureReason.NOT_WRITTEN, "no", judged=OPENED, now=NOW)
    assert given_up.incident == replace(
        OPENED, held=HELD, given_up=GivenUp(NOW, FailureReason.NOT_WRITTEN, "no")
    )
    waited = moves.wait(found, "why", judged=OPENED, now=NOW)
    assert waited.incident.held == HELD
