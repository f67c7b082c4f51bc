"""Waiting for what another thread, process or server brings about."""

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], *, seconds: float = 20) -> None:
    """Wait until something holds, and fail if it does not within the time given."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)
