"""Waiting for an effect of another thread, process or server."""

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], *, seconds: float = 20, every: float = 0.01) -> None:
    """Wait until a condition holds; fail if it does not within the given time.

    Poll expensive conditions, such as a web page or a command, ``every`` so many seconds, so that
    they do not slow down what is waited for.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(every)
