"""The gate: answers each request at once, from what it knows to be blocked.

It never sees a usage, and it asks nobody: what is blocked comes by itself, and is kept in the
ledger, so that a gate that was started again blocks from its first answer on.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from budget_recovery_dagster.adapters.nats.codec import CounterKey, UnreadableKeyError
from budget_recovery_dagster.domain.budgets import BudgetDefinition, Enforcement
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.keys import BLOCKED, counter_of, described, suffix_of
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger, LedgerError
from budget_recovery_dagster.sandbox.gateway.requests import Request
from budget_recovery_dagster.sandbox.gateway.store import Seen

log = logging.getLogger("gate")

_NAMED = 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What the gate says to a request: refused by these budgets, or let through.

    ``noted`` are the budgets that are exhausted and only audit. ``number`` is that of the charge in
    the ledger; None for a request that was refused, by budgets or, without any, because the ledger
    could not take it.
    """

    blocked_by: tuple[BudgetDefinition, ...]
    noted: tuple[BudgetDefinition, ...]
    number: int | None

    @property
    def is_allowed(self) -> bool:
        """Whether the request was let through."""
        return self.number is not None


class Gate:
    """Answers requests; also the view of all blocked keys, by which it learns of them."""

    def __init__(self, ledger: Ledger, budgets: Budgets, clock: Callable[[], datetime]) -> None:
        self._ledger = ledger
        self._budgets = budgets
        self._clock = clock
        self._blocked = set(ledger.blocked())
        self._is_told_of_ledger = False
        self.recorded = asyncio.Event()
        """Set whenever a charge was written into the ledger."""

    def answer(self, request: Request) -> Answer:
        """Let a request through and write it into the ledger, or refuse it; does not wait.

        What the ledger cannot take, because somebody else holds it or its disk is full, is refused:
        rather nothing is spent than something that no record tells of. That takes a quarter of a
        second, is logged once until it is over, and ends by itself.

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
        number = self._recorded(moment, request)
        return Answer((), noted, number)

    def _recorded(self, moment: datetime, request: Request) -> int | None:
        try:
            number = self._ledger.record(moment, request)
        except LedgerError as error:
            if not self._is_told_of_ledger:
                self._is_told_of_ledger = True
                log.error("Requests are refused: %s.", error)  # noqa: TRY400 - it says it all
            return None
        if self._is_told_of_ledger:
            self._is_told_of_ledger = False
            log.info("Requests are let through again: the ledger takes them.")
        self.recorded.set()
        return number

    def tell_of_blocks(self) -> None:
        """Log what is blocked now, in one line."""
        now = self._clock()
        blocked = [
            described(each)
            for each in sorted(self._blocked)
            if (counter := self._counter(each)) and counter.of.window.is_current(now)
            if self._does_block(counter)
        ]
        names = blocked[:_NAMED]
        if len(blocked) > _NAMED:
            names.append(f"and {len(blocked) - _NAMED} more")
        log.info("Blocked at the start, %d: %s.", len(blocked), "; ".join(names) or "nobody")

    def _does_block(self, counter: CounterKey) -> bool:
        definition = self._budgets.behind(counter)
        return definition is not None and definition.enforcement is Enforcement.ENFORCE

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
            log.info("%s: %s.", self._effect(each), described(each))

    def _unblock(self, suffixes: set[str]) -> None:
        self._ledger.unblock(suffixes)
        self._blocked -= suffixes
        for each in sorted(suffixes):
            log.info("No longer over its limit: %s.", described(each))

    def _effect(self, suffix: str) -> str:
        counter = self._counter(suffix)
        if counter is None:
            return "Blocked, but no request can be meant"
        return "Blocked" if self._does_block(counter) else "Over its limit, only noted"

    def _counter(self, suffix: str) -> CounterKey | None:
        """Read what others may have written."""
        try:
            return counter_of(suffix)
        except UnreadableKeyError:
            return None


def _suffix(key: str) -> str:
    return key.removeprefix(f"{BLOCKED}.")
