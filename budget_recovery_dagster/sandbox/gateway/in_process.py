"""The gateway's parts inside another program, such as a test, each on an event loop of its own."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from budget_recovery_dagster.sandbox.gateway.aggregate import run_aggregator
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.gate import Answer, Gate
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place
from budget_recovery_dagster.sandbox.gateway.requests import Request
from budget_recovery_dagster.sandbox.gateway.serve import connect_gate

Clock = Callable[[], datetime]
"""Tells the present moment, aware."""


def utc_clock() -> datetime:
    """Tell the real time."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class RunningGate:
    """A gate that reports costs and hears of blocks; ``ledger`` is the file of its ledger."""

    ledger: Path
    _portal: BlockingPortal
    _gate: Gate

    def answer(self, request: Request) -> Answer:
        """Have a request answered.

        Raises:
            UnusableNameError: a name in the request can stand in no key.
        """
        return self._portal.call(self._gate.answer, request)


@contextmanager
def running_gate(
    place: Place, ledger_file: Path, budgets: Budgets, *, clock: Clock = utc_clock
) -> Iterator[RunningGate]:
    """Run a gate on this ledger, without any traffic of its own."""
    with Ledger(ledger_file) as ledger, start_blocking_portal("asyncio") as portal:
        # Made on the loop on which it is used.
        gate = portal.call(lambda: _made(ledger, budgets, clock))
        with _running(portal, lambda: connect_gate(place, gate, ledger)):
            yield RunningGate(ledger_file, portal, gate)


@contextmanager
def running_aggregator(
    place: Place, budgets: Budgets, *, clock: Clock = utc_clock
) -> Iterator[None]:
    """Run an aggregator with its derivation."""
    with (
        start_blocking_portal("asyncio") as portal,
        _running(portal, lambda: run_aggregator(place, budgets, clock)),
    ):
        yield


@contextmanager
def _running(
    portal: BlockingPortal, work: Callable[[], Coroutine[Any, Any, None]]
) -> Iterator[None]:
    stop = portal.call(_event)
    ended = portal.start_task_soon(_work_until, stop, work)
    try:
        yield
    finally:
        portal.call(stop.set)
        ended.result()


async def _work_until(stop: asyncio.Event, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    # Cancelled as asyncio does it, once: anyio would cancel the closing of connections, too.
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work())
        stopping = tasks.create_task(stop.wait())
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        stopping.cancel()


async def _event() -> asyncio.Event:
    return asyncio.Event()


async def _made(ledger: Ledger, budgets: Budgets, clock: Clock) -> Gate:
    return Gate(ledger, budgets, clock)
