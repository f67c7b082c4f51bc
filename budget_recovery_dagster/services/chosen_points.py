"""What a person has chosen, checked against what there is, and the points that belong to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from budget_recovery_dagster.domain.restore_choice import (
    EVERY_TENANT,
    LATEST,
    RestoreChoice,
    choose_budget,
    choose_snapshot,
    choose_tenant,
    is_latest,
)
from budget_recovery_dagster.errors import ChoiceError
from budget_recovery_dagster.restore_ports import RestorePoints, TenantPoint
from budget_recovery_dagster.snapshot_ports import SnapshotList


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What a person asks for, as it was written; see ``RestoreChoice``."""

    tenant: str = EVERY_TENANT
    budget: str = ""
    snapshot: str = LATEST
    despite_resets: bool = False


@dataclass(frozen=True, slots=True)
class ChosenPoints:
    """The points that a choice restores tenants to."""

    points: RestorePoints
    choice: RestoreChoice

    def tenants(self) -> Sequence[str]:
        """Return the tenants that are restored, by name."""
        if self.choice.tenant is not None:
            return [self.choice.tenant]
        return sorted(self.points.tenants())

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        """Return a tenant's point with the chosen budgets only; None: it has nothing to restore."""
        points = self.points.despite_resets() if self.choice.despite_resets else self.points
        if self.choice.snapshot is None:
            point = points.point_of(tenant, now)
        else:
            point = points.snapshot_of(tenant, self.choice.snapshot)
        if point is None or self.choice.budget is None:
            return point
        windows = tuple(each for each in point.windows if each.of.budget == self.choice.budget)
        return replace(point, windows=windows)


@dataclass(frozen=True, slots=True)
class Choosing:
    """Checks what is asked for."""

    points: RestorePoints
    snapshots: SnapshotList

    def choose(self, request: RestoreRequest) -> ChosenPoints:
        """Return the points that are asked for.

        Raises:
            ChoiceError: something of it does not exist; the hint has the choices.
        """
        tenants = sorted(self.points.tenants())
        if not tenants:
            raise ChoiceError(
                "There is nothing to restore from: no snapshot is retained.",
                "see with `budget-recovery status` why; an open incident can be ended with "
                "`budget-recovery resolve`, so that snapshots are taken again.",
            )
        tenant = choose_tenant(request.tenant, tenants)
        budgets = self.snapshots.budgets_of(tenant) if tenant is not None else ()
        budget = choose_budget(request.budget, tenant, budgets)
        moments = () if is_latest(request.snapshot) else self._moments(tenant)
        snapshot = choose_snapshot(request.snapshot, moments)
        choice = RestoreChoice(tenant, budget, snapshot, request.despite_resets)
        return ChosenPoints(self.points, choice)

    def _moments(self, tenant: str | None) -> Sequence[datetime]:
        # One of which retention has taken records is no snapshot any more.
        return [each.captured_at for each in self.snapshots.all(tenant) if not each.is_pruned]
