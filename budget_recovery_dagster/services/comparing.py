"""Holding a restore against the preview that a person has looked at."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from budget_recovery_dagster.domain.identity import StoreIdentity, Verdict
from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.domain.plan import PlannedEntry, RecoveryPlan
from budget_recovery_dagster.domain.plan_differences import Difference, differences
from budget_recovery_dagster.domain.restore_choice import RestoreChoice
from budget_recovery_dagster.errors import (
    ChoiceError,
    DatabaseError,
    DatabaseUnreachableError,
    PreviewOutdatedError,
)
from budget_recovery_dagster.preview_ports import KeptPreview, Previews


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
