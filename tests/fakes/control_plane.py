"""Fake control plane: state, clock, leases, previews, budget definitions and audits.

The fakes keep the promises of ``budget_recovery_dagster.ports``.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import uuid4

from budget_recovery_dagster.adapters.postgres import storable, storable_trail
from budget_recovery_dagster.domain import (
    OUTDATED_KEPT_FOR,
    PREVIEWS_KEPT_FOR,
    UNKNOWN_AMOUNTS,
    Attempt,
    AuditEntry,
    AuditTrail,
    Bound,
    BudgetDefinition,
    BudgetRecord,
    BudgetWindow,
    CaptureFailure,
    CaptureSummary,
    Check,
    Commit,
    Configuration,
    EndedFall,
    Fall,
    FoundMarker,
    Holding,
    Incident,
    IncidentAmounts,
    KeptPreview,
    KeyCount,
    LandmarkKind,
    LeaseState,
    LossAmounts,
    ManualRestore,
    Marker,
    MergedAudits,
    NamedDrop,
    Period,
    PlannedEntry,
    RecordedRun,
    Reset,
    RestoreChoice,
    Restored,
    StoreRecord,
    TenantWindow,
    Uncaptured,
    WindowAmounts,
    exact_sum,
    lease_lost,
    require_aware,
    require_free,
    require_lease_of,
    require_ours,
    shown_bound,
)
from budget_recovery_dagster.ports import Lease


class ManualClock:
    """A clock that moves only when a test moves it."""

    def __init__(self, at: datetime) -> None:
        self._now = require_aware(at)
        self.host_is_ahead = timedelta(0)

    def now(self) -> datetime:
        return self._now

    def host_time(self) -> datetime:
        """Return the time of this host, which agrees unless a test says how far it is ahead."""
        return self._now + self.host_is_ahead

    def wait(self, span: timedelta) -> None:
        """Move forward at once."""
        self._now += max(span, timedelta(0))

    def set(self, at: datetime) -> None:
        """Change the time, even to an earlier one."""
        self._now = require_aware(at)

    def advance(self, duration: timedelta) -> None:
        """Move the clock forward."""
        self._now += duration


@dataclass(slots=True)
class StoredSnapshot:
    """A stored snapshot; pruning removes records from it."""

    number: int
    summary: CaptureSummary
    stored_at: datetime
    drops: tuple[NamedDrop, ...]
    records: dict[BudgetWindow, BudgetRecord]

    @property
    def commit(self) -> Commit:
        return Commit(self.number, self.summary.captured_at, self.stored_at)


@dataclass(frozen=True, slots=True)
class NotedFailure:
    """A stored failure, by run, kind and name."""

    failure: CaptureFailure
    failed_at: datetime


@dataclass(frozen=True, slots=True)
class NotedOutcome:
    """How the last capture of a tenant ended; ``failure`` None: it found nothing, or is stored."""

    at: datetime
    run_number: int | None
    is_absent: bool = False
    failure: CaptureFailure | None = None


@dataclass(frozen=True, slots=True)
class KeptAudit:
    """A stored entry of a restore's trail; if not finished, the restore may have been interrupted.

    ``trail`` contains only this entry.
    """

    trail: AuditTrail
    entry: AuditEntry
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class Landmark:
    """A stored event that an older copy of the database lacks."""

    landmark_id: str
    at: datetime
    kind: LandmarkKind
    about: str | None
    deployment_id: str
    number: int
    created_at: datetime | None


@dataclass(slots=True)
class MemoryState:
    """What the database would contain; ``lock`` replaces its transactions."""

    clock: ManualClock
    lock: threading.RLock = field(default_factory=threading.RLock)
    store: StoreRecord | None = None
    commits: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    holdings: dict[str, Holding] = field(default_factory=dict)
    snapshots: dict[tuple[str, datetime], StoredSnapshot] = field(default_factory=dict)
    failures: dict[tuple[str, Uncaptured, str], NotedFailure] = field(default_factory=dict)
    outcomes: dict[str, NotedOutcome] = field(default_factory=dict)
    runs: dict[int, RecordedRun] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    incidents: dict[str, Incident] = field(default_factory=dict)
    launches_before: dict[str, int] = field(default_factory=dict)
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    audits: dict[tuple[str, datetime, str, BudgetWindow], KeptAudit] = field(default_factory=dict)
    resets: list[Reset] = field(default_factory=list)
    counts: dict[TenantWindow, KeyCount] = field(default_factory=dict)
    deletions_until: int | None = None
    falls: list[Fall] = field(default_factory=list)
    ended_falls: list[EndedFall] = field(default_factory=list)
    configurations: list[tuple[datetime, Configuration]] = field(default_factory=list)
    discarded: list[tuple[str, datetime, str, str]] = field(default_factory=list)
    landmarks: list[Landmark] = field(default_factory=list)
    given: tuple[int, str | None] = (0, None)

    def add_landmark(
        self,
        kind: LandmarkKind,
        *,
        about: str | None = None,
        created_at: datetime | None = None,
        landmark_id: str | None = None,
    ) -> None:
        """Record an event, once for each run of captures and each id."""
        known = {each.landmark_id for each in self.landmarks}
        captured = {each.about for each in self.landmarks if each.kind is LandmarkKind.CAPTURE}
        if landmark_id in known or (kind is LandmarkKind.CAPTURE and about in captured):
            return
        self.landmarks.append(
            Landmark(
                landmark_id or str(uuid4()),
                self.clock.now(),
                kind,
                about,
                self.claimed_store().deployment_id,
                self.given[0],
                created_at,
            )
        )

    def go_above(self, marker: Marker | FoundMarker | None) -> None:
        """Give later markers higher numbers than one that is taken over."""
        if marker is not None and marker.number >= self.given[0]:
            self.given = (marker.number, marker.nonce)

    def claimed_store(self) -> StoreRecord:
        """Return the store's record.

        Raises:
            RuntimeError: no store has been claimed.
        """
        if self.store is None:
            raise RuntimeError("no store has been claimed")
        return self.store


@dataclass
class OnState:
    """A part of the control plane, over the state that all parts share."""

    _plane: MemoryState


_DURATION = timedelta(seconds=30)
_NEVER = datetime.max.replace(tzinfo=UTC)


class MemoryLeases(OnState):
    """Leases whose holders are always alive.

    Moving the clock forward ends only leases with ``at_most``; ``lose`` ends a lease as if its
    holder could no longer renew it.
    """

    def state_of(self, name: str) -> LeaseState:
        with self._plane.lock:
            token = self._plane.tokens.get(name, 0)
            holding = current_holding(self._plane, name)
            return LeaseState.of(token, holding, self._plane.clock.now())

    @contextmanager
    def hold(self, name: str, holder: str, *, at_most: timedelta | None = None) -> Iterator[Lease]:
        """Hold a lease until the context ends, or until ``at_most`` has passed.

        Raises:
            LeaseHeldError: another holder has it.
        """
        lease = self._take(name, holder, at_most)
        try:
            yield lease
        finally:
            self._release(lease)

    def lose(self, name: str) -> None:
        """Expire a held lease, so that its holder loses it and others may take it."""
        with self._plane.lock:
            del self._plane.holdings[name]

    def _take(self, name: str, holder: str, at_most: timedelta | None) -> "_MemoryLease":
        with self._plane.lock:
            now = self._plane.clock.now()
            require_free(name, current_holding(self._plane, name), now)
            token = self._plane.tokens.get(name, 0) + 1
            self._plane.tokens[name] = token
            renewed_until = _NEVER if at_most is None else now + at_most
            self._plane.holdings[name] = Holding(storable(holder), token, now, renewed_until)
            return _MemoryLease(self._plane, name, token)

    def _release(self, lease: "_MemoryLease") -> None:
        with self._plane.lock:
            holding = self._plane.holdings.get(lease.name)
            if holding is not None and holding.token == lease.token:
                del self._plane.holdings[lease.name]


@dataclass(frozen=True, slots=True)
class _MemoryLease:
    plane: MemoryState
    name: str
    token: int

    def require_held(self) -> None:
        holding = current_holding(self.plane, self.name)
        if (
            holding is None
            or holding.token != self.token
            or self.plane.clock.now() >= holding.expires_at
        ):
            raise lease_lost(self.name, "it could not be renewed in time")


def current_holding(plane: MemoryState, name: str) -> Holding | None:
    """Return the state of a lease, as if a living holder had just renewed it."""
    holding = plane.holdings.get(name)
    if holding is None:
        return None
    return replace(holding, expires_at=min(holding.expires_at, plane.clock.now() + _DURATION))


def require_lease(plane: MemoryState, lease: Lease, *, name: str) -> None:
    """Refuse to work under a lease that is not held.

    Raises:
        LeaseLostError: it is no longer held.
        ValueError: it has another name.
    """
    require_lease_of(lease.name, name)
    lease.require_held()
    require_ours(lease.name, lease.token, current_holding(plane, lease.name), plane.clock.now())


class MemoryBudgets:
    """Budget definitions, by tenant, budget and period."""

    def __init__(self) -> None:
        self._defined: dict[tuple[str, str, Period], BudgetDefinition] = {}

    def define(self, definitions: Collection[BudgetDefinition]) -> None:
        """Add definitions, or replace those of the same tenant, budget and period."""
        for each in definitions:
            self._defined[each.tenant, each.budget, each.period] = each

    def of_tenant(self, tenant: str) -> tuple[BudgetDefinition, ...]:
        found = [each for each in self._defined.values() if each.tenant == tenant]
        return tuple(sorted(found, key=lambda each: (each.budget, each.period)))


@dataclass(slots=True)
class _Kept:
    preview: KeptPreview
    entries: dict[str, tuple[PlannedEntry, ...]] = field(default_factory=dict)
    is_complete: bool = False


class MemoryPreviews:
    """Previews, by id."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._kept: dict[str, _Kept] = {}

    def begin(self, preview: KeptPreview) -> None:
        self._kept = {each.preview.preview_id: each for each in self._not_too_old()}
        self._kept[preview.preview_id] = _Kept(preview)

    def add(self, preview_id: str, tenant: str, entries: Sequence[PlannedEntry]) -> None:
        if entries:
            self._kept[preview_id].entries[tenant] = tuple(entries)

    def complete(self, preview_id: str) -> None:
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
        found = [each.preview for each in self._not_too_old() if each.is_complete]
        return next((each for each in found if each.preview_id == preview_id), None)

    def newest(self, choice: RestoreChoice) -> KeptPreview | None:
        found = [
            each.preview
            # The last one of those with the same time.
            for each in reversed(self._not_too_old())
            if each.is_complete and each.preview.choice == choice
        ]
        return max(found, key=lambda preview: preview.at, default=None)

    def tenants_of(self, preview_id: str) -> frozenset[str]:
        kept = self._kept.get(preview_id)
        return frozenset() if kept is None else frozenset(kept.entries)

    def entries_of(self, preview_id: str, tenant: str) -> tuple[PlannedEntry, ...]:
        kept = self._kept.get(preview_id)
        return () if kept is None else kept.entries.get(tenant, ())

    def _not_too_old(self) -> list[_Kept]:
        oldest = self._clock.now() - PREVIEWS_KEPT_FOR
        return [each for each in self._kept.values() if each.preview.at >= oldest]


