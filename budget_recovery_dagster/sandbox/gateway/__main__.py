"""The gateway as processes: ``python -m budget_recovery_dagster.sandbox.gateway serve LEDGER``.

``serve`` runs the gate with traffic, ``aggregate`` the aggregator with its derivation. The servers
are those of BUDGET_RECOVERY_NATS_URL and BUDGET_RECOVERY_BUCKET.
"""

import argparse
import asyncio
import logging
import sys
from contextlib import suppress
from pathlib import Path

from budget_recovery_dagster.sandbox.gateway.ledger import Ledger, LedgerError
from budget_recovery_dagster.sandbox.gateway.operations import (
    REQUESTS_PER_SECOND,
    run_aggregator,
    serve,
)
from budget_recovery_dagster.sandbox.gateway.requests import BUDGETS, Traffic, utc_clock
from budget_recovery_dagster.sandbox.gateway.store import Place
from budget_recovery_dagster.settings import load_settings


def main() -> None:
    """Run until a signal stops it."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}")
    commands = parser.add_subparsers(dest="command", required=True)
    gate = commands.add_parser("serve")
    gate.add_argument("ledger", type=Path)
    gate.add_argument("--with-history", action="store_true")
    gate.add_argument("--requests-per-second", type=float, default=REQUESTS_PER_SECOND)
    commands.add_parser("aggregate")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = load_settings()
    place = Place(settings.require_nats_url(), settings.bucket)
    # SIGTERM simply ends the process: the ledger is always complete, and an unacknowledged cost is
    # delivered again.
    with suppress(KeyboardInterrupt):
        if given.command == "aggregate":
            asyncio.run(run_aggregator(place, BUDGETS, utc_clock))
            return
        try:
            ledger = Ledger(given.ledger)
        except LedgerError as error:
            sys.exit(f"Error: {error}.")
        past = Traffic(seed=1).history if given.with_history else None
        with ledger:
            asyncio.run(serve(place, ledger, given.requests_per_second, past))


if __name__ == "__main__":
    main()
