"""Which snapshots there are to restore from, in memory."""

from collections import defaultdict
from datetime import datetime

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane, StoredSnapshot
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.snapshot_ports import ListedSnapshot


class MemorySnapshotList:
    """The snapshots of a control plane, summed up."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    def all(self, tenant: str | None) -> tuple[ListedSnapshot, ...]:
        """Return a tenant's snapshots, or of None all tenants' by their moments; newest first."""
        together: defaultdict[tuple[datetime, CaptureSource], list[StoredSnapshot]]
        together = defaultdict(list)
        for (name, captured_at), stored in self._plane.snapshots.items():
            if tenant in (None, name):
                together[captured_at, stored.summary.source].append(stored)
        # Of one moment, the sources by name.
        by_source = sorted(together, key=lambda key: key[1].value)
        return tuple(
            _listed(*key, together[key])
            for key in sorted(by_source, key=lambda key: key[0], reverse=True)
        )

    def budgets_of(self, tenant: str) -> tuple[str, ...]:
        """Return the budgets of a tenant that have a retained record, by name."""
        return tuple(
            sorted(
                {
                    of.budget
                    for (name, _), stored in self._plane.snapshots.items()
                    if name == tenant
                    for of in stored.records
                }
            )
        )


def _listed(
    captured_at: datetime, source: CaptureSource, snapshots: list[StoredSnapshot]
) -> ListedSnapshot:
    summaries = [stored.summary for stored in snapshots]
    return ListedSnapshot(
        captured_at=captured_at,
        source=source,
        tenants=len(summaries),
        records=sum(each.record_count for each in summaries),
        entries=sum(each.entry_count for each in summaries),
        omitted=sum(each.omitted_count for each in summaries),
        unreadable=sum(each.unreadable_count for each in summaries),
        drops=sum(each.drop_count for each in summaries),
        partial=sum(each.is_partial for each in summaries),
        is_pruned=any(len(each.records) < each.summary.record_count for each in snapshots),
    )
