"""Snapshots of tenants, reports of captures, retention, and the columns of usage tables."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    CounterReading,
    Drop,
    Entity,
    Expiries,
    OmittedCounter,
    TenantUsages,
    UnlistedEntities,
    UnreadableKey,
    Usages,
    ValueShape,
    covers,
    find_drops,
    hash_expiries,
    hash_usages,
    max_merge,
    missing_usage,
    order_of,
)
from budget_recovery_dagster.domain.store import StoreIdentity
from budget_recovery_dagster.domain.windows import Hour, require_aware


class CaptureSource(StrEnum):
    """The keys of the store that a snapshot is taken from."""

    COUNTERS = "counters"
    LEADERBOARDS = "leaderboards"


@dataclass(frozen=True, slots=True)
class Commit:
    """When a snapshot was captured and stored, and its place in the order of commits.

    The database gives out the numbers, from 1, in the order of commits, whatever its clock says.
    The times are those of its clock, which may have been wrong.
    """

    number: int
    captured_at: datetime
    stored_at: datetime


@dataclass(frozen=True, slots=True)
class TenantReading:
    """Everything that one source of the store held for one tenant.

    ``unlisted`` are the windows in which other entities than the listed ones may have usage.
    ``is_partial``: fewer keys arrived than the store announced, twice. ``boards`` are the windows
    that have a leaderboard; None: not looked up. ``other_keys`` are how many keys of a budget and
    window hold no counter: delete marks and unreadable names. ``read_after`` is the store's
    sequence before the read; None: unknown.
    """

    tenant: str
    source: CaptureSource
    counters: tuple[CounterReading, ...]
    omitted: tuple[OmittedCounter, ...]
    unreadable: tuple[UnreadableKey, ...]
    is_partial: bool
    unlisted: tuple[UnlistedEntities, ...] = ()
    boards: frozenset[BudgetWindow] | None = None
    other_keys: Mapping[BudgetWindow, int] = field(default_factory=dict)
    # Not what was read: two readings of the same counters are equal.
    read_after: int | None = field(default=None, compare=False)

    @property
    def reasons(self) -> dict[tuple[BudgetWindow, Entity], str]:
        """Why each omitted counter could not be read."""
        return {(each.of, each.entity): each.reason for each in self.omitted}


@dataclass(frozen=True, slots=True)
class TenantListing:
    """The tenants that have keys of a source in the store, and keys that name no tenant."""

    tenants: frozenset[str]
    unreadable: tuple[UnreadableKey, ...]


@dataclass(frozen=True, slots=True)
class BudgetRecord:
    """One budget and window in a snapshot.

    ``covers_earlier``: no eligible usage of the earlier intact records is missing or lower here, so
    a restore need not read older records. ``shape`` is that of a key that a restore creates; None:
    no counter was readable, or the source has no shapes. ``expiries`` are those of all counters;
    empty: unknown. ``is_truncated``: the source lists only the largest spenders, and its list was
    full. ``has_board``: the gateway keeps a leaderboard of this window; None: unknown.

    Records with equal ``content_hash`` and ``expiry_hash`` have equal contents. ``expiry_hash`` is
    None unless the expiries differ from each other.
    """

    of: BudgetWindow
    usages: Usages
    omitted: tuple[OmittedCounter, ...]
    shape: ValueShape | None
    expiries: Expiries
    is_truncated: bool
    covers_earlier: bool
    has_board: bool | None = None
    content_hash: bytes = field(init=False)
    expiry_hash: bytes | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "content_hash", hash_usages(self.usages))
        is_one = len(set(self.expiries.values())) <= 1
        object.__setattr__(self, "expiry_hash", None if is_one else hash_expiries(self.expiries))


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """A tenant's counters at ``captured_at`` (aware).

    Every counter of the source is in a record or reported, unless the snapshot is partial. The
    drop with the largest missing usage is the first.
    """

    tenant: str
    captured_at: datetime
    source: CaptureSource
    identity: StoreIdentity
    records: tuple[BudgetRecord, ...]
    unreadable: tuple[UnreadableKey, ...]
    drops: tuple[Drop, ...]
    is_partial: bool
    other_keys: Mapping[BudgetWindow, int] = field(default_factory=dict)
    read_after: int | None = None

    def __post_init__(self) -> None:
        require_aware(self.captured_at)

    @property
    def entry_count(self) -> int:
        """How many counters the records hold."""
        return sum(len(record.usages) for record in self.records)

    @property
    def omitted_count(self) -> int:
        """How many counters are omitted because their value could not be read."""
        return sum(len(record.omitted) for record in self.records)

    @property
    def most_missing(self) -> Decimal:
        """The usage that the store lacks in the budget and window that lacks most of all."""
        drops: defaultdict[BudgetWindow, list[Drop]] = defaultdict(list)
        for drop in self.drops:
            drops[drop.of].append(drop)
        return max(map(missing_usage, drops.values()), default=Decimal(0))

    @property
    def truncated_count(self) -> int:
        """How many records hold only the largest spenders."""
        return sum(record.is_truncated for record in self.records)

    @property
    def is_empty(self) -> bool:
        """Whether the store held nothing for the tenant, and nothing was expected."""
        return not (self.records or self.unreadable or self.drops or self.is_partial)


def take_snapshot(
    reading: TenantReading,
    captured_at: datetime,
    identity: StoreIdentity,
    point: TenantUsages,
) -> TenantSnapshot:
    """Make a snapshot from a reading, compared with the recovery point before it."""
    counters: defaultdict[BudgetWindow, list[CounterReading]] = defaultdict(list)
    omitted: defaultdict[BudgetWindow, list[OmittedCounter]] = defaultdict(list)
    truncated = {unlisted.of for unlisted in reading.unlisted if unlisted.is_truncated}
    for counter in reading.counters:
        counters[counter.of].append(counter)
    for omission in reading.omitted:
        omitted[omission.of].append(omission)
    records = tuple(
        _record(
            of,
            counters[of],
            # The point has only open windows. A closed one covers no earlier record, which is
            # safe: no restore uses it.
            earlier=point.get(of, {}) if of.window.is_current(captured_at) else None,
            marks=_Marks(
                omitted=tuple(omitted[of]),
                is_truncated=of in truncated,
                has_board=None if reading.boards is None else of in reading.boards,
            ),
        )
        for of in sorted(counters.keys() | omitted.keys(), key=order_of)
    )
    drops = find_drops(
        point,
        {record.of: record.usages for record in records},
        (
            (omission.of, omission.entity)
            for omission in reading.omitted
            if omission.is_entity_known
        ),
        reading.unlisted,
    )
    return TenantSnapshot(
        tenant=reading.tenant,
        captured_at=captured_at,
        source=reading.source,
        identity=identity,
        records=records,
        unreadable=reading.unreadable,
        # A counter that did not arrive is unknown, not absent.
        drops=tuple(drop for drop in drops if drop.after is not None or not reading.is_partial),
        is_partial=reading.is_partial,
        other_keys=reading.other_keys,
        read_after=reading.read_after,
    )


class _Marks(NamedTuple):
    """The facts about a record that do not come from its counters."""

    omitted: tuple[OmittedCounter, ...]
    is_truncated: bool
    has_board: bool | None


def _record(
    of: BudgetWindow, counters: list[CounterReading], *, earlier: Usages | None, marks: _Marks
) -> BudgetRecord:
    usages = {counter.entity: counter.usage for counter in counters}
    return BudgetRecord(
        of=of,
        usages=usages,
        omitted=marks.omitted,
        shape=_commonest(counter.shape for counter in counters),
        expiries=_expiries(counters),
        is_truncated=marks.is_truncated,
        covers_earlier=earlier is not None and covers(usages, earlier),
        has_board=marks.has_board,
    )


def _commonest(shapes: Iterable[ValueShape | None]) -> ValueShape | None:
    counted = Counter(shape for shape in shapes if shape is not None)
    return max(sorted(counted), key=counted.__getitem__, default=None)


# Times to live are whole seconds: keys that expire together appear to differ by one or two.
_ROUNDING_SECONDS = 2


def _expiries(counters: list[CounterReading]) -> Expiries:
    """Return the expiries of a record's keys, if all are known.

    If they differ only by rounding, all have the latest, so that the record needs only one.
    """
    expiries = {
        counter.entity: counter.expiry for counter in counters if counter.expiry is not None
    }
    if len(expiries) < len(counters):
        return {}
    seconds = [expiry for expiry in expiries.values() if isinstance(expiry, int)]
    if not seconds or len(seconds) < len(expiries):
        return expiries
    if max(seconds) - min(seconds) > _ROUNDING_SECONDS:
        return expiries
    return dict.fromkeys(expiries, max(seconds))


DEFAULT_RETENTION_DAYS = 7
MAX_RETENTION_DAYS = 3660
CHECKS_KEPT_FOR = timedelta(days=30)
"""How long checks of the store are kept; the newest good check is kept in any case."""
CHECKS_KEPT = 1000
"""So many of the newest checks are kept in any case, a week of them: a clock may be ahead."""


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Snapshots are kept for ``days`` whole days of 24 hours, from 1 to 3660."""

    days: int = DEFAULT_RETENTION_DAYS

    def __post_init__(self) -> None:
        if not 1 <= self.days <= MAX_RETENTION_DAYS:
            raise ValueError(f"retention of {self.days} days: from 1 to {MAX_RETENTION_DAYS}")

    def cutoff(self, now: datetime) -> datetime:
        """Return the time before which a record is past retention."""
        return require_aware(now) - timedelta(days=self.days)


