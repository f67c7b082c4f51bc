"""The simulated gateway with a history and traffic of its own, which can be halted for a look."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from budget_recovery_dagster.sandbox.child_process import poll
from budget_recovery_dagster.sandbox.demo.cast import (
    BUDGETS,
    HISTORY_SEED,
    PROBE,
    REQUEST,
    request_of,
    traffic,
)
from budget_recovery_dagster.sandbox.demo.figures import Figures, read_figures
from budget_recovery_dagster.sandbox.errors import DemoError
from budget_recovery_dagster.sandbox.gateway.history import begin
from budget_recovery_dagster.sandbox.gateway.in_process import (
    RunningGate,
    running_aggregator,
    running_gate,
    utc_clock,
)
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place
from budget_recovery_dagster.sandbox.gateway.requests import Request
from budget_recovery_dagster.sandbox.gateway.traffic import Traffic
from budget_recovery_dagster.sandbox.gateway.wiping import wipe

_REQUESTS_PER_SECOND = 20.0
# Fast enough to watch, slow enough for a block to take effect between two of them.
_PACE_SECONDS = 0.2
_MOST_REQUESTS = 60
_ANSWER_SECONDS = 20.0


class DemoGateway:
    """A gateway that serves the story's tenants while the story goes on."""

    def __init__(self, place: Place, ledger_file: Path, gate: RunningGate) -> None:
        self.place = place
        self._ledger_file = ledger_file
        self._gate = gate
        self._may_spend = threading.Lock()

    def refuses(self, request: Request = REQUEST) -> bool:
        """Send a request, and return whether a budget refuses it.

        Raises:
            DemoError: it is refused for another reason.
        """
        answer = self._gate.answer(request)
        if not answer.is_allowed and not answer.blocked_by:
            raise DemoError(
                "The gateway cannot write into its ledger, so it refuses every request.",
                "see whether the disk is full.",
            )
        return not answer.is_allowed

    def spend_until_refused(self) -> int:
        """Send the request again and again until it is refused; return how often it was not.

        Raises:
            DemoError: it never is.
        """
        for number in range(_MOST_REQUESTS):
            if self.refuses():
                return number
            time.sleep(_PACE_SECONDS)
        raise DemoError(
            f"The gateway let {_MOST_REQUESTS} requests through, far beyond the limit.",
            "run it again; the machine may be too busy for the simulated gateway.",
        )

    def comes_to_refuse(self) -> bool:
        """Wait until the request is refused; return False if it is not in time.

        Nothing is spent by that.
        """
        return poll(lambda: self.refuses(PROBE) or None, seconds=_ANSWER_SECONDS) is not None

    def comes_to_let_through(self) -> bool:
        """Wait until the request is let through; as ``comes_to_refuse``."""
        return poll(lambda: not self.refuses(PROBE) or None, seconds=_ANSWER_SECONDS) is not None

    def spend(self, agent: str, cost: str) -> None:
        """Have an agent of the story's tenant spend so many dollars in one request."""
        self.refuses(request_of(agent, cost))

    def look(self) -> Figures:
        """Halt the traffic, wait until all of it is counted, and read what there is."""
        with self._may_spend:
            return read_figures(self.place, self._ledger_file)

    def look_and_wipe(self) -> tuple[Figures, float]:
        """Read what there is, and destroy all of it before anything more is spent.

        Return what there was, and after how many seconds the gateway had made the store anew.

        Raises:
            DemoError: it did not make it anew in time.
            NotWipedError: the store is not wiped.
        """
        with self._may_spend:
            before = read_figures(self.place, self._ledger_file)
            wiped = wipe(self.place)
        if wiped.seconds is None:
            raise DemoError(
                "The gateway did not make its store anew in time.",
                "run it again; the machine may be too busy for the simulated gateway.",
            )
        return before, wiped.seconds

    def make_traffic(self, stop: threading.Event) -> None:
        """Send requests of all tenants until it is told to stop."""
        for request in traffic():
            if stop.wait(1 / _REQUESTS_PER_SECOND):
                return
            with self._may_spend:
                self._gate.answer(request)


@contextmanager
def running_gateway(place: Place, ledger_file: Path) -> Iterator[DemoGateway]:
    """Run a gateway that has served for months, with traffic."""
    with Ledger(ledger_file) as ledger:
        asyncio.run(begin(place, ledger, BUDGETS, utc_clock, Traffic(seed=HISTORY_SEED).history))
    with running_gate(place, ledger_file, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        gateway = DemoGateway(place, ledger_file, gate)
        stop = threading.Event()
        thread = threading.Thread(target=gateway.make_traffic, args=(stop,))
        thread.start()
        try:
            yield gateway
        finally:
            stop.set()
            thread.join()
