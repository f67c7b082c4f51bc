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
"""The most that a tick takes of its own: Dagster breaks it off after a minute, without a reason."""


class OutOfTimeError(BudgetRecoveryError):
    """A tick's work was not done in time; what it was at may still end, unheeded."""


class Deadline:
    """When a tick's work has to be done."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for the work any more."""
        return time.monotonic() >= self._at


def within(seconds: float, work: Callable[[Deadline], Result]) -> Result:
    """Return what ``work`` returns, or raise what it raises, unless that takes too long.

    A server that hangs, rather than refuses, cannot be made to answer, nor can the thread that
    waits for it be ended; all that it may still do is conditional on what it has read. It is told
    until when it is waited for.

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
    """Write a cursor after a tick that found something out."""
    if suspicion is None:
        return "0"
    return f"0 {suspicion.suspect} {suspicion.token} {suspicion.since.isoformat()}"


def read_suspicion(cursor: str | None) -> Suspicion | None:
    """Read the suspicion; None where there is none, also where somebody has edited the cursor."""
    try:
        _, suspect, token, since = (cursor or "").split()
        moment = datetime.fromisoformat(since)
        return Suspicion(suspect, int(token), moment) if moment.tzinfo else None
    except ValueError:
        return None


ALLOWED = 3
"""A tick that could find nothing out fails if it is at least this one in a row."""


def unknown_tick(
    context: dg.SensorEvaluationContext,
    reason: str,
    hint: str,
    events: list[dg.AssetObservation] | None = None,
) -> dg.SensorResult:
    """Skip the tick, and count it in the cursor.

    Raises:
        dagster.Failure: it is not the first ones in a row any more.
    """
    count = _counted(context.cursor) + 1
    told = f"{reason} Try: {hint}" if hint else reason
    if count >= ALLOWED:
        # The cursor stays as it is, so the next one fails as well unless it finds something out.
        raise dg.Failure(f"At least {count} ticks in a row could find nothing out. {told}")
    return dg.SensorResult(skip_reason=told, cursor=str(count), asset_events=events or [])


def _counted(cursor: str | None) -> int:
    # It can be edited in the UI. The supervisor keeps more behind the count.
    count = (cursor or "").partition(" ")[0]
    return int(count) if count.isdecimal() else 0
