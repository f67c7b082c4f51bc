"""Usage of the past months, with which a new sandbox begins."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.counting import create_counters
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.lifecycle import RETRY_SECONDS, Place, attempt
from budget_recovery_dagster.sandbox.gateway.opening import opened
from budget_recovery_dagster.sandbox.gateway.requests import Watermark

log = logging.getLogger("gateway")


async def count_history(
    place: Place, ledger: Ledger, budgets: Budgets, clock: Callable[[], datetime]
) -> None:
    """Write the ledger's history into counters, unless that was done before, and wait for it.

    Until then there must be no traffic, so that each counter stands for the whole past: one that
    exists was written by this before it was interrupted.
    """
    last = ledger.uncounted_history()
    if not last:
        return

    async def write() -> None:
        now = clock()
        usages = ledger.true_spend(budgets, now, up_to=last)
        async with opened(place.url, place.bucket, "history") as store:
            await create_counters(store, usages, Watermark(ledger.id, last), now)
        log.info("The history of %d requests stands in %d counters.", last, len(usages))

    while (reason := await attempt(write())) is not None:
        log.warning("The history is not written: %s. Trying again.", reason)
        await asyncio.sleep(RETRY_SECONDS)
    ledger.history_is_counted()
