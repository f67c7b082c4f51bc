"""The gate: answers each request at once, from what it knows to be blocked.

It never sees a usage, and it asks nobody: what is blocked comes by itself, and is kept in the
ledger, so that a gate that was started again blocks from its first answer on.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from budget_recovery_dagster.domain.budgets import BudgetDefinition, Enforcement
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.keys import BLOCKED, described, suffix_of
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.requests import Request
from budget_recovery_dagster.sandbox.gateway.store import Seen

log = logging.getLogger("gate")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the gate says to a request: refused by these budgets, or let through.

    ``noted`` are the budgets that are exhausted and only audit. ``number`` is that of the charge in
    the ledger; None for a request that was refused.
    """

    blocked_by: tuple[BudgetDefinition, ...]
    noted: tuple[BudgetDefinition, ...]
    number: int | None

    @property
    def is_allowed(self) -> bool:
        """Whether the request was let through."""
        return not self.blocked_by


class Gate:
    """Answers requests; also the view of all blocked keys, by which it learns of them."""

    def __init__(self, ledger: Ledger, budgets: Budgets, clock: Callable[[], datetime]) -> None:
        self._ledger = ledger
        self._budgets = budgets
        self._clock = clock
        self._blocked = set(ledger.blocked())
        self.recorded = asyncio.Event()
        """Set whenever a charge was written into the ledger."""

    def answer(self, request: Request) -> Answer:
        """Let a request through and write it into the ledger, or refuse it; does not wait.

        Raises:
            UnusableNameError: a name in the request can stand in no key; nothing is recorded.
        """
        moment = self._clock()
        exhausted = [
            definition
            for definition, counter in self._budgets.raised_by(request, moment)
            if suffix_of(counter) in self._blocked
        ]
        noted = tuple(each for each in exhausted if each.enforcement is Enforcement.AUDIT)
        blocked_by = tuple(each for each in exhausted if each.enforcement is Enforcement.ENFORCE)
        if blocked_by:
            return Answer(blocked_by, noted, None)
        number = self._ledger.record(moment, request)
        self.recorded.set()
        return Answer((), noted, number)

    def replace(self, found: Mapping[str, Seen]) -> None:
        """Take over all blocks that there are."""
        blocked = {_suffix(key) for key, seen in found.items() if seen.data is not None}
        self._block(blocked - self._blocked)
        self._unblock(self._blocked - blocked)

    def change(self, key: str, seen: Seen) -> None:
        """Take over a block that was set or lifted."""
        if seen.data is None:
            self._unblock({_suffix(key)} & self._blocked)
        else:
            self._block({_suffix(key)} - self._blocked)

    def _block(self, suffixes: set[str]) -> None:
        self._ledger.block(suffixes)
        self._blocked |= suffixes
        for each in sorted(suffixes):
            log.info("Exhausted: %s.", described(each))

    def _unblock(self, suffixes: set[str]) -> None:
        self._ledger.unblock(suffixes)
        self._blocked -= suffixes
        for each in sorted(suffixes):
            log.info("No longer exhausted: %s.", described(each))


def _suffix(key: str) -> str:
    return key.removeprefix(f"{BLOCKED}.")
