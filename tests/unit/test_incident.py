import pytest

from budget_recovery_dagster.domain.incident import (
    Event,
    IllegalMoveError,
    RecoveryState,
    after,
)

HEALTHY, RECOVERING, FAILED = RecoveryState

# Written out once more, by hand: what is not here cannot happen.
MOVES = {
    HEALTHY: {Event.LOSS: RECOVERING},
    RECOVERING: {
        Event.LOSS: RECOVERING,
        Event.RESTORED: HEALTHY,
        Event.NOTHING_TO_RAISE: HEALTHY,
        Event.GAVE_UP: FAILED,
        Event.RESTORED_BY_HAND: HEALTHY,
        Event.RESOLVED: HEALTHY,
    },
    FAILED: {
        Event.LOSS: FAILED,
        Event.RESTORED_BY_HAND: HEALTHY,
        Event.RESOLVED: HEALTHY,
    },
}


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", RecoveryState)
def test_a_state_moves_as_the_table_says_or_not_at_all(state: RecoveryState, event: Event) -> None:
    if event in MOVES[state]:
        assert after(state, event) is MOVES[state][event]
    else:
        with pytest.raises(IllegalMoveError, match=f"{event}, while the store is {state}"):
            after(state, event)


def test_captures_are_paused_unless_the_store_is_trusted() -> None:
    assert [state.captures_paused for state in (HEALTHY, RECOVERING, FAILED)] == [
        False,
        True,
        True,
    ]