MAX_CAPTURE_GAP = timedelta(hours=24)
"""A longer time between two captures is a gap: captures failed, or a clock was wrong."""
CAPTURES_AFTER_GAP = 24
"""So many captures must follow a gap before snapshots are removed."""


def awaited_captures(runs: Iterable[tuple[datetime, datetime]], now: datetime) -> int:
    """Return how many captures must follow before snapshots may be removed; 0: none.

    ``runs`` are the times at which each capture stored its first and last snapshot, the newest
    capture first. Also a clock that was set forward or back makes a gap.
    """
    following = now
    for captures, (first, last) in enumerate(islice(runs, CAPTURES_AFTER_GAP)):
        if max(abs(following - last), abs(last - first)) > MAX_CAPTURE_GAP:
            return CAPTURES_AFTER_GAP - captures
        following = first
    return 0


@dataclass(frozen=True, slots=True)
class DatedUsages:
    """The usages of one record of a budget and window; None: the record is damaged.

    ``number`` is that of the commit.
    """

    number: int
    captured_at: datetime
    usages: Usages | None


def needed_past_retention(
    records: Iterable[DatedUsages], cutoff: datetime, *, covered_since: int | None = None
) -> frozenset[datetime]:
    """Return the times of the records before ``cutoff`` that their window still needs.

    ``records`` are those of one window that has not closed, the newest commit first; they are read
    one by one, so they need not fit into memory together. An intact record is needed if it raises
    an entity above all newer ones, so the maximum over the kept records is the maximum over all
    intact ones.

    ``covered_since`` is the number of the newest intact record that covers the earlier ones; None:
    none does. A damaged record after it is kept: its usages are lost, and that stays visible.

    Raises:
        ValueError: a record is newer than the one before it.
    """
    best: Usages = {}
    needed: set[datetime] = set()
    last: int | None = None
    for record in records:
        if last is not None and record.number > last:
            raise ValueError(f"record {record.number} follows an older one, {last}")
        last = record.number
        if record.usages is None:
            is_needed = covered_since is None or record.number > covered_since
        else:
            is_needed = not covers(best, record.usages)
            if is_needed:
                best = max_merge(best, record.usages)
        if is_needed and record.captured_at < cutoff:
            needed.add(record.captured_at)
    return frozenset(needed)


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """A tenant's stored snapshot, without its records.

    ``unreadable`` has the first of ``unreadable_count`` unreadable keys. ``truncated_count`` counts
    only records that are still retained. ``most_missing`` is the usage that the store lacks in the
    budget and window that lacks most, None if unknown: earlier versions of the schema did not store
    it.
    """

    tenant: str
    captured_at: datetime
    source: CaptureSource
    identity: StoreIdentity
    run_id: str
    record_count: int
    entry_count: int
    omitted_count: int
    drop_count: int
    most_missing: Decimal | None
    truncated_count: int
    unreadable_count: int
    unreadable: tuple[UnreadableKey, ...]
    is_partial: bool


