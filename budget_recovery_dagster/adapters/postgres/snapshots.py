"""Stored snapshots: commit, list, read and prune them."""

from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from operator import attrgetter
from typing import Any

from psycopg.types.json import Jsonb

from budget_recovery_dagster.adapters.postgres.contents import PER_KEY, stream_verified
from budget_recovery_dagster.adapters.postgres.database import (
    MAX_NAMED,
    Connection,
    Database,
    storable,
    storable_id,
)
from budget_recovery_dagster.adapters.postgres.falls import record_falls, record_findings
from budget_recovery_dagster.adapters.postgres.leases import require_lease
from budget_recovery_dagster.adapters.postgres.retention import (
    count_awaited,
    discard_snapshots,
    find_needed,
    prune_snapshots,
)
from budget_recovery_dagster.adapters.postgres.store import add_landmark, lock_store, move_baseline
from budget_recovery_dagster.domain.admission import CAPTURE_LEASE, Facts, admit, require_healthy
from budget_recovery_dagster.domain.counters import (
    NEVER_EXPIRES,
    BudgetWindow,
    NoExpiry,
    OmittedCounter,
    UnreadableKey,
    format_usage,
)
from budget_recovery_dagster.domain.falls import JudgedFalls
from budget_recovery_dagster.domain.recovery_point import latest_time
from budget_recovery_dagster.domain.snapshots import (
    RUNS_KEPT,
    RUNS_KEPT_FOR,
    BudgetRecord,
    CaptureFailure,
    CaptureSource,
    CaptureSummary,
    ListedSnapshot,
    NamedDrop,
    PruneReport,
    RetentionPolicy,
    RunResult,
    StoredRecord,
    TenantSnapshot,
    Uncaptured,
)
from budget_recovery_dagster.domain.store import Baseline, LandmarkKind, StoreIdentity
from budget_recovery_dagster.domain.windows import Hour, Window
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.ports import Lease

_NEWEST = """
select max(captured_at) from budget_recovery.capture where tenant = %s and captured_at <= %s
"""
_INSERT_CAPTURE = """
insert into budget_recovery.capture (
    tenant, captured_at, source, store_created_at, store_last_sequence, run_id, record_count,
    entry_count, omitted_count, drop_count, most_missing, unreadable_count, is_partial, unreadable,
    drops, stored_at
) values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
_COPY_RECORDS = """
copy budget_recovery.budget_record (
    tenant, captured_at, budget_id, window_token, window_start, window_end, content_id,
    omitted_count, omitted, is_truncated, value_shape, expiry_seconds, expiry_kind,
    covers_earlier, has_board
) from stdin
"""


def summary_of(snapshot: TenantSnapshot, run_id: str) -> CaptureSummary:
    """Return the summary that is stored for a snapshot."""
    return CaptureSummary(
        tenant=snapshot.tenant,
        captured_at=snapshot.captured_at,
        source=snapshot.source,
        identity=snapshot.identity,
        run_id=storable_id(run_id),
        record_count=len(snapshot.records),
        entry_count=snapshot.entry_count,
        omitted_count=snapshot.omitted_count,
        drop_count=len(snapshot.drops),
        most_missing=snapshot.most_missing,
        truncated_count=snapshot.truncated_count,
        unreadable_count=len(snapshot.unreadable),
        unreadable=tuple(
            UnreadableKey(storable(unreadable.key), storable(unreadable.reason))
            for unreadable in snapshot.unreadable[:MAX_NAMED]
        ),
        is_partial=snapshot.is_partial,
    )


def named_drops_of(snapshot: TenantSnapshot) -> tuple[NamedDrop, ...]:
    """Return the drops that are stored by name: those with the largest missing usage."""
    return tuple(
        NamedDrop(
            tenant=snapshot.tenant,
            budget=drop.of.budget,
            window=drop.of.window.token,
            entity=drop.entity,
            before=format_usage(drop.before),
            after=None if drop.after is None else format_usage(drop.after),
        )
        for drop in snapshot.drops[:MAX_NAMED]
    )


def kept_omissions(omitted: Sequence[OmittedCounter]) -> tuple[OmittedCounter, ...]:
    """Return the omitted counters of a record that are stored by name, in stored form."""
    return tuple(
        replace(omission, key=storable(omission.key), reason=storable(omission.reason))
        for omission in omitted[:MAX_NAMED]
    )


def named_omissions(omitted: Sequence[OmittedCounter]) -> list[dict[str, object]]:
    """Return the JSON of the omitted counters that are stored by name."""
    return [
        {
            "entity": omission.entity,
            "key": omission.key,
            "reason": omission.reason,
            # Stored only if false, which is rare.
            **({} if omission.is_entity_known else {"is_entity_known": False}),
        }
        for omission in kept_omissions(omitted)
    ]


def _insert_snapshot(
    connection: Connection, snapshot: TenantSnapshot, *, run_id: str, stored_at: datetime
) -> None:
    """Insert a snapshot in a transaction that locks the store's row."""
    summary = summary_of(snapshot, run_id)
    unreadable = [asdict(key) for key in summary.unreadable]
    # The tenant has a column.
    drops = [
        {name: value for name, value in asdict(drop).items() if name != "tenant"}
        for drop in named_drops_of(snapshot)
    ]
    values = (*_capture_row(summary), Jsonb(unreadable), Jsonb(drops), stored_at)
    connection.execute(_INSERT_CAPTURE, values)
    contents = {_content_key(record): record for record in snapshot.records}
    content_ids = _share_contents(connection, contents)
    with connection.cursor() as cursor, cursor.copy(_COPY_RECORDS) as copy:
        for row in _record_rows(snapshot, content_ids):
            copy.write_row(row)


