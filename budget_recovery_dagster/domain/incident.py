"""The state of recovery of a store, and the only moves between its states.

    HEALTHY --loss--> RECOVERING --restored--> HEALTHY
                          |  ^
                   gave up|  |  (nothing leads back from FAILED to RECOVERING)
                          v
                       FAILED --restored by hand, or resolved--> HEALTHY

A further loss while an incident is open belongs to it: RECOVERING begins again, FAILED stays.
"""

from collections.abc import Mapping
from enum import StrEnum

MAX_ATTEMPTS = 3
"""How often a restore is tried for one loss before a person has to look."""


class RecoveryState(StrEnum):
    """Whether the store is trusted; captures are paused in every state but HEALTHY."""

    HEALTHY = "HEALTHY"
    RECOVERING = "RECOVERING"
    FAILED = "FAILED"

    @property
    def captures_paused(self) -> bool:
        """Whether a capture now could let a damaged store stand in for a good snapshot."""
        return self is not RecoveryState.HEALTHY


class Event(StrEnum):
    """What moves the state."""

    LOSS = "a loss was found"
    RESTORED = "a restore brought everything back"
    NOTHING_TO_RAISE = "nothing had to be raised"
    GAVE_UP = "the attempts are used up"
    RESTORED_BY_HAND = "a person restored the whole store"
    RESOLVED = "a person resolved the incident"


class IllegalMoveError(ValueError):
    """An event that cannot happen in a state."""


_HEALTHY, _RECOVERING, _FAILED = RecoveryState

_MOVES: Mapping[tuple[RecoveryState, Event], RecoveryState] = {
    (_HEALTHY, Event.LOSS): _RECOVERING,
    (_RECOVERING, Event.LOSS): _RECOVERING,
    (_FAILED, Event.LOSS): _FAILED,
    (_RECOVERING, Event.RESTORED): _HEALTHY,
    (_RECOVERING, Event.NOTHING_TO_RAISE): _HEALTHY,
    (_RECOVERING, Event.GAVE_UP): _FAILED,
    (_RECOVERING, Event.RESTORED_BY_HAND): _HEALTHY,
    (_FAILED, Event.RESTORED_BY_HAND): _HEALTHY,
    (_RECOVERING, Event.RESOLVED): _HEALTHY,
    (_FAILED, Event.RESOLVED): _HEALTHY,
}


def after(state: RecoveryState, event: Event) -> RecoveryState:
    """Return the state that follows.

    Raises:
        IllegalMoveError: the event cannot happen in this state.
    """
    try:
        return _MOVES[state, event]
    except KeyError:
        raise IllegalMoveError(f"{event}, while the store is {state}") from None
