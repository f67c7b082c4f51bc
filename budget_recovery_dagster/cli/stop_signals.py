"""Signals that ask a command to stop, turned into an orderly end."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedBySignal(KeyboardInterrupt):
    """A signal asked to stop; ``exit_code`` is what a shell expects then, 130 for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Let the first signal to stop unwind the program; more of them cannot cut that short.

    Raises:
        StoppedBySignal: wherever the program is when the signal comes.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        ignore_stop_signals()
        # Past the buffers: the interrupted code may be in the middle of writing to them.
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
    """Heed no more signals to stop, for what must be brought to its end."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
