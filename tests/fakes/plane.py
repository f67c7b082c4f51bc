"""The whole fake control plane: every port on one state."""

import threading
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from budget_recovery_dagster.ports import ControlPlane
from tests.fakes.control_plane import (
    ManualClock,
    MemoryBudgets,
    MemoryLeases,
    MemoryPreviews,
    MemoryRestoreAudits,
    MemoryState,
)
from tests.fakes.falls import MemoryFalls
from tests.fakes.incidents import MemoryIncidents, MemoryStoreRegistry
from tests.fakes.snapshots import (
    MemoryCaptureReports,
    MemoryRecoveryPoints,
    MemoryResets,
    MemorySnapshots,
)

BUCKET = "budget-usage"


@dataclass(frozen=True)
class MemoryControlPlane(ControlPlane):
    """The control plane of one store; tests ``replace`` parts by failing ones."""

    clock: ManualClock
    registry: MemoryStoreRegistry
    leases: MemoryLeases
    snapshots: MemorySnapshots
    reports: MemoryCaptureReports
    points: MemoryRecoveryPoints
    falls: MemoryFalls
    incidents: MemoryIncidents
    audits: MemoryRestoreAudits
    resets: MemoryResets
    budgets: MemoryBudgets
    previews: MemoryPreviews
    state: MemoryState

    @classmethod
    def at(cls, now: datetime, bucket: str = BUCKET) -> Self:
        """Create an empty control plane with its clock at ``now``."""
        clock = ManualClock(now)
        state = MemoryState(clock)
        return cls(
            clock=clock,
            registry=MemoryStoreRegistry(state, bucket),
            leases=MemoryLeases(state),
            snapshots=MemorySnapshots(state),
            reports=MemoryCaptureReports(state),
            points=MemoryRecoveryPoints(state),
            falls=MemoryFalls(state),
            incidents=MemoryIncidents(state),
            audits=MemoryRestoreAudits(state),
            resets=MemoryResets(state),
            budgets=MemoryBudgets(),
            previews=MemoryPreviews(clock),
            state=state,
        )

    def copy(self) -> Self:
        """Return a copy of the database, such as a dump; its clock is the same."""
        shared: dict[int, object] = {id(self.clock): self.clock}
        return deepcopy(self, shared | {id(self.state.lock): threading.RLock()})
