"""The common part of the commands that run servers: start steps, and signals that stop them."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from rich.console import Console

from budget_recovery_dagster.sandbox.stack import Step

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def shown_steps(console: Console) -> Step:
    """Return a step that writes its name and duration to this console."""

    @contextmanager
    def step(name: str) -> Iterator[None]:
        # No spinner: its thread would run while children are forked.
        if console.is_terminal:
            console.print(f"  ..  {name}", end="\r")
        begun = time.monotonic()
        try:
            yield
        except BaseException:
            if console.is_terminal:
                console.print()
            raise
        console.print(f"  [green]ok[/]  {name} [dim]{time.monotonic() - begun:.1f} s[/]")

    return step


class StoppedBySignal(KeyboardInterrupt):
    """A signal asked to stop; ``exit_code`` is the one that shells expect, 130 for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Turn the first stop signal into an exception; later signals cannot interrupt the shutdown.

    Raises:
        StoppedBySignal: at any point of the program.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        ignore_stop_signals()
        # Written directly: the interrupted code may be writing to a buffer.
        with suppress(OSError):
            os.write(1, b"\nStopping ...\n")
        raise StoppedBySignal(number)

    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """Ignore further stop signals, so that the shutdown completes."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
