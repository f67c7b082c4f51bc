"""The aggregator and the derivation as a process: ``python -m …gateway.aggregate``.

BUDGET_RECOVERY_NATS_URL and BUDGET_RECOVERY_BUCKET say where.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from budget_recovery_dagster.sandbox.gateway.aggregator import aggregate
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.derivation import derive
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place, keep_working
from budget_recovery_dagster.sandbox.gateway.scene import BUDGETS
from budget_recovery_dagster.sandbox.gateway.store import Store
from budget_recovery_dagster.settings import load_settings

READY = "is connected to bucket"
"""What it logs whenever it begins to work."""


async def run_aggregator(place: Place, budgets: Budgets, clock: Callable[[], datetime]) -> None:
    """Count costs and derive what follows from counters, for ever."""

    async def count(store: Store) -> None:
        await aggregate(store, budgets, clock)

    async def keep_in_line(store: Store) -> None:
        await derive(store, budgets, clock)

    await keep_working(place, "aggregator", count, keep_in_line)


def main() -> None:
    """Run until it is told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = load_settings()
    place = Place(settings.require_nats_url(), settings.bucket)
    # SIGTERM just ends it: what is not acknowledged comes again.
    with suppress(KeyboardInterrupt):
        asyncio.run(run_aggregator(place, BUDGETS, lambda: datetime.now(UTC)))


if __name__ == "__main__":
    main()
