"""Stores tenants' snapshots and lists what runs captured."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, LiteralString

from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from budget_recovery_dagster.adapters.postgres.contents import share_contents
from budget_recovery_dagster.adapters.postgres.database import Connection, Database
from budget_recovery_dagster.adapters.postgres.leases import require_lease
from budget_recovery_dagster.adapters.postgres.records import find_damage
from budget_recovery_dagster.adapters.postgres.retention import find_needed, prune_snapshots
from budget_recovery_dagster.adapters.postgres.storable import (
    named_drops_of,
    named_omissions,
    storable_failure,
    storable_id,
    summary_of,
)
from budget_recovery_dagster.adapters.postgres.store import lock_store, move_baseline
from budget_recovery_dagster.domain.admission import CAPTURE_LEASE, Facts, admit, admit_prune
from budget_recovery_dagster.domain.counters import UnreadableKey
from budget_recovery_dagster.domain.snapshots import (
    CaptureFailure,
    CaptureSource,
    CaptureSummary,
    ListedSnapshot,
    NamedDrop,
    NamedOmission,
    PruneReport,
    RetentionPolicy,
    TenantSnapshot,
    Uncaptured,
)
from budget_recovery_dagster.domain.store import Baseline, StoreIdentity
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.ports import Lease

_NEWEST = "select max(captured_at) from budget_recovery.capture where tenant = %s"
_INSERT_CAPTURE = """
insert into budget_recovery.capture (
    tenant, captured_at, stored_at, run_id, source, store_created_at, store_last_sequence,
    record_count, entry_count, omitted_count, unreadable_count, unreadable, drop_count, drops,
    is_partial
) values (
    %(tenant)s, %(captured_at)s, %(stored_at)s, %(run_id)s, %(source)s, %(store_created_at)s,
    %(store_last_sequence)s, %(record_count)s, %(entry_count)s, %(omitted_count)s,
    %(unreadable_count)s, %(unreadable)s, %(drop_count)s, %(drops)s, %(is_partial)s
)
"""
_COPY_RECORDS = """
copy budget_recovery.budget_record (
    tenant, captured_at, budget_id, window_token, window_start, window_end, content_id,
    omitted_count, omitted, is_truncated, value_shape, expiry_seconds, covers_earlier
) from stdin
"""


def read_newest(connection: Connection, tenant: str) -> datetime | None:
    """Return the time of a tenant's newest snapshot."""
    row = connection.execute(_NEWEST, (tenant,)).fetchone()
    return None if row is None else row[0]


def insert_snapshot(
    connection: Connection, snapshot: TenantSnapshot, *, run_id: str, stored_at: datetime
) -> None:
    """Insert a snapshot in a transaction that locks the store's row."""
    _insert_capture(connection, snapshot, run_id, stored_at)
    contents = {record.content_hash: record.usages for record in snapshot.records}
    _copy_records(connection, snapshot, share_contents(connection, contents))


def _insert_capture(
    connection: Connection, snapshot: TenantSnapshot, run_id: str, stored_at: datetime
) -> None:
    summary = summary_of(snapshot, run_id)
    values = {
        "tenant": summary.tenant,
        "captured_at": summary.captured_at,
        "stored_at": stored_at,
        "run_id": summary.run_id,
        "source": summary.source.value,
        "store_created_at": summary.identity.created_at,
        "store_last_sequence": summary.identity.last_sequence,
        "record_count": summary.record_count,
        "entry_count": summary.entry_count,
        "omitted_count": summary.omitted_count,
        "unreadable_count": summary.unreadable_count,
        "unreadable": Jsonb(
            [{"key": each.key, "reason": each.reason} for each in summary.unreadable]
        ),
        "drop_count": summary.drop_count,
        "drops": Jsonb(
            [
                {
                    "budget": drop.budget,
                    "window": drop.window,
                    "entity": drop.entity,
                    "before": drop.before,
                    "after": drop.after,
                }
                for drop in named_drops_of(snapshot)
            ]
        ),
        "is_partial": summary.is_partial,
    }
    connection.execute(_INSERT_CAPTURE, values)


def _copy_records(
    connection: Connection, snapshot: TenantSnapshot, content_ids: dict[bytes, int]
) -> None:
    with connection.cursor() as cursor, cursor.copy(_COPY_RECORDS) as copy:
        for row in _rows(snapshot, content_ids):
            copy.write_row(row)


def _rows(snapshot: TenantSnapshot, content_ids: dict[bytes, int]) -> Iterator[tuple[object, ...]]:
    for record in snapshot.records:
        window = record.of.window
        yield (
            snapshot.tenant,
            snapshot.captured_at,
            record.of.budget,
            window.token,
            window.start,
            window.end,
            content_ids[record.content_hash],
            len(record.omitted),
            Jsonb(named_omissions(record.omitted)) if record.omitted else None,
            record.is_truncated,
            None if record.shape is None else record.shape.value,
            record.expiry_seconds,
            record.covers_earlier,
        )