@dataclass(frozen=True, slots=True)
class NamedDrop:
    """A stored drop, as text for people; usages in plain digits."""

    tenant: str
    budget: str
    window: str
    entity: str | None
    before: str
    after: str | None


@dataclass(frozen=True, slots=True)
class NamedOmission:
    """A stored omission: a counter's key, and why its value could not be read."""

    tenant: str
    key: str
    reason: str


class Uncaptured(StrEnum):
    """What a run could not capture."""

    TENANT = "tenant"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class CaptureFailure:
    """A tenant that a run did not capture, or a key that names no tenant, and why."""

    name: str
    hour: Hour
    reason: str
    hint: str
    kind: Uncaptured = Uncaptured.TENANT


@dataclass(frozen=True, slots=True)
class FailingTenant:
    """A tenant whose last capture failed, and why.

    ``newest_snapshot`` is the time of its newest snapshot; None: there is none.
    """

    newest_snapshot: datetime | None
    failed_at: datetime
    reason: str
    hint: str


RUNS_KEPT_FOR = timedelta(days=30)
"""How long captures and how they ended are kept."""
RUNS_KEPT = 168
"""So many of the newest captures are kept in any case, a week of them: a clock may be ahead."""


class RunOutcome(StrEnum):
    """How a capture of all tenants ended."""

    STORED = "stored"
    STORED_IN_PART = "stored_in_part"
    NOTHING_TO_STORE = "nothing_to_store"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why tenants, or all of a capture, failed: a stable code, and sentences for people."""

    code: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a capture ended, and how many tenants were stored, absent and failed.

    ``error`` is what ended it, or what most tenants failed for; None: nothing failed.
    ``clock_skew`` is how far the store's clock was ahead of the database's; None: not measured.
    """

    outcome: RunOutcome
    stored: int
    absent: int
    failed: int
    error: Stopped | None
    clock_skew: timedelta | None


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A capture of the current hour that began at ``started_at``.

    ``ended_at`` and ``result`` are None while it runs, and for ever if its process died.
    """

    run_id: str
    hour: Hour
    started_at: datetime
    ended_at: datetime | None = None
    result: RunResult | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it ended without any tenant stored, although there may be some."""
        return self.result is not None and self.result.outcome is RunOutcome.FAILED

    @property
    def found_nothing(self) -> bool:
        """Whether it ended well, without any tenant to store."""
        return self.result is not None and self.result.outcome is RunOutcome.NOTHING_TO_STORE


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune removed.

    ``awaited_captures``: nothing was removed, because so many captures must follow a gap first.
    """

    records: int
    captures: int
    contents: int
    failures: int
    awaited_captures: int = 0


@dataclass(frozen=True, slots=True)
class ListedSnapshot:
    """The snapshots with one timestamp, of one tenant or of all, summed up.

    The numbers are those of the capture: ``records`` counts budgets and windows, ``entries``
    counters, and ``partial`` the tenants with a partial snapshot. ``most_missing`` is the usage
    that the store lacks in the budget and window that lacks most, None if unknown. ``is_pruned``:
    retention has removed records of it since, so a restore from it would be incomplete.
    """

    captured_at: datetime
    source: CaptureSource
    tenants: int
    records: int
    entries: int
    omitted: int
    unreadable: int
    drops: int
    most_missing: Decimal | None
    partial: int
    is_pruned: bool


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A stored record, with the source of its snapshot and whether that is partial.

    ``omitted_count`` is how many counters of this budget and window could not be read.
    """

    captured_at: datetime
    source: CaptureSource
    of: BudgetWindow
    usages: Usages
    is_truncated: bool
    is_partial: bool
    omitted_count: int


