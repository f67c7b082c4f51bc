"""Detection and recovery with an in-memory control plane and a fake store."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from budget_recovery_dagster.domain import RESTORE_LEASE, Incident, format_usage
from budget_recovery_dagster.services import Checked, check_store
from budget_recovery_dagster.services.restore import RecoveryResult, recover_store
from tests.unit.capture_house import REBORN, House

AnyHouse = TypeVar("AnyHouse", bound="RecoveryHouse")

LATER = REBORN + timedelta(minutes=30)


@dataclass
class RecoveryHouse(House):
    """A house whose store is captured, checked and recovered."""

    said: list[str] = field(default_factory=list)

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
        return recover_store(
            self.plane,
            lambda: nullcontext(self.store),
            run_id="a run",
            holder="a restore",
            convergence_timeout=self.convergence_timeout,
            on_progress=self.said.append,
        )

    def wipe(self) -> None:
        """Lose the store, recreate it empty, and run a check."""
        self.store.recreate(REBORN)
        self.check()

    def usage(self, tenant: str, entity: str | None = None) -> str | None:
        """Return the usage of a lifetime counter in the store."""
        reading = self.store.open_tenant(tenant).reading
        found = [format_usage(each.usage) for each in reading.counters if each.entity == entity]
        return found[0] if found else None

    def before_write(self, number: int, happen: Callable[[], object]) -> None:
        """Call something once, between the decision on the numbered write and the write."""
        count = 0

        def hook(_key: str) -> None:
            nonlocal count
            count += 1
            if count == number:
                happen()

        self.store.before_write = hook

    def die_in_an_attempt(self) -> None:
        """Claim an attempt like a worker that then dies."""
        with self.plane.leases.hold(RESTORE_LEASE, "a worker") as lease:
            self.plane.incidents.claim_attempt(
                judged=self.incident, run_id="dead", holder="a worker", lease=lease
            )


def captured_house() -> RecoveryHouse:
    """Return a store of two tenants, captured and checked ten minutes ago."""
    return captured(RecoveryHouse())


def captured(house: AnyHouse) -> AnyHouse:
    """Give the store two tenants, captured and checked ten minutes ago."""
    house.spend("a", "80")
    house.spend("a", "30", "alice")
    house.spend("b", "5")
    house.capture()
    house.check()
    house.clock.advance(timedelta(minutes=10))
    return house
