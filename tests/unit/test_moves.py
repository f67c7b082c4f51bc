"""Moves of an incident, compared with literal values."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from budget_recovery_dagster.domain import (
    Baseline,
    Ended,
    FailureReason,
    GivenUp,
    Incident,
    IntendedMarker,
    Loss,
    Marker,
    Move,
    Opening,
    Outcome,
    RecoveryState,
    Restored,
    Standing,
    StoreIdentity,
    Verdict,
    Waiting,
    moves,
)
from budget_recovery_dagster.errors import (
    AttemptNotDueError,
    AttemptsUsedUpError,
    IncidentMovedError,
)

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
HEALTHY, RECOVERING, FAILED = RecoveryState
IDENTITY = StoreIdentity(NOW - timedelta(days=20), 40)
BASELINE = Baseline(IDENTITY, 7, Marker("n1", 39), NOW - timedelta(minutes=10))
LOST = StoreIdentity(NOW, 2)
TARGET = Baseline(LOST, version=1)
LOSS = Loss(NOW, "tick 1", Verdict.LOST, "recreated", before=IDENTITY, after=LOST)
GONE = replace(LOSS, found_by="tick 2", after=None)
OPENED = Incident("11111111-aaaa", NOW, (LOSS,), TARGET, None, None)
OPENING = Opening("11111111-aaaa", NOW, newest_point_at=None, newest_good_check_at=None)
ENDED = Ended(NOW, Outcome.RESTORED, "all is back", Restored(1, 2, 3, 4))


def standing(state: RecoveryState = RECOVERING, launches_before: int = 0, **of: object) -> Standing:
    """Return a standing whose open incident differs from OPENED in the given fields."""
    incident = replace(OPENED, **of)  # type: ignore[arg-type]
    return Standing(state, BASELINE, incident, launches_before)


# Losses


def test_a_first_loss_opens_an_incident_and_leaves_the_baseline() -> None:
    opened = moves.open_incident(
        Standing(HEALTHY, BASELINE), LOSS, target=TARGET, judged=BASELINE, opening=OPENING
    )
    assert opened == Move(RECOVERING, BASELINE, OPENED, launches_before=0)


@pytest.mark.parametrize(
    ("point", "check", "last_good"),
    [(None, None, None), (3, None, 3), (None, 5, 5), (3, 5, 5), (5, 3, 5), (5, 5, 5)],
)
def test_the_last_good_time_is_the_later_of_check_and_snapshot(
    point: int | None, check: int | None, last_good: int | None
) -> None:
    def at(minutes: int | None) -> datetime | None:
        return None if minutes is None else NOW + timedelta(minutes=minutes)

    assert Opening("id", NOW, at(point), at(check)).last_good_at == at(last_good)


def test_a_second_incident_is_refused_while_one_is_open() -> None:
    for state in (RECOVERING, FAILED):
        with pytest.raises(IncidentMovedError, match="11111111 is already open"):
            moves.open_incident(
                standing(state), LOSS, target=None, judged=BASELINE, opening=OPENING
            )


def test_a_further_loss_resets_attempts_and_backoff() -> None:
    before = standing(
        launches_before=2,
        attempts=3,
        launches=5,
        waiting=Waiting(NOW, "why", 4),
        next_launch_at=NOW + 240 * SECOND,
        next_attempt_at=NOW + 300 * SECOND,
    )
    joined = moves.join(before, GONE, target=None, judged=OPENED)
    assert joined == Move(
        RECOVERING,
        BASELINE,
        replace(OPENED, losses=(LOSS, GONE), target=None, launches=5),
        launches_before=5,
    )


def test_a_further_loss_of_a_failed_store_leaves_it_failed() -> None:
    given_up = GivenUp(NOW, FailureReason.NOT_WRITTEN, "it refuses")
    joined = moves.join(standing(FAILED, given_up=given_up), GONE, target=None, judged=OPENED)
    assert (joined.state, joined.incident.given_up) == (FAILED, given_up)


# Launches and attempts


@pytest.mark.parametrize(
    ("launches", "launches_before", "pause"),
    [(0, 0, 30), (1, 0, 60), (2, 0, 120), (3, 0, 240), (4, 0, 300), (90, 0, 300), (90, 90, 30)],
)
def test_the_backoff_grows_with_the_launches_since_the_last_attempt(
    launches: int, launches_before: int, pause: int
) -> None:
    before = standing(launches_before=launches_before, launches=launches)
    assert before.incident is not None
    move = moves.claim_launch(before, judged=before.incident, now=NOW)
    launched = replace(OPENED, launches=launches + 1, next_launch_at=NOW + pause * SECOND)
    assert move == Move(RECOVERING, BASELINE, launched, launches_before)


@pytest.mark.parametrize(
    "found",
    [
        Standing(HEALTHY, BASELINE),
        standing(FAILED),
        standing(launches=1),
        standing(incident_id="another"),
        standing(next_launch_at=NOW + timedelta(microseconds=1)),
    ],
)
def test_a_launch_that_is_not_due_is_not_claimed(found: Standing) -> None:
    assert moves.claim_launch(found, judged=OPENED, now=NOW) is None


def test_a_launch_is_claimed_when_due() -> None:
    assert moves.claim_launch(standing(next_launch_at=NOW), judged=OPENED, now=NOW) is not None


def test_waiting_keeps_its_start_and_counts() -> None:
    since = NOW - timedelta(hours=3)
    waited = moves.wait(
        standing(waiting=Waiting(since, "before", 2)), "now", judged=OPENED, now=NOW
    )
    assert waited.incident == replace(
        OPENED, waiting=Waiting(since, "now", 3), next_launch_at=NOW + 120 * SECOND
    )
    first = moves.wait(standing(), "now", judged=OPENED, now=NOW)
    assert first.incident == replace(
        OPENED, waiting=Waiting(NOW, "now", 1), next_launch_at=NOW + 30 * SECOND
    )


def test_an_attempt_resets_waiting_and_backoff() -> None:
    before = standing(
        attempts=2, launches=9, waiting=Waiting(NOW, "why", 4), next_launch_at=NOW + 240 * SECOND
    )
    claimed = moves.claim_attempt(before, judged=OPENED, now=NOW)
    assert claimed == Move(RECOVERING, BASELINE, replace(OPENED, attempts=3, launches=9), 9)


def test_a_fourth_attempt_is_refused() -> None:
    with pytest.raises(AttemptsUsedUpError, match="11111111 has used all 3 attempts"):
        moves.claim_attempt(standing(attempts=3), judged=OPENED, now=NOW)


@pytest.mark.parametrize(("before", "pause"), [(0, 60), (1, 300), (2, None)])
def test_an_attempt_delays_the_next_even_if_it_dies_and_again_when_it_fails(
    before: int, pause: int | None
) -> None:
    claimed = moves.claim_attempt(standing(attempts=before), judged=OPENED, now=NOW).incident
    due = None if pause is None else NOW + pause * SECOND
    assert (claimed.attempts, claimed.next_attempt_at) == (before + 1, due)
    later = NOW + 1000 * SECOND
    failed = moves.fail_attempt(Standing(RECOVERING, BASELINE, claimed), judged=claimed, now=later)
    assert failed is not None
    due = None if pause is None else later + pause * SECOND
    assert failed.incident == replace(claimed, next_attempt_at=due)


def test_an_attempt_is_claimed_and_launched_only_when_due() -> None:
    waits = standing(attempts=1, next_attempt_at=NOW + 60 * SECOND)
    just_before = NOW + 60 * SECOND - timedelta(microseconds=1)
    with pytest.raises(AttemptNotDueError, match=r"Attempt 2 of 3 for .* is due at 12:01:00 UTC"):
        moves.claim_attempt(waits, judged=OPENED, now=just_before)
    assert moves.claim_launch(waits, judged=OPENED, now=just_before) is None
    due = NOW + 60 * SECOND
    assert moves.claim_attempt(waits, judged=OPENED, now=due).incident.attempts == 2
    assert moves.claim_launch(waits, judged=OPENED, now=due) is not None


def test_a_clock_that_was_ahead_delays_no_attempt() -> None:
    ahead = standing(attempts=1, next_attempt_at=NOW + timedelta(days=40))
    assert moves.claim_attempt(ahead, judged=OPENED, now=NOW).incident.attempts == 2
    assert moves.claim_launch(ahead, judged=OPENED, now=NOW) is not None


@pytest.mark.parametrize(
    "found",
    [
        Standing(HEALTHY, BASELINE),
        standing(FAILED, attempts=1),
        standing(incident_id="another", attempts=1),
        standing(losses=(LOSS, GONE), attempts=1),
        standing(attempts=0),
    ],
)
def test_a_failed_attempt_delays_none_of_an_incident_that_has_changed(found: Standing) -> None:
    assert moves.fail_attempt(found, judged=replace(OPENED, attempts=1), now=NOW) is None


def test_a_returned_attempt_delays_no_attempt() -> None:
    found = standing(attempts=2, next_attempt_at=NOW + 300 * SECOND)
    returned = moves.return_attempt(found, judged=OPENED, waited=None).incident
    assert returned == replace(OPENED, attempts=1)


def test_a_returned_attempt_goes_on_waiting_as_before() -> None:
    waited = Waiting(NOW - 600 * SECOND, "no room", 4)
    returned = moves.return_attempt(standing(attempts=1), judged=OPENED, waited=waited)
    found = Standing(RECOVERING, BASELINE, returned.incident)
    again = moves.wait(found, "no room", judged=OPENED, now=NOW).incident
    assert again == replace(
        OPENED,
        waiting=Waiting(NOW - 600 * SECOND, "no room", 5),
        next_launch_at=NOW + 300 * SECOND,
    )


# Ends


def test_giving_up_keeps_the_baseline_and_ends_waiting() -> None:
    later = NOW + 240 * SECOND
    waiting = Waiting(NOW, "why", 4)
    before = standing(waiting=waiting, next_launch_at=later, next_attempt_at=later)
    given_up = GivenUp(NOW, FailureReason.NO_SNAPSHOTS, "none")
    move = moves.give_up(before, given_up, judged=OPENED)
    assert move == Move(FAILED, BASELINE, replace(OPENED, given_up=given_up), launches_before=0)


def test_closing_accepts_the_store_and_increments_the_baseline_version() -> None:
    before = standing(attempts=2, launches=4)
    move = moves.close(before, ENDED, baseline=TARGET, judged=OPENED)
    closed = replace(OPENED, attempts=2, launches=4, ended=ENDED)
    assert move == Move(HEALTHY, Baseline(LOST, version=8), closed, launches_before=0)


# What is refused

MOVES: dict[str, Callable[[Standing], Move]] = {
    "join": lambda found: moves.join(found, GONE, target=None, judged=OPENED),
    "adopt target": lambda found: moves.adopt_target(found, BASELINE, judged=OPENED),
    "wait": lambda found: moves.wait(found, "why", judged=OPENED, now=NOW),
    "claim": lambda found: moves.claim_attempt(found, judged=OPENED, now=NOW),
    "give up": lambda found: moves.give_up(
        found, GivenUp(NOW, FailureReason.NOT_WRITTEN, "why"), judged=OPENED
    ),
    "close": lambda found: moves.close(found, ENDED, baseline=TARGET, judged=OPENED),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Standing(HEALTHY, BASELINE), "11111111 has changed: it is closed"),
        (standing(incident_id="22222222-b"), "it is closed, and 22222222 is open"),
        (standing(target=None), "its restore target has changed"),
        (
            standing(target=replace(TARGET, intended=IntendedMarker("n"))),
            "its restore target has changed",
        ),
    ],
)
def test_an_incident_that_changed_since_it_was_judged_does_not_move(
    name: str, found: Standing, why: str
) -> None:
    with pytest.raises(IncidentMovedError, match=why) as refused:
        MOVES[name](found)
    assert refused.value.hint


@pytest.mark.parametrize("name", MOVES)
def test_only_a_recovering_store_is_attempted_given_up_and_closed(name: str) -> None:
    if name in ("claim", "give up", "close"):
        with pytest.raises(IncidentMovedError, match="the store is FAILED"):
            MOVES[name](standing(FAILED))
    else:
        assert MOVES[name](standing(FAILED)).state is FAILED