class MemoryRestoreAudits(OnState):
    """Audit trails in memory."""

    def begin(self, trail: AuditTrail) -> None:
        self._keep(trail, finished_at=None)

    def finish(self, trail: AuditTrail) -> None:
        self._keep(trail, finished_at=self._plane.clock.now())

    def restored_in(self, incident_id: str) -> Restored:
        return _restored(self._merged(incident_id))

    def windows_begun(self, incident_id: str, tenant: str) -> frozenset[BudgetWindow]:
        with self._plane.lock:
            return frozenset(
                audit.entry.of
                for audit in self._plane.audits.values()
                if audit.trail.incident_id == incident_id
                and audit.entry.tenant == tenant
                and _raised(audit)
            )

    def largest(self, incident_id: str, count: int) -> MergedAudits:
        return _largest(self._merged(incident_id), count)

    def manual_restores(self, since: datetime, count: int) -> tuple[ManualRestore, ...]:
        runs: dict[str, list[KeptAudit]] = {}
        with self._plane.lock:
            attempts = {each.run_id for some in self._plane.attempts.values() for each in some}
            for (run_id, at, *_), audit in self._plane.audits.items():
                if at > since and run_id not in attempts:
                    # Each run is where its newest entry is.
                    runs[run_id] = [*runs.pop(run_id, ()), audit]
        found = [_manual_restore(audits) for audits in runs.values() if any(map(_raised, audits))]
        return tuple(found[::-1][:count])

    def raised_by(self, run_id: str, count: int) -> tuple[Restored, MergedAudits]:
        merged = self._merged(run_id=run_id)
        return _restored(merged), _largest(merged, count)

    def amounts_of(self, incident_id: str, tenant: str) -> Mapping[BudgetWindow, LossAmounts]:
        return {
            of: entry.amounts
            for (whose, of), audits in self._by_window(incident_id).items()
            if whose == tenant and (entry := _merge(audits)).amounts is not None
        }

    def amounts_in(self, incident_id: str, count: int) -> IncidentAmounts:
        merged = [
            entry
            for entry in self._merged(incident_id)
            if entry.amounts is not None or entry.raised
        ]
        found = [_window_amounts(entry) for entry in sorted(merged, key=_name)]
        # Stable sorts.
        restored = [each for each in _by_amount(found, lambda each: each.restored) if each.restored]
        counted = [each for each in _by_amount(found, _counted) if each.counted]
        return IncidentAmounts(
            restored_windows=len(restored),
            counted_windows=len(counted),
            unknown_windows=sum(each.bound is Bound.UNKNOWN for each in found),
            restored=tuple(restored[:count]),
            counted=tuple(counted[:count]),
        )

    def _keep(self, trail: AuditTrail, *, finished_at: datetime | None) -> None:
        kept = storable_trail(trail)
        with self._plane.lock:
            for entry in kept.entries:
                key = kept.run_id, kept.at, entry.tenant, entry.of
                known = self._plane.audits.get(key)
                if finished_at is None and known is not None and known.finished_at is not None:
                    continue
                self._plane.audits[key] = KeptAudit(
                    replace(kept, entries=(entry,)), entry, finished_at
                )

    def _merged(
        self, incident_id: str | None = None, *, run_id: str | None = None
    ) -> list[AuditEntry]:
        return [_merge(audits) for audits in self._by_window(incident_id, run_id).values()]

    def _by_window(
        self, incident_id: str | None, run_id: str | None = None
    ) -> dict[tuple[str, BudgetWindow], list[KeptAudit]]:
        """Return the entries of an incident or a run by tenant, budget and window, in time."""
        windows: defaultdict[tuple[str, BudgetWindow], list[KeptAudit]] = defaultdict(list)
        with self._plane.lock:
            for audit in self._plane.audits.values():
                is_of_incident = incident_id is not None and audit.trail.incident_id == incident_id
                if is_of_incident or audit.trail.run_id == run_id:
                    windows[audit.entry.tenant, audit.entry.of].append(audit)
        return {
            where: sorted(audits, key=lambda audit: audit.trail.at)
            for where, audits in windows.items()
        }