_capture_row = attrgetter(
    "tenant",
    "captured_at",
    "source.value",
    "identity.created_at",
    "identity.last_sequence",
    "run_id",
    "record_count",
    "entry_count",
    "omitted_count",
    "drop_count",
    "most_missing",
    "unreadable_count",
    "is_partial",
)


ContentKey = tuple[bytes, bytes | None]
"""The hashes of a content: of its usages, and of its expiries if they differ from each other."""


def _content_key(record: BudgetRecord) -> ContentKey:
    return record.content_hash, record.expiry_hash


def _record_rows(
    snapshot: TenantSnapshot, content_ids: dict[ContentKey, int]
) -> Iterator[tuple[object, ...]]:
    for record in snapshot.records:
        window = record.of.window
        yield (
            snapshot.tenant,
            snapshot.captured_at,
            record.of.budget,
            window.token,
            window.start,
            window.end,
            content_ids[_content_key(record)],
            len(record.omitted),
            Jsonb(named_omissions(record.omitted)) if record.omitted else None,
            record.is_truncated,
            None if record.shape is None else record.shape.value,
            *_shared_expiry(record),
            record.covers_earlier,
            record.has_board,
        )


def _shared_expiry(record: BudgetRecord) -> tuple[int | None, str | None]:
    """Return the columns ``expiry_seconds`` and ``expiry_kind`` of a record."""
    if record.expiry_hash is not None:
        return None, PER_KEY
    expiry = next(iter(record.expiries.values()), None)
    return (None, expiry.value) if isinstance(expiry, NoExpiry) else (expiry, None)


# A damaged content is never shared: the next record with its usages gets a new one.
_INTACT_CONTENTS = """
select content_hash, expiry_hash, content_id
from budget_recovery.budget_content
where content_hash = any(%s)
  and budget_recovery.content_is_intact(content_hash, entities, usages)
  and budget_recovery.expiries_are_intact(expiry_hash, entities, expiries, never_expires)
"""
_ADD_CONTENTS = """
copy budget_recovery.budget_content (
    content_hash, expiry_hash, entities, usages, expiries, never_expires
) from stdin
"""


