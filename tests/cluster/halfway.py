"""Work that stops halfway, until a test has done something to the cluster."""

import threading
from collections.abc import Callable

_SECONDS = 60


class Halfway:
    """Where some workers stop, each the first time that it comes by."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._here = threading.Semaphore(0)
        self._go_on = threading.Event()

    def stop(self) -> Callable[[], None]:
        """Return what one worker calls whenever it comes by."""
        is_first = [True]

        def stop_here() -> None:
            if is_first[0]:
                is_first[0] = False
                self._here.release()
                assert self._go_on.wait(_SECONDS), "nothing happened at the halfway"

        return stop_here

    def meanwhile(self, happens: Callable[[], None]) -> None:
        """Wait for all workers, let something happen, and let them go on."""
        try:
            for _ in range(self._workers):
                assert self._here.acquire(timeout=_SECONDS), "a worker did not come by"
            happens()
        finally:
            self._go_on.set()
