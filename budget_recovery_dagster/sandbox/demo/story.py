"""The story, step by step: what is done, what is seen, and what is read to be judged."""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

from budget_recovery_dagster.sandbox.child_process import poll
from budget_recovery_dagster.sandbox.demo.cast import (
    AGENT,
    BUDGET,
    LIMIT,
    NEWCOMER,
    REQUEST,
    TENANT,
    counter_of,
)
from budget_recovery_dagster.sandbox.demo.figures import Figures, read_snapshot
from budget_recovery_dagster.sandbox.demo.gateway import DemoGateway
from budget_recovery_dagster.sandbox.demo.protection import Protection, RecoveryEnded
from budget_recovery_dagster.sandbox.demo.verdict import Evidence
from budget_recovery_dagster.sandbox.errors import DemoError

# How long traffic may do its work before the story goes on.
_TRAFFIC_SECONDS = 2.0
_BLOCKS_SECONDS = 20.0


class Teller(Protocol):
    """Tells the story to a person while it happens."""

    def step(self, title: str) -> AbstractContextManager[None]:
        """Begin a step, and measure how long it takes."""
        ...

    def say(self, text: str) -> None:
        """Tell what has happened, in sentences."""
        ...

    def answer(self, request: str, *, is_refused: bool) -> None:
        """Tell how the gateway has answered a request."""
        ...


@dataclass(frozen=True, slots=True)
class Story:
    """The story of one store."""

    gateway: DemoGateway
    protection: Protection
    database_url: str
    teller: Teller

    def tell(self) -> Evidence:
        """Lose the store and have it brought back, and return what was read meanwhile.

        Raises:
            DemoError: the story could not be told to its end.
            BudgetRecoveryError: a server did not do what was asked.
        """
        self._make_traffic()
        with self.teller.step("A snapshot is taken"):
            taken = self.protection.take_snapshot()
            self.teller.say(
                f"{taken.counters:,} counters of {taken.tenants} tenants are copied to PostgreSQL."
                " Dagster has that done at every full hour. Here the same code runs without"
                " Dagster, now."
            )
        self._use_the_budget_up()
        with self.teller.step("The next snapshot is taken, as an hour later"):
            newest = self.protection.take_snapshot()
            snapshot = read_snapshot(self.database_url, newest.captured_at)
            recorded = snapshot[counter_of(AGENT)]
            self.teller.say(
                f"It knows that {AGENT} has spent {dollars(recorded)}. Traffic goes on; what is"
                " spent from here on is in no snapshot."
            )
            time.sleep(_TRAFFIC_SECONDS)
        before_wipe = self._wipe()
        after_wipe = self._spend_again()
        with self.teller.step("The store is checked"):
            found = self.protection.find_loss()
            self.teller.say(
                "Dagster has that done every ten minutes. The check finds:"
                f" {found.reason} It opens incident {found.incident}, and snapshots are paused."
            )
        with self.teller.step("The counters are restored, while traffic goes on"):
            ended = self.protection.recover()
            if ended.is_recovered:
                self.teller.say(
                    "Each counter is raised to the highest value that a snapshot knows. None is"
                    " lowered, and nothing is added up."
                )
            self.teller.say(ended.detail)
        is_refused = self._await_blocks(before_wipe, ended)
        return Evidence(snapshot, before_wipe, after_wipe, self.gateway.look(), is_refused)

    def _make_traffic(self) -> None:
        with self.teller.step("Traffic"):
            time.sleep(_TRAFFIC_SECONDS)
            figures = self.gateway.look()
            tenants = len({counter.tenant for counter in figures.counters})
            self.teller.say(
                f"A simulated AI gateway serves {tenants} tenants. It adds up what their requests"
                f" cost in {len(figures.counters):,} counters, which live in a store in NATS, and"
                f" blocks whoever has used up a budget: {len(figures.blocked)} so far."
            )
            self.teller.say(
                f"By the budget {BUDGET!r} of tenant {TENANT!r} each agent may spend"
                f" {dollars(LIMIT)}; {AGENT} has spent"
                f" {dollars(figures.counters[counter_of(AGENT)])}."
            )

    def _use_the_budget_up(self) -> None:
        with self.teller.step("A budget is used up"):
            requests = self.gateway.spend_until_refused()
            spent = self.gateway.look().counters[counter_of(AGENT)]
            self.teller.say(
                f"After {requests} requests of {dollars(REQUEST.cost)} {AGENT} has spent"
                f" {dollars(spent)}, and the gateway blocks it."
            )
            self._answer(is_refused=True)

    def _wipe(self) -> Figures:
        with self.teller.step("The store is wiped"):
            before_wipe, seconds = self.gateway.look_and_wipe()
            self.teller.say(
                "Its stream is deleted, as an operator might lose it. The gateway makes it anew"
                f" after {seconds:.1f} s, and it is empty. Nothing fails, and nobody is told."
            )
        return before_wipe

    def _spend_again(self) -> Figures:
        with self.teller.step("The budget that is used up spends again"):
            if not self.gateway.comes_to_let_through():
                raise DemoError(
                    "The gateway still refuses the request, although its store was wiped.",
                    "run it again; the machine may be too busy for the simulated gateway.",
                )
            self._answer(is_refused=self.gateway.refuses())
            self.gateway.spend(NEWCOMER, "1")
            time.sleep(_TRAFFIC_SECONDS)
            figures = self.gateway.look()
            usage = figures.counters.get(counter_of(AGENT), Decimal(0))
            self.teller.say(
                f"Usage counts from zero: {AGENT} seems to have spent {dollars(usage)}, and"
                f" {len(figures.blocked)} are blocked. {NEWCOMER}, which no snapshot knows, spends"
                f" its first {dollars(figures.counters[counter_of(NEWCOMER)])}."
            )
        return figures

    def _await_blocks(self, before_wipe: Figures, ended: RecoveryEnded) -> bool:
        """Wait for what was blocked to be blocked again, and send the request once more.

        Return whether it is refused.
        """
        with self.teller.step("The gateway is asked once more"):
            # Where nothing was restored, there is nothing to wait for.
            if ended.is_recovered and self.gateway.comes_to_refuse():
                poll(lambda: self._are_back(before_wipe), seconds=_BLOCKS_SECONDS)
                self.teller.say("It finds its counters, and derives the blocks from them.")
            is_refused = self.gateway.refuses()
            self._answer(is_refused=is_refused)
        return is_refused

    def _are_back(self, before_wipe: Figures) -> bool | None:
        now = self.gateway.look()
        missing = before_wipe.blocked - now.blocked
        return None if any(each.of.window.is_current(now.at) for each in missing) else True

    def _answer(self, *, is_refused: bool) -> None:
        request = f"{AGENT} asks for {dollars(REQUEST.cost)} more:"
        self.teller.answer(request, is_refused=is_refused)


def dollars(amount: Decimal) -> str:
    """Write an amount for people, to the cent."""
    return f"${amount:,.2f}"
