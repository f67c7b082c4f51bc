from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from budget_recovery_dagster.domain import (
    MAX_ATTEMPTS,
    Event,
    IllegalMoveError,
    Incident,
    Loss,
    Outcome,
    Recovery,
    RecoveryState,
    StoreIdentity,
    Verdict,
    after,
    backoff,
    may_launch,
)

HEALTHY, RECOVERING, FAILED = RecoveryState
NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
INCIDENT = Incident(
    incident_id="0f8fad5b-d9cb-469f-a165-70867728950e",
    opened_at=NOON,
    losses=(Loss(NOON, "tick", Verdict.LOST, "why", StoreIdentity(NOON, 1), after=None),),
    target=None,
    newest_point_at=None,
    last_good_at=None,
)

# A second copy of the table, to compare with. Other moves are illegal.
MOVES = {
    HEALTHY: {Event.LOSS: RECOVERING},
    RECOVERING: {
        Event.LOSS: RECOVERING,
        Event.RESTORED: HEALTHY,
        Event.NOTHING_TO_RAISE: HEALTHY,
        Event.RETURNED: HEALTHY,
        Event.GAVE_UP: FAILED,
        Event.RESTORED_MANUALLY: HEALTHY,
        Event.RESOLVED: HEALTHY,
    },
    FAILED: {
        Event.LOSS: FAILED,
        Event.RESTORED_MANUALLY: HEALTHY,
        Event.RESOLVED: HEALTHY,
    },
}


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", RecoveryState)
def test_a_state_moves_only_as_the_table_allows(state: RecoveryState, event: Event) -> None:
    if event in MOVES[state]:
        assert after(state, event) is MOVES[state][event]
    else:
        with pytest.raises(
            IllegalMoveError, match=f"{event.value} is not permitted while .* {state.name}"
        ):
            after(state, event)


def test_captures_are_paused_unless_the_store_is_trusted() -> None:
    assert [state.captures_paused for state in (HEALTHY, RECOVERING, FAILED)] == [
        False,
        True,
        True,
    ]


# When a restore is launched


@pytest.mark.parametrize(
    ("waits", "seconds"),
    [(1, 30), (2, 60), (3, 120), (4, 240), (5, 300), (6, 300), (10**9, 300), (0, 30)],
)
def test_the_backoff_doubles_up_to_five_minutes(waits: int, seconds: int) -> None:
    assert backoff(waits) == timedelta(seconds=seconds)


@pytest.mark.parametrize("state", [HEALTHY, FAILED])
def test_no_restore_is_launched_unless_the_store_is_recovering(state: RecoveryState) -> None:
    reason = may_launch(Recovery(state, INCIDENT), NOON)
    assert reason is not None
    assert state.name in reason


def test_no_restore_is_launched_without_an_open_incident() -> None:
    assert may_launch(Recovery(RECOVERING, None), NOON) is not None


@pytest.mark.parametrize("attempts", range(MAX_ATTEMPTS + 1))
def test_a_restore_is_launched_when_due_whatever_the_number_of_attempts(attempts: int) -> None:
    due = replace(INCIDENT, attempts=attempts, next_launch_at=NOON)
    assert may_launch(Recovery(RECOVERING, due), NOON) is None
    assert may_launch(Recovery(RECOVERING, replace(due, next_launch_at=None)), NOON) is None
    early = may_launch(Recovery(RECOVERING, due), NOON - timedelta(microseconds=1))
    assert early == "The next launch for incident 0f8fad5b is due at 12:00:00 UTC."


# Properties of an incident


@pytest.mark.parametrize(
    ("point", "good", "uncovered"),
    [
        # The last good check is no end: usage was counted after it.
        (0, 40, timedelta(minutes=50)),
        # A snapshot that is newer than the last good check.
        (40, 0, timedelta(minutes=10)),
        (40, 40, timedelta(minutes=10)),
        (0, None, timedelta(minutes=50)),
        # A clock was set back.
        (60, 40, timedelta(0)),
        (None, 40, None),
    ],
)
def test_usage_between_the_last_snapshot_and_the_loss_is_in_no_snapshot(
    point: int | None, good: int | None, uncovered: timedelta | None
) -> None:
    def at(minutes: int | None) -> datetime | None:
        return None if minutes is None else NOON + timedelta(minutes=minutes)

    loss = replace(INCIDENT.losses[0], found_at=NOON + timedelta(minutes=50))
    incident = replace(INCIDENT, losses=(loss,), newest_point_at=at(point), last_good_at=at(good))
    assert incident.uncovered == uncovered


def test_an_incident_needs_a_loss() -> None:
    with pytest.raises(ValueError, match="at least one loss"):
        replace(INCIDENT, losses=())


def test_each_outcome_has_its_event() -> None:
    assert {outcome: outcome.event for outcome in Outcome} == {
        Outcome.RESTORED_IN_PART: Event.RESTORED,
        Outcome.RESTORED_MANUALLY: Event.RESTORED_MANUALLY,
        Outcome.ACCEPTED: Event.RESOLVED,
        Outcome.RESTORED: Event.RESTORED,
        Outcome.NOTHING_LOST: Event.NOTHING_TO_RAISE,
        Outcome.NOTHING_CURRENT: Event.NOTHING_TO_RAISE,
        Outcome.RETURNED: Event.RETURNED,
    }