def _share_contents(
    connection: Connection, contents: Mapping[ContentKey, BudgetRecord]
) -> dict[ContentKey, int]:
    """Return the ids of intact contents by hash, and add those that are not stored intact.

    The caller holds the lock on the store's row: without it, two captures could add the same
    content, and a prune could remove one that was found here.
    """
    known = _find_intact(connection, contents.keys())
    new = [key for key in contents if key not in known]
    if not new:
        return known
    with connection.cursor() as cursor, cursor.copy(_ADD_CONTENTS) as copy:
        for key in new:
            copy.write_row((*key, *_content_columns(contents[key])))
    return known | _find_intact(connection, new)


def _find_intact(connection: Connection, keys: Collection[ContentKey]) -> dict[ContentKey, int]:
    hashes = [content_hash for content_hash, _ in keys]
    rows = connection.execute(_INTACT_CONTENTS, (hashes,))
    return {(content_hash, expiry_hash): content for content_hash, expiry_hash, content in rows}


def _content_columns(
    record: BudgetRecord,
) -> tuple[list[str], list[Decimal], list[int | None] | None, list[bool] | None]:
    entities = sorted(record.usages, key=lambda entity: entity or "")
    names = [entity or "" for entity in entities]
    usages = [record.usages[entity] for entity in entities]
    if record.expiry_hash is None:
        return names, usages, None, None
    expiries = [record.expiries[entity] for entity in entities]
    seconds = [each if isinstance(each, int) else None for each in expiries]
    return names, usages, seconds, [each is NEVER_EXPIRES for each in expiries]


def storable_failure(failure: CaptureFailure) -> CaptureFailure:
    """Return a failure in its stored form."""
    return CaptureFailure(
        name=storable_id(failure.name) if failure.kind is Uncaptured.KEY else failure.name,
        hour=failure.hour,
        reason=storable(failure.reason),
        hint=storable(failure.hint),
        kind=failure.kind,
    )


def storable_result(result: RunResult) -> RunResult:
    """Return the result of a run in its stored form."""
    error = result.error
    if error is None:
        return result
    kept = replace(error, message=storable(error.message), hint=storable(error.hint))
    return replace(result, error=kept)


