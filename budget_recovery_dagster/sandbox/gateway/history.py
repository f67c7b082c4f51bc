"""Usage of the past months, with which a new sandbox begins."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from datetime import datetime
from typing import Any

from budget_recovery_dagster.adapters.nats.codec import COUNTERS
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.counting import Counting
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.lifecycle import RETRY_SECONDS, Place, attempt
from budget_recovery_dagster.sandbox.gateway.opening import opened
from budget_recovery_dagster.sandbox.gateway.requests import Request, Watermark
from budget_recovery_dagster.sandbox.gateway.store import Store

log = logging.getLogger("gateway")


_NO_HISTORY = (
    "There were counters in bucket %s before this ledger: it gets no history, and is exact only for"
    " what is spent from now on."
)


async def begin(
    place: Place,
    ledger: Ledger,
    budgets: Budgets,
    clock: Callable[[], datetime],
    past: Callable[[datetime], Iterable[tuple[datetime, Request]]],
) -> None:
    """Give a new ledger the history that ``past`` makes up at a moment, and have it counted.

    A ledger decides that once: the first time it meets its bucket. Where counters stand already
    that are not its own it gets none, for they would not sum up to what it says; a store that is
    wiped later reads as zero.
    """

    async def decide() -> None:
        async with opened(place.url, place.bucket, "history") as store:
            is_used = await _holds_counters(store)
        if is_used:
            ledger.begin_without_history()
            log.warning(_NO_HISTORY, place.bucket)
        else:
            ledger.record_history(past(clock()))

    if not ledger.has_begun():
        await _insist(decide)
    await count_history(place, ledger, budgets, clock)


async def _holds_counters(store: Store) -> bool:
    existing = await store.existing(f"{COUNTERS}.")
    if existing is None:
        return True
    for key in existing:  # there may be markers of removed ones among them
        if (await store.read(key)).data is not None:
            return True
    return False


async def count_history(
    place: Place, ledger: Ledger, budgets: Budgets, clock: Callable[[], datetime]
) -> None:
    """Add the ledger's history to the counters, unless that was done before, and wait for it.

    Until then nothing else may be counted from this ledger: a counter's mark that is later than the
    history says that it is in.
    """
    last = ledger.uncounted_history()
    if not last:
        return

    async def write() -> None:
        now = clock()
        usages = ledger.true_spend(budgets, now, up_to=last)
        async with opened(place.url, place.bucket, "history") as store:
            await Counting(store, budgets, clock).add_usages(usages, Watermark(ledger.id, last))
        ledger.history_is_counted()
        log.info("The history of %d requests stands in %d counters.", last, len(usages))

    await _insist(write)


async def _insist(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while (reason := await attempt(work())) is not None:
        log.warning("The history is not written: %s. Trying again.", reason)
        await asyncio.sleep(RETRY_SECONDS)
