"""What becomes of many changes, whether they are written, left or refused.

A store may refuse one value for what it is, or refuse a writing for any other reason, such as that
it is full. Neither keeps the other keys from being tried, until refusals show that it is no use.
"""

from collections.abc import Sequence
from typing import Generic

from budget_recovery_dagster.adapters.live_keys import Change, Outcome
from budget_recovery_dagster.errors import StoreWriteError

REFUSALS_IN_A_ROW = 100
"""So many refused writings with none stored between them show that no more need to be tried."""

_GIVEN_UP = f"It was given up, as the store refused {REFUSALS_IN_A_ROW} writings in a row."


class Outcomes(Generic[Outcome]):
    """What has become of changes so far, each known by its number."""

    def __init__(self, changes: Sequence[Change[Outcome]]) -> None:
        self._changes = changes
        self._outcomes: dict[int, Outcome] = {}
        self._refusals: dict[int, StoreWriteError] = {}
        self._in_a_row = 0
        self._is_given_up = False

    @property
    def is_given_up(self) -> bool:
        """Whether nothing more is to be written, for all that the store refuses."""
        return self._is_given_up

    def leave(self, number: int, outcome: Outcome) -> None:
        """Note that nothing is written."""
        self._outcomes[number] = outcome

    def store(self, number: int, outcome: Outcome) -> None:
        """Note that the store has taken the writing."""
        self._outcomes[number] = outcome
        self._in_a_row = 0

    def refuse_value(self, number: int, outcome: Outcome, reason: str) -> None:
        """Note that the store takes no such value, which says nothing about any other."""
        self._outcomes[number] = self._changes[number].refused(outcome, reason)

    def refuse(self, number: int, error: StoreWriteError) -> None:
        """Note that the store refuses the writing, whatever its value."""
        self._refusals[number] = error
        self._in_a_row += 1
        if self._in_a_row >= REFUSALS_IN_A_ROW:
            self._is_given_up = True

    def all(self) -> list[Outcome]:
        """Return what became of each change, in their order.

        Raises:
            StoreWriteError: the first refusal that was for no value's sake.
        """
        for error in self._refusals.values():
            raise error
        return [self._outcomes[number] for number in range(len(self._changes))]

    def all_or_why(self) -> list[Outcome | str]:
        """Return what became of each change; of those that were not brought about, why not."""
        return [
            self._outcomes[number] if number in self._outcomes else self._why(number)
            for number in range(len(self._changes))
        ]

    def _why(self, number: int) -> str:
        error = self._refusals.get(number)
        return _GIVEN_UP if error is None else error.message
