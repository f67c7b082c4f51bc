"""The recovery points that a restore uses, in memory."""

from dataclasses import replace
from datetime import datetime

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane
from budget_recovery_dagster.adapters.memory.resets import resets_of
from budget_recovery_dagster.adapters.restore_windows import (
    RecordMarks,
    WindowInMaking,
    tokens_at,
)
from budget_recovery_dagster.adapters.stored_forms import kept_omissions
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.snapshots import BudgetRecord, hash_usages
from budget_recovery_dagster.restore_ports import TenantPoint, WindowPoint

Records = list[tuple[datetime, BudgetRecord]]
"""The records of one budget and window with their times, newest first."""


class MemoryRestorePoints:
    """What a restore would bring back, verified; ``corrupt`` damages a stored record."""

    def __init__(self, control_plane: ControlPlane, *, heeds_resets: bool = True) -> None:
        self._plane = control_plane
        self._heeds_resets = heeds_resets

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
                self._window_point(tenant, of, records, records)
                for of, records in self._records_of(tenant).items()
                if of.window.token in current
                or (of.window.token in closed_since and records[0][0] == newest_at)
            ]
            return self._point(tenant, newest_at, windows)

    def snapshot_of(self, tenant: str, captured_at: datetime) -> TenantPoint | None:
        """Read the records of one snapshot of a tenant, and no others; None: there is none."""
        with self._plane.lock:
            if (tenant, captured_at) not in self._plane.snapshots:
                return None
            windows = [
                self._window_point(tenant, of, records, [each])
                for of, records in self._records_of(tenant).items()
                for each in records
                if each[0] == captured_at
            ]
            return self._point(tenant, captured_at, windows)

    def despite_resets(self) -> "MemoryRestorePoints":
        """Return the same points as if no reset had been recorded."""
        return MemoryRestorePoints(self._plane, heeds_resets=False)

    def _records_of(self, tenant: str) -> dict[BudgetWindow, Records]:
        found: dict[BudgetWindow, Records] = {}
        for name, captured_at in sorted(self._plane.snapshots, reverse=True):
            if name == tenant:
                for of, record in self._plane.snapshots[name, captured_at].records.items():
                    found.setdefault(of, []).append((captured_at, record))
        return found

    def _point(self, tenant: str, captured_at: datetime, windows: list[WindowPoint]) -> TenantPoint:
        summary = self._plane.snapshots[tenant, captured_at].summary
        return TenantPoint(
            tenant=tenant,
            newest_at=summary.captured_at,
            windows=tuple(sorted(windows, key=lambda each: (each.of.budget, each.of.window.token))),
            unreadable=summary.unreadable,
            unreadable_count=summary.unreadable_count,
        )

    def _window_point(
        self, tenant: str, of: BudgetWindow, known: Records, wanted: Records
    ) -> WindowPoint:
        """Make a window of the ``wanted`` ones of all its ``known`` records."""
        described = [record for _, record in known if record.shape is not None]
        window = WindowInMaking(
            of,
            newest_at=wanted[0][0],
            shape=described[0].shape if described else None,
            expiry_seconds=described[0].expiry_seconds if described else None,
            resets=resets_of(self._plane, tenant) if self._heeds_resets else (),
        )
        resets_are_known = any(reset.is_about(of) for reset in resets_of(self._plane, tenant))
        covering = [index for index, (_, record) in enumerate(wanted) if record.covers_earlier]
        _add(window, wanted[: covering[0] + 1] if covering and not resets_are_known else wanted)
        if window.needs_all_records:
            _add(window, wanted)
        newest = next((record for at, record in wanted if at == window.newest_sound), None)
        if newest is None or window.newest_sound is None:
            return window.finished()
        return window.finished(
            RecordMarks(
                is_truncated=newest.is_truncated,
                is_partial=self._plane.snapshots[tenant, window.newest_sound].summary.is_partial,
                omitted=kept_omissions(newest.omitted),
                omitted_count=len(newest.omitted),
            )
        )


def newest_point_at(plane: ControlPlane) -> datetime | None:
    """Return the time of the newest snapshot of any tenant."""
    return max((captured_at for _, captured_at in plane.snapshots), default=None)


def _add(window: WindowInMaking, records: Records) -> None:
    for captured_at, record in records:
        is_sound = hash_usages(record.usages) == record.content_hash
        window.add(captured_at, record.usages if is_sound else None)
