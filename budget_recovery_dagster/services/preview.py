"""Previews: what a restore would do, with everything that it rests on; nothing is written.

A preview builds the plan that a restore builds, from the same points and the same reading. What it
planned is kept for a day, so that whoever applies it is told of every difference.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import uuid4

from budget_recovery_dagster.domain.budgets import BudgetDefinition
from budget_recovery_dagster.domain.convergence import objection
from budget_recovery_dagster.domain.counters import BudgetWindow, Entity, UnreadableKey
from budget_recovery_dagster.domain.identity import StoreIdentity
from budget_recovery_dagster.domain.incident import Recovery
from budget_recovery_dagster.domain.plan import PlannedEntry
from budget_recovery_dagster.domain.restore_choice import RestoreChoice
from budget_recovery_dagster.domain.windows import Period
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    DatabaseUnreachableError,
    put_into_words,
)
from budget_recovery_dagster.ports import Clock, Snapshots, StoreRegistry
from budget_recovery_dagster.preview_ports import BudgetDefinitions, KeptPreview, Previews
from budget_recovery_dagster.recovery_ports import Incidents
from budget_recovery_dagster.restore_ports import OpenStore, RecoverableStore, TenantPoint
from budget_recovery_dagster.services.accepted_store import AcceptedStore
from budget_recovery_dagster.services.chosen_points import Choosing, ChosenPoints, RestoreRequest
from budget_recovery_dagster.services.comparing import require_same
from budget_recovery_dagster.services.tenant_restore import RunningClock, plan_tenant
from budget_recovery_dagster.services.window_preview import (
    EntryPreview,
    WindowPreview,
    preview_window,
)

MOST_CHANGES = 20
"""So many of the largest changes are told one by one."""


@dataclass(frozen=True, slots=True)
class TenantPreview:
    """What a restore would do to a tenant.

    ``point_at`` is its newest snapshot, or the chosen one; None where it has none that was chosen.
    ``unreadable`` are the first keys that this snapshot could not read, of ``unreadable_count``.
    ``is_partial``: fewer live keys arrived than the store announced. ``entries`` are told only
    where one tenant was chosen. ``failure`` is why nothing is known of it, in words, with what to
    do; None if it is.
    """

    tenant: str
    point_at: datetime | None
    windows: tuple[WindowPreview, ...] = ()
    entries: tuple[EntryPreview, ...] = ()
    unreadable: tuple[UnreadableKey, ...] = ()
    unreadable_count: int = 0
    is_partial: bool = False
    failure: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Preview:
    """What a restore would do, as of ``at``; ``changes`` are the largest rises, largest first.

    ``warnings`` say why it could not be applied now, or not at once.
    """

    preview_id: str
    at: datetime
    choice: RestoreChoice
    recovery: Recovery
    identity: StoreIdentity
    tenants: tuple[TenantPreview, ...]
    changes: tuple[EntryPreview, ...]
    warnings: tuple[str, ...]

    @property
    def windows(self) -> list[WindowPreview]:
        """All budgets and windows, by tenant."""
        return [window for tenant in self.tenants for window in tenant.windows]

    @property
    def raised(self) -> int:
        """How many counters would be raised."""
        return sum(window.raised for window in self.windows)

    @property
    def failures(self) -> list[TenantPreview]:
        """The tenants that could not be seen."""
        return [tenant for tenant in self.tenants if tenant.failure is not None]


@dataclass(frozen=True, slots=True)
class PreviewService:
    """Previews restores of the one store that the control-plane database belongs to."""

    open_store: OpenStore
    registry: StoreRegistry
    snapshots: Snapshots
    incidents: Incidents
    choosing: Choosing
    definitions: BudgetDefinitions
    previews: Previews
    clock: Clock
    bucket: str

    def preview(self, request: RestoreRequest, *, by: str, tell: Callable[[str], None]) -> Preview:
        """Tell what a restore of what is asked for would do now; ``tell`` hears how it goes on.

        Raises:
            ChoiceError: what is asked for does not exist.
            SettingsError: the database belongs to another bucket.
            PreviewOutdatedError: the store became another one meanwhile.
            StoreError, DatabaseError: it could not be seen.
        """
        record = self.registry.claim(self.bucket)
        chosen = self.choosing.choose(request)
        with self.open_store() as store:
            before = store.look(record.deployment_id).identity
            kept = KeptPreview(str(uuid4()), self.clock.now(), by, chosen.choice, before)
            self.previews.begin(kept)
            tenants = chosen.tenants()
            run = _Run(self, store, chosen, kept.preview_id, is_of_one=len(tenants) == 1)
            for number, tenant in enumerate(tenants, 1):
                tell(f"Tenant {tenant!r}, {number} of {len(tenants)}")
                run.add(tenant)
            after = store.look(record.deployment_id).identity
            warnings = tuple(self._warnings(store))
        require_same(kept, after)
        self.previews.complete(kept.preview_id)
        return Preview(
            preview_id=kept.preview_id,
            at=kept.at,
            choice=chosen.choice,
            recovery=self.incidents.recovery(),
            identity=after,
            tenants=tuple(run.tenants),
            changes=run.changes(),
            warnings=warnings,
        )

    def _warnings(self, store: RecoverableStore) -> Iterator[str]:
        if self.incidents.recovery().incident is None:
            accepted = AcceptedStore(
                store, self.registry, self.snapshots, self.incidents, self.clock, self.bucket
            )
            judgement, _ = accepted.judge()
            if not judgement.verdict.is_good:
                yield f"Nothing can be applied now. {judgement.reason}"
        problem = objection(store.cluster_view(self.clock.now()))
        if problem is not None:
            yield f"To apply would wait for the store: {problem}."


@dataclass(slots=True)
class _Run:
    """One preview under way."""

    service: PreviewService
    store: RecoverableStore
    chosen: ChosenPoints
    preview_id: str
    is_of_one: bool
    tenants: list[TenantPreview] = field(default_factory=list)
    _largest: list[EntryPreview] = field(default_factory=list)

    def add(self, tenant: str) -> None:
        try:
            self.tenants.append(self._preview(tenant))
        except DatabaseUnreachableError:
            raise
        except BudgetRecoveryError as error:
            if self.is_of_one:
                raise
            self.tenants.append(TenantPreview(tenant, None, failure=put_into_words(error)))

    def changes(self) -> tuple[EntryPreview, ...]:
        return tuple(self._largest)

    def _preview(self, tenant: str) -> TenantPreview:
        running = RunningClock.by(self.service.clock)
        point = self.chosen.point_of(tenant, running.now())
        if point is None:
            return TenantPreview(tenant, None)
        live = self.store.open_tenant(tenant).reading
        plan = plan_tenant(point, live, running.now())
        self.service.previews.add(self.preview_id, tenant, plan.entries)
        reasons = {(each.of, each.entity): each.reason for each in live.omitted}
        windows, told = self._windows(point, plan.by_window(), reasons)
        self._largest = heapq.nlargest(
            MOST_CHANGES,
            (entry for entry in (*self._largest, *told) if entry.rise),
            key=lambda entry: entry.rise,
        )
        return TenantPreview(
            tenant=tenant,
            point_at=point.newest_at,
            windows=windows,
            entries=tuple(told) if self.chosen.choice.tenant is not None else (),
            unreadable=point.unreadable,
            unreadable_count=point.unreadable_count,
            is_partial=live.is_partial,
        )

    def _windows(
        self,
        point: TenantPoint,
        planned: defaultdict[BudgetWindow, list[PlannedEntry]],
        unreadable: dict[tuple[BudgetWindow, Entity], str],
    ) -> tuple[tuple[WindowPreview, ...], list[EntryPreview]]:
        definitions = _by_budget(self.service.definitions.of_tenant(point.tenant))
        windows, told = [], []
        for window in point.windows:
            sums, entries = preview_window(
                point.tenant,
                window,
                planned[window.of],
                definitions.get((window.of.budget, window.of.window.period)),
                unreadable,
            )
            windows.append(sums)
            told += entries
        return tuple(windows), told


def _by_budget(
    definitions: Sequence[BudgetDefinition],
) -> dict[tuple[str, Period], BudgetDefinition]:
    return {(each.budget, each.period): each for each in definitions}