# If a run is retried with the same id, its last failure replaces the earlier one.
_RECORD_FAILURE = """
insert into budget_recovery.capture_failure (run_id, failed_at, kind, name, hour, reason, hint)
values (%s, %s, %s, %s, %s, %s, %s)
on conflict (run_id, kind, name) do update
set hour = excluded.hour, failed_at = excluded.failed_at,
    reason = excluded.reason, hint = excluded.hint
"""
_INSERT_RUN = """
insert into budget_recovery.capture_run (run_id, hour, started_at)
values (%s, %s, %s)
returning number
"""
_PRUNE_RUNS = """
delete from budget_recovery.capture_run
where started_at < %s
  and number < (
      select min(n.number)
      from (select number from budget_recovery.capture_run order by number desc limit %s) n
  )
"""
_END_RUN = """
update budget_recovery.capture_run
set ended_at = %s, outcome = %s, stored = %s, absent = %s, failed = %s,
    code = %s, reason = %s, hint = %s, clock_skew = %s
where number = %s and ended_at is null
"""
# By the number of the run: a run that lost its lease may record its failures after a later run has
# captured the tenant.
_NOTE_OUTCOME = """
insert into budget_recovery.tenant_outcome as o (tenant, outcome, at, run_number, reason, hint)
values (
    %(tenant)s, %(outcome)s, %(at)s,
    (select max(number) from budget_recovery.capture_run where run_id = %(run_id)s),
    %(reason)s, %(hint)s
)
on conflict (tenant) do update
set outcome = excluded.outcome, at = excluded.at, run_number = excluded.run_number,
    reason = excluded.reason, hint = excluded.hint
where (excluded.run_number >= o.run_number) is not false
"""
_TENANTS = "select distinct tenant from budget_recovery.capture"
_NEWEST_IDENTITY = """
select store_created_at, store_last_sequence
from budget_recovery.capture
order by commit_number desc
limit 1
"""
# Sums of bigints are numeric. An unknown usage may be the largest.
_ALL = """
select captured_at, source, count(*), sum(record_count)::bigint, sum(entry_count)::bigint,
       sum(omitted_count)::bigint, sum(unreadable_count)::bigint, sum(drop_count)::bigint,
       case when bool_and(most_missing is not null) then max(most_missing) end,
       count(*) filter (where is_partial), bool_or(pruned_at is not null)
from budget_recovery.capture
where (%(tenant)s::text is null or tenant = %(tenant)s)
  and captured_at > coalesce(%(after)s::timestamptz, '-infinity')
group by captured_at, source
order by captured_at desc, source
"""
# Steps by index from one budget to the next, independent of the number of records.
_BUDGETS = """
with recursive found as (
    (select r.budget_id from budget_recovery.budget_record r
     where r.tenant = %(tenant)s
     order by r.budget_id
     limit 1)
    union all
    select (
        select r.budget_id from budget_recovery.budget_record r
        where r.tenant = %(tenant)s and r.budget_id > f.budget_id
        order by r.budget_id
        limit 1
    )
    from found f
    where f.budget_id is not null
)
select budget_id from found where budget_id is not null order by budget_id
"""
_TENANTS_IN = """
select distinct tenant
from budget_recovery.capture
where captured_at >= %s and captured_at < %s and pruned_at is null
order by tenant
"""
# Every session's time zone is UTC.
_HOURS_OF = """
select distinct tenant, date_trunc('hour', captured_at)
from budget_recovery.capture
where tenant = any(%s) and pruned_at is null
"""
# A snapshot has no records if all keys of the tenant were unreadable.
_IS_RETAINED = """
select
from budget_recovery.capture
where tenant = %(tenant)s and captured_at >= %(start)s and captured_at < %(end)s
  and pruned_at is null
limit 1
"""
# Narrow rows only; the wide contents follow by id, one by one.
_STORED_RECORDS = """
select r.captured_at, c.source, r.budget_id, r.window_token, r.is_truncated, c.is_partial,
       r.omitted_count, r.content_id
from budget_recovery.capture c
join budget_recovery.budget_record r using (tenant, captured_at)
where c.tenant = %(tenant)s
  and c.captured_at >= %(start)s and c.captured_at < %(end)s
  and c.pruned_at is null
order by r.captured_at, r.budget_id, r.window_token
"""