_TENANTS = "select distinct tenant from budget_recovery.capture"
# All tenants of a run share a time; the highest store sequence belongs to the last one read.
_NEWEST_IDENTITY = """
select store_created_at, store_last_sequence
from budget_recovery.capture
order by captured_at desc, store_last_sequence desc
limit 1
"""
_SUMMARIES = """
select tenant, captured_at, source, store_created_at, store_last_sequence, run_id,
       record_count, entry_count, omitted_count, drop_count, unreadable_count, unreadable,
       is_partial,
       (select count(*) from budget_recovery.budget_record r
        where r.tenant = c.tenant and r.captured_at = c.captured_at and r.is_truncated
       ) as truncated_count
from budget_recovery.capture c
"""
_CAPTURED_IN = f"""{_SUMMARIES}
where captured_at >= %s and captured_at < %s
order by tenant, captured_at
"""
_CAPTURED_BY = f"""{_SUMMARIES}
where run_id = %s
order by tenant, captured_at
"""
_DROPS = """
select c.tenant, d.value
from budget_recovery.capture c
cross join lateral jsonb_array_elements(c.drops) with ordinality as d (value, position)
where c.run_id = %s
order by c.tenant, c.captured_at, d.position
"""
_OMISSIONS = """
select r.tenant, o.value ->> 'key', o.value ->> 'reason'
from budget_recovery.capture c
join budget_recovery.budget_record r using (tenant, captured_at)
cross join lateral jsonb_array_elements(r.omitted) with ordinality as o (value, position)
where c.run_id = %s and c.omitted_count > 0
order by r.tenant, r.captured_at, r.budget_id, r.window_token, o.position
"""
# If a run is retried with the same id, its last failure replaces the earlier one.
_NOTE_FAILURE = """
insert into budget_recovery.capture_failure (run_id, kind, name, hour, failed_at, reason, hint)
values (%(run_id)s, %(kind)s, %(name)s, %(hour)s, %(failed_at)s, %(reason)s, %(hint)s)
on conflict (run_id, kind, name) do update
set hour = excluded.hour, failed_at = excluded.failed_at,
    reason = excluded.reason, hint = excluded.hint
"""
_FAILURES = """
select name, hour, reason, hint, kind
from budget_recovery.capture_failure
where run_id = %s
order by kind desc, name
"""
_NEWEST_RUN = """
select run_id
from (
    select run_id, stored_at as at from budget_recovery.capture
    where captured_at >= %(start)s and captured_at < %(end)s
    union all
    select run_id, failed_at from budget_recovery.capture_failure where hour = %(start)s
) noted
order by at desc, run_id desc
limit 1
"""


