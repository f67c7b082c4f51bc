"""Waiting for what another thread, process or server brings about."""

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], *, seconds: float = 20, every: float = 0.01) -> None:
    """Wait until something holds, and fail if it does not within the time given.

    What is expensive to ask, such as a web page or a command, is asked ``every`` so many seconds:
    the machine is needed by what is waited for.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(every)
