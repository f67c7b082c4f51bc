"""Previews: what a person chose, and what a restore would do, counter by counter."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from uuid import uuid4

from budget_recovery_dagster.domain.counters import (
    BudgetDefinition,
    BudgetWindow,
    Enforcement,
    Entity,
    UnreadableKey,
)
from budget_recovery_dagster.domain.incident import Recovery
from budget_recovery_dagster.domain.plan import (
    EVERY_TENANT,
    LATEST,
    Action,
    KeptPreview,
    PlannedAmounts,
    PlannedEntry,
    RestoreChoice,
    Room,
    choose_budget,
    choose_snapshot,
    choose_tenant,
    is_latest,
    planned_amounts,
    rise_of,
)
from budget_recovery_dagster.domain.recovery_point import TenantPoint, WindowPoint
from budget_recovery_dagster.domain.store import StoreIdentity, objection
from budget_recovery_dagster.domain.verdict import continues
from budget_recovery_dagster.domain.windows import Period
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    ChoiceError,
    DatabaseUnreachableError,
    PreviewOutdatedError,
)
from budget_recovery_dagster.ports import ControlPlane, OpenStore, RecoveryPoints, UsageStore
from budget_recovery_dagster.services.restore.tenants import (
    RunningClock,
    lacking_room,
    plan_tenant,
    room_for_tenant,
    with_marker,
)
from budget_recovery_dagster.services.store_watch import watch_store


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """A manual restore as a person requested it; see ``RestoreChoice`` and ``named_tenant``."""

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
        """Return a tenant's point with the chosen budgets; None if it has nothing to restore."""
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
    """Return the points of a request.

    Raises:
        ChoiceError: a part of the request does not exist; the hint lists the choices.
    """
    tenants = sorted(plane.points.tenants())
    if not tenants:
        raise ChoiceError(
            "Nothing can be restored: no snapshot is retained.",
            "run `budget-recovery status` to see why. `budget-recovery resolve` closes an open "
            "incident, so that captures resume.",
        )
    tenant = choose_tenant(request.tenant, tenants)
    budgets = plane.snapshots.budgets_of(tenant) if tenant is not None else ()
    budget = choose_budget(request.budget, tenant, budgets)
    times = () if is_latest(request.snapshot) else _snapshot_times(plane, tenant)
    snapshot = choose_snapshot(request.snapshot, times)
    choice = RestoreChoice(tenant, budget, snapshot, request.despite_resets)
    return ChosenPoints(plane.points, choice)


def _snapshot_times(plane: ControlPlane, tenant: str | None) -> Sequence[datetime]:
    # A snapshot is incomplete once retention has removed records from it.
    return [each.captured_at for each in plane.snapshots.listed(tenant) if not each.is_pruned]


@dataclass(frozen=True, slots=True)
class EntryPreview:
    """What a restore would do to one counter, and the source of its usage.

    ``source`` is the newest snapshot that holds ``recorded``. ``blocks`` is whether the gateway
    would block the entity after the restore, which it never does with the aggregate of a budget
    that is split; None if no limit is known.
    """

    tenant: str
    of: BudgetWindow
    entity: Entity
    live: Decimal | None
    recorded: Decimal
    result: Decimal | None
    action: Action
    source: datetime
    blocks: bool | None

    @property
    def rise(self) -> Decimal:
        """The increase of the usage."""
        return rise_of(self.action, self.recorded, self.live)


@dataclass(frozen=True, slots=True)
class WindowPreview:
    """The usage and the counters of one budget and window.

    ``amounts`` are its usage by the counters in the snapshots. ``raised``, ``kept`` and ``skipped``
    count these counters. ``missing`` counts the raised counters that are missing from the store.
    ``unread`` are those with an unreadable live usage, with the reason. ``newest_source`` and
    ``oldest_source`` are the times of the source snapshots, None if there is no counter. ``limit``
    is None if unknown. ``blocked_before`` and ``blocked_after`` count the entities at the limit, if
    it is known. ``point`` has the marks of the records and no usages, because there may be very
    many.
    """

    tenant: str
    point: WindowPoint
    counters: int
    raised: int
    kept: int
    skipped: int
    missing: int
    unread: tuple[tuple[Entity, str], ...]
    is_closed: bool
    amounts: PlannedAmounts
    newest_source: datetime | None
    oldest_source: datetime | None
    limit: Decimal | None
    is_enforced: bool
    blocked_before: int
    blocked_after: int

    @property
    def of(self) -> BudgetWindow:
        """The budget and window."""
        return self.point.of

    @property
    def unreadable(self) -> int:
        """How many live counters are unreadable."""
        return len(self.unread)

    @property
    def rise(self) -> Decimal:
        """By how much the raised counters rise, as one amount."""
        return self.amounts.rise

    @property
    def is_unknown(self) -> bool:
        """Whether its usage is unknown, because every record is damaged."""
        return not self.point.has_intact_record

    @property
    def is_usage_known(self) -> bool:
        """Whether its usage now and after a restore follows from at least one counter."""
        return not self.is_unknown and not 0 < self.counters == self.unreadable


