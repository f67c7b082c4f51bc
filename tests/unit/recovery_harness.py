"""A harness for detection and recovery."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from budget_recovery_dagster.domain import RESTORE_LEASE, Incident, Outcome, format_usage
from budget_recovery_dagster.errors import StoreRefusedError, StoreUnreachableError
from budget_recovery_dagster.services import Checked, check_store
from budget_recovery_dagster.services.restore import Recovered, RecoveryResult, recover_store
from tests.unit.capture_harness import REBORN, Harness

AnyHarness = TypeVar("AnyHarness", bound="RecoveryHarness")

LATER = REBORN + timedelta(minutes=30)
FULL = StoreRefusedError("The store is full.", "make room.")
UNCONFIRMED = StoreUnreachableError("No response to a write.", "check the servers.")
AWAY = StoreUnreachableError("Nobody answers.", "start it.")


@dataclass
class RecoveryHarness(Harness):
    """A capture harness that can also check and recover its store."""

    messages: list[str] = field(default_factory=list)

    convergence_timeout: timedelta = timedelta(seconds=30)

    @property
    def incident(self) -> Incident:
        """Return the open incident."""
        incident = self.plane.incidents.recovery().incident
        assert incident is not None
        return incident

    def check(self) -> Checked:
        return check_store(self.plane, lambda: nullcontext(self.store), checked_by="a check")

    def recover(self) -> RecoveryResult:
        """Run one recovery, as soon as an attempt is due."""
        self.await_attempt()
        return recover_store(
            self.plane,
            lambda: nullcontext(self.store),
            run_id="a run",
            holder="a restore",
            convergence_timeout=self.convergence_timeout,
            on_progress=self.messages.append,
        )

    def await_attempt(self) -> None:
        """Set the clocks to the time of the next attempt, if that is later."""
        incident = self.plane.incidents.recovery().incident
        due = incident.next_attempt_at if incident else None
        if due is not None and due > self.clock.now():
            self.clock.set(due)
            self.store.clock = due if self.store.clock else None

    def wipe(self) -> None:
        """Lose the store, recreate it empty, and run a check."""
        self.store.recreate(REBORN)
        self.check()

    def usage(self, tenant: str, entity: str | None = None) -> str | None:
        """Return the usage of a lifetime counter in the store."""
        reading = self.store.open_tenant(tenant).reading
        found = [format_usage(each.usage) for each in reading.counters if each.entity == entity]
        return found[0] if found else None

    def before_write(self, number: int, action: Callable[[], object]) -> None:
        """Call something once, between the decision on the numbered write and the write."""
        count = 0

        def hook(_key: str) -> None:
            nonlocal count
            count += 1
            if count == number:
                action()

        self.store.before_write = hook

    def die_in_an_attempt(self) -> None:
        """Claim an attempt, once it is due, like a worker that then dies."""
        self.await_attempt()
        with self.plane.leases.hold(RESTORE_LEASE, "a worker") as lease:
            self.plane.incidents.claim_attempt(
                judged=self.incident, run_id="dead", holder="a worker", lease=lease
            )


def captured_harness() -> RecoveryHarness:
    """Return a store of two tenants with leaderboards, captured and checked ten minutes ago."""
    return captured(RecoveryHarness())


def captured(harness: AnyHarness) -> AnyHarness:
    """Give the store two tenants with leaderboards, captured and checked ten minutes ago."""
    harness.spend("a", "80")
    harness.spend("a", "30", "alice")
    harness.spend("b", "5")
    harness.rank("a", {None: "80", "alice": "30"})
    harness.rank("b", {None: "5"})
    harness.capture()
    harness.check()
    harness.clock.advance(timedelta(minutes=10))
    return harness


def outcome_of(result: RecoveryResult) -> Outcome:
    assert isinstance(result, Recovered)
    assert result.incident.ended is not None
    return result.incident.ended.outcome
