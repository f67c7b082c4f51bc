"""Restore audits in PostgreSQL."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from psycopg.types.json import Jsonb

from budget_recovery_dagster.adapters.postgres.database import Database
from budget_recovery_dagster.adapters.postgres.storable import storable_trail
from budget_recovery_dagster.domain.audit import AuditEntry, AuditTrail, MergedAudits
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.incident import Restored
from budget_recovery_dagster.domain.windows import Window

# One list for each column: a statement for each of very many rows would take minutes.
_INSERT = """
insert into budget_recovery.restore_audit as a (
    at, run_id, who, why, incident_id, finished_at, tenant, budget_id, window_token, point_at,
    entries, planned, raised, kept, skipped, usage_before, usage_after, notes
)
select %s, %s, %s, %s, %s, %s, e.*
from unnest(
    %s::text[], %s::text[], %s::text[], %s::timestamptz[],
    %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
    %s::numeric[], %s::numeric[], %s::jsonb[]
) as e
on conflict on constraint audit_entry_is_one do update
set who = excluded.who, why = excluded.why, incident_id = excluded.incident_id,
    finished_at = excluded.finished_at, point_at = excluded.point_at, entries = excluded.entries,
    planned = excluded.planned, raised = excluded.raised, kept = excluded.kept,
    skipped = excluded.skipped, usage_before = excluded.usage_before,
    usage_after = excluded.usage_after, notes = excluded.notes
"""
# A finished entry is never replaced by an unfinished one.
_BEGIN = f"{_INSERT}where a.finished_at is null"
# A row for each budget and window. Only narrow columns: all of an incident's rows are sorted. An
# unfinished entry counts what the next plan no longer had to raise.
_MERGED = """
with merged as (
    select tenant, budget_id, window_token,
           max(audit_id) filter (where is_last) as newest_id,
           least(sum(counted), max(entries) filter (where is_last))::bigint as raised,
           max(usage_before) filter (where is_first) as usage_before,
           max(usage_after) filter (where is_last) as usage_after,
           bool_or(is_last and notes <> '[]') as has_notes
    from (
        select tenant, budget_id, window_token, audit_id, entries, usage_before, usage_after, notes,
               case
                   when finished_at is not null then raised
                   else greatest(planned - coalesce(lead(planned) over in_time, 0), 0)
               end as counted,
               lag(audit_id) over in_time is null as is_first,
               lead(audit_id) over in_time is null as is_last
        from budget_recovery.restore_audit
        where incident_id = %(incident)s
        window in_time as (partition by tenant, budget_id, window_token order by at, audit_id)
    ) counted_entry
    group by tenant, budget_id, window_token
)"""
_COUNTS = """
select count(distinct tenant), count(*), coalesce(sum(raised), 0)::bigint
from merged
where raised > 0
"""
_RESTORED = f"{_MERGED}{_COUNTS}"
# Each of the largest has the totals; without any, the totals are the only row. The wide notes are
# read only for these.
_TOTALS_AND_LARGEST = """
, totals as (
    select count(*) as windows, coalesce(sum(usage_before), 0) as usage_before,
           coalesce(sum(usage_after), 0) as usage_after
    from merged
),
largest as (
    select *
    from merged
    order by usage_after - usage_before desc, has_notes desc, tenant, budget_id, window_token
    limit %(count)s
)
select t.windows, t.usage_before, t.usage_after,
       a.tenant, a.budget_id, a.window_token, a.point_at, a.entries, a.planned, l.raised, a.kept,
       a.skipped, l.usage_before, l.usage_after, a.notes
from totals t
left join largest l on true
left join budget_recovery.restore_audit a on a.audit_id = l.newest_id
order by l.usage_after - l.usage_before desc, l.has_notes desc, a.tenant, a.budget_id,
         a.window_token
"""
_LARGEST = f"{_MERGED}{_TOTALS_AND_LARGEST}"
# The server's time limit is per statement.
_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class PostgresRestoreAudits:
    """The table of audits: a row for each budget and window of a restore."""

    _database: Database

    def begin(self, trail: AuditTrail) -> None:
        """Store what a restore is about to do; finished entries stay."""
        kept = storable_trail(trail)
        with self._database.writing() as connection:
            for columns in _columns(kept):
                connection.execute(_BEGIN, (*_common(kept), None, *columns))

    def finish(self, trail: AuditTrail) -> None:
        """Store what a restore did, in place of its unfinished entries; new entries are added."""
        kept = storable_trail(trail)
        with self._database.writing() as connection:
            finished_at = self._database.moment(connection)
            for columns in _columns(kept):
                connection.execute(_INSERT, (*_common(kept), finished_at, *columns))

    def restored_in(self, incident_id: str) -> Restored:
        """Count what was raised in an incident; leaderboards are not audited, so 0 boards."""
        with self._database.reading() as connection:
            [counts] = connection.execute(_RESTORED, {"incident": incident_id}).fetchall()
        tenants, windows, counters = counts
        return Restored(tenants=tenants, windows=windows, counters=counters)

    def largest(self, incident_id: str, count: int) -> MergedAudits:
        """Merge the entries of each budget and window in an incident, and return the largest."""
        scope = {"incident": incident_id, "count": count}
        with self._database.reading() as connection:
            rows = connection.execute(_LARGEST, scope).fetchall()
        windows, before, after = rows[0][:3]
        return MergedAudits(
            windows=windows,
            before=before,
            after=after,
            largest=tuple(_entry(*row[3:]) for row in rows if row[3] is not None),
        )


def _common(trail: AuditTrail) -> tuple[object, ...]:
    return trail.at, trail.run_id, trail.who, trail.why, trail.incident_id


def _columns(trail: AuditTrail) -> Iterator[list[list[object]]]:
    """Yield the columns of a trail's entries, in batches."""
    entries = iter(trail.entries)
    while some := list(islice(entries, _AT_ONCE)):
        yield [list(column) for column in zip(*map(_row, some), strict=True)]


def _row(entry: AuditEntry) -> tuple[object, ...]:
    return (
        entry.tenant,
        entry.of.budget,
        entry.of.window.token,
        entry.point_at,
        entry.entries,
        entry.planned,
        entry.raised,
        entry.kept,
        entry.skipped,
        entry.before,
        entry.after,
        Jsonb(list(entry.notes)),
    )


def _entry(
    tenant: str,
    budget: str,
    token: str,
    point_at: datetime,
    *numbers_and_notes: Any,
) -> AuditEntry:
    entries, planned, raised, kept, skipped, before, after, notes = numbers_and_notes
    return AuditEntry(
        tenant=tenant,
        of=BudgetWindow(budget, Window.parse(token)),
        point_at=point_at.astimezone(UTC),
        entries=entries,
        planned=planned,
        raised=raised,
        kept=kept,
        skipped=skipped,
        before=before,
        after=after,
        notes=tuple(notes),
    )
