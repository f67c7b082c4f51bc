"""What previews need from the outside world; as in ``ports``, with promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from budget_recovery_dagster.domain.budgets import BudgetDefinition
from budget_recovery_dagster.domain.identity import StoreIdentity
from budget_recovery_dagster.domain.plan import PlannedEntry
from budget_recovery_dagster.domain.restore_choice import RestoreChoice

PREVIEWS_KEPT_FOR = timedelta(days=1)
"""How long a preview is held against what is applied afterwards."""

OUTDATED_KEPT_FOR = timedelta(hours=1)
"""How long one is kept of whose choice there is a newer one: as long as a restore may take."""


class BudgetDefinitions(Protocol):
    """What may be spent, where that is known."""

    def of_tenant(self, tenant: str) -> tuple[BudgetDefinition, ...]:
        """Return the definitions of a tenant's budgets, by budget and period; none: not known."""
        ...


@dataclass(frozen=True, slots=True)
class KeptPreview:
    """That a preview was made: when, by whom, of what, and of which store."""

    preview_id: str
    at: datetime
    by: str
    choice: RestoreChoice
    identity: StoreIdentity


class Previews(Protocol):
    """The previews of the last day, so that what is applied can be compared with them."""

    def begin(self, preview: KeptPreview) -> None:
        """Begin to keep a preview, and drop those that are too old."""
        ...

    def add(self, preview_id: str, tenant: str, entries: Sequence[PlannedEntry]) -> None:
        """Keep what is planned for a tenant."""
        ...

    def complete(self, preview_id: str) -> None:
        """Say that all tenants of a preview are kept; until then it counts for nothing.

        Earlier ones of the same choice are dropped, but not those of the last hour, with which
        somebody may just be comparing.
        """
        ...

    def get(self, preview_id: str) -> KeptPreview | None:
        """Return a complete preview; None: there is none of this id, or not any more."""
        ...

    def newest(self, choice: RestoreChoice) -> KeptPreview | None:
        """Return the newest complete preview of just this choice; None: there is none any more."""
        ...

    def tenants_of(self, preview_id: str) -> frozenset[str]:
        """Return the tenants of whom something was planned."""
        ...

    def entries_of(self, preview_id: str, tenant: str) -> tuple[PlannedEntry, ...]:
        """Return what was planned for a tenant, by budget, window and entity."""
        ...