def preview_window(
    tenant: str,
    point: WindowPoint,
    entries: Sequence[PlannedEntry],
    definition: BudgetDefinition | None,
    unreadable: Mapping[tuple[BudgetWindow, Entity], str],
) -> tuple[WindowPreview, list[EntryPreview]]:
    """Preview a window; ``unreadable`` has the reason of each unreadable live counter."""
    previews = [_entry(tenant, point, entry, definition) for entry in entries]
    actions = Counter(entry.action for entry in previews)
    to_raise, kept = actions[Action.RAISE], actions[Action.KEEP]
    sources = [entry.source for entry in previews]
    open_ones = [entry for entry in previews if entry.action is not Action.SKIP_CLOSED]
    window = WindowPreview(
        tenant=tenant,
        point=replace(point, usages={}, sources={}),
        counters=len(previews),
        raised=to_raise,
        kept=kept,
        skipped=len(previews) - to_raise - kept,
        missing=sum(entry.action is Action.RAISE and entry.live is None for entry in previews),
        unread=tuple(
            (entry.entity, unreadable.get((entry.of, entry.entity), "no reason"))
            for entry in sorted(previews, key=lambda entry: entry.recorded, reverse=True)
            if entry.action is Action.SKIP_UNREADABLE
        ),
        is_closed=bool(previews) and not open_ones,
        amounts=planned_amounts(entries),
        newest_source=max(sources, default=None),
        oldest_source=min(sources, default=None),
        limit=definition.limit if definition else None,
        is_enforced=definition is not None and definition.enforcement is Enforcement.ENFORCE,
        blocked_before=sum(
            _is_blocked(definition, entry.entity, entry.live) for entry in open_ones
        ),
        blocked_after=sum(bool(entry.blocks) for entry in previews),
    )
    return window, previews


def _entry(
    tenant: str, point: WindowPoint, entry: PlannedEntry, definition: BudgetDefinition | None
) -> EntryPreview:
    return EntryPreview(
        tenant=tenant,
        of=entry.of,
        entity=entry.entity,
        live=entry.live,
        recorded=entry.recorded,
        result=entry.result,
        action=entry.action,
        source=point.sources.get(entry.entity, point.newest_at),
        blocks=None
        if definition is None or entry.action in (Action.SKIP_CLOSED, Action.SKIP_UNREADABLE)
        else _is_blocked(definition, entry.entity, entry.result),
    )


def _is_blocked(definition: BudgetDefinition | None, entity: Entity, usage: Decimal | None) -> bool:
    if definition is None or usage is None or definition.enforcement is not Enforcement.ENFORCE:
        return False
    return definition.is_exhausted_at(entity, usage)


MOST_CHANGES = 20
"""How many of the largest changes a preview lists."""


@dataclass(frozen=True, slots=True)
class TenantPreview:
    """What a restore would do to a tenant.

    ``point_at`` is the time of its newest snapshot, or of the chosen one; None if that has nothing
    of it. ``unreadable`` are the first of ``unreadable_count`` unreadable keys of this snapshot.
    ``is_partial``: fewer live keys arrived than the store announced. ``entries`` is filled only if
    one tenant was chosen. ``failure`` is why the tenant could not be read; None if it could.
    """

    tenant: str
    point_at: datetime | None
    windows: tuple[WindowPreview, ...] = ()
    entries: tuple[EntryPreview, ...] = ()
    unreadable: tuple[UnreadableKey, ...] = ()
    unreadable_count: int = 0
    is_partial: bool = False
    failure: BudgetRecoveryError | None = None


@dataclass(frozen=True, slots=True)
class Preview:
    """What a restore would do, as of ``at``; ``changes`` are the largest rises, largest first.

    ``refusal`` is why a restore would be refused now, ``objection`` why it would wait for the
    store; None: it would not.
    """

    preview_id: str
    at: datetime
    choice: RestoreChoice
    recovery: Recovery
    identity: StoreIdentity
    tenants: tuple[TenantPreview, ...]
    changes: tuple[EntryPreview, ...]
    refusal: str | None
    objection: str | None

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
        """The tenants that could not be read."""
        return [tenant for tenant in self.tenants if tenant.failure is not None]


