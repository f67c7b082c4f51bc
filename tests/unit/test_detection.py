"""The verdict on an observation of the store: the table, and how its inputs are found."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from budget_recovery_dagster.domain import (
    Answer,
    Baseline,
    Evidence,
    Found,
    FoundMarker,
    IntendedMarker,
    Judgement,
    Marker,
    Memory,
    Observation,
    StoreFacts,
    StoreIdentity,
    Verdict,
    accepted_marker,
    facts_of,
    judge_observation,
    verdict_on,
)

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
BORN = datetime(2026, 11, 1, tzinfo=UTC)
SEEN_AT = NOON - timedelta(minutes=10)
DAY = timedelta(days=1)
LARGE = 9007199254740993
"""The first whole number that a float cannot hold."""

MARKER = Marker("ours", 100, 7)
ACCEPTED = Baseline(
    StoreIdentity(BORN, 120),
    7,
    MARKER,
    marked_at=SEEN_AT,
    seen_at=SEEN_AT,
    others=frozenset({"neighbour"}),
)
NEXT = IntendedMarker("next", 8, "a landmark")
INTENDED = replace(ACCEPTED, intended=NEXT)
UNMARKED = Baseline(StoreIdentity(BORN, 120), version=7)
OURS = FoundMarker("ours", 100, number=7, landmark="a landmark")
GIVEN = Memory(number=7, nonce="ours")
NEXT_GIVEN = Memory(number=8, nonce="next")


def seen(sequence: int, marker: FoundMarker | None = OURS, **also: object) -> Observation:
    return Observation(StoreIdentity(BORN, sequence), marker, **also)  # type: ignore[arg-type]


def judged(
    accepted: Baseline | None, observed: Observation | None, memory: Memory = GIVEN
) -> Judgement:
    return judge_observation(accepted, observed, memory, NOON)


# The table: every combination of its inputs, against expectations that never overlap

ANY = None
UNMARKED_KINDS = (Found.NEVER, Found.REMOVED, Found.MISSING)
GONE, PRESENT, NOBODY = Answer.GONE, Answer.PRESENT, Answer.WITHOUT_AUTHORITY
# answer, known, marker, same creation, sequence lower, replaced, foreign, predates: verdict
Pattern = tuple[object, object, object, object, object, object, object, object, Verdict]
EXPECTED: tuple[Pattern, ...] = (
    (NOBODY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, Verdict.UNKNOWN),
    (GONE, False, ANY, ANY, ANY, ANY, ANY, ANY, Verdict.UNKNOWN),
    (GONE, True, ANY, ANY, ANY, ANY, ANY, ANY, Verdict.LOST),
    (PRESENT, False, ANY, ANY, ANY, ANY, ANY, ANY, Verdict.FIRST_SEEN),
    (PRESENT, True, Found.AHEAD, ANY, ANY, ANY, ANY, ANY, Verdict.DATABASE_BEHIND),
    (PRESENT, True, Found.AS_LEFT, True, False, ANY, ANY, ANY, Verdict.SAME),
    (PRESENT, True, Found.AS_LEFT, True, True, ANY, ANY, ANY, Verdict.LOST),
    (PRESENT, True, Found.AS_LEFT, False, ANY, ANY, ANY, ANY, Verdict.LOST),
    (PRESENT, True, Found.NOT_AS_LEFT, ANY, ANY, False, ANY, ANY, Verdict.LOST),
    (PRESENT, True, Found.NOT_AS_LEFT, ANY, ANY, True, ANY, ANY, Verdict.OTHER_STORE),
    (PRESENT, True, UNMARKED_KINDS, ANY, ANY, True, ANY, ANY, Verdict.OTHER_STORE),
    (PRESENT, True, Found.NEVER, True, False, False, ANY, ANY, Verdict.SAME),
    (PRESENT, True, Found.REMOVED, True, False, False, ANY, ANY, Verdict.SAME),
    (PRESENT, True, Found.NEVER, True, True, False, ANY, ANY, Verdict.LOST),
    (PRESENT, True, Found.REMOVED, True, True, False, ANY, ANY, Verdict.LOST),
    (PRESENT, True, Found.MISSING, True, ANY, False, ANY, ANY, Verdict.LOST),
    (PRESENT, True, UNMARKED_KINDS, False, ANY, False, True, ANY, Verdict.OTHER_STORE),
    (PRESENT, True, UNMARKED_KINDS, False, ANY, False, False, True, Verdict.OTHER_STORE),
    (PRESENT, True, UNMARKED_KINDS, False, ANY, False, False, False, Verdict.LOST),
)


def combinations() -> Iterator[tuple[object, ...]]:
    booleans = (False, True)
    return product(Answer, booleans, Found, *(booleans,) * 5)


def covers(pattern: Pattern, combination: tuple[object, ...]) -> bool:
    return all(
        wanted is ANY or (value in wanted if isinstance(wanted, tuple) else value is wanted)
        for wanted, value in zip(pattern[:-1], combination, strict=True)
    )


def test_the_table_gives_the_expected_verdict_for_every_combination_of_its_inputs() -> None:
    count = 0
    for combination in combinations():
        matching = [pattern for pattern in EXPECTED if covers(pattern, combination)]
        assert len(matching) == 1, combination
        facts = StoreFacts(*combination)  # type: ignore[arg-type]
        assert verdict_on(facts) is matching[0][-1], facts
        count += 1
    assert count == 3 * 2 * 6 * 2**5


# Creation time and sequence


@pytest.mark.parametrize(
    ("sequence", "verdict"),
    [(120, Verdict.SAME), (121, Verdict.SAME), (119, Verdict.LOST)],
)
def test_a_store_with_our_marker_is_judged_by_its_sequence(sequence: int, verdict: Verdict) -> None:
    assert judged(ACCEPTED, seen(sequence)).verdict is verdict


@pytest.mark.parametrize(
    ("sequence", "verdict"),
    [(LARGE, Verdict.SAME), (LARGE - 1, Verdict.LOST), (LARGE + 1, Verdict.SAME)],
)
def test_large_sequences_are_compared_exactly(sequence: int, verdict: Verdict) -> None:
    accepted = replace(ACCEPTED, identity=StoreIdentity(BORN, LARGE))
    assert judged(accepted, seen(sequence)).verdict is verdict


def test_creation_times_less_than_five_seconds_apart_are_equal() -> None:
    """After a restore from a backup, the servers of a stream disagree a little."""
    for apart, verdict in ((4.999999, Verdict.SAME), (5.0, Verdict.LOST)):
        for sign in (-1, 1):
            created_at = BORN + sign * timedelta(seconds=apart)
            accepted = replace(ACCEPTED, seen_at=None)
            moved = Observation(StoreIdentity(created_at, 500), OURS)
            assert judged(accepted, moved).verdict is verdict


def test_a_store_with_another_creation_time_is_recreated() -> None:
    recreated = Observation(StoreIdentity(NOON, 500), OURS)
    found = judged(ACCEPTED, recreated)
    assert (found.verdict, found.evidence) == (Verdict.LOST, Evidence.RECREATED)
    assert found.reason == (
        f"The store was recreated; it was: {ACCEPTED.identity}; now: {recreated.identity}."
    )


def test_a_store_with_a_lower_sequence_went_back() -> None:
    older = seen(119, OURS)
    found = judged(ACCEPTED, older)
    assert (found.verdict, found.evidence) == (Verdict.LOST, Evidence.SEQUENCE_BACK)
    assert found.reason == (
        "The store went back to an earlier state; it was: "
        f"{ACCEPTED.identity}; now: {older.identity}."
    )


def test_a_missing_store_is_lost_and_the_reason_names_the_old_one() -> None:
    found = judged(ACCEPTED, None)
    assert (found.verdict, found.evidence) == (Verdict.LOST, Evidence.GONE)
    assert found.reason == f"The store is gone; it was: {ACCEPTED.identity}."


def test_a_missing_store_without_a_baseline_is_unknown() -> None:
    assert judged(None, None).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("marker", [None, OURS])
def test_a_store_without_a_baseline_is_first_seen(marker: FoundMarker | None) -> None:
    assert judged(None, seen(3, marker)).verdict is Verdict.FIRST_SEEN


# Our marker


@pytest.mark.parametrize(
    "marker",
    [
        FoundMarker("ours before", 60, number=6),
        FoundMarker("ours", 99, number=7),
        FoundMarker("ours", 101, number=7),
        FoundMarker("of version 1", 60),
        FoundMarker("of version 1", 101),
    ],
)
def test_any_other_marker_of_ours_is_a_loss_behind_later_traffic(marker: FoundMarker) -> None:
    found = judged(ACCEPTED, seen(500, marker))
    assert (found.verdict, found.evidence) == (Verdict.LOST, Evidence.OLDER_COPY)
    assert f"should be at sequence 100, but {marker.revision} has another one" in found.reason


def test_an_older_marker_is_a_loss_although_the_newest_one_is_not_known() -> None:
    older = FoundMarker("older", 60, number=6, landmark="a landmark")
    found = judged(UNMARKED, seen(121, older))
    assert (found.verdict, found.evidence) == (Verdict.LOST, Evidence.OLDER_COPY)
    assert found.reason.endswith("our marker was overwritten: sequence 60 has another one.")


def test_a_missing_marker_is_a_loss() -> None:
    found = judged(ACCEPTED, seen(121, None))
    assert (found.verdict, found.evidence) == (Verdict.LOST, Evidence.MARKER_GONE)
    assert "Part of the store is gone" in found.reason
    assert "but it does not exist" in found.reason


def test_a_foreign_value_in_place_of_our_marker_is_a_loss() -> None:
    found = judged(ACCEPTED, seen(121, FoundMarker(None, 121)))
    assert found.verdict is Verdict.LOST
    assert "but another value is there" in found.reason


def test_a_marker_deleted_by_its_key_is_not_a_loss_but_reported() -> None:
    deleted = FoundMarker(None, 121, is_deleted=True)
    found = judged(ACCEPTED, seen(121, deleted))
    assert (found.verdict, found.evidence) == (Verdict.SAME, Evidence.MARKER_REMOVED)
    assert found.reason.endswith("Our marker was deleted or became too old.")


def test_a_deletion_older_than_our_marker_is_a_rollback() -> None:
    deleted = FoundMarker(None, 60, is_deleted=True)
    assert judged(ACCEPTED, seen(121, deleted)).verdict is Verdict.LOST


# A marker may have expired if it is a day old by a clock one minute ahead of ours.
@pytest.mark.parametrize(
    ("age", "verdict"),
    [
        (DAY + timedelta(hours=1), Verdict.SAME),
        (DAY - timedelta(minutes=1), Verdict.SAME),
        (DAY - timedelta(minutes=1, microseconds=1), Verdict.LOST),
        (timedelta(hours=1), Verdict.LOST),
    ],
)
def test_a_marker_that_may_have_expired_is_not_a_loss(age: timedelta, verdict: Verdict) -> None:
    accepted = replace(ACCEPTED, marked_at=NOON - age, keeps_for=DAY)
    for marker in (None, FoundMarker(None, 121, is_deleted=True, is_expired=True)):
        assert judged(accepted, seen(121, marker)).verdict is verdict


def test_the_age_limit_counts_as_of_the_writing_of_the_marker() -> None:
    """If it was shortened since, everything expired with the marker: that is a loss."""
    accepted = replace(ACCEPTED, marked_at=NOON - timedelta(hours=1))
    shortened = timedelta(minutes=5)
    for keeps_for in (None, DAY):
        kept = replace(accepted, keeps_for=keeps_for)
        assert judged(kept, seen(121, None, keeps_for=shortened)).verdict is Verdict.LOST


def test_an_older_marker_in_place_of_an_expired_one_is_a_loss() -> None:
    accepted = replace(ACCEPTED, marked_at=NOON - 400 * DAY, keeps_for=DAY)
    older = seen(121, FoundMarker("before", 60, number=6))
    assert judged(accepted, older).verdict is Verdict.LOST


@pytest.mark.parametrize(
    ("marker", "verdict"),
    [
        (FoundMarker("next", 101, number=8), Verdict.SAME),
        (OURS, Verdict.SAME),
        (FoundMarker("next", 100, number=8), Verdict.LOST),
        (FoundMarker("next", 60, number=8), Verdict.LOST),
    ],
)
def test_the_intended_marker_counts_only_at_a_later_sequence(
    marker: FoundMarker, verdict: Verdict
) -> None:
    assert judged(INTENDED, seen(121, marker), NEXT_GIVEN).verdict is verdict


@pytest.mark.parametrize("marker", [None, FoundMarker("of version 1", 5), FoundMarker(None, 5)])
def test_a_baseline_without_a_marker_expects_none(marker: FoundMarker | None) -> None:
    for accepted in (UNMARKED, replace(UNMARKED, intended=NEXT)):
        assert judged(accepted, seen(121, marker)).verdict is Verdict.SAME


def test_a_lost_baseline_left_the_newest_marker_that_was_given_out() -> None:
    assert judged(UNMARKED, seen(121, OURS)).verdict is Verdict.SAME
    older = FoundMarker("before", 60, number=6)
    assert judged(UNMARKED, seen(121, older)).verdict is Verdict.LOST


# A database that went back


@pytest.mark.parametrize(
    ("marker", "memory", "evidence"),
    [
        (OURS, replace(GIVEN, has_landmark=False), Evidence.LANDMARK_MISSING),
        (OURS, Memory(number=6, nonce="before"), Evidence.NUMBER_AHEAD),
        (OURS, Memory(number=7, nonce="another"), Evidence.NUMBER_AHEAD),
        (OURS, Memory(), Evidence.NUMBER_AHEAD),
    ],
)
def test_a_marker_that_the_database_cannot_have_written_shows_that_it_went_back(
    marker: FoundMarker, memory: Memory, evidence: Evidence
) -> None:
    older = Baseline(StoreIdentity(BORN, 90), 3, Marker("before", 60, 6), marked_at=SEEN_AT)
    for observed in (seen(500, marker), Observation(StoreIdentity(NOON, 500), marker)):
        found = judged(older, observed, memory)
        assert (found.verdict, found.evidence) == (Verdict.DATABASE_BEHIND, evidence)
        assert "The control-plane database is older than the store" in found.reason


def test_a_marker_of_version_1_never_shows_an_older_database() -> None:
    accepted = replace(ACCEPTED, marker=Marker("of version 1", 100))
    found = FoundMarker("of version 1", 100)
    assert judged(accepted, seen(121, found), Memory()).verdict is Verdict.SAME
    other = FoundMarker("older", 60)
    assert judged(accepted, seen(121, other), Memory()).verdict is Verdict.LOST


# Another store


def other_store(created_at: datetime, **also: object) -> Observation:
    return Observation(StoreIdentity(created_at, 500), None, **also)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "verdict"),
    [
        (timedelta(seconds=60, microseconds=1), Verdict.OTHER_STORE),
        (timedelta(seconds=60), Verdict.LOST),
        (timedelta(seconds=-60), Verdict.LOST),
    ],
)
def test_a_store_older_than_the_last_good_check_was_not_rebuilt(
    before: timedelta, verdict: Verdict
) -> None:
    found = judged(ACCEPTED, other_store(SEEN_AT - before))
    assert found.verdict is verdict
    if verdict is Verdict.OTHER_STORE:
        assert found.evidence is Evidence.PREDATES
        assert "existed 60 s before the last good check" in found.reason


def test_a_store_with_a_marker_of_another_installation_is_another_one() -> None:
    new = frozenset({"neighbour", "stranger"})
    found = judged(ACCEPTED, other_store(NOON, others=new))
    assert (found.verdict, found.evidence) == (Verdict.OTHER_STORE, Evidence.FOREIGN_MARKER)
    known = other_store(NOON, others=frozenset({"neighbour"}))
    assert judged(ACCEPTED, known).verdict is Verdict.LOST
    unknown = replace(ACCEPTED, others=None)
    assert judged(unknown, other_store(NOON, others=new)).verdict is Verdict.LOST


def test_a_store_that_another_one_replaced_is_another_one() -> None:
    memory = replace(GIVEN, was_replaced=True)
    for marker in (None, FoundMarker("before", 60, number=6)):
        found = judged(ACCEPTED, Observation(StoreIdentity(NOON, 500), marker), memory)
        assert (found.verdict, found.evidence) == (Verdict.OTHER_STORE, Evidence.FORMER_STORE)


def test_a_former_store_is_the_same_one_if_it_is_the_restore_target() -> None:
    memory = replace(GIVEN, was_replaced=True)
    assert judged(UNMARKED, seen(121, None), memory).verdict is Verdict.SAME
    assert judged(ACCEPTED, seen(500, None), memory).verdict is Verdict.LOST


# Who answered


@pytest.mark.parametrize(
    ("sequence", "marker"), [(119, OURS), (500, None), (121, OURS)], ids=["back", "purged", "same"]
)
def test_a_server_that_may_no_longer_be_the_leader_proves_nothing(
    sequence: int, marker: FoundMarker | None
) -> None:
    doubted = judged(ACCEPTED, seen(sequence, marker, is_led=False))
    assert doubted.verdict is Verdict.UNKNOWN
    assert doubted.reason.startswith("The server that answered may no longer be the leader")


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        facts_of(ACCEPTED, seen(121), GIVEN, datetime(2026, 11, 25))  # noqa: DTZ001


@pytest.mark.parametrize(
    ("accepted", "marker", "expected"),
    [
        (None, OURS, None),
        (ACCEPTED, None, None),
        (ACCEPTED, OURS, MARKER),
        (ACCEPTED, FoundMarker("ours", 101, number=7), None),
        (ACCEPTED, FoundMarker(None, 101), None),
        (INTENDED, FoundMarker("next", 101, number=8), Marker("next", 101, 8)),
        (INTENDED, FoundMarker("next", 100, number=8), None),
        (UNMARKED, OURS, None),
        (replace(UNMARKED, intended=NEXT), FoundMarker("next", 1), Marker("next", 1)),
        (replace(UNMARKED, intended=NEXT), OURS, None),
    ],
)
def test_a_marker_is_as_left_if_it_is_the_accepted_one_or_its_successor(
    accepted: Baseline | None, marker: FoundMarker | None, expected: Marker | None
) -> None:
    assert accepted_marker(accepted, seen(121, marker)) == expected
