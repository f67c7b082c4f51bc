"""Operations on the whole gateway: run its two sides, give it a history, wipe its bucket."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import nats.js.errors
from anyio.from_thread import BlockingPortal, start_blocking_portal

from budget_recovery_dagster.adapters.nats.codec import COUNTERS, UnreadableKeyError
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.sandbox.gateway.aggregator import Counting, aggregate
from budget_recovery_dagster.sandbox.gateway.derivation import derive
from budget_recovery_dagster.sandbox.gateway.gate import (
    Answer,
    Gate,
    Tally,
    log_every_minute,
    report,
)
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.requests import (
    BUDGETS,
    USERS,
    Budgets,
    Clock,
    Request,
    Traffic,
    Watermark,
    utc_clock,
)
from budget_recovery_dagster.sandbox.gateway.store import (
    BLOCKED,
    RETRY_SECONDS,
    Place,
    answer_to,
    attempt,
    bucket_stream,
    counter_of,
    keep_working,
    opened,
)
from budget_recovery_dagster.sandbox.gateway.watching import follow, read_all

GATE_READY = "Traffic of"
"""Logged once the counters include the history and requests are answered."""

AGGREGATOR_READY = "is connected to bucket"
"""Logged whenever the aggregator starts to work."""

REQUESTS_PER_SECOND = 4.0

_CHECK_SECONDS = 0.1
_NEW_BUCKET_SECONDS = 20.0

_NO_HISTORY = (
    "Bucket %s had counters before this ledger, so the ledger gets no history. It is exact only for"
    " spend from now on."
)

log = logging.getLogger("gateway")

Past = Callable[[datetime], Iterable[tuple[datetime, Request]]]
"""Makes up the past requests as of a time."""


async def serve(
    place: Place, ledger: Ledger, requests_per_second: float, past: Past | None
) -> None:
    """Run the gate with traffic, forever; ``past`` makes up the history of a new ledger."""
    if past is not None:
        await begin(place, ledger, BUDGETS, utc_clock, past)
    else:
        await count_history(place, ledger, BUDGETS, utc_clock)
    gate = Gate(ledger, BUDGETS, utc_clock)
    gate.log_blocks()
    log.info(
        "%s %d tenants, %g requests per second in total.",
        GATE_READY,
        len(USERS),
        requests_per_second,
    )
    tally = Tally()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_make_traffic(gate, tally, requests_per_second))
        tasks.create_task(log_every_minute(tally))
        tasks.create_task(connect_gate(place, gate, ledger))


async def _make_traffic(gate: Gate, tally: Tally, requests_per_second: float) -> None:
    traffic = Traffic(seed=time.time_ns())
    while True:
        request = traffic.request()
        tally.add(request.tenant, gate.answer(request))
        await asyncio.sleep(1 / requests_per_second)


async def connect_gate(place: Place, gate: Gate, ledger: Ledger) -> None:
    """Report the costs of the gate, and keep its blocks current, forever."""
    await keep_working(
        place,
        "gateway",
        lambda store: follow(store, f"{BLOCKED}.", gate),
        lambda store: report(store, ledger, gate),
    )


async def run_aggregator(place: Place, budgets: Budgets, clock: Clock) -> None:
    """Count costs and run the derivation, forever."""
    await keep_working(
        place,
        "aggregator",
        lambda store: aggregate(store, budgets, clock),
        lambda store: derive(store, budgets, clock),
    )


async def begin(place: Place, ledger: Ledger, budgets: Budgets, clock: Clock, past: Past) -> None:
    """Give a new ledger its history, and wait until the counters include it.

    A ledger decides once whether it has a history: when it first meets its bucket. If the bucket
    has counters of another ledger, it gets none, because its spend would not match them. A store
    that is wiped later starts at zero, as a real one does.
    """

    async def decide() -> None:
        async with opened(place, "history") as store:
            found = await read_all(store)
        if any(key.startswith(f"{COUNTERS}.") for key in found):
            ledger.begin_without_history()
            log.warning(_NO_HISTORY, place.bucket)
        else:
            ledger.record_history(past(clock()))

    if not ledger.has_begun():
        await _insist(decide)
    await count_history(place, ledger, budgets, clock)


async def count_history(place: Place, ledger: Ledger, budgets: Budgets, clock: Clock) -> None:
    """Add the history of a ledger to the counters, unless that is done, and wait for it.

    No other charge of this ledger may be counted before: a mark after the history means that the
    counter includes it.
    """
    last = ledger.uncounted_history()
    if not last:
        return

    async def write() -> None:
        usages = ledger.true_spend(budgets, clock(), up_to=last)
        async with opened(place, "history") as store:
            await Counting(store, budgets, clock).add_usages(usages, Watermark(ledger.id, last))
        ledger.mark_history_counted()
        log.info("%d counters include the history of %d requests.", len(usages), last)

    await _insist(write)


async def _insist(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while (reason := await attempt(work())) is not None:
        log.warning("The history is not written: %s. Trying again.", reason)
        await asyncio.sleep(RETRY_SECONDS)


@dataclass(frozen=True, slots=True)
class RunningGate:
    """A gate in this process that reports costs and receives blocks."""

    _portal: BlockingPortal
    _gate: Gate

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request.

        Raises:
            UnusableNameError: no key can hold a name of the request.
        """
        return self._portal.call(self._gate.answer, request)


