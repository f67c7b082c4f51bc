"""The time that passes on this host, also while it is suspended or its clock is set."""

import time
from collections.abc import Callable, Sequence

HostClock = Callable[[], float]
"""Returns seconds since any time."""


def _since_boot() -> float:
    # On Linux, the monotonic clock stands still while the host is suspended; this one does not.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


HOST_CLOCKS: Sequence[HostClock] = (
    time.monotonic,
    time.time,
    *((_since_boot,) if hasattr(time, "CLOCK_BOOTTIME") else ()),
)


class Stopwatch:
    """Measures the seconds since its start; they never become fewer.

    The clock that has advanced most counts. So time that passed is not missed if a clock stood
    still or was set back. If one was set forward, a worker stops too early, which is safe.
    """

    def __init__(self, clocks: Sequence[HostClock] = HOST_CLOCKS) -> None:
        self._clocks = clocks
        self._started = [clock() for clock in clocks]
        self._most = 0.0

    def anew(self) -> "Stopwatch":
        """Return another one with the same clocks, started now."""
        return Stopwatch(self._clocks)

    def seconds(self) -> float:
        """Return the seconds since the start."""
        passed = (clock() - then for clock, then in zip(self._clocks, self._started, strict=True))
        self._most = max(self._most, *passed)
        return self._most
