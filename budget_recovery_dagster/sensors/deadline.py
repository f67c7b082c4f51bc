"""A limit to the time of a tick."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
