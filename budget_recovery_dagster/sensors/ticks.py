"""Sensor ticks: a deadline, a cursor, and unknown results in a row."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from typing import TypeVar

import dagster as dg

from budget_recovery_dagster.domain.supervision import Suspicion
from budget_recovery_dagster.errors import BudgetRecoveryError

Result = TypeVar("Result")
TICK_SECONDS = 10.0
"""The longest that a tick works: Dagster terminates it after a minute, without a reason."""


class OutOfTimeError(BudgetRecoveryError):
    """A tick's work was not done in time; it may still end, without effect on the tick."""


class Deadline:
    """The time until which a tick's work must be done."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the tick has stopped waiting for the work."""
        return time.monotonic() >= self._at


def within(seconds: float, work: Callable[[Deadline], Result]) -> Result:
    """Return what ``work`` returns, or raise what it raises, within the time limit.

    If a server hangs, the thread that waits for it cannot be ended. It gets the deadline, and its
    later writes are conditional on what it has read.

    Raises:
        OutOfTimeError: it is not done in time.
    """
    done: Future[Result] = Future()
    deadline = Deadline(seconds)

    def run() -> None:
        try:
            done.set_result(work(deadline))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    # A daemon, so that it does not hold up the end of the code server.
    threading.Thread(target=run, name="tick", daemon=True).start()
    try:
        return done.result(timeout=seconds)
    except TimeoutError as error:
        if done.done():
            raise
        raise OutOfTimeError(
            f"The tick was not done within {seconds:g} s.",
            "see whether PostgreSQL and NATS answer.",
        ) from error


def write_suspicion(suspicion: Suspicion | None) -> str:
    """Write the cursor after a tick with a known result."""
    if suspicion is None:
        return "0"
    return f"0 {suspicion.suspect} {suspicion.token} {suspicion.since.isoformat()}"


def read_suspicion(cursor: str | None) -> Suspicion | None:
    """Read the suspicion; None if there is none, or if a person edited the cursor."""
    try:
        _, suspect, token, since = (cursor or "").split()
        moment = datetime.fromisoformat(since)
        return Suspicion(suspect, int(token), moment) if moment.tzinfo else None
    except ValueError:
        return None


ALLOWED = 3
"""An unknown tick fails if it is at least this many in a row."""


def unknown_tick(
    context: dg.SensorEvaluationContext,
    reason: str,
    hint: str,
    events: list[dg.AssetObservation] | None = None,
) -> dg.SensorResult:
    """Skip the tick, and count it in the cursor.

    Raises:
        dagster.Failure: too many ticks in a row are unknown.
    """
    count = _counted(context.cursor) + 1
    text = f"{reason} Try: {hint}" if hint else reason
    if count >= ALLOWED:
        # The cursor keeps its value, so the next tick fails as well unless its result is known.
        raise dg.Failure(f"At least {count} ticks in a row are unknown. {text}")
    return dg.SensorResult(skip_reason=text, cursor=str(count), asset_events=events or [])


def _counted(cursor: str | None) -> int:
    # It can be edited in the UI. The supervisor stores more after the count.
    count = (cursor or "").partition(" ")[0]
    return int(count) if count.isdecimal() else 0
