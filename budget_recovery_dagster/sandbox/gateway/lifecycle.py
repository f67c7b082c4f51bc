"""Work on a store that is begun anew for as long as it takes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import nats.js.errors

from budget_recovery_dagster.sandbox.gateway.opening import opened
from budget_recovery_dagster.sandbox.gateway.store import FAILURES, Store

RETRY_SECONDS = 0.3

log = logging.getLogger("gateway")

Part = Callable[[Store], Awaitable[None]]
"""Work on a store that goes on until something fails."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bucket is: ``url`` names NATS servers, several after a comma."""

    url: str
    bucket: str


async def keep_working(place: Place, name: str, *parts: Part) -> None:
    """Work on the bucket, all parts at the same time, beginning anew whenever one fails.

    The bucket and the stream of costs are made where they are missing. What went wrong is logged
    once, until it works again.
    """
    told: str | None = None

    async def work() -> None:
        nonlocal told
        async with opened(place.url, place.bucket, name) as store, asyncio.TaskGroup() as tasks:
            log.info("%s is connected to bucket %s.", name.capitalize(), place.bucket)
            told = None
            tasks.create_task(store.stand_guard())
            for part in parts:
                tasks.create_task(_run(part, store))

    while True:
        reason = await attempt(work())
        if reason != told:
            told = reason
            log.warning("Without the bucket: %s. Trying again.", reason)
        await asyncio.sleep(RETRY_SECONDS)


async def attempt(work: Coroutine[Any, Any, None]) -> str | None:
    """Do work on a store; return None once it is done, or why it could not be.

    The work gets a task of its own: one in which a task group has failed looks as if it had been
    cancelled ever after (before Python 3.13).
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    reason = None
    try:
        task.result()
    except* FAILURES as failures:
        reason = _sentence(next(_leaves(failures)))
    return reason


async def _run(part: Part, store: Store) -> None:
    await part(store)


def _leaves(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for each in failures.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _leaves(each)
        else:
            yield each


def _sentence(failure: BaseException) -> str:
    match failure:
        case nats.js.errors.NoStreamResponseError():
            return "nothing takes what is written"
        case TimeoutError():
            return "the server does not answer"
        case _:
            return str(failure).rstrip(".") or type(failure).__name__
