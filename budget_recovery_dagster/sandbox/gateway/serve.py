"""The gate and its traffic as a process: ``python -m …gateway.serve LEDGER [--with-history]``.

BUDGET_RECOVERY_NATS_URL and BUDGET_RECOVERY_BUCKET say where. With ``--with-history`` a new ledger
that meets a new bucket begins with the usage of past months; a store that is wiped later reads as
zero all the same, as a real one does.
"""

import argparse
import asyncio
import logging
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.gate import Gate
from budget_recovery_dagster.sandbox.gateway.history import begin, count_history
from budget_recovery_dagster.sandbox.gateway.keys import BLOCKED
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger, LedgerError
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place, keep_working
from budget_recovery_dagster.sandbox.gateway.reporter import report
from budget_recovery_dagster.sandbox.gateway.scene import BUDGETS, USERS
from budget_recovery_dagster.sandbox.gateway.store import Store
from budget_recovery_dagster.sandbox.gateway.tally import Tally, tell_every_minute
from budget_recovery_dagster.sandbox.gateway.traffic import Traffic
from budget_recovery_dagster.sandbox.gateway.watching import follow
from budget_recovery_dagster.settings import load_settings

HISTORY = "--with-history"
READY = "Traffic of"
"""What it logs once the history stands in the counters and requests are answered."""

REQUESTS_PER_SECOND = 4.0

log = logging.getLogger("gateway")


async def connect_gate(place: Place, gate: Gate, ledger: Ledger) -> None:
    """Report what the gate lets through, and tell it what is blocked, for ever."""

    async def watch(store: Store) -> None:
        await follow(store, f"{BLOCKED}.", gate)

    async def send(store: Store) -> None:
        await report(store, ledger, gate)

    await keep_working(place, "gateway", watch, send)


async def make_traffic(gate: Gate, tally: Tally, traffic: Traffic, per_second: float) -> None:
    """Have the gate answer requests, for ever."""
    while True:
        request = traffic.request()
        tally.add(request.tenant, gate.answer(request))
        await asyncio.sleep(1 / per_second)


async def serve(
    place: Place, ledger: Ledger, budgets: Budgets, per_second: float, *, with_history: bool
) -> None:
    """Run the whole gate side of the gateway, for ever."""
    if with_history:
        await begin(place, ledger, budgets, _now, Traffic(seed=1).history)
    else:
        await count_history(place, ledger, budgets, _now)
    gate = Gate(ledger, budgets, _now)
    gate.tell_of_blocks()
    log.info("%s %d tenants, %g requests a second in all.", READY, len(USERS), per_second)
    tally = Tally()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(make_traffic(gate, tally, Traffic(seed=time.time_ns()), per_second))
        tasks.create_task(tell_every_minute(tally))
        tasks.create_task(connect_gate(place, gate, ledger))


def _now() -> datetime:
    return datetime.now(UTC)


def main() -> None:
    """Run until it is told to stop."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("ledger", type=Path)
    arguments.add_argument(HISTORY, action="store_true")
    arguments.add_argument("--requests-per-second", type=float, default=REQUESTS_PER_SECOND)
    given = arguments.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = load_settings()
    place = Place(settings.require_nats_url(), settings.bucket)
    try:
        opened_ledger = Ledger(given.ledger)
    except LedgerError as error:
        sys.exit(f"Error: {error}.")
    with opened_ledger as ledger, suppress(KeyboardInterrupt):
        # SIGTERM just ends it: all that must be kept stands in the ledger at any moment.
        asyncio.run(
            serve(
                place,
                ledger,
                BUDGETS,
                given.requests_per_second,
                with_history=given.with_history,
            )
        )


if __name__ == "__main__":
    main()
