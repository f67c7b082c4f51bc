"""What the servers say at one moment: counters and blocks, true spend, and a snapshot."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import psycopg

from budget_recovery_dagster.adapters.nats.codec import COUNTERS, CounterKey, decode_value
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.windows import Window
from budget_recovery_dagster.sandbox.demo.cast import BUDGETS
from budget_recovery_dagster.sandbox.errors import DemoError
from budget_recovery_dagster.sandbox.gateway.keys import BLOCKED, counter_of
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place, attempt
from budget_recovery_dagster.sandbox.gateway.opening import opened
from budget_recovery_dagster.sandbox.gateway.store import Seen, Store, cost_stream
from budget_recovery_dagster.sandbox.gateway.watching import read_whole

Usages = Mapping[CounterKey, Decimal]

_NAME = "demo"
_LOOK_SECONDS = 0.05
_COUNTED_SECONDS = 20.0
# A reading that is broken off, because the store was replaced under it, is begun again.
_READINGS = 5

_SNAPSHOT = """
select tenant, budget_id, window_token, entity, usage from budget_recovery.budget_entry
where captured_at = %s
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """What stood in the store, and what was spent by the ledger; all of it was read before ``at``.

    So a window that is current at ``at`` was so all the time.
    """

    at: datetime
    counters: Usages
    blocked: frozenset[CounterKey]
    spent: Usages


def read_figures(place: Place, ledger_file: Path) -> Figures:
    """Read what there is once every reported cost is counted; nothing may be spent meanwhile.

    Raises:
        DemoError: it cannot be read, or is not counted in time.
    """
    found: list[Mapping[str, Seen]] = []

    async def read(ledger: Ledger) -> None:
        async with opened(place.url, place.bucket, _NAME) as store:
            await _all_counted(store, ledger)
            found.append(await read_whole(store, ""))

    with Ledger(ledger_file) as ledger:
        for _ in range(_READINGS):
            if (reason := asyncio.run(attempt(read(ledger)))) is None:
                break
        else:
            raise DemoError(
                f"The gateway's counters could not be read: {reason}.",
                "run it again; on a machine that is very busy it may take too long.",
            )
        at = datetime.now(UTC)
        spent = ledger.true_spend(BUDGETS, at)
    counters, blocked = {}, set()
    for key, seen in found[-1].items():
        kind, _, suffix = key.partition(".")
        if kind == COUNTERS:
            counters[counter_of(suffix)], _ = decode_value(seen.data or b"")
        elif kind == BLOCKED:
            blocked.add(counter_of(suffix))
    return Figures(at, counters, frozenset(blocked), spent)


async def _all_counted(store: Store, ledger: Ledger) -> None:
    """Wait until nothing is left to be reported, and every report was counted and taken away."""
    async with asyncio.timeout(_COUNTED_SECONDS):
        while ledger.unreported(1) or await _waiting_costs(store):
            await asyncio.sleep(_LOOK_SECONDS)


async def _waiting_costs(store: Store) -> int:
    info = await store.js.stream_info(cost_stream(store.bucket))
    return info.state.messages


def read_snapshot(database_url: str, captured_at: datetime) -> Usages:
    """Read the snapshot of all tenants of one moment, as it is stored."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(_SNAPSHOT, (captured_at,)).fetchall()
    return {
        CounterKey(tenant, BudgetWindow(budget, Window.parse(token)), entity): usage
        for tenant, budget, token, entity, usage in rows
    }
