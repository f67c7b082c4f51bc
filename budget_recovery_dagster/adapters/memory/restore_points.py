"""The recovery points that a restore uses, in memory."""

from dataclasses import replace
from datetime import datetime

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane
from budget_recovery_dagster.adapters.restore_windows import WindowInMaking, tokens_at
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.snapshots import BudgetRecord, hash_usages
from budget_recovery_dagster.restore_ports import TenantPoint, WindowPoint

Records = list[tuple[datetime, BudgetRecord]]
"""The records of one budget and window with their times, newest first."""


class MemoryRestorePoints:
    """What a restore would bring back, verified; ``corrupt`` damages a stored record."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    def corrupt(self, tenant: str, captured_at: datetime, of: BudgetWindow) -> None:
        """Let a record hold other usages than were captured, and far too high ones."""
        records = self._plane.snapshots[tenant, captured_at].records
        damaged = replace(
            records[of],
            usages={entity: 10**9 + usage for entity, usage in records[of].usages.items()},
        )
        # What was captured is what the hash still says.
        object.__setattr__(damaged, "content_hash", records[of].content_hash)
        records[of] = damaged

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained record of any budget."""
        return frozenset(
            tenant for (tenant, _), stored in self._plane.snapshots.items() if stored.records
        )

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        """Read a tenant's recovery point; None where nothing of the tenant is retained."""
        with self._plane.lock:
            times = [at for name, at in self._plane.snapshots if name == tenant]
            if not times:
                return None
            newest_at = max(times)
            current, closed_since = tokens_at(now), tokens_at(newest_at)
            windows = [
                _window_point(of, records)
                for of, records in self._records_of(tenant).items()
                if of.window.token in current
                or (of.window.token in closed_since and records[0][0] == newest_at)
            ]
        by_name = sorted(windows, key=lambda each: (each.of.budget, each.of.window.token))
        return TenantPoint(tenant, newest_at, tuple(by_name))

    def _records_of(self, tenant: str) -> dict[BudgetWindow, Records]:
        found: dict[BudgetWindow, Records] = {}
        for name, captured_at in sorted(self._plane.snapshots, reverse=True):
            if name == tenant:
                for of, record in self._plane.snapshots[name, captured_at].records.items():
                    found.setdefault(of, []).append((captured_at, record))
        return found


def newest_point_at(plane: ControlPlane) -> datetime | None:
    """Return the time of the newest snapshot of any tenant."""
    return max((captured_at for _, captured_at in plane.snapshots), default=None)


def _window_point(of: BudgetWindow, records: Records) -> WindowPoint:
    described = [record for _, record in records if record.shape is not None]
    window = WindowInMaking(
        of,
        newest_at=records[0][0],
        shape=described[0].shape if described else None,
        expiry_seconds=described[0].expiry_seconds if described else None,
    )
    covering = [index for index, (_, record) in enumerate(records) if record.covers_earlier]
    _add(window, records[: covering[0] + 1] if covering else records)
    if window.needs_all_records:
        _add(window, records)
    return window.finished()


def _add(window: WindowInMaking, records: Records) -> None:
    for captured_at, record in records:
        is_sound = hash_usages(record.usages) == record.content_hash
        window.add(captured_at, record.usages if is_sound else None)
