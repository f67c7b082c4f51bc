"""Work that stops halfway, until a test has done something to the cluster."""

import threading
from collections.abc import Callable

_SECONDS = 60


class Halfway:
    """A point at which each worker stops once, when it first arrives."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._here = threading.Semaphore(0)
        self._go_on = threading.Event()

    def stop(self) -> Callable[[], None]:
        """Return the function that one worker calls at this point."""
        is_first = [True]

        def stop_here() -> None:
            if is_first[0]:
                is_first[0] = False
                self._here.release()
                assert self._go_on.wait(_SECONDS), "nothing happened at the halfway"

        return stop_here

    def meanwhile(self, action: Callable[[], None]) -> None:
        """Wait for all workers, call something, and let them continue."""
        try:
            for _ in range(self._workers):
                assert self._here.acquire(timeout=_SECONDS), "a worker did not come by"
            action()
        finally:
            self._go_on.set()
