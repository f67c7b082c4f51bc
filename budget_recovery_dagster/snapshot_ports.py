"""What the services that let people choose a snapshot need; as in ``ports``, with promises."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from budget_recovery_dagster.domain.snapshots import CaptureSource


@dataclass(frozen=True, slots=True)
class ListedSnapshot:
    """The snapshots that were captured at one moment, of one tenant or of all, summed up.

    The numbers are of what was captured: ``records`` of budgets and windows, ``entries`` of
    counters; ``partial`` is how many tenants' snapshots are partial. ``is_pruned``: retention has
    removed records of it since, so that a restore from it could bring back only a part.
    """

    captured_at: datetime
    source: CaptureSource
    tenants: int
    records: int
    entries: int
    omitted: int
    unreadable: int
    drops: int
    partial: int
    is_pruned: bool


class SnapshotList(Protocol):
    """Which snapshots there are to restore from."""

    def all(self, tenant: str | None) -> tuple[ListedSnapshot, ...]:
        """Return a tenant's snapshots, or of None all tenants' by their moments; newest first.

        All tenants that a run captures have one moment. Of the rare one that has snapshots of two
        sources, each source is told by itself.
        """
        ...

    def budgets_of(self, tenant: str) -> tuple[str, ...]:
        """Return the budgets of a tenant that have a retained record, by name."""
        ...
