"""What a person chose to restore, from which snapshot, and what changed since the preview."""

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
    """Who wants a manual restore or resolve, why, and in which run.

    ``on_progress`` receives sentences. ``accept_unconverged``: the store is taken as it is,
    although its servers have not converged.
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
    """Refuse a reason that says nothing.

    Raises:
        ChoiceError: it is empty.
    """
    if not reason.strip():
        raise ChoiceError(
            "No reason is given.", "say why; it is kept with what is done, for whoever asks."
        )


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

    points: RecoveryPoints
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


def choose_points(plane: ControlPlane, request: RestoreRequest) -> ChosenPoints:
    """Return the points that are asked for.

    Raises:
        ChoiceError: something of it does not exist; the hint lists the choices.
    """
    tenants = sorted(plane.points.tenants())
    if not tenants:
        raise ChoiceError(
            "There is nothing to restore from: no snapshot is retained.",
            "see with `budget-recovery status` why; an open incident can be ended with "
            "`budget-recovery resolve`, so that snapshots are taken again.",
        )
    tenant = choose_tenant(request.tenant, tenants)
    budgets = plane.snapshot_list.budgets_of(tenant) if tenant is not None else ()
    budget = choose_budget(request.budget, tenant, budgets)
    times = () if is_latest(request.snapshot) else _snapshot_times(plane, tenant)
    snapshot = choose_snapshot(request.snapshot, times)
    choice = RestoreChoice(tenant, budget, snapshot, request.despite_resets)
    return ChosenPoints(plane.points, choice)


def _snapshot_times(plane: ControlPlane, tenant: str | None) -> Sequence[datetime]:
    # One of which retention has removed records is no snapshot any more.
    return [each.captured_at for each in plane.snapshot_list.all(tenant) if not each.is_pruned]


def require_same(kept: KeptPreview, found: StoreIdentity) -> None:
    """Refuse to go on with a store that is not the previewed one.

    Raises:
        PreviewOutdatedError: it was made anew or has gone back since.
    """
    seen = kept.identity
    if found.created_at != seen.created_at or found.last_sequence < seen.last_sequence:
        raise _outdated(kept, f"it was {seen}, and is {found}")


def require_no_loss_since(kept: KeptPreview, incident: Incident | None) -> None:
    """Refuse to go on with a store that may have lost data since it was previewed.

    Raises:
        PreviewOutdatedError: a loss was found since, and it is not that of the store before.
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
        "preview once more, and see what would be restored now.",
    )


@dataclass(slots=True)
class Comparison:
    """What is applied, beside what was previewed; ``preview`` None: there is none to compare with.

    ``uncompared`` are the tenants of whom it is not known what has changed.
    """

    previews: Previews
    preview: KeptPreview | None
    found: list[Difference] = field(default_factory=list)
    uncompared: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, previews: Previews, choice: RestoreChoice, preview_id: str | None) -> "Comparison":
        """Compare with the preview of this id, or else with the newest one of this choice.

        Raises:
            ChoiceError: there is no such preview, or it is of another choice.
            DatabaseUnreachableError: the database is away; without it nothing is restored.
        """
        if preview_id is not None:
            kept = previews.get(preview_id) if _is_id(preview_id) else None
            if kept is None or kept.choice != choice:
                raise ChoiceError(
                    f"The preview is {preview_id!r}, and there is none of that id for {choice}.",
                    "preview once more; one is kept for a day.",
                )
            return cls(previews, kept)
        try:
            return cls(previews, previews.newest(choice))
        except DatabaseUnreachableError:
            raise
        except DatabaseError:
            # A restore in need must not fail for what it is only compared with.
            return cls(previews, None)

    def tenants(self) -> frozenset[str]:
        """Return the tenants of whom something was previewed."""
        if self.preview is None:
            return frozenset()
        return self.previews.tenants_of(self.preview.preview_id)

    def previewed(self, tenant: str) -> Sequence[PlannedEntry] | None:
        """Return what was previewed of a tenant; None: it is not known.

        Raises:
            DatabaseUnreachableError: the database is away.
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
        """Compare what is planned of a tenant; None: no plan could be made."""
        if self.preview is None:
            return
        if previewed is None or plan is None:
            self.uncompared.append(tenant)
        else:
            self.found += differences(tenant, previewed, plan.entries)