class ColumnKind(StrEnum):
    """The type of a column, as a reader of Parquet sees it."""

    TEXT = "string"
    TIME = "timestamp[us, UTC]"
    USAGE = "decimal(38, 18)"
    COUNT = "int64"
    FLAG = "bool"


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and the meaning of its values."""

    name: str
    kind: ColumnKind
    description: str
    is_nullable: bool = False


USAGE_COLUMNS = (
    Column("tenant", ColumnKind.TEXT, "The tenant's real name; its directory has a file-safe name"),
    Column(
        "captured_at",
        ColumnKind.TIME,
        "The snapshot's timestamp. The table of an hour that was captured twice has both "
        "snapshots, with different timestamps",
    ),
    Column("budget_id", ColumnKind.TEXT, "The budget"),
    Column("period", ColumnKind.TEXT, "Length of the window: day, week, month, quarter, lifetime"),
    Column(
        "window_token",
        ColumnKind.TEXT,
        "The window as the gateway names it, such as 2026-11-29, 2026-W48, 2026-11, 2026-Q4 or "
        "lifetime",
    ),
    Column(
        "window_start",
        ColumnKind.TIME,
        "Start of the window; null for a lifetime",
        is_nullable=True,
    ),
    Column(
        "window_end",
        ColumnKind.TIME,
        "End of the window, exclusive; null for a lifetime",
        is_nullable=True,
    ),
    Column(
        "entity",
        ColumnKind.TEXT,
        "Who spent: a user, model, account, agent or metadata value; null is the aggregate of the "
        "whole budget",
        is_nullable=True,
    ),
    Column("usage", ColumnKind.USAGE, "Usage in the window at that time, exact"),
    Column(
        "source",
        ColumnKind.TEXT,
        "Keys that the snapshot was read from: counters (every entity), or leaderboards (only the "
        "largest)",
    ),
    Column(
        "is_truncated",
        ColumnKind.FLAG,
        "The source lists only the largest spenders of this budget and window, and was full: "
        "there may be more",
    ),
    Column(
        "is_partial",
        ColumnKind.FLAG,
        "Fewer keys of the tenant arrived than the store announced, twice: rows may be missing",
    ),
    Column(
        "omitted_count",
        ColumnKind.COUNT,
        "Number of counters of this budget and window without a row, because their value could "
        "not be read",
    ),
)
"""In the order of the file, the same in every file and every release.

Readers combine tables of several hours, so a new column goes to the end, and no column is renamed,
removed or changed in kind.
"""


@dataclass(frozen=True, slots=True)
class TableFile:
    """A written table; ``path`` is for people, ``size`` is in bytes."""

    path: str
    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class RemovedTables:
    """How many tables were removed, and a sentence for each failure."""

    removed: int
    failures: tuple[str, ...]