@dataclass(frozen=True, slots=True)
class PostgresSnapshots:
    """The tables of captures, records, contents and failures."""

    _database: Database

    def commit(  # noqa: PLR0913 - by keyword, each the caller's own
        self,
        snapshot: TenantSnapshot,
        *,
        hour: Hour,
        run_id: str,
        lease: Lease,
        judged: Baseline | None,
        first: Baseline | None = None,
    ) -> Baseline:
        """Store a snapshot and accept its identity as the baseline, in one transaction."""
        with self._database.writing() as connection:
            # Locks are taken in this order everywhere: the lease, then the store.
            require_lease(connection, self._database, lease, name=CAPTURE_LEASE)
            store = lock_store(connection)
            # Read only now: the wait for the locks may have taken the rest of the hour.
            now = self._database.time_on(connection)
            scope = (snapshot.tenant, latest_time(now))
            [(newest,)] = connection.execute(_NEWEST, scope).fetchall()
            facts = Facts(
                now=now,
                state=store.state,
                baseline=store.baseline,
                newest=newest,
            )
            baseline = admit(snapshot, hour=hour, judged=judged, first=first, facts=facts)
            if not snapshot.is_empty:
                _insert_snapshot(connection, snapshot, run_id=run_id, stored_at=facts.now)
            record_findings(connection, snapshot)
            outcome = "absent" if snapshot.is_empty else "stored"
            connection.execute(
                _NOTE_OUTCOME, _outcome_row(snapshot.tenant, outcome, facts.now, run_id)
            )
            if baseline != store.baseline:
                move_baseline(connection, baseline)
            add_landmark(
                connection,
                LandmarkKind.CAPTURE,
                at=facts.now,
                about=storable_id(run_id),
                created_at=baseline.identity.created_at,
            )
            return baseline

    def begin_run(self, run_id: str, hour: Hour, *, started_at: datetime, lease: Lease) -> int:
        """Insert a run, and delete those that are too old."""
        with self._database.writing() as connection:
            require_lease(connection, self._database, lease, name=CAPTURE_LEASE)
            cutoff = self._database.time_on(connection) - RUNS_KEPT_FOR
            connection.execute(_PRUNE_RUNS, (cutoff, RUNS_KEPT))
            values = (storable_id(run_id), hour.start, started_at)
            [(number,)] = connection.execute(_INSERT_RUN, values).fetchall()
            return int(number)

    def end_run(self, number: int, result: RunResult) -> None:
        """Store the result of a run, unless it has one."""
        kept = storable_result(result)
        error = kept.error
        with self._database.writing() as connection:
            values = (
                self._database.time_on(connection),
                kept.outcome.value,
                *(kept.stored, kept.absent, kept.failed),
                *((error.code, error.message, error.hint) if error else (None, None, None)),
                kept.clock_skew,
                number,
            )
            connection.execute(_END_RUN, values)

    def record_failures(self, failures: Collection[CaptureFailure], *, run_id: str) -> None:
        """Insert what a run could not capture; a retried run replaces its earlier failures."""
        with self._database.writing() as connection, connection.cursor() as cursor:
            now = self._database.time_on(connection)
            common = (storable_id(run_id), now)
            kept = [storable_failure(each) for each in failures]
            cursor.executemany(_RECORD_FAILURE, [(*common, *_failure_row(each)) for each in kept])
            outcomes = [
                _outcome_row(each.name, "failed", now, run_id, each)
                for each in kept
                if each.kind is Uncaptured.TENANT
            ]
            cursor.executemany(_NOTE_OUTCOME, outcomes)

    def prune(
        self, tenants: Collection[str], *, policy: RetentionPolicy, now: datetime, lease: Lease
    ) -> PruneReport:
        """Remove records of these tenants past retention, except those that a restore needs."""
        cutoff = policy.cutoff(now)
        with self._database.reading() as connection:
            awaited = count_awaited(connection, now)
            needed = [] if awaited else find_needed(connection, tenants, cutoff=cutoff, now=now)
        with self._database.writing() as connection:
            require_lease(connection, self._database, lease, name=CAPTURE_LEASE)
            # Under the lock, no commit can share a content that is being removed.
            require_healthy(lock_store(connection).state, "no snapshot is removed")
            if awaited:
                return PruneReport(0, 0, 0, 0, awaited_captures=awaited)
            return prune_snapshots(connection, tenants, needed=needed, cutoff=cutoff, now=now)

    def in_future(self, now: datetime) -> tuple[ListedSnapshot, ...]:
        """Return the snapshots of all tenants that are dated in the future; newest first."""
        with self._database.reading() as connection:
            return _list(connection, after=latest_time(now))

    def discard_future(  # noqa: PLR0913 - by keyword, each the caller's own
        self,
        confirmed: Collection[datetime],
        *,
        falls: JudgedFalls,
        now: datetime,
        by: str,
        reason: str,
        lease: Lease,
    ) -> tuple[ListedSnapshot, ...]:
        """Discard the snapshots of these times that are dated in the future, and record each."""
        with self._database.writing() as connection:
            require_lease(connection, self._database, lease, name=CAPTURE_LEASE)
            require_healthy(lock_store(connection).state, "no snapshot is discarded")
            in_future = _list(connection, after=latest_time(now))
            discarded = tuple(each for each in in_future if each.captured_at in confirmed)
            times = [each.captured_at for each in discarded]
            discard_snapshots(connection, times, by=by, reason=reason, now=now)
            record_falls(connection, falls)
            return discarded

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained snapshot."""
        return frozenset(tenant for (tenant,) in self._database.rows(_TENANTS))

    def newest_identity(self) -> StoreIdentity | None:
        """Return the identity stored with the newest snapshot of any tenant."""
        rows = self._database.rows(_NEWEST_IDENTITY)
        return StoreIdentity(rows[0][0], int(rows[0][1])) if rows else None

    def listed(self, tenant: str | None) -> tuple[ListedSnapshot, ...]:
        """Return the snapshots of a tenant, or of all tenants by timestamp; newest first."""
        with self._database.reading() as connection:
            return _list(connection, tenant=tenant)

    def budgets_of(self, tenant: str) -> tuple[str, ...]:
        """Return the budgets of a tenant that have a retained record, by name."""
        rows = self._database.rows(_BUDGETS, {"tenant": tenant})
        return tuple(budget for (budget,) in rows)

    def tenants_in(self, hour: Hour) -> tuple[str, ...]:
        """Return the tenants that have a complete snapshot of an hour, by name."""
        rows = self._database.rows(_TENANTS_IN, (hour.start, hour.end))
        return tuple(tenant for (tenant,) in rows)

    def hours_of(self, tenants: Collection[str]) -> Mapping[str, frozenset[Hour]]:
        """Return the hours in which these tenants have a complete snapshot; none: no key."""
        hours: defaultdict[str, set[Hour]] = defaultdict(set)
        for tenant, start in self._database.rows(_HOURS_OF, (list(tenants),)):
            hours[tenant].add(Hour(start))
        return {tenant: frozenset(each) for tenant, each in hours.items()}

    @contextmanager
    def records_of(self, tenant: str, hour: Hour) -> Iterator[Iterator[StoredRecord] | None]:
        """Yield the records of a tenant's complete snapshots of an hour, in one transaction."""
        scope = {"tenant": tenant, "start": hour.start, "end": hour.end}
        with self._database.reading() as connection:
            if connection.execute(_IS_RETAINED, scope).fetchone() is None:
                yield None
                return
            rows = connection.execute(_STORED_RECORDS, scope).fetchall()
            # Closed before the transaction, even if the reader stops early.
            with closing(_stored_records(connection, tenant, rows)) as records:
                yield records


