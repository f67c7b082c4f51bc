"""Destroys the bucket as an operator would lose it; the gateway makes it anew, and it is empty.

Nothing else is touched: costs that are under way stay in their stream, and count into the new one.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import nats.js.errors
from nats.js.api import StreamInfo

from budget_recovery_dagster.adapters.nats.codec import COUNTERS, UnreadableKeyError
from budget_recovery_dagster.sandbox.errors import NotWipedError
from budget_recovery_dagster.sandbox.gateway.keys import BLOCKED, counter_of
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place, attempt
from budget_recovery_dagster.sandbox.gateway.opening import opened
from budget_recovery_dagster.sandbox.gateway.store import (
    Store,
    bucket_stream,
    heed_cancellation,
)
from budget_recovery_dagster.sandbox.gateway.watching import read_whole

_NAME = "wipe"
_LOOK_SECONDS = 0.1
_MADE_ANEW_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Contents:
    """How much a bucket held when it was looked at."""

    tenants: int
    counters: int
    blocked: int


@dataclass(frozen=True, slots=True)
class Wiped:
    """That a bucket was destroyed; after ``seconds`` there was a new one, None: not in time."""

    stream: str
    seconds: float | None


def count_contents(place: Place) -> Contents:
    """Count what the bucket holds.

    Raises:
        NotWipedError: that cannot be told.
    """
    found: list[Contents] = []

    async def count() -> None:
        async with opened(place.url, place.bucket, _NAME) as store:
            found.append(await _count(store))

    _do(place, count())
    return found[0]


def wipe(place: Place) -> Wiped:
    """Delete the stream behind the bucket, and see the gateway make it anew.

    Raises:
        NotWipedError: it was not deleted, or that cannot be told.
    """
    wiped: list[Wiped] = []

    async def destroy() -> None:
        stream = bucket_stream(place.bucket)
        async with opened(place.url, place.bucket, _NAME) as store:
            before = await store.js.stream_info(stream)
            await store.js.delete_stream(stream)
            heed_cancellation()
            wiped.append(Wiped(stream, await _seconds_until_anew(store, before)))

    _do(place, destroy())
    return wiped[0]


def _do(place: Place, work: Coroutine[Any, Any, None]) -> None:
    if reason := asyncio.run(attempt(work)):
        raise NotWipedError(
            f"Bucket {place.bucket} at {place.url} could not be looked at or wiped: {reason}.",
            "see whether `budget-recovery dev` still runs, and try again.",
        )


async def _seconds_until_anew(store: Store, before: StreamInfo) -> float | None:
    """Wait for another stream of this name; return how long that took, None: too long."""
    begun = time.monotonic()
    while (passed := time.monotonic() - begun) < _MADE_ANEW_SECONDS:
        with contextlib.suppress(nats.js.errors.NotFoundError):
            now = await store.js.stream_info(before.config.name or "")
            heed_cancellation()
            if now.created != before.created:
                return passed
        await asyncio.sleep(_LOOK_SECONDS)
    return None


async def _count(store: Store) -> Contents:
    keys = [key.partition(".") for key in await read_whole(store, "")]
    counters = [suffix for kind, _, suffix in keys if kind == COUNTERS]
    tenants = set()
    for suffix in counters:
        with contextlib.suppress(UnreadableKeyError):
            tenants.add(counter_of(suffix).tenant)
    blocked = sum(kind == BLOCKED for kind, _, _ in keys)
    return Contents(len(tenants), len(counters), blocked)
