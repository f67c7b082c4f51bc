"""Restoring one tenant after the other: audited, told of, and none in another's way."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from budget_recovery_dagster.audit_ports import (
    AuditEntry,
    AuditTrail,
    RestoreAudits,
)
from budget_recovery_dagster.domain.plan import Action
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    DatabaseUnreachableError,
    LeaseLostError,
    StoreError,
    StoreWriteError,
    put_into_words,
)
from budget_recovery_dagster.ports import Clock, Lease
from budget_recovery_dagster.restore_ports import (
    RecoverableStore,
    TenantPoint,
)
from budget_recovery_dagster.services.count_words import counted
from budget_recovery_dagster.services.restore_report import left_entries
from budget_recovery_dagster.services.tenant_restore import (
    Guards,
    TenantRestored,
    failed,
    plan_tenant,
    restore_tenant,
)


@dataclass(frozen=True, slots=True)
class Worker:
    """Who restores, in which run, under which lease, and who hears of it."""

    run_id: str
    holder: str
    lease: Lease
    tell: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Left:
    """The windows with counters below their point, and how many live counters are unreadable."""

    entries: tuple[AuditEntry, ...]
    unreadable: int

    @property
    def counters(self) -> int:
        """How many counters are below their point."""
        return sum(entry.planned for entry in self.entries)


class PointsOfTenants(Protocol):
    """The points that tenants are restored to."""

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        """Return a tenant's point; None where nothing of the tenant is to be restored."""
        ...


@dataclass(slots=True)
class TenantRestores:
    """Restores tenants to their points, in an opened store.

    ``why`` and ``incident_id`` are what the audit says; the incident is None where none is open.
    ``tenants`` is what became of each, in the order of their restoring.
    """

    points: PointsOfTenants
    audits: RestoreAudits
    clock: Clock
    worker: Worker
    store: RecoverableStore
    deployment_id: str
    why: str
    incident_id: str | None
    tenants: list[TenantRestored] = field(default_factory=list, init=False)
    has_current: bool = field(default=False, init=False)
    unsound: int = field(default=0, init=False)
    """Of so many current windows nobody knows what was used: every record of them is damaged."""

    @property
    def undone(self) -> list[TenantRestored]:
        """Those that are not done."""
        return [tenant for tenant in self.tenants if tenant.failure is not None]

    @property
    def noted(self) -> int:
        """Of how many budgets and windows something was left, or is to be said."""
        return sum(bool(entry.notes) for tenant in self.tenants for entry in tenant.entries)

    @property
    def boards(self) -> int:
        """How many leaderboards were written."""
        return sum(tenant.boards for tenant in self.tenants)

    def restore(self, tenant: str) -> TenantRestored | None:
        """Restore a tenant; None where nothing of it is to be restored.

        A failure of its own is in the result, and so is the plan.

        Raises:
            StoreError: nothing can be asked of the store any more.
            DatabaseUnreachableError, LeaseLostError: the work was cut short.
        """
        self.worker.lease.require_held()
        at = self.clock.now()
        guards = Guards(
            keep_going=self.worker.lease.require_held,
            begin=lambda entries: self.audits.begin(self._trail(at, entries)),
        )
        try:
            point = self.points.point_of(tenant, at)
            if point is None:
                return None
            self._note_current(point, at)
            restored = restore_tenant(self.store, point, self.clock, guards)
        except (DatabaseUnreachableError, LeaseLostError):
            raise
        except Exception as error:  # noqa: BLE001 - reported by name; no tenant stops another
            restored = failed(tenant, error)
        # Plans are large, and only whoever asked for this tenant may want it.
        self.tenants.append(replace(restored, plan=None))
        self._tell(restored)
        if restored.entries:
            self.audits.finish(self._trail(at, restored.entries))
        if restored.failure is not None:
            self.require_answer(restored.failure)
        return restored

    def left_of(self, tenant: str) -> Left:
        """Tell what of a tenant is not at its point, writing nothing.

        Raises:
            BudgetRecoveryError: they could not be seen.
        """
        self.worker.lease.require_held()
        now = self.clock.now()
        point = self.points.point_of(tenant, now)
        if point is None:
            return Left((), 0)
        self._note_current(point, now)
        plan = plan_tenant(point, self.store.open_tenant(tenant).reading, now)
        unreadable = sum(1 for _ in plan.that(Action.SKIP_UNREADABLE))
        return Left(left_entries(point, plan), unreadable)

    def keep(self, entries: tuple[AuditEntry, ...]) -> None:
        """Keep in the audits what is left.

        Else a restore that was cut off would count as having raised all that it had begun to.
        """
        if entries:
            self.audits.finish(self._trail(self.clock.now(), entries))

    def require_answer(self, failure: Exception) -> None:
        """See, after a tenant's failure, whether that tenant alone is refused or the store is gone.

        Else each of a thousand tenants would wait for its time-out.

        Raises:
            StoreError: the store does not answer.
        """
        if isinstance(failure, StoreError) and not isinstance(failure, StoreWriteError):
            self.store.look(self.deployment_id)

    def _note_current(self, point: TenantPoint, now: datetime) -> None:
        current = [each for each in point.windows if each.of.window.is_current(now)]
        self.has_current |= bool(current)
        self.unsound += sum(bool(each.corrupt) and not each.usages for each in current)

    def _trail(self, at: datetime, entries: tuple[AuditEntry, ...]) -> AuditTrail:
        return AuditTrail(
            at=at,
            run_id=self.worker.run_id,
            who=self.worker.holder,
            why=self.why,
            incident_id=self.incident_id,
            entries=entries,
        )

    def _tell(self, restored: TenantRestored) -> None:
        name = f"Tenant {restored.tenant!r}"
        if restored.failure is not None:
            self.worker.tell(f"{name} is not done: {restored.failure}")
        elif restored.raised or restored.boards:
            self.worker.tell(
                f"{name}: {counted(restored.raised, 'counter')} raised, "
                f"{counted(restored.boards, 'leaderboard')} written"
            )
        for entry in restored.entries:
            for note in entry.notes:
                self.worker.tell(f"{name}, {entry.of}: {note}")


def undone_error(undone: list[TenantRestored]) -> AttemptFailedError:
    """Name the first of the tenants that are not done, and count the others."""
    first = undone[0]
    message, hint = put_into_words(first.failure) if first.failure else ("", "")
    others = f" {counted(len(undone) - 1, 'other')} likewise." if len(undone) > 1 else ""
    return AttemptFailedError(f"Tenant {first.tenant!r} is not restored: {message}{others}", hint)