def _outcome_row(
    tenant: str, outcome: str, at: datetime, run_id: str, failure: CaptureFailure | None = None
) -> dict[str, object]:
    return {
        "tenant": tenant,
        "outcome": outcome,
        "at": at,
        "run_id": storable_id(run_id),
        "reason": failure and failure.reason,
        "hint": failure and failure.hint,
    }


_failure_row = attrgetter("kind.value", "name", "hour.start", "reason", "hint")


def _list(
    connection: Connection, *, tenant: str | None = None, after: datetime | None = None
) -> tuple[ListedSnapshot, ...]:
    rows = connection.execute(_ALL, {"tenant": tenant, "after": after})
    return tuple(_listed(*row) for row in rows)


def _listed(captured_at: datetime, source: str, *numbers_and_mark: Any) -> ListedSnapshot:
    return ListedSnapshot(captured_at.astimezone(UTC), CaptureSource(source), *numbers_and_mark)


def _stored_records(
    connection: Connection, tenant: str, rows: Sequence[tuple[Any, ...]]
) -> Generator[StoredRecord]:
    content_ids = [content_id for *_, content_id in rows]
    # An open stream locks the connection. An error keeps this frame alive, and with it the stream.
    with closing(stream_verified(connection, content_ids)) as contents:
        for row, (_, usages) in zip(rows, contents, strict=True):
            captured_at, source, budget, token, *marks, _ = row
            if usages is None:
                raise DatabaseError(
                    f"A stored record is damaged (checksum mismatch): tenant {tenant!r},"
                    f" {captured_at:%Y-%m-%d %H:%M:%S} UTC, budget {budget!r},"
                    f" window {token}.",
                    "capture the current hour; restores ignore damaged records; see the runbook.",
                )
            of = BudgetWindow(budget, Window.parse(token))
            yield StoredRecord(
                captured_at.astimezone(UTC), CaptureSource(source), of, usages, *marks
            )