def _raised(audit: KeptAudit) -> bool:
    """Whether a restore raised counters, or was about to do so and did not finish."""
    return bool(audit.entry.raised or (audit.finished_at is None and audit.entry.planned))


def _manual_restore(audits: list[KeptAudit]) -> ManualRestore:
    first = min(audits, key=lambda audit: audit.trail.at).trail
    unfinished = {
        audit.entry.tenant for audit in audits if audit.finished_at is None and audit.entry.planned
    }
    return ManualRestore(
        first.run_id,
        first.at,
        first.who,
        first.why,
        first.incident_id,
        tuple(sorted(unfinished)),
    )


def _restored(merged: list[AuditEntry]) -> Restored:
    raised = [entry for entry in merged if entry.raised]
    return Restored(
        tenants=len({entry.tenant for entry in raised}),
        windows=len(raised),
        counters=sum(entry.raised for entry in raised),
        boards=sum(entry.wrote_board for entry in merged),
    )


def _largest(merged: list[AuditEntry], count: int) -> MergedAudits:
    return MergedAudits(windows=len(merged), largest=tuple(sorted(merged, key=_rank)[:count]))


def _merge(audits: list[KeptAudit]) -> AuditEntry:
    """Merge the entries of a budget and window, given in order of time."""
    last = audits[-1].entry
    planned_next = [*(audit.entry.planned for audit in audits[1:]), 0]
    raised = sum(
        max(audit.entry.planned - planned, 0) if audit.finished_at is None else audit.entry.raised
        for audit, planned in zip(audits, planned_next, strict=True)
    )
    return replace(
        last,
        before=audits[0].entry.before,
        raised=min(raised, last.entries),
        wrote_board=any(audit.entry.wrote_board for audit in audits),
        amounts=next(filter(None, map(_amounts, reversed(audits))), None),
    )


def _amounts(audit: KeptAudit) -> LossAmounts | None:
    amounts = audit.entry.amounts
    return amounts and replace(amounts, is_begun=audit.finished_at is None)


def _window_amounts(entry: AuditEntry) -> WindowAmounts:
    amounts = entry.amounts or UNKNOWN_AMOUNTS
    return WindowAmounts(
        entry.tenant, entry.of, amounts.restored, amounts.counted, shown_bound(amounts)
    )


def _counted(amounts: WindowAmounts) -> Decimal:
    return amounts.counted or Decimal(0)


def _by_amount(
    found: list[WindowAmounts], amount: Callable[[WindowAmounts], Decimal]
) -> list[WindowAmounts]:
    return sorted(found, key=amount, reverse=True)


def _name(entry: AuditEntry) -> tuple[str, str, str]:
    return entry.tenant, entry.of.budget, entry.of.window.token


def _rank(entry: AuditEntry) -> tuple[Decimal, bool, str, str, str]:
    fall = exact_sum((entry.before, entry.after.copy_negate()))
    return fall, not entry.notes, *_name(entry)
