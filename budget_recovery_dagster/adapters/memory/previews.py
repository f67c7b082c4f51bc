"""Previews of restores in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from budget_recovery_dagster.adapters.memory.control_plane import ManualClock
from budget_recovery_dagster.domain.plan import PlannedEntry
from budget_recovery_dagster.domain.restore_choice import RestoreChoice
from budget_recovery_dagster.preview_ports import (
    OUTDATED_KEPT_FOR,
    PREVIEWS_KEPT_FOR,
    KeptPreview,
)


@dataclass(slots=True)
class _Kept:
    preview: KeptPreview
    entries: dict[str, tuple[PlannedEntry, ...]] = field(default_factory=dict)
    is_complete: bool = False


class MemoryPreviews:
    """The previews, by their ids."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._kept: dict[str, _Kept] = {}

    def begin(self, preview: KeptPreview) -> None:
        """Begin to keep a preview, and drop those that are too old."""
        self._kept = {each.preview.preview_id: each for each in self._not_too_old()}
        self._kept[preview.preview_id] = _Kept(preview)

    def add(self, preview_id: str, tenant: str, entries: Sequence[PlannedEntry]) -> None:
        """Keep what is planned for a tenant."""
        if entries:
            self._kept[preview_id].entries[tenant] = tuple(entries)

    def complete(self, preview_id: str) -> None:
        """Say that all tenants of a preview are kept; until then it counts for nothing."""
        completed = self._kept[preview_id]
        completed.is_complete = True
        oldest = self._clock.now() - OUTDATED_KEPT_FOR
        self._kept = {
            each.preview.preview_id: each
            for each in self._kept.values()
            if each is completed
            or each.preview.at >= oldest
            or each.preview.choice != completed.preview.choice
        }

    def get(self, preview_id: str) -> KeptPreview | None:
        """Return a complete preview; None: there is none of this id, or not any more."""
        found = [each.preview for each in self._not_too_old() if each.is_complete]
        return next((each for each in found if each.preview_id == preview_id), None)

    def newest(self, choice: RestoreChoice) -> KeptPreview | None:
        """Return the newest complete preview of just this choice; None: there is none any more."""
        found = [
            each.preview
            # Of those of one moment the last one.
            for each in reversed(self._not_too_old())
            if each.is_complete and each.preview.choice == choice
        ]
        return max(found, key=lambda preview: preview.at, default=None)

    def tenants_of(self, preview_id: str) -> frozenset[str]:
        """Return the tenants of whom something was planned."""
        kept = self._kept.get(preview_id)
        return frozenset() if kept is None else frozenset(kept.entries)

    def entries_of(self, preview_id: str, tenant: str) -> tuple[PlannedEntry, ...]:
        """Return what was planned for a tenant, by budget, window and entity."""
        kept = self._kept.get(preview_id)
        return () if kept is None else kept.entries.get(tenant, ())

    def _not_too_old(self) -> list[_Kept]:
        oldest = self._clock.now() - PREVIEWS_KEPT_FOR
        return [each for each in self._kept.values() if each.preview.at >= oldest]
