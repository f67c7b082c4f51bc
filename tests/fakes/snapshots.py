"""Fake snapshots, retained records, reports, resets and recovery points."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

from budget_recovery_dagster.adapters.postgres import (
    MAX_NAMED,
    kept_omissions,
    named_drops_of,
    storable,
    storable_failure,
    storable_id,
    storable_reset,
    storable_result,
    summary_of,
)
from budget_recovery_dagster.domain import (
    CAPTURE_LEASE,
    MAX_CAPTURE_GAP,
    RUNS_KEPT,
    RUNS_KEPT_FOR,
    Baseline,
    BudgetRecord,
    BudgetWindow,
    CaptureFailure,
    CaptureSource,
    CaptureSummary,
    Commit,
    Damage,
    DatedUsages,
    Facts,
    FailingTenant,
    Hour,
    JudgedFalls,
    LandmarkKind,
    ListedSnapshot,
    NamedDrop,
    NamedOmission,
    PruneReport,
    RecordedRun,
    RecordMarks,
    Reset,
    RetentionPolicy,
    RunResult,
    StoredRecord,
    StoreIdentity,
    TenantPoint,
    TenantSnapshot,
    TenantUsages,
    TenantWindow,
    Uncaptured,
    WindowMerge,
    WindowPoint,
    admit,
    awaited_captures,
    concerning,
    counts_of,
    eligible,
    hash_usages,
    is_in_the_future,
    judge_falls,
    keeping_out,
    last_excluded,
    max_merge,
    needed_past_retention,
    require_healthy,
    tokens_at,
)
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.ports import Lease
from tests.fakes.control_plane import (
    MemoryState,
    NotedFailure,
    NotedOutcome,
    OnState,
    StoredSnapshot,
    require_lease,
)


class MemoryResets(OnState):
    """The resets of a control plane."""

    def record(self, reset: Reset) -> Reset:
        with self._plane.lock:
            kept = add_reset(self._plane, storable_reset(reset))
            self._plane.add_landmark(LandmarkKind.RESET)
        return kept


def add_reset(plane: MemoryState, reset: Reset) -> Reset:
    """Store a reset with the last commit that it excludes."""
    commits = [
        stored.commit for (tenant, _), stored in plane.snapshots.items() if tenant == reset.tenant
    ]
    kept = replace(reset, last_excluded=last_excluded(commits, reset.at, reset.recorded_at))
    plane.resets.append(kept)
    return kept


def resets_of(plane: MemoryState, tenant: str) -> tuple[Reset, ...]:
    """Return the resets of a tenant, in order of recording."""
    return tuple(reset for reset in plane.resets if reset.tenant == tenant)


def record_findings(plane: MemoryState, snapshot: TenantSnapshot) -> None:
    """Keep the falls and counts that follow from a snapshot."""
    tenant = snapshot.tenant
    known = [fall for fall in plane.falls if fall.at.tenant == tenant]
    # A fall that is known stays open or ends, so this replaces all of the tenant.
    _record_falls(plane, judge_falls(known, snapshot, resets_of(plane, tenant)))
    of_tenant = {at.of: each for at, each in plane.counts.items() if at.tenant == tenant}
    for of in of_tenant:
        del plane.counts[TenantWindow(tenant, of)]
    restored: dict[BudgetWindow, datetime] = {}
    for audit in plane.audits.values():
        entry, at = audit.entry, audit.finished_at
        if entry.tenant == tenant and entry.raised and at is not None:
            restored[entry.of] = max(at, restored.get(entry.of, at))
    resets = resets_of(plane, tenant)
    counts = counts_of(snapshot, of_tenant, restored=restored, resets=resets)
    plane.counts |= {each.at: each for each in counts}


def _record_falls(plane: MemoryState, falls: JudgedFalls) -> None:
    judged = {fall.at for fall in (*falls.still_open, *(each.fall for each in falls.ended))}
    others = [fall for fall in plane.falls if fall.at not in judged]
    plane.falls = [*others, *falls.still_open]
    plane.ended_falls += falls.ended


class MemorySnapshots(OnState):
    """Snapshots in memory."""

    def tenants(self) -> frozenset[str]:
        return frozenset(tenant for tenant, _ in self._plane.snapshots)

    def newest_identity(self) -> StoreIdentity | None:
        newest = max(self._plane.snapshots.values(), key=lambda stored: stored.number, default=None)
        return None if newest is None else newest.summary.identity

    def commit(
        self,
        snapshot: TenantSnapshot,
        *,
        hour: Hour,
        run_id: str,
        lease: Lease,
        judged: Baseline | None,
        first: Baseline | None = None,
    ) -> Baseline:
        with self._plane.lock:
            require_lease(self._plane, lease, name=CAPTURE_LEASE)
            store = self._plane.claimed_store()
            now = self._plane.clock.now()
            times = (stored.summary.captured_at for stored in self._of([snapshot.tenant]))
            facts = Facts(
                now=now,
                state=store.state,
                baseline=store.baseline,
                newest=max((at for at in times if not is_in_the_future(at, now)), default=None),
            )
            baseline = admit(snapshot, hour=hour, judged=judged, first=first, facts=facts)
            if not snapshot.is_empty:
                self._plane.commits += 1
                self._plane.snapshots[snapshot.tenant, snapshot.captured_at] = StoredSnapshot(
                    number=self._plane.commits,
                    summary=summary_of(snapshot, run_id),
                    stored_at=facts.now,
                    drops=named_drops_of(snapshot),
                    records={record.of: record for record in snapshot.records},
                )
            record_findings(self._plane, snapshot)
            number = self._number_of(run_id)
            self._plane.outcomes[snapshot.tenant] = NotedOutcome(
                facts.now, number, is_absent=snapshot.is_empty
            )
            self._plane.store = replace(store, baseline=baseline)
            self._plane.add_landmark(
                LandmarkKind.CAPTURE,
                about=storable_id(run_id),
                created_at=baseline.identity.created_at,
            )
            return baseline

    def begin_run(self, run_id: str, hour: Hour, *, started_at: datetime, lease: Lease) -> int:
        with self._plane.lock:
            require_lease(self._plane, lease, name=CAPTURE_LEASE)
            runs = self._plane.runs
            cutoff = self._plane.clock.now() - RUNS_KEPT_FOR
            for old in sorted(runs)[:-RUNS_KEPT]:
                if runs[old].started_at < cutoff:
                    del runs[old]
            number = max(runs, default=0) + 1
            runs[number] = RecordedRun(storable_id(run_id), hour, started_at)
            return number

    def end_run(self, number: int, result: RunResult) -> None:
        with self._plane.lock:
            run = self._plane.runs[number]
            if run.result is None:
                now = self._plane.clock.now()
                ended = replace(run, ended_at=now, result=storable_result(result))
                self._plane.runs[number] = ended

    def record_failures(self, failures: Collection[CaptureFailure], *, run_id: str) -> None:
        now, number = self._plane.clock.now(), self._number_of(run_id)
        for failure in map(storable_failure, failures):
            noted = NotedFailure(failure, now)
            self._plane.failures[storable_id(run_id), failure.kind, failure.name] = noted
            if failure.kind is Uncaptured.TENANT:
                before = self._plane.outcomes.get(failure.name)
                if not (before and before.run_number and number and before.run_number > number):
                    outcome = NotedOutcome(now, number, failure=failure)
                    self._plane.outcomes[failure.name] = outcome

    def _number_of(self, run_id: str) -> int | None:
        kept = storable_id(run_id)
        return max(
            (each for each, run in self._plane.runs.items() if run.run_id == kept), default=None
        )

    def prune(
        self, tenants: Collection[str], *, policy: RetentionPolicy, now: datetime, lease: Lease
    ) -> PruneReport:
        cutoff = policy.cutoff(now)
        with self._plane.lock:
            require_lease(self._plane, lease, name=CAPTURE_LEASE)
            require_healthy(self._plane.claimed_store().state, "no snapshot is removed")
            if awaited := awaited_captures(self._runs(), now):
                return PruneReport(0, 0, 0, 0, awaited_captures=awaited)
            hashes = self._hashes()
            records = sum(self._prune_records(tenant, cutoff, now) for tenant in tenants)
            captures = [
                key
                for key, stored in self._plane.snapshots.items()
                if key[0] in tenants and key[1] < cutoff and not stored.records
            ]
            for key in captures:
                del self._plane.snapshots[key]
            failed = [
                key for key, noted in self._plane.failures.items() if noted.failed_at < cutoff
            ]
            for noted_key in failed:
                del self._plane.failures[noted_key]
            outcomes = self._plane.outcomes
            for tenant in [each for each, outcome in outcomes.items() if outcome.at < cutoff]:
                del outcomes[tenant]
            contents = len(hashes - self._hashes())
            return PruneReport(records, len(captures), contents, len(failed))

    def _prune_records(self, tenant: str, cutoff: datetime, now: datetime) -> int:
        windows: defaultdict[BudgetWindow, list[StoredSnapshot]] = defaultdict(list)
        for stored in self._of([tenant]):
            for of in stored.records:
                windows[of].append(stored)
        removed = 0
        for of, snapshots in windows.items():
            expired = [each for each in snapshots if each.summary.captured_at < cutoff]
            needed: frozenset[datetime] = frozenset()
            if of.window.end is None or now - MAX_CAPTURE_GAP < of.window.end:
                newest_first = [
                    (each.commit, each.records[of])
                    for each in sorted(snapshots, key=lambda each: each.number, reverse=True)
                    if not is_in_the_future(each.summary.captured_at, now)
                ]
                covering = (
                    commit.number
                    for commit, record in newest_first
                    if record.covers_earlier and is_intact(record)
                )
                needed = needed_past_retention(
                    (
                        DatedUsages(
                            commit.number,
                            commit.captured_at,
                            record.usages if is_intact(record) else None,
                        )
                        for commit, record in newest_first
                    ),
                    cutoff,
                    covered_since=next(covering, None),
                )
            for stored in expired:
                if stored.summary.captured_at not in needed:
                    del stored.records[of]
                    removed += 1
        return removed

    def _runs(self) -> list[tuple[datetime, datetime]]:
        """Return when each capture stored its first and last snapshot, the newest first."""
        runs: dict[datetime, list[datetime]] = {}
        for stored in sorted(
            self._plane.snapshots.values(), key=lambda each: each.number, reverse=True
        ):
            runs.setdefault(stored.summary.captured_at, []).append(stored.stored_at)
        return [(min(times), max(times)) for times in runs.values()]

    def listed(self, tenant: str | None) -> tuple[ListedSnapshot, ...]:
        together: defaultdict[tuple[datetime, CaptureSource], list[StoredSnapshot]]
        together = defaultdict(list)
        for (name, captured_at), stored in self._plane.snapshots.items():
            if tenant in (None, name):
                together[captured_at, stored.summary.source].append(stored)
        # The sources of one timestamp are in order of name.
        by_source = sorted(together, key=lambda key: key[1].value)
        return tuple(
            _listed(*key, together[key])
            for key in sorted(by_source, key=lambda key: key[0], reverse=True)
        )

    def in_future(self, now: datetime) -> tuple[ListedSnapshot, ...]:
        return tuple(each for each in self.listed(None) if is_in_the_future(each.captured_at, now))

    def discard_future(
        self,
        confirmed: Collection[datetime],
        *,
        falls: JudgedFalls,
        now: datetime,
        by: str,
        reason: str,
        lease: Lease,
    ) -> tuple[ListedSnapshot, ...]:
        with self._plane.lock:
            require_lease(self._plane, lease, name=CAPTURE_LEASE)
            require_healthy(self._plane.claimed_store().state, "no snapshot is discarded")
            in_future = self.in_future(now)
            discarded = tuple(each for each in in_future if each.captured_at in confirmed)
            times = {each.captured_at for each in discarded}
            for tenant, captured_at in list(self._plane.snapshots):
                if captured_at in times:
                    del self._plane.snapshots[tenant, captured_at]
                    self._plane.discarded.append((tenant, captured_at, by, reason))
            _record_falls(self._plane, falls)
            return discarded

    def budgets_of(self, tenant: str) -> tuple[str, ...]:
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

    def tenants_in(self, hour: Hour) -> tuple[str, ...]:
        return tuple(sorted({stored.summary.tenant for stored in self._of_hour(hour)}))

    def hours_of(self, tenants: Collection[str]) -> Mapping[str, frozenset[Hour]]:
        hours: defaultdict[str, set[Hour]] = defaultdict(set)
        for stored in self._whole():
            if stored.summary.tenant in tenants:
                hours[stored.summary.tenant].add(Hour.containing(stored.summary.captured_at))
        return {tenant: frozenset(each) for tenant, each in hours.items()}

    @contextmanager
    def records_of(self, tenant: str, hour: Hour) -> Iterator[Iterator[StoredRecord] | None]:
        snapshots = [each for each in self._of_hour(hour) if each.summary.tenant == tenant]
        records = (
            _stored_record(stored, stored.records[of])
            for stored in sorted(snapshots, key=lambda each: each.summary.captured_at)
            for of in sorted(stored.records, key=_entry_order)
        )
        yield records if snapshots else None

    def _of_hour(self, hour: Hour) -> Iterator[StoredSnapshot]:
        for stored in self._whole():
            if Hour.containing(stored.summary.captured_at) == hour:
                yield stored

    def _whole(self) -> Iterator[StoredSnapshot]:
        for stored in self._plane.snapshots.values():
            if len(stored.records) == stored.summary.record_count:
                yield stored

    def _of(self, tenants: Collection[str]) -> Iterator[StoredSnapshot]:
        for (tenant, _), stored in self._plane.snapshots.items():
            if tenant in tenants:
                yield stored

    def _hashes(self) -> set[tuple[bytes, bytes | None]]:
        return {
            (record.content_hash, record.expiry_hash)
            for stored in self._plane.snapshots.values()
            for record in stored.records.values()
        }


class MemoryCaptureReports(OnState):
    """The reports on the snapshots of a control plane."""

    def captured_in(self, hour: Hour) -> tuple[CaptureSummary, ...]:
        return self._summaries(
            stored
            for stored in self._plane.snapshots.values()
            if hour.start <= stored.summary.captured_at < hour.end
        )

    def captured_by(self, run_id: str) -> tuple[CaptureSummary, ...]:
        return self._summaries(self._by(run_id))

    def failures_of(self, run_id: str) -> tuple[CaptureFailure, ...]:
        noted = (
            each.failure
            for (of_run, *_), each in self._plane.failures.items()
            if of_run == storable_id(run_id)
        )
        return tuple(sorted(noted, key=lambda each: (each.kind is Uncaptured.KEY, each.name)))

    def drops_of(self, run_id: str) -> tuple[NamedDrop, ...]:
        drops = [
            drop
            for stored in sorted(self._by(run_id), key=lambda stored: _order(stored.summary))
            for drop in stored.drops
        ]
        return tuple(sorted(drops, key=_missing, reverse=True))

    def omissions_of(self, run_id: str) -> tuple[NamedOmission, ...]:
        return tuple(
            NamedOmission(stored.summary.tenant, storable(omission.key), storable(omission.reason))
            for stored in sorted(self._by(run_id), key=lambda stored: _order(stored.summary))
            for of in sorted(stored.records, key=lambda of: (of.budget, of.window.token))
            for omission in stored.records[of].omitted[:MAX_NAMED]
        )

    def newest_run(self, hour: Hour) -> str | None:
        stored = (
            (each.stored_at, each.summary.run_id)
            for each in self._plane.snapshots.values()
            if Hour.containing(each.summary.captured_at) == hour
        )
        noted = (
            (each.failed_at, run_id)
            for (run_id, *_), each in self._plane.failures.items()
            if each.failure.hour == hour
        )
        newest = max([*stored, *noted], default=None)
        return None if newest is None else newest[1]

    def damaged_in(
        self, hour: Hour, *, on_progress: Callable[[str], None] = lambda _: None
    ) -> tuple[str, ...]:
        on_progress(f"{hour} is verified.")
        return tuple(
            f"tenant {summary.tenant!r}, {summary.captured_at:%Y-%m-%d %H:%M:%S} UTC: {of} holds"
            " other usages than were captured."
            for summary in self.captured_in(hour)
            for of, record in self._plane.snapshots[
                summary.tenant, summary.captured_at
            ].records.items()
            if not is_intact(record)
        )

    def newest_snapshots(self) -> Mapping[str, datetime]:
        newest = _newest_of_each(self._plane)
        return {tenant: newest[tenant].summary.captured_at for tenant in sorted(newest)}

    def failing(self) -> Mapping[str, FailingTenant]:
        newest = self.newest_snapshots()
        return {
            tenant: FailingTenant(
                newest.get(tenant), noted.at, noted.failure.reason, noted.failure.hint
            )
            for tenant, noted in sorted(self._plane.outcomes.items())
            if noted.failure is not None
        }

    def absent(self) -> frozenset[str]:
        outcomes = self._plane.outcomes.items()
        return frozenset(tenant for tenant, noted in outcomes if noted.is_absent)

    def newest_runs(self, count: int) -> tuple[RecordedRun, ...]:
        newest_first = sorted(self._plane.runs.items(), reverse=True)
        return tuple(run for _, run in newest_first[:count])

    def _by(self, run_id: str) -> Iterator[StoredSnapshot]:
        for stored in self._plane.snapshots.values():
            if stored.summary.run_id == storable_id(run_id):
                yield stored

    def _summaries(self, snapshots: Iterable[StoredSnapshot]) -> tuple[CaptureSummary, ...]:
        return tuple(sorted((stored.summary for stored in snapshots), key=_order))


def _oldest_first(plane: MemoryState, now: datetime) -> list[StoredSnapshot]:
    """Sort the snapshots in the order of commits, after those that are dated in the future."""
    return sorted(
        plane.snapshots.values(),
        key=lambda each: (not is_in_the_future(each.summary.captured_at, now), each.number),
    )


def _newest_of_each(plane: MemoryState) -> dict[str, StoredSnapshot]:
    """Return the newest snapshot of each tenant."""
    return {each.summary.tenant: each for each in _oldest_first(plane, plane.clock.now())}


def _missing(drop: NamedDrop) -> Decimal:
    return Decimal(drop.before) - Decimal(drop.after or 0)


def _order(summary: CaptureSummary) -> tuple[str, datetime]:
    return summary.tenant, summary.captured_at


def is_intact(record: BudgetRecord) -> bool:
    """Return whether the content of a record matches its hash."""
    return hash_usages(record.usages) == record.content_hash


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
        most_missing=max(each.most_missing or Decimal(0) for each in summaries),
        partial=sum(each.is_partial for each in summaries),
        is_pruned=any(len(each.records) < each.summary.record_count for each in snapshots),
    )


def _stored_record(stored: StoredSnapshot, record: BudgetRecord) -> StoredRecord:
    if not is_intact(record):
        tenant = stored.summary.tenant
        raise DatabaseError(
            f"A stored record is damaged (checksum mismatch): tenant {tenant!r}.", "a hint."
        )
    return StoredRecord(
        captured_at=stored.summary.captured_at,
        source=stored.summary.source,
        of=record.of,
        usages=record.usages,
        is_truncated=record.is_truncated,
        is_partial=stored.summary.is_partial,
        omitted_count=len(record.omitted),
    )


def _entry_order(of: BudgetWindow) -> tuple[str, str]:
    return of.budget, of.window.token


Records = list[tuple[Commit, BudgetRecord]]
"""The records of one budget and window with their commits, newest first."""


class MemoryRecoveryPoints:
    """What a restore would bring back; ``corrupt`` damages a stored record."""

    def __init__(self, control_plane: MemoryState, *, heeds_resets: bool = True) -> None:
        self._plane = control_plane
        self._heeds_resets = heeds_resets

    def corrupt(self, tenant: str, captured_at: datetime, of: BudgetWindow) -> None:
        """Replace the usages of a record by far too high ones."""
        records = self._plane.snapshots[tenant, captured_at].records
        damaged = replace(
            records[of],
            usages={entity: 10**9 + usage for entity, usage in records[of].usages.items()},
        )
        # The hash still belongs to the captured usages.
        object.__setattr__(damaged, "content_hash", records[of].content_hash)
        records[of] = damaged

    def tenants(self) -> frozenset[str]:
        return frozenset(
            tenant for (tenant, _), stored in self._plane.snapshots.items() if stored.records
        )

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        with self._plane.lock:
            mine = [e for e in _oldest_first(self._plane, now) if e.summary.tenant == tenant]
            if not mine:
                return None
            newest_at = mine[-1].summary.captured_at
            current, closed_since = tokens_at(now), tokens_at(newest_at)
            windows = [
                self._window_point(tenant, of, records, records, now)
                for of, records in self._records_of(tenant, now).items()
                if of.window.token in current
                or (of.window.token in closed_since and records[0][0].captured_at == newest_at)
            ]
            return self._point(tenant, newest_at, windows)

    def snapshot_of(self, tenant: str, captured_at: datetime) -> TenantPoint | None:
        with self._plane.lock:
            if (tenant, captured_at) not in self._plane.snapshots:
                return None
            now = self._plane.clock.now()
            windows = [
                self._window_point(tenant, of, records, [each], now)
                for of, records in self._records_of(tenant, now).items()
                for each in records
                if each[0].captured_at == captured_at
            ]
            return self._point(tenant, captured_at, windows)

    def despite_resets(self) -> "MemoryRecoveryPoints":
        return MemoryRecoveryPoints(self._plane, heeds_resets=False)

    def current_usages(
        self, tenant: str, now: datetime, *, without: Collection[datetime] = ()
    ) -> TenantUsages:
        resets = resets_of(self._plane, tenant) if self._heeds_resets else ()
        usages = {
            of: max_merge(
                *(
                    eligible(record.usages, commit, of, resets)
                    for commit, record in records
                    if is_intact(record) and commit.captured_at not in without
                )
            )
            for of, records in self._records_of(tenant, now).items()
            if of.window.is_current(now)
        }
        return {of: each for of, each in usages.items() if each}

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        newest = {
            stored.summary.tenant: stored.summary.captured_at
            for stored in _oldest_first(self._plane, now)
            if any(
                of.window.is_current(now) and is_intact(record)
                for of, record in stored.records.items()
            )
        }
        return dict(sorted(newest.items()))

    def damaged(
        self,
        now: datetime,
        *,
        tenant: str | None = None,
        within: timedelta | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> Damage:
        on_progress("All contents are verified.")
        tenants = sorted(self.tenants()) if tenant is None else [tenant]
        if within is not None and within <= timedelta(0):
            return Damage({}, tuple(tenants))
        counts = {}
        for each in tenants:
            point = self.point_of(each, now)
            counts[each] = sum(
                len(window.corrupt)
                for window in (point.windows if point else ())
                if window.of.window.is_current(now)
            )
        return Damage({each: count for each, count in counts.items() if count})

    def _records_of(self, tenant: str, now: datetime) -> dict[BudgetWindow, Records]:
        found: dict[BudgetWindow, Records] = {}
        for stored in reversed(_oldest_first(self._plane, now)):
            if stored.summary.tenant == tenant:
                for of, record in stored.records.items():
                    found.setdefault(of, []).append((stored.commit, record))
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
        self, tenant: str, of: BudgetWindow, known: Records, wanted: Records, now: datetime
    ) -> WindowPoint:
        """Merge the ``wanted`` records of a window out of all its ``known`` ones."""
        described = [record for _, record in known if record.shape is not None]
        resets = concerning(of, resets_of(self._plane, tenant))
        heeded, ignored = (resets, ()) if self._heeds_resets else ((), resets)
        window = WindowMerge(
            of,
            now=now,
            newest_at=wanted[0][0].captured_at,
            shape=described[0].shape if described else None,
            has_board=next((r.has_board for _, r in known if r.has_board is not None), None),
            resets=heeded,
        )
        covering = (
            commit.number
            for commit, record in wanted
            if record.covers_earlier and not is_in_the_future(commit.captured_at, now)
        )
        # A covering record need not cover what was excluded when it was captured.
        since = 0 if ignored else next(covering, 0)
        _add(window, [(commit, record) for commit, record in wanted if commit.number >= since])
        if window.needs_all_records:
            _add(window, wanted)
        for commit, record in known:
            if is_intact(record):
                window.add_expiries(commit.number, record.expiries)
        for commit, record in wanted:
            if is_intact(record):
                for reset in keeping_out(record.usages, commit, of, heeded):
                    window.add_excluding(reset)
        newest = next(
            (each for commit, each in wanted if commit.captured_at == window.newest_intact), None
        )
        if newest is None or window.newest_intact is None:
            return window.merged(None)
        summary = self._plane.snapshots[tenant, window.newest_intact].summary
        return window.merged(
            RecordMarks(
                source=summary.source,
                is_truncated=newest.is_truncated,
                is_partial=summary.is_partial,
                omitted=kept_omissions(newest.omitted),
                omitted_count=len(newest.omitted),
            )
        )


def newest_point_at(plane: MemoryState) -> datetime | None:
    """Return the time of the newest snapshot of any tenant with an intact record."""
    times = [
        stored.summary.captured_at
        for stored in _oldest_first(plane, plane.clock.now())
        if not stored.summary.record_count or any(map(is_intact, stored.records.values()))
    ]
    return times[-1] if times else None


def oldest_failing_at(plane: MemoryState) -> datetime | None:
    """Return the oldest of the newest snapshots of tenants whose last capture failed."""
    failing = {tenant for tenant, noted in plane.outcomes.items() if noted.failure is not None}
    newest = _newest_of_each(plane)
    times = [each.summary.captured_at for tenant, each in newest.items() if tenant in failing]
    return min(times, default=None)


def _add(window: WindowMerge, records: Records) -> None:
    for commit, record in records:
        usages = record.usages if is_intact(record) else None
        window.add(commit, usages, record.expiries)
