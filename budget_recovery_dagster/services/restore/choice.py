"""The choice of a manual restore, and its comparison with the preview."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from uuid import UUID

from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.domain.plan import (
    EVERY_TENANT,
    LATEST,
    Difference,
    KeptPreview,
    PlannedEntry,
    RecoveryPlan,
    RestoreChoice,
    choose_budget,
    choose_snapshot,
    choose_tenant,
    differences,
    is_latest,
)
from budget_recovery_dagster.domain.recovery_point import TenantPoint
from budget_recovery_dagster.domain.store import StoreIdentity, Verdict
from budget_recovery_dagster.errors import (
    ChoiceError,
    DatabaseError,
    DatabaseUnreachableError,
    PreviewOutdatedError,
)
from budget_recovery_dagster.ports import ControlPlane, Previews, RecoveryPoints


@dataclass(frozen=True, slots=True)
class Order:
    """Who orders a manual restore or resolve, why, and in which run.

    ``on_progress`` receives sentences. ``accept_unconverged``: use the store even if its servers
    have not converged.
    """

    by: str
    reason: str
    run_id: str
    on_progress: Callable[[str], None]
    accept_unconverged: bool = False

    def require_reason(self) -> None:
        """Refuse an order without a reason.

        Raises:
            ChoiceError: no reason is given.
        """
        require_reason(self.reason)


def require_reason(reason: str) -> None:
    """Refuse an empty reason.

    Raises:
        ChoiceError: it is empty.
    """
    if not reason.strip():
        raise ChoiceError("The reason is empty.", "give a reason; it is stored with the result.")


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """A manual restore as a person requested it; see ``RestoreChoice``."""

    tenant: str = EVERY_TENANT
    budget: str = ""
    snapshot: str = LATEST
    despite_resets: bool = False


@dataclass(frozen=True, slots=True)
class ChosenPoints:
    """The points that a choice restores tenants to."""

    points: RecoveryPoints
    choice: RestoreChoice

    def tenants(self) -> Sequence[str]:
        """Return the tenants that are restored, by name."""
        if self.choice.tenant is not None:
            return [self.choice.tenant]
        return sorted(self.points.tenants())

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        """Return a tenant's point with the chosen budgets; None if it has nothing to restore."""
        points = self.points.despite_resets() if self.choice.despite_resets else self.points
        if self.choice.snapshot is None:
            point = points.point_of(tenant, now)
        else:
            point = points.snapshot_of(tenant, self.choice.snapshot)
        if point is None or self.choice.budget is None:
            return point
        windows = tuple(each for each in point.windows if each.of.budget == self.choice.budget)
        return replace(point, windows=windows)


def choose_points(plane: ControlPlane, request: RestoreRequest) -> ChosenPoints:
    """Return the points of a request.

    Raises:
        ChoiceError: a part of the request does not exist; the hint lists the choices.
    """
    tenants = sorted(plane.points.tenants())
    if not tenants:
        raise ChoiceError(
            "Nothing can be restored: no snapshot is retained.",
            "run `budget-recovery status` to see why. `budget-recovery resolve` closes an open "
            "incident, so that captures resume.",
        )
    tenant = choose_tenant(request.tenant, tenants)
    budgets = plane.snapshot_list.budgets_of(tenant) if tenant is not None else ()
    budget = choose_budget(request.budget, tenant, budgets)
    times = () if is_latest(request.snapshot) else _snapshot_times(plane, tenant)
    snapshot = choose_snapshot(request.snapshot, times)
    choice = RestoreChoice(tenant, budget, snapshot, request.despite_resets)
    return ChosenPoints(plane.points, choice)


def _snapshot_times(plane: ControlPlane, tenant: str | None) -> Sequence[datetime]:
    # A snapshot is incomplete once retention has removed records from it.
    return [each.captured_at for each in plane.snapshot_list.all(tenant) if not each.is_pruned]


def require_same(kept: KeptPreview, found: StoreIdentity) -> None:
    """Refuse to restore a store that is not the previewed one.

    Raises:
        PreviewOutdatedError: the store was recreated or went back to an earlier state since.
    """
    seen = kept.identity
    if found.created_at != seen.created_at or found.last_sequence < seen.last_sequence:
        raise _outdated(kept, f"it was {seen}, and is {found}")


def require_no_loss_since(kept: KeptPreview, incident: Incident | None) -> None:
    """Refuse to restore a store that may have lost data since it was previewed.

    Raises:
        PreviewOutdatedError: a loss was found since, and the preview did not see the store after
            that loss.
    """
    loss = incident.losses[-1] if incident is not None else None
    if loss is None or loss.found_at <= kept.at:
        return
    was_previewed_after = (
        loss.verdict is Verdict.RECREATED
        and loss.after is not None
        and loss.after.created_at == kept.identity.created_at
    )
    if not was_previewed_after:
        raise _outdated(kept, loss.reason.rstrip("."))


def _is_id(preview_id: str) -> bool:
    try:
        return str(UUID(preview_id)) == preview_id
    except ValueError:
        return False


def _outdated(kept: KeptPreview, why: str) -> PreviewOutdatedError:
    return PreviewOutdatedError(
        f"The store is not the one of the preview at {kept.at:%Y-%m-%d %H:%M:%S} UTC: {why}.",
        "preview again to see what would be restored now.",
    )


@dataclass(slots=True)
class Comparison:
    """Compares a restore with its preview; ``preview`` is None if there is none.

    ``uncompared`` are the tenants that could not be compared.
    """

    previews: Previews
    preview: KeptPreview | None
    found: list[Difference] = field(default_factory=list)
    uncompared: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, previews: Previews, choice: RestoreChoice, preview_id: str | None) -> "Comparison":
        """Compare with the preview of this id, or else with the newest one for this choice.

        Raises:
            ChoiceError: there is no such preview, or it has another choice.
            DatabaseUnreachableError: the database is not reachable; nothing can be restored.
        """
        if preview_id is not None:
            kept = previews.get(preview_id) if _is_id(preview_id) else None
            if kept is None or kept.choice != choice:
                raise ChoiceError(
                    f"No stored preview {preview_id!r} has these options: {choice}.",
                    "preview again; a preview is stored for a day.",
                )
            return cls(previews, kept)
        try:
            return cls(previews, previews.newest(choice))
        except DatabaseUnreachableError:
            raise
        except DatabaseError:
            # A restore must not fail only because there is nothing to compare it with.
            return cls(previews, None)

    def tenants(self) -> frozenset[str]:
        """Return the previewed tenants."""
        if self.preview is None:
            return frozenset()
        return self.previews.tenants_of(self.preview.preview_id)

    def previewed(self, tenant: str) -> Sequence[PlannedEntry] | None:
        """Return the previewed entries of a tenant; None if they are unknown.

        Raises:
            DatabaseUnreachableError: the database is not reachable.
        """
        if self.preview is None:
            return None
        try:
            return self.previews.entries_of(self.preview.preview_id, tenant)
        except DatabaseUnreachableError:
            raise
        except DatabaseError:
            return None

    def add(
        self, tenant: str, previewed: Sequence[PlannedEntry] | None, plan: RecoveryPlan | None
    ) -> None:
        """Compare the plan of a tenant with its preview; ``plan`` None: no plan could be made."""
        if self.preview is None:
            return
        if previewed is None or plan is None:
            self.uncompared.append(tenant)
        else:
            self.found += differences(tenant, previewed, plan.entries)
