"""Detection and recovery with everything around them in memory."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from budget_recovery_dagster.domain import RESTORE_LEASE, Incident, RecoveryState, format_usage
from budget_recovery_dagster.services import Checked, DetectionService
from budget_recovery_dagster.services.restore import RecoveryResult, RecoveryService
from tests.fakes.control_plane import MemoryRestoreAudits
from tests.fakes.incidents import MemoryBaselines
from tests.fakes.snapshots import MemoryRestorePoints
from tests.unit.capture_house import REBORN, House

AnyHouse = TypeVar("AnyHouse", bound="RecoveryHouse")

LATER = REBORN + timedelta(minutes=30)


@dataclass
class RecoveryHouse(House):
    """A house whose store is captured, checked and recovered."""

    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.baselines = MemoryBaselines(self.plane)
        self.audits = MemoryRestoreAudits(self.plane)
        self.points = MemoryRestorePoints(self.plane)
        self.detection = DetectionService(
            open_store=lambda: nullcontext(self.store),
            registry=self.registry,
            baselines=self.baselines,
            snapshots=self.snapshots,
            checks=self.checks,
            incidents=self.incidents,
            leases=self.leases,
            clock=self.clock,
            bucket="budget-usage",
        )
        self.recovery = RecoveryService(
            open_store=lambda: nullcontext(self.store),
            registry=self.registry,
            incidents=self.incidents,
            points=self.points,
            audits=self.audits,
            checks=self.checks,
            leases=self.leases,
            clock=self.clock,
            bucket="budget-usage",
            convergence_timeout=timedelta(seconds=30),
        )

    @property
    def state(self) -> RecoveryState:
        return self.incidents.recovery().state

    @property
    def incident(self) -> Incident:
        """The open incident."""
        incident = self.incidents.recovery().incident
        assert incident is not None
        return incident

    def check(self) -> Checked:
        return self.detection.check(checked_by="a check")

    def recover(self) -> RecoveryResult:
        return self.recovery.recover(run_id="a run", holder="a restore", tell=self.said.append)

    def wipe(self) -> None:
        """Lose the store, which its owner makes anew, and notice it."""
        self.store.recreate(REBORN)
        self.check()

    def usage(self, tenant: str, entity: str | None = None) -> str | None:
        """Return what a lifetime counter says in the store."""
        reading = self.store.open_tenant(tenant).reading
        found = [format_usage(each.usage) for each in reading.counters if each.entity == entity]
        return found[0] if found else None

    def before_write(self, number: int, happen: Callable[[], object]) -> None:
        """Let something happen between the decision on a write and the writing, once."""
        count = 0

        def hook(_key: str) -> None:
            nonlocal count
            count += 1
            if count == number:
                happen()

        self.store.before_write = hook

    def die_in_an_attempt(self) -> None:
        """Claim an attempt as a worker does that then dies without a word."""
        with self.leases.hold(RESTORE_LEASE, "a worker") as lease:
            self.incidents.claim_attempt(
                judged=self.incident, run_id="dead", holder="a worker", lease=lease
            )


def captured_house() -> RecoveryHouse:
    """A store of two tenants that was captured and checked, ten minutes ago."""
    return captured(RecoveryHouse())


def captured(house: AnyHouse) -> AnyHouse:
    """Let the store of a house have two tenants, captured and checked ten minutes ago."""
    house.spend("a", "80")
    house.spend("a", "30", "alice")
    house.spend("b", "5")
    house.capture()
    house.check()
    house.clock.advance(timedelta(minutes=10))
    return house
