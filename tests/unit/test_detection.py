"""The verdict on an observation of the store, for each known and conceivable case."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from budget_recovery_dagster.domain import (
    Baseline,
    FoundMarker,
    Marker,
    Observation,
    StoreIdentity,
    Verdict,
    accepted_marker,
    judge_observation,
)

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
BORN = datetime(2026, 11, 1, tzinfo=UTC)
DAY = timedelta(days=1)
LARGE = 9007199254740993
"""The first whole number that a float cannot hold."""

MARKER = Marker("ours", 100)
ACCEPTED = Baseline(StoreIdentity(BORN, 120), 7, MARKER, marked_at=NOON - timedelta(minutes=10))
INTENDED = replace(ACCEPTED, intended="next")
UNMARKED = Baseline(StoreIdentity(BORN, 120), version=7)
OURS = FoundMarker("ours", 100)


def seen(sequence: int, marker: FoundMarker | None = OURS, **also: object) -> Observation:
    return Observation(StoreIdentity(BORN, sequence), marker, **also)  # type: ignore[arg-type]


# The store itself


@pytest.mark.parametrize(
    ("sequence", "verdict"),
    [(120, Verdict.UNCHANGED), (121, Verdict.ADVANCED), (119, Verdict.REGRESSED)],
)
def test_a_store_with_our_marker_is_judged_by_its_sequence(sequence: int, verdict: Verdict) -> None:
    assert judge_observation(ACCEPTED, seen(sequence), NOON).verdict is verdict


@pytest.mark.parametrize(
    ("sequence", "verdict"),
    [(LARGE, Verdict.UNCHANGED), (LARGE - 1, Verdict.REGRESSED), (LARGE + 1, Verdict.ADVANCED)],
)
def test_large_sequences_are_compared_exactly(sequence: int, verdict: Verdict) -> None:
    accepted = replace(ACCEPTED, identity=StoreIdentity(BORN, LARGE))
    assert judge_observation(accepted, seen(sequence), NOON).verdict is verdict


def test_a_store_with_another_creation_time_is_recreated() -> None:
    recreated = Observation(StoreIdentity(BORN + timedelta(microseconds=1), 500), OURS)
    judged = judge_observation(ACCEPTED, recreated, NOON)
    assert judged.verdict is Verdict.RECREATED
    assert judged.reason == (
        f"The store was recreated; it was: {ACCEPTED.identity}; now: {recreated.identity}."
    )


def test_a_store_with_a_lower_sequence_went_back() -> None:
    older = seen(99, OURS)
    judged = judge_observation(ACCEPTED, older, NOON)
    assert judged.verdict is Verdict.REGRESSED
    assert judged.reason == (
        "The store went back to an earlier state; it was: "
        f"{ACCEPTED.identity}; now: {older.identity}."
    )


def test_a_missing_store_is_recreated_and_the_reason_names_the_old_one() -> None:
    judged = judge_observation(ACCEPTED, None, NOON)
    assert judged.verdict is Verdict.RECREATED
    assert judged.reason == f"The store is gone; it was: {ACCEPTED.identity}."


def test_a_missing_store_without_a_baseline_is_unknown() -> None:
    assert judge_observation(None, None, NOON).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("marker", [None, OURS])
def test_a_store_without_a_baseline_is_first_seen(marker: FoundMarker | None) -> None:
    assert judge_observation(None, seen(3, marker), NOON).verdict is Verdict.FIRST_SEEN


# The marker


def test_an_older_marker_reveals_a_rollback_behind_later_traffic() -> None:
    judged = judge_observation(ACCEPTED, seen(500, FoundMarker("ours before", 60)), NOON)
    assert judged.verdict is Verdict.MARKER_LOST
    assert "went back to older data" in judged.reason
    assert "at sequence 100, but 60 has another marker" in judged.reason


def test_our_nonce_at_an_older_sequence_is_a_rollback() -> None:
    judged = judge_observation(ACCEPTED, seen(500, FoundMarker("ours", 99)), NOON)
    assert judged.verdict is Verdict.MARKER_LOST


def test_another_marker_at_our_sequence_is_a_rollback() -> None:
    judged = judge_observation(ACCEPTED, seen(500, FoundMarker("theirs", 100)), NOON)
    assert judged.verdict is Verdict.MARKER_LOST
    assert "went back to older data" in judged.reason


@pytest.mark.parametrize("nonce", ["theirs", "ours", None])
def test_a_foreign_marker_at_a_later_sequence_is_a_loss(nonce: str | None) -> None:
    judged = judge_observation(INTENDED, seen(500, FoundMarker(nonce, 101)), NOON)
    assert judged.verdict is Verdict.MARKER_LOST
    assert "another installation uses a copy" in judged.reason


def test_a_missing_marker_is_a_loss() -> None:
    judged = judge_observation(ACCEPTED, seen(121, None), NOON)
    assert judged.verdict is Verdict.MARKER_LOST
    assert "Part of the store is gone" in judged.reason


def test_a_marker_deleted_by_its_key_is_not_a_loss() -> None:
    deleted = FoundMarker(None, 121, is_deleted=True)
    assert judge_observation(ACCEPTED, seen(121, deleted), NOON).verdict is Verdict.ADVANCED


def test_a_deletion_older_than_our_marker_is_a_rollback() -> None:
    deleted = FoundMarker(None, 60, is_deleted=True)
    assert judge_observation(ACCEPTED, seen(121, deleted), NOON).verdict is Verdict.MARKER_LOST


# A marker may have expired if it is a day old by a clock one minute ahead of ours.
@pytest.mark.parametrize(
    ("age", "verdict"),
    [
        (DAY + timedelta(hours=1), Verdict.ADVANCED),
        (DAY - timedelta(minutes=1), Verdict.ADVANCED),
        (DAY - timedelta(minutes=1, microseconds=1), Verdict.MARKER_LOST),
        (timedelta(hours=1), Verdict.MARKER_LOST),
    ],
)
def test_a_marker_that_may_have_expired_is_not_a_loss(age: timedelta, verdict: Verdict) -> None:
    accepted = replace(ACCEPTED, marked_at=NOON - age)
    assert judge_observation(accepted, seen(121, None, keeps_for=DAY), NOON).verdict is verdict


def test_an_old_marker_missing_from_a_store_without_a_maximum_age_is_a_loss() -> None:
    accepted = replace(ACCEPTED, marked_at=NOON - 400 * DAY)
    assert judge_observation(accepted, seen(121, None), NOON).verdict is Verdict.MARKER_LOST


def test_an_older_marker_in_place_of_an_expired_one_is_a_loss() -> None:
    accepted = replace(ACCEPTED, marked_at=NOON - 400 * DAY)
    older = seen(121, FoundMarker("before", 60), keeps_for=DAY)
    assert judge_observation(accepted, older, NOON).verdict is Verdict.MARKER_LOST


@pytest.mark.parametrize(
    ("marker", "verdict"),
    [
        (FoundMarker("next", 101), Verdict.ADVANCED),
        (FoundMarker("ours", 100), Verdict.ADVANCED),
        (FoundMarker("next", 100), Verdict.MARKER_LOST),
        (FoundMarker("next", 60), Verdict.MARKER_LOST),
    ],
)
def test_the_intended_marker_counts_only_at_a_later_sequence(
    marker: FoundMarker, verdict: Verdict
) -> None:
    assert judge_observation(INTENDED, seen(121, marker), NOON).verdict is verdict


@pytest.mark.parametrize("marker", [None, FoundMarker("theirs", 5), FoundMarker(None, 5)])
def test_a_baseline_without_a_marker_expects_none(marker: FoundMarker | None) -> None:
    for accepted in (UNMARKED, replace(UNMARKED, intended="next")):
        assert judge_observation(accepted, seen(121, marker), NOON).verdict is Verdict.ADVANCED


def test_regressed_and_recreated_take_precedence_over_a_lost_marker() -> None:
    assert judge_observation(ACCEPTED, seen(119, None), NOON).verdict is Verdict.REGRESSED
    recreated = Observation(StoreIdentity(NOON, 500), None)
    assert judge_observation(ACCEPTED, recreated, NOON).verdict is Verdict.RECREATED


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        judge_observation(ACCEPTED, seen(121), datetime(2026, 11, 25))  # noqa: DTZ001


# Which marker is valid


@pytest.mark.parametrize(
    ("accepted", "marker", "expected"),
    [
        (None, OURS, None),
        (ACCEPTED, None, None),
        (ACCEPTED, OURS, Marker("ours", 100)),
        (ACCEPTED, FoundMarker("ours", 101), None),
        (ACCEPTED, FoundMarker(None, 101), None),
        (INTENDED, FoundMarker("next", 101), Marker("next", 101)),
        (INTENDED, FoundMarker("next", 100), None),
        (UNMARKED, OURS, None),
        (replace(UNMARKED, intended="next"), FoundMarker("next", 1), Marker("next", 1)),
        (replace(UNMARKED, intended="next"), OURS, None),
    ],
)
def test_a_marker_is_ours_if_it_is_the_accepted_one_or_its_successor(
    accepted: Baseline | None, marker: FoundMarker | None, expected: Marker | None
) -> None:
    assert accepted_marker(accepted, seen(121, marker)) == expected


# A leader that was cut off


@pytest.mark.parametrize(
    ("sequence", "marker"), [(119, OURS), (500, None)], ids=["regressed", "marker lost"]
)
def test_a_loss_reported_by_a_possibly_deposed_leader_is_unknown(
    sequence: int, marker: FoundMarker | None
) -> None:
    assert judge_observation(ACCEPTED, seen(sequence, marker), NOON).verdict.is_loss
    doubted = judge_observation(ACCEPTED, seen(sequence, marker, is_led=False), NOON)
    assert doubted.verdict is Verdict.UNKNOWN
    assert doubted.reason.startswith("The server that answered may no longer be the leader. ")


def test_a_good_verdict_from_a_possibly_deposed_leader_counts() -> None:
    assert judge_observation(ACCEPTED, seen(121, is_led=False), NOON).verdict is Verdict.ADVANCED