def preview_restore(
    plane: ControlPlane,
    open_store: OpenStore,
    request: RestoreRequest,
    *,
    by: str,
    on_progress: Callable[[str], None],
) -> Preview:
    """Plan a restore and store the plan; nothing is written into the store.

    Raises:
        ChoiceError: the choice does not exist.
        SettingsError: the database belongs to another bucket.
        PreviewOutdatedError: the store was replaced during the preview.
        StoreError, DatabaseError: the store or the database could not be read.
    """
    plane.registry.claim()
    chosen = choose_points(plane, request)
    with open_store() as store:
        watch = watch_store(plane, store, open_store, by)
        before = store.observe(watch.deployment_id).identity
        kept = KeptPreview(str(uuid4()), plane.clock.now(), by, chosen.choice, before)
        plane.previews.begin(kept)
        tenants = chosen.tenants()
        run = _Run(
            plane,
            store,
            chosen,
            kept.preview_id,
            is_of_one=len(tenants) == 1,
            may_evict=store.limits().may_evict,
        )
        for number, tenant in enumerate(tenants, 1):
            on_progress(f"Tenant {tenant!r}, {number} of {len(tenants)}")
            run.add(tenant)
        after = store.observe(watch.deployment_id).identity
        refusal = watch.refusal_to_choose(plane.incidents.recovery().incident)
        if refusal is None and (
            full := lacking_room(store.limits(), with_marker(run.needed), "the restore")
        ):
            refusal = full.message
        objected = objection(store.cluster_view(plane.clock.now()))
    require_same(kept, after)
    plane.previews.complete(kept.preview_id)
    return Preview(
        preview_id=kept.preview_id,
        at=kept.at,
        choice=chosen.choice,
        recovery=plane.incidents.recovery(),
        identity=after,
        tenants=tuple(run.tenants),
        changes=run.changes(),
        refusal=refusal,
        objection=objected,
    )


def require_same(kept: KeptPreview, found: StoreIdentity) -> None:
    """Refuse to restore a store that is not the previewed one.

    Raises:
        PreviewOutdatedError: the store was recreated or went back to an earlier state since.
    """
    if not continues(kept.identity, found):
        raise outdated(kept, f"it was {kept.identity}, and is {found}")


def outdated(kept: KeptPreview, why: str) -> PreviewOutdatedError:
    """Return the error of a restore whose preview saw another store."""
    return PreviewOutdatedError(
        f"The store is not the one of the preview at {kept.at:%Y-%m-%d %H:%M:%S} UTC: {why}.",
        "preview again to see what would be restored now.",
    )


@dataclass(slots=True)
class _Run:
    """A running preview."""

    plane: ControlPlane
    store: UsageStore
    chosen: ChosenPoints
    preview_id: str
    is_of_one: bool
    may_evict: bool
    tenants: list[TenantPreview] = field(default_factory=list)
    needed: Room = field(default_factory=Room)
    _largest: list[EntryPreview] = field(default_factory=list)

    def add(self, tenant: str) -> None:
        try:
            self.tenants.append(self._preview(tenant))
        except DatabaseUnreachableError:
            raise
        except BudgetRecoveryError as error:
            if self.is_of_one:
                raise
            self.tenants.append(TenantPreview(tenant, None, failure=error))

    def changes(self) -> tuple[EntryPreview, ...]:
        return tuple(self._largest)

    def _preview(self, tenant: str) -> TenantPreview:
        """Compare a tenant's point with its live counters, and store the plan for a later apply."""
        running = RunningClock(self.plane.clock)
        point = self.chosen.point_of(tenant, running.now())
        if point is None:
            return TenantPreview(tenant, None)
        opened = self.store.open_tenant(tenant)
        live = opened.reading
        plan = plan_tenant(point, live, running.now())
        if self.may_evict:
            self.needed += room_for_tenant(opened, point, plan, running)
        self.plane.previews.add(self.preview_id, tenant, plan.entries)
        windows, entries = self._windows(point, plan.by_window(), live.reasons)
        self._largest = heapq.nlargest(
            MOST_CHANGES,
            (entry for entry in (*self._largest, *entries) if entry.rise),
            key=lambda entry: entry.rise,
        )
        return TenantPreview(
            tenant=tenant,
            point_at=point.newest_at,
            windows=windows,
            entries=tuple(entries) if self.chosen.choice.tenant is not None else (),
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
        definitions = _by_budget(self.plane.budgets.of_tenant(point.tenant))
        windows, entries = [], []
        for window in point.windows:
            shown, previews = preview_window(
                point.tenant,
                window,
                planned[window.of],
                definitions.get((window.of.budget, window.of.window.period)),
                unreadable,
            )
            windows.append(shown)
            entries += previews
        return tuple(windows), entries


def _by_budget(
    definitions: Sequence[BudgetDefinition],
) -> dict[tuple[str, Period], BudgetDefinition]:
    return {(each.budget, each.period): each for each in definitions}
