"""The aggregator: takes the costs from their stream and has them counted."""

import logging
from collections.abc import Callable
from datetime import datetime

from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.counting import Counting
from budget_recovery_dagster.sandbox.gateway.pulling import Pull
from budget_recovery_dagster.sandbox.gateway.requests import Charge, UnreadableChargeError
from budget_recovery_dagster.sandbox.gateway.store import Store, cost_stream

log = logging.getLogger("aggregator")


async def aggregate(store: Store, budgets: Budgets, clock: Callable[[], datetime]) -> None:
    """Count all costs, for ever: each at least once by the stream, at most once by the counters.

    Several may do it at the same time; the stream gives out one cost after the other.

    Raises:
        StoreLostError, nats.errors.Error, OSError, ExceptionGroup of these: it must begin anew.
    """
    counting = Counting(store, budgets, clock)
    async with Pull(store, cost_stream(store.bucket), await store.take_costs()) as pull:
        while True:
            message = await pull.next()
            if message is None:
                continue
            try:
                charge = Charge.from_json(message.data)
            except UnreadableChargeError as error:
                place = message.metadata.sequence.stream
                log.warning("Message %d of the costs is none, and is left out: %s.", place, error)
            else:
                await counting.add(charge)
            await message.ack()
