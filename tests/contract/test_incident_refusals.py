"""Moves of an incident that are based on outdated facts are refused and change nothing."""

from collections.abc import Callable

import pytest

from budget_recovery_dagster.domain import FailureReason, Incident, Recovery, RecoveryState
from budget_recovery_dagster.errors import IncidentMovedError, LeaseLostError
from budget_recovery_dagster.ports import Lease
from tests.contract.control_planes import ControlPlane
from tests.contract.incident_scene import CLOSING, GONE, MARKED_TARGET, close, give_up, open_one

Move = Callable[[ControlPlane, Incident, Lease], object]
MOVES: dict[str, Move] = {
    "join": lambda plane, judged, _: plane.incidents.join(GONE, target=None, judged=judged),
    "adopt target": lambda plane, judged, _: plane.incidents.adopt_target(
        MARKED_TARGET, judged=judged
    ),
    "wait": lambda plane, judged, lease: plane.incidents.wait("why", judged=judged, lease=lease),
    "claim an attempt": lambda plane, judged, lease: plane.incidents.claim_attempt(
        judged=judged, run_id="r", holder="h", lease=lease
    ),
    "give up": lambda plane, judged, lease: plane.incidents.give_up(
        FailureReason.NOT_WRITTEN, "why", judged=judged, lease=lease
    ),
    "close": lambda plane, judged, lease: plane.incidents.close(
        CLOSING, judged=judged, lease=lease
    ),
}
LEASED_AND_RECOVERING = ("claim an attempt", "give up", "close")
LEASED = ("wait", *LEASED_AND_RECOVERING)
# A new restore target does not prevent what an operator wants.
OF_A_PERSON: dict[str, Move] = {
    "hold": lambda plane, judged, _: plane.incidents.hold("why", "ann", judged=judged),
    "release": lambda plane, judged, _: plane.incidents.release("ann", judged=judged),
}
EVERY = {**MOVES, **OF_A_PERSON}


def refused(plane: ControlPlane, move: Move, judged: Incident, why: str) -> None:
    def everything() -> object:
        recent = plane.incidents.recent(10)
        return (
            plane.incidents.recovery(),
            recent,
            plane.baseline,
            [plane.incidents.attempts_of(each.incident_id) for each in recent],
        )

    before = everything()
    with plane.restore_lease() as lease, pytest.raises(IncidentMovedError, match=why) as raised:
        move(plane, judged, lease)
    assert raised.value.hint
    assert everything() == before


@pytest.mark.parametrize("name", EVERY)
def test_a_closed_incident_does_not_move(plane: ControlPlane, name: str) -> None:
    incident = open_one(plane)
    close(plane, incident)
    refused(plane, EVERY[name], incident, "it is closed")


@pytest.mark.parametrize("name", EVERY)
def test_a_move_of_a_closed_incident_does_not_move_the_next(plane: ControlPlane, name: str) -> None:
    incident = open_one(plane)
    close(plane, incident)
    following = open_one(plane)
    refused(plane, EVERY[name], incident, f"it is closed, and {following.short_id} is open")


@pytest.mark.parametrize("name", MOVES)
def test_a_move_judged_on_another_restore_target_is_refused(plane: ControlPlane, name: str) -> None:
    incident = open_one(plane)
    plane.incidents.adopt_target(MARKED_TARGET, judged=incident)
    refused(plane, MOVES[name], incident, "its restore target has changed")


@pytest.mark.parametrize("name", [*LEASED_AND_RECOVERING, *OF_A_PERSON])
def test_a_failed_incident_cannot_be_attempted_held_given_up_or_closed(
    plane: ControlPlane, name: str
) -> None:
    failed = give_up(plane, open_one(plane))
    refused(plane, EVERY[name], failed, "the store is FAILED")


@pytest.mark.parametrize("name", LEASED)
def test_a_move_under_a_lost_or_wrong_lease_is_refused(plane: ControlPlane, name: str) -> None:
    incident = open_one(plane)
    with plane.lease() as other, pytest.raises(ValueError, match="lease restore, not capture"):
        MOVES[name](plane, incident, other)
    with plane.restore_lease() as lost:
        plane.lose_lease(lost)
        with pytest.raises(LeaseLostError):
            MOVES[name](plane, incident, lost)
        with pytest.raises(LeaseLostError):
            plane.incidents.end_attempt("why", judged=incident, lease=lost)
    assert plane.incidents.recovery() == Recovery(RecoveryState.RECOVERING, incident)
    assert plane.incidents.attempts_of(incident.incident_id) == ()
