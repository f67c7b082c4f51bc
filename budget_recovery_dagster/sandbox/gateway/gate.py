"""The gate: answers each request at once, from the blocks that it knows, and reports the costs.

It never reads a usage and waits for no server. Blocks arrive by themselves and are kept in the
ledger, so a restarted gate blocks from its first answer.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from budget_recovery_dagster.adapters.nats.codec import CounterKey, UnreadableKeyError
from budget_recovery_dagster.domain.counters import BudgetDefinition, Enforcement
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger, LedgerError
from budget_recovery_dagster.sandbox.gateway.requests import Budgets, Clock, Request
from budget_recovery_dagster.sandbox.gateway.store import (
    BLOCKED,
    Seen,
    Store,
    counter_of,
    described,
    suffix_of,
)

log = logging.getLogger("gate")

_MOST_NAMED = 20
_REPORTED_AT_ONCE = 200
_TALLY_SECONDS = 60.0
_NO_LEDGER = "no ledger"


@dataclass(frozen=True, slots=True)
class Answer:
    """The gate's answer to a request: refused by these budgets, or allowed.

    ``noted`` are exhausted budgets that only audit. ``number`` is the number of the charge in the
    ledger. It is None for a request that was refused, by budgets or, if there are none, because
    the ledger could not record it.
    """

    blocked_by: tuple[BudgetDefinition, ...]
    noted: tuple[BudgetDefinition, ...]
    number: int | None

    @property
    def is_allowed(self) -> bool:
        """Whether the request was allowed."""
        return self.number is not None


class Gate:
    """Answers requests; also the view of all blocked keys, from which it learns the blocks."""

    def __init__(self, ledger: Ledger, budgets: Budgets, clock: Clock) -> None:
        self._ledger = ledger
        self._budgets = budgets
        self._clock = clock
        self._blocked = set(ledger.blocked())
        self._is_ledger_failing = False
        self.recorded = asyncio.Event()
        """Set whenever the ledger has recorded a charge."""

    def answer(self, request: Request) -> Answer:
        """Allow a request and record it in the ledger, or refuse it; never wait for a server.

        A request that the ledger cannot record, because it is locked or its disk is full, is
        refused: no spend may go unrecorded. That takes a quarter of a second and is logged once
        until it is over.

        Raises:
            UnusableNameError: no key can hold a name of the request; nothing is recorded.
        """
        at = self._clock()
        exhausted = [
            definition
            for definition, counter in self._budgets.raised_by(request, at)
            if suffix_of(counter) in self._blocked
        ]
        noted = tuple(each for each in exhausted if each.enforcement is Enforcement.AUDIT)
        blocked_by = tuple(each for each in exhausted if each.enforcement is Enforcement.ENFORCE)
        if blocked_by:
            return Answer(blocked_by, noted, None)
        return Answer((), noted, self._record(at, request))

    def _record(self, at: datetime, request: Request) -> int | None:
        try:
            number = self._ledger.record(at, request)
        except LedgerError as error:
            if not self._is_ledger_failing:
                self._is_ledger_failing = True
                log.error("Requests are refused: %s.", error)  # noqa: TRY400 - no traceback needed
            return None
        if self._is_ledger_failing:
            self._is_ledger_failing = False
            log.info("Requests are allowed again: the ledger can be written.")
        self.recorded.set()
        return number

    def log_blocks(self) -> None:
        """Log the current blocks in one line."""
        now = self._clock()
        blocked = [
            described(each)
            for each in sorted(self._blocked)
            if (counter := _readable(each)) and counter.of.window.is_current(now)
            if self._is_enforced(counter)
        ]
        names = blocked[:_MOST_NAMED]
        if len(blocked) > _MOST_NAMED:
            names.append(f"and {len(blocked) - _MOST_NAMED} more")
        log.info("Blocked at the start, %d: %s.", len(blocked), "; ".join(names) or "none")

    def _is_enforced(self, counter: CounterKey) -> bool:
        definition = self._budgets.definition_of(counter)
        return definition is not None and definition.enforcement is Enforcement.ENFORCE

    def replace(self, found: Mapping[str, Seen]) -> None:
        """Take all blocks that exist."""
        blocked = {_suffix(key) for key, seen in found.items() if seen.data is not None}
        self._block(blocked - self._blocked)
        self._unblock(self._blocked - blocked)

    def change(self, changes: Mapping[str, Seen]) -> None:
        """Take blocks that were set or lifted."""
        blocked = {_suffix(key) for key, seen in changes.items() if seen.data is not None}
        self._block(blocked - self._blocked)
        self._unblock((set(map(_suffix, changes)) - blocked) & self._blocked)

    def _block(self, suffixes: set[str]) -> None:
        if not suffixes:
            return
        self._ledger.block(suffixes)
        self._blocked |= suffixes
        for each in sorted(suffixes):
            counter = _readable(each)
            if counter is None:
                effect = "Blocked, but matches no request"
            else:
                effect = "Blocked" if self._is_enforced(counter) else "Over its limit, audit only"
            log.info("%s: %s.", effect, described(each))

    def _unblock(self, suffixes: set[str]) -> None:
        if not suffixes:
            return
        self._ledger.unblock(suffixes)
        self._blocked -= suffixes
        for each in sorted(suffixes):
            log.info("No longer over its limit: %s.", described(each))


def _suffix(key: str) -> str:
    return key.removeprefix(f"{BLOCKED}.")


def _readable(suffix: str) -> CounterKey | None:
    """Return the counter; None for a key that another program has written in another form."""
    try:
        return counter_of(suffix)
    except UnreadableKeyError:
        return None


async def report(store: Store, ledger: Ledger, gate: Gate) -> None:
    """Publish all unreported costs of the ledger and those that the gate records, forever.

    Each message is sent after the acknowledgement of the one before, so their order is certain. If
    an acknowledgement is lost, the message is sent again under the same id.

    Raises:
        nats.errors.Error, OSError: the stream does not accept it.
    """
    while True:
        gate.recorded.clear()
        for charge in ledger.unreported(_REPORTED_AT_ONCE):
            await store.report(charge.to_json(), message_id=str(charge.watermark))
            ledger.mark_reported(charge.number)
            gate.recorded.set()  # there may be more
        await gate.recorded.wait()


class Tally:
    """Counts the answers since the last summary."""

    def __init__(self) -> None:
        self._answers: defaultdict[str, list[Answer]] = defaultdict(list)

    def add(self, tenant: str, answer: Answer) -> None:
        """Count the answer to a request of this tenant."""
        self._answers[tenant].append(answer)

    def take_summary(self) -> str:
        """Return the counts by tenant, and start again at zero."""
        summaries = [f"{tenant} {_summary(each)}" for tenant, each in sorted(self._answers.items())]
        self._answers.clear()
        return "; ".join(summaries) or "no requests"


def _summary(answers: Sequence[Answer]) -> str:
    refused = [each for each in answers if not each.is_allowed]
    parts = []
    if allowed := len(answers) - len(refused):
        parts.append(f"{allowed} allowed")
    if refused:
        budgets = [[budget.budget for budget in each.blocked_by] for each in refused]
        reasons = {reason for each in budgets for reason in each or [_NO_LEDGER]}
        parts.append(f"{len(refused)} refused ({', '.join(sorted(reasons))})")
    return ", ".join(parts)


async def log_every_minute(
    tally: Tally, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Log the counts of each minute, forever."""
    while True:
        await sleep(_TALLY_SECONDS)
        log.info("Last minute: %s.", tally.take_summary())