@contextlib.contextmanager
def running_gate(
    place: Place, ledger_file: Path, budgets: Budgets, *, clock: Clock = utc_clock
) -> Iterator[RunningGate]:
    """Run a gate on this ledger in a thread of this process, without traffic of its own."""
    with Ledger(ledger_file) as ledger, start_blocking_portal("asyncio") as portal:
        gate = portal.call(Gate, ledger, budgets, clock)
        with _running(portal, connect_gate(place, gate, ledger)):
            yield RunningGate(portal, gate)


@contextlib.contextmanager
def running_aggregator(
    place: Place, budgets: Budgets, *, clock: Clock = utc_clock
) -> Iterator[None]:
    """Run an aggregator with its derivation in a thread of this process."""
    with (
        start_blocking_portal("asyncio") as portal,
        _running(portal, run_aggregator(place, budgets, clock)),
    ):
        yield


@contextlib.contextmanager
def _running(portal: BlockingPortal, work: Coroutine[Any, Any, None]) -> Iterator[None]:
    # A plain asyncio task, cancelled once: the portal's own tasks are cancelled again at every
    # await, which would interrupt the closing of connections. In a list, because the portal would
    # wait for a bare task.
    [task] = portal.call(lambda: [asyncio.create_task(work)])
    try:
        yield
    finally:
        portal.call(_end, task)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


class NotWipedError(BudgetRecoveryError):
    """The bucket was not wiped, or its state is unknown."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The size of a bucket."""

    tenants: int
    counters: int
    blocked: int


def count_contents(place: Place) -> Contents:
    """Count the keys of the bucket.

    Raises:
        NotWipedError: they cannot be read.
    """
    found: list[str] = []

    async def read() -> None:
        async with opened(place, "wipe") as store:
            found.extend(await read_all(store))

    _run_on(place, read())
    counters = [key.removeprefix(f"{COUNTERS}.") for key in found if key.startswith(f"{COUNTERS}.")]
    tenants = set()
    for suffix in counters:
        with contextlib.suppress(UnreadableKeyError):
            tenants.add(counter_of(suffix).tenant)
    blocked = sum(key.startswith(f"{BLOCKED}.") for key in found)
    return Contents(len(tenants), len(counters), blocked)


def wipe(place: Place) -> float | None:
    """Delete the stream of the bucket, as an operator might lose it, and wait for a new one.

    Return the seconds until the gateway has created it; None if it has not in time. Costs on their
    way stay in their stream and count into the new bucket.

    Raises:
        NotWipedError: it was not deleted, or its state is unknown.
    """
    stream = bucket_stream(place.bucket)
    seconds: float | None = None

    async def destroy() -> None:
        nonlocal seconds
        async with opened(place, "wipe") as store:
            before = await answer_to(store.js.stream_info(stream))
            await answer_to(store.js.delete_stream(stream))
            begun = time.monotonic()
            while (passed := time.monotonic() - begun) < _NEW_BUCKET_SECONDS:
                with contextlib.suppress(nats.js.errors.NotFoundError):
                    now = await answer_to(store.js.stream_info(stream))
                    if now.created != before.created:
                        seconds = passed
                        return
                await asyncio.sleep(_CHECK_SECONDS)

    _run_on(place, destroy())
    return seconds


def _run_on(place: Place, work: Coroutine[Any, Any, None]) -> None:
    if reason := asyncio.run(attempt(work)):
        raise NotWipedError(
            f"Bucket {place.bucket} at {place.url} could not be read or wiped: {reason}.",
            "check that `budget-recovery dev` still runs, and try again.",
        )
