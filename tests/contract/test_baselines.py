from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from budget_recovery_dagster.domain import (
    Baseline,
    FoundMarker,
    IntendedMarker,
    Marker,
    Observation,
    RecoveryState,
    StoreIdentity,
)
from budget_recovery_dagster.errors import BaselineMovedError, CapturesPausedError
from tests.contract.control_planes import BORN, NOON, ControlPlane, Counters, reading

TEAM: Counters = {("team", "lifetime"): {"alice": "1"}}
FIRST = Baseline(StoreIdentity(BORN, 5), version=1)
MARKED = Baseline(
    StoreIdentity(BORN, 9007199254740993),
    version=0,
    marker=Marker("n1", 9007199254740993),
    marked_at=NOON,
    intended=IntendedMarker("n2"),
)


def test_a_first_baseline_gets_version_one(plane: ControlPlane) -> None:
    accepted = plane.registry.accept(replace(FIRST, version=77), judged=None)
    assert accepted == FIRST == plane.baseline


def test_an_accepted_baseline_is_stored_exactly_with_the_next_version(plane: ControlPlane) -> None:
    first = plane.registry.accept(FIRST, judged=None)
    accepted = plane.registry.accept(MARKED, judged=first)
    assert accepted == replace(MARKED, version=2) == plane.baseline
    assert plane.registry.accept(FIRST, judged=accepted) == replace(FIRST, version=3)
    assert plane.baseline == replace(FIRST, version=3)


@pytest.mark.parametrize("sequence", [0, 9007199254740993, 2**63, 2**64 - 1])
def test_sequences_and_revisions_are_exact_over_the_whole_range(
    plane: ControlPlane, sequence: int
) -> None:
    exact = Baseline(StoreIdentity(BORN, sequence), 1, Marker("n", sequence), NOON)
    assert plane.registry.accept(exact, judged=None) == exact == plane.baseline


def test_an_intended_marker_is_stored_with_the_accepted_one(plane: ControlPlane) -> None:
    plane.registry.accept(FIRST, judged=None)
    marked = plane.registry.accept(replace(MARKED, intended=None), judged=FIRST)
    intended = plane.registry.accept(replace(marked, intended=IntendedMarker("n2")), judged=marked)
    assert intended == replace(MARKED, version=3) == plane.baseline


@pytest.mark.parametrize(
    "judged",
    [
        replace(MARKED, version=2),
        replace(MARKED, version=1, identity=FIRST.identity),
        replace(MARKED, version=1, marker=Marker("n1", 9007199254740992)),
        replace(MARKED, version=1, marker=Marker("n0", 9007199254740993)),
        replace(MARKED, version=1, marked_at=NOON + timedelta(microseconds=1)),
        replace(MARKED, version=1, intended=None),
    ],
)
def test_a_move_judged_on_a_different_baseline_is_refused(
    plane: ControlPlane, judged: Baseline
) -> None:
    present = plane.registry.accept(MARKED, judged=None)
    with pytest.raises(BaselineMovedError):
        plane.registry.accept(replace(judged, intended=IntendedMarker("n3")), judged=judged)
    with pytest.raises(BaselineMovedError):
        plane.registry.accept(FIRST, judged=judged)
    with pytest.raises(BaselineMovedError):
        plane.registry.accept(FIRST, judged=None)
    assert plane.baseline == present


def test_a_move_judged_on_a_missing_baseline_is_refused(plane: ControlPlane) -> None:
    with pytest.raises(BaselineMovedError):
        plane.registry.accept(replace(FIRST, intended=IntendedMarker("n")), judged=FIRST)
    with pytest.raises(BaselineMovedError):
        plane.registry.accept(FIRST, judged=FIRST)
    assert plane.baseline is None


@pytest.mark.parametrize("state", [RecoveryState.RECOVERING, RecoveryState.FAILED])
def test_the_baseline_moves_only_while_the_store_is_healthy(
    plane: ControlPlane, state: RecoveryState
) -> None:
    present = plane.registry.accept(FIRST, judged=None)
    plane.set_state(state)
    with pytest.raises(CapturesPausedError, match=state.name):
        plane.registry.accept(replace(present, intended=IntendedMarker("n")), judged=present)
    with pytest.raises(CapturesPausedError, match=state.name):
        plane.registry.accept(MARKED, judged=present)
    assert plane.baseline == present


def test_a_capture_keeps_the_accepted_and_the_intended_marker(plane: ControlPlane) -> None:
    present = plane.registry.accept(MARKED, judged=None)
    snapshot = plane.take(reading("acme", TEAM))
    expected = replace(present, identity=snapshot.identity, version=2)
    assert plane.commit(snapshot) == expected == plane.baseline


def test_only_one_of_concurrent_moves_on_the_same_baseline_succeeds(
    postgres_plane: ControlPlane,
) -> None:
    plane = postgres_plane
    present = plane.registry.accept(FIRST, judged=None)

    def accept(_: int) -> Baseline | None:
        try:
            return plane.registry.accept(MARKED, judged=present)
        except BaselineMovedError:
            return None

    def intend(number: int) -> Baseline | None:
        try:
            return plane.registry.accept(
                replace(present, intended=IntendedMarker(f"n{number}")), judged=present
            )
        except BaselineMovedError:
            return None

    with ThreadPoolExecutor(4) as pool:
        tries = [pool.submit((accept, intend)[number % 2], number) for number in range(8)]
    moved = [each.result() for each in tries if each.result() is not None]
    assert moved == [plane.baseline]
    assert moved[0] is not None
    assert moved[0].version == 2


def test_a_marker_after_an_acknowledged_one_names_a_landmark_that_no_other_database_has(
    plane: ControlPlane,
) -> None:
    plane.registry.accept(FIRST, judged=None)
    known = plane.registry.newest_landmark()
    theirs = FoundMarker("theirs", 9, number=40, landmark=str(uuid4()))
    plane.registry.acknowledge(theirs)
    named = plane.registry.next_marker()
    assert named.number == 41
    assert named.landmark not in (None, known, theirs.landmark)
    seen = Observation(FIRST.identity, theirs)
    assert plane.registry.memory_of(seen, FIRST).has_landmark

    plane.registry.acknowledge(theirs)
    assert plane.registry.newest_landmark() == named.landmark