@dataclass(frozen=True, slots=True)
class PostgresSnapshots:
    """The stored snapshots of all tenants, and the reports on them."""

    _database: Database

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained snapshot."""
        with self._database.reading() as connection:
            return frozenset(tenant for (tenant,) in connection.execute(_TENANTS))

    def newest_identity(self) -> StoreIdentity | None:
        """Return the identity stored with the newest snapshot of any tenant."""
        with self._database.reading() as connection:
            row = connection.execute(_NEWEST_IDENTITY).fetchone()
        return None if row is None else StoreIdentity(row[0], int(row[1]))

    def commit(
        self,
        snapshot: TenantSnapshot,
        *,
        hour: Hour,
        run_id: str,
        lease: Lease,
        judged: Baseline | None,
    ) -> Baseline:
        """Store a snapshot and accept its identity as the baseline, all or nothing."""
        with self._database.writing() as connection:
            # Locks are taken in this order everywhere: the lease, then the store.
            require_lease(connection, self._database, lease, name=CAPTURE_LEASE)
            store = lock_store(connection)
            facts = Facts(
                # Read only now: the wait for the locks may have taken the rest of the hour.
                now=self._database.moment(connection),
                state=store.state,
                baseline=store.baseline,
                newest=read_newest(connection, snapshot.tenant),
            )
            baseline = admit(snapshot, hour=hour, judged=judged, facts=facts)
            if not snapshot.is_empty:
                insert_snapshot(connection, snapshot, run_id=run_id, stored_at=facts.now)
            if baseline != store.baseline:
                move_baseline(connection, baseline)
            return baseline

    def record_failures(self, failures: Collection[CaptureFailure], *, run_id: str) -> None:
        """Record what a run could not capture."""
        with self._database.writing() as connection, connection.cursor() as cursor:
            failed_at = self._database.moment(connection)
            cursor.executemany(
                _NOTE_FAILURE,
                [
                    {
                        "run_id": storable_id(run_id),
                        "kind": failure.kind.value,
                        "name": failure.name,
                        "hour": failure.hour.start,
                        "failed_at": failed_at,
                        "reason": failure.reason,
                        "hint": failure.hint,
                    }
                    for failure in map(storable_failure, failures)
                ],
            )

    def prune(
        self, tenants: Collection[str], *, policy: RetentionPolicy, now: datetime, lease: Lease
    ) -> PruneReport:
        """Remove records of these tenants past retention, except those that a restore needs."""
        cutoff = policy.cutoff(now)
        with self._database.reading() as connection:
            needed = find_needed(connection, tenants, cutoff=cutoff, now=now)
        with self._database.writing() as connection:
            require_lease(connection, self._database, lease, name=CAPTURE_LEASE)
            # Under the lock, no commit can share a content that is being removed.
            admit_prune(lock_store(connection).state)
            return prune_snapshots(connection, tenants, needed=needed, cutoff=cutoff, now=now)

    def captured_in(self, hour: Hour) -> tuple[CaptureSummary, ...]:
        """Return the snapshots captured in an hour, by tenant and time."""
        with self._database.reading() as connection:
            return _read_summaries(connection, _CAPTURED_IN, (hour.start, hour.end))

    def captured_by(self, run_id: str) -> tuple[CaptureSummary, ...]:
        """Return the snapshots that a run stored, by tenant."""
        with self._database.reading() as connection:
            return _read_summaries(connection, _CAPTURED_BY, (storable_id(run_id),))

    def failures_of(self, run_id: str) -> tuple[CaptureFailure, ...]:
        """Return what a run could not capture: tenants, then keys, each by name."""
        with self._database.reading() as connection:
            rows = connection.execute(_FAILURES, (storable_id(run_id),))
            return tuple(
                CaptureFailure(name, Hour(hour), reason, hint, Uncaptured(kind))
                for name, hour, reason, hint, kind in rows
            )

    def drops_of(self, run_id: str) -> tuple[NamedDrop, ...]:
        """Return the drops in the snapshots of a run; long lists are cut when stored."""
        with self._database.reading() as connection:
            rows = connection.execute(_DROPS, (storable_id(run_id),))
            return tuple(NamedDrop(tenant=tenant, **drop) for tenant, drop in rows)

    def omissions_of(self, run_id: str) -> tuple[NamedOmission, ...]:
        """Return the omissions in the snapshots of a run; long lists are cut when stored."""
        with self._database.reading() as connection:
            rows = connection.execute(_OMISSIONS, (storable_id(run_id),))
            return tuple(NamedOmission(*row) for row in rows)

    def newest_run(self, hour: Hour) -> str | None:
        """Return the newest run that stored a snapshot of an hour, or recorded a failure in it."""
        with self._database.reading() as connection:
            row = connection.execute(_NEWEST_RUN, {"start": hour.start, "end": hour.end}).fetchone()
        return None if row is None else str(row[0])

    def damaged_in(self, hour: Hour) -> tuple[str, ...]:
        """Verify the stored snapshots of an hour; return a sentence for each damage."""
        with self._database.reading() as connection:
            return tuple(find_damage(connection, hour))


def _read_summaries(
    connection: Connection, query: LiteralString, parameters: tuple[object, ...]
) -> tuple[CaptureSummary, ...]:
    with connection.cursor(row_factory=dict_row) as cursor:
        return tuple(_summary(**row) for row in cursor.execute(query, parameters))


def _summary(
    *,
    source: str,
    store_created_at: datetime,
    store_last_sequence: Decimal,
    unreadable: list[dict[str, str]],
    **as_stored: Any,
) -> CaptureSummary:
    return CaptureSummary(
        source=CaptureSource(source),
        identity=StoreIdentity(store_created_at, int(store_last_sequence)),
        unreadable=tuple(UnreadableKey(**each) for each in unreadable),
        **as_stored,
    )


# Sums of bigints are numeric.
_ALL = """
select captured_at, source, count(*), sum(record_count), sum(entry_count), sum(omitted_count),
       sum(unreadable_count), sum(drop_count), count(*) filter (where is_partial),
       bool_or(pruned_at is not null)
from budget_recovery.capture
where %(tenant)s::text is null or tenant = %(tenant)s
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


@dataclass(frozen=True, slots=True)
class PostgresSnapshotList:
    """The stored snapshots, summed up."""

    _database: Database

    def all(self, tenant: str | None) -> tuple[ListedSnapshot, ...]:
        """Return the snapshots of a tenant, or of all tenants by timestamp; newest first."""
        with self._database.reading() as connection:
            return tuple(_listed(row) for row in connection.execute(_ALL, {"tenant": tenant}))

    def budgets_of(self, tenant: str) -> tuple[str, ...]:
        """Return the budgets of a tenant that have a retained record, by name."""
        with self._database.reading() as connection:
            rows = connection.execute(_BUDGETS, {"tenant": tenant})
            return tuple(budget for (budget,) in rows)


def _listed(row: tuple[Any, ...]) -> ListedSnapshot:
    captured_at, source, *counts, is_pruned = row
    tenants, records, entries, omitted, unreadable, drops, partial = map(int, counts)
    return ListedSnapshot(
        captured_at=captured_at.astimezone(UTC),
        source=CaptureSource(source),
        tenants=tenants,
        records=records,
        entries=entries,
        omitted=omitted,
        unreadable=unreadable,
        drops=drops,
        partial=partial,
        is_pruned=is_pruned,
    )
