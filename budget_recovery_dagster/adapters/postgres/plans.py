"""Plans of restores: previews, audits, and the budget definitions that previews use."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from itertools import islice
from operator import attrgetter
from typing import Any, LiteralString

from psycopg.types.json import Jsonb

from budget_recovery_dagster.adapters.postgres.database import (
    MAX_NAMED,
    Connection,
    Database,
    storable,
    storable_id,
)
from budget_recovery_dagster.domain.audits import (
    AuditEntry,
    AuditTrail,
    Bound,
    IncidentAmounts,
    LossAmounts,
    ManualRestore,
    MergedAudits,
    WindowAmounts,
)
from budget_recovery_dagster.domain.counters import (
    BudgetDefinition,
    BudgetWindow,
    Enforcement,
    SplitBy,
    format_usage,
)
from budget_recovery_dagster.domain.incident import Restored
from budget_recovery_dagster.domain.plan import (
    OUTDATED_KEPT_FOR,
    PREVIEWS_KEPT_FOR,
    Action,
    KeptPreview,
    PlannedEntry,
    RecoveryPlan,
    RestoreChoice,
)
from budget_recovery_dagster.domain.store import StoreIdentity
from budget_recovery_dagster.domain.windows import Period, Window

_DEFINE = """
insert into budget_recovery.budget (
    tenant, budget_id, period, limit_amount, split_by, metadata_key, enforcement
) values (%s, %s, %s, %s, %s, %s, %s)
on conflict (tenant, budget_id, period) do update
set limit_amount = excluded.limit_amount, split_by = excluded.split_by,
    metadata_key = excluded.metadata_key, enforcement = excluded.enforcement
"""
_DEFINITIONS = """
select budget_id, period, limit_amount, split_by, enforcement, metadata_key
from budget_recovery.budget
where tenant = %s
order by budget_id, period
"""


@dataclass(frozen=True, slots=True)
class PostgresBudgets:
    """The table of budget definitions."""

    _database: Database

    def define(self, definitions: Collection[BudgetDefinition]) -> None:
        """Add definitions, or replace those of the same tenant, budget and period."""
        with self._database.writing() as connection, connection.cursor() as cursor:
            cursor.executemany(_DEFINE, [_definition_row(each) for each in definitions])

    def of_tenant(self, tenant: str) -> tuple[BudgetDefinition, ...]:
        """Return the definitions of a tenant's budgets, by budget and period."""
        with self._database.reading() as connection:
            return tuple(
                BudgetDefinition(
                    tenant,
                    budget,
                    Period(period),
                    limit,
                    SplitBy(split_by),
                    Enforcement(enforcement),
                    metadata_key,
                )
                for budget, period, limit, split_by, enforcement, metadata_key in (
                    connection.execute(_DEFINITIONS, (tenant,))
                )
            )


_definition_row = attrgetter(
    "tenant",
    "budget",
    "period.value",
    "limit",
    "split_by.value",
    "metadata_key",
    "enforcement.value",
)


_DROP_OLD = "delete from budget_recovery.restore_preview where at < %s"
_ADD_PREVIEW = """
insert into budget_recovery.restore_preview (
    preview_id, at, previewed_by, tenant, budget_id, captured_at, despite_resets,
    store_created_at, store_last_sequence, is_complete
) values (%s, %s, %s, %s, %s, %s, %s, %s, %s, false)
"""
_ADD_WINDOW = """
insert into budget_recovery.restore_preview_window (
    preview_id, tenant, budget_id, window_token, entities, live, recorded, actions
) values (%s, %s, %s, %s, %s, %s::numeric[], %s::numeric[], %s)
"""
_COMPLETE = "update budget_recovery.restore_preview set is_complete = true where preview_id = %s"
_DROP_OUTDATED = """
delete from budget_recovery.restore_preview old
using budget_recovery.restore_preview new
where new.preview_id = %s
  and old.preview_id <> new.preview_id
  and old.at < %s
  and old.tenant is not distinct from new.tenant
  and old.budget_id is not distinct from new.budget_id
  and old.captured_at is not distinct from new.captured_at
  and old.despite_resets = new.despite_resets
"""
_COMPLETED = """
select preview_id, at, previewed_by, tenant, budget_id, captured_at, despite_resets,
       store_created_at, store_last_sequence
from budget_recovery.restore_preview
where is_complete
  and at >= %s
"""
_PREVIEW = f"{_COMPLETED}and preview_id = %s"
_NEWEST_PREVIEW = f"""{_COMPLETED}
  and tenant is not distinct from %s
  and budget_id is not distinct from %s
  and captured_at is not distinct from %s
  and despite_resets = %s
order by at desc, preview_id
limit 1
"""
_TENANTS = """
select distinct tenant from budget_recovery.restore_preview_window where preview_id = %s
"""
_PLANNED = """
select budget_id, window_token, entities, live, recorded, actions
from budget_recovery.restore_preview_window
where preview_id = %s and tenant = %s
order by budget_id, window_token
"""


@dataclass(frozen=True, slots=True)
class PostgresPreviews:
    """The tables of previews and their plans."""

    _database: Database

    def begin(self, preview: KeptPreview) -> None:
        """Insert a preview that is not complete, after removing those that are too old."""
        identity = preview.identity
        with self._database.writing() as connection:
            connection.execute(_DROP_OLD, (self._oldest(connection),))
            connection.execute(
                _ADD_PREVIEW,
                (
                    preview.preview_id,
                    preview.at,
                    storable(preview.by),
                    *_choice_row(preview.choice),
                    identity.created_at,
                    identity.last_sequence,
                ),
            )

    def add(self, preview_id: str, tenant: str, entries: Sequence[PlannedEntry]) -> None:
        """Insert a row for each budget and window of the plan, with a list for each fact."""
        by_window = RecoveryPlan(tenant, tuple(entries)).by_window()
        with self._database.writing() as connection, connection.cursor() as cursor:
            cursor.executemany(
                _ADD_WINDOW,
                [
                    (
                        preview_id,
                        tenant,
                        of.budget,
                        of.window.token,
                        [entry.entity or "" for entry in planned],
                        [entry.live for entry in planned],
                        [entry.recorded for entry in planned],
                        [entry.action.value for entry in planned],
                    )
                    for of, planned in by_window.items()
                ],
            )

    def complete(self, preview_id: str) -> None:
        """Complete a preview, and remove outdated ones with the same choice."""
        with self._database.writing() as connection:
            connection.execute(_COMPLETE, (preview_id,))
            oldest = self._database.time_on(connection) - OUTDATED_KEPT_FOR
            connection.execute(_DROP_OUTDATED, (preview_id, oldest))

    def get(self, preview_id: str) -> KeptPreview | None:
        """Return a complete preview that is not too old."""
        return self._read(_PREVIEW, preview_id)

    def newest(self, choice: RestoreChoice) -> KeptPreview | None:
        """Return the newest complete preview with this choice that is not too old."""
        return self._read(_NEWEST_PREVIEW, *_choice_row(choice))

    def tenants_of(self, preview_id: str) -> frozenset[str]:
        """Return the tenants with a stored plan."""
        with self._database.reading() as connection:
            return frozenset(tenant for (tenant,) in connection.execute(_TENANTS, (preview_id,)))

    def entries_of(self, preview_id: str, tenant: str) -> tuple[PlannedEntry, ...]:
        """Return the plan of a tenant, by budget, window and entity."""
        with self._database.reading() as connection:
            rows = connection.execute(_PLANNED, (preview_id, tenant)).fetchall()
        return tuple(entry for row in rows for entry in _entries(*row))

    def _read(self, query: LiteralString, *scope: object) -> KeptPreview | None:
        with self._database.reading() as connection:
            row = connection.execute(query, (self._oldest(connection), *scope)).fetchone()
        if row is None:
            return None
        found_id, at, by, tenant, budget, captured_at, despite_resets, *identity = row
        snapshot = captured_at and captured_at.astimezone(UTC)
        created_at, last_sequence = identity
        return KeptPreview(
            found_id,
            at.astimezone(UTC),
            by,
            RestoreChoice(tenant, budget, snapshot, despite_resets),
            StoreIdentity(created_at.astimezone(UTC), int(last_sequence)),
        )

    def _oldest(self, connection: Connection) -> datetime:
        return self._database.time_on(connection) - PREVIEWS_KEPT_FOR


_choice_row = attrgetter("tenant", "budget", "snapshot", "despite_resets")


def _entries(budget: str, token: str, *lists: list[Any]) -> Iterator[PlannedEntry]:
    of = BudgetWindow(budget, Window.parse(token))
    for entity, live, recorded, action in zip(*lists, strict=True):
        yield PlannedEntry(of, entity or None, recorded, live, Action(action))


# One list for each column: a statement for each of very many rows would take minutes.
_FINISH = """
insert into budget_recovery.restore_audit as a (
    at, run_id, who, why, incident_id, finished_at, tenant, budget_id, window_token, point_at,
    entries, planned, raised, kept, skipped, usage_before, usage_after, wrote_board, notes,
    usage_restored, usage_counted, counted_bound, shares, losses
)
select %s, %s, %s, %s, %s, %s, e.*
from unnest(
    %s::text[], %s::text[], %s::text[], %s::timestamptz[],
    %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
    %s::numeric[], %s::numeric[], %s::boolean[], %s::jsonb[],
    %s::numeric[], %s::numeric[], %s::text[], %s::jsonb[], %s::bigint[]
) as e
on conflict on constraint audit_entry_is_one do update
set who = excluded.who, why = excluded.why, incident_id = excluded.incident_id,
    finished_at = excluded.finished_at, point_at = excluded.point_at, entries = excluded.entries,
    planned = excluded.planned, raised = excluded.raised, kept = excluded.kept,
    skipped = excluded.skipped, usage_before = excluded.usage_before,
    usage_after = excluded.usage_after, wrote_board = excluded.wrote_board, notes = excluded.notes,
    usage_restored = excluded.usage_restored, usage_counted = excluded.usage_counted,
    counted_bound = excluded.counted_bound, shares = excluded.shares, losses = excluded.losses
"""
# A finished entry is never replaced by an unfinished one.
_BEGIN = f"{_FINISH}where a.finished_at is null"
# A row for each budget and window of an incident, or of one run. Only narrow columns: all of these
# rows are sorted. An unfinished entry counts what the next plan no longer had to raise.
_MERGED = """
with merged as (
    select tenant, budget_id, window_token,
           max(audit_id) filter (where is_last) as newest_id,
           (array_agg(audit_id order by at desc, audit_id desc)
               filter (where counted_bound is not null))[1] as amounts_id,
           least(sum(counted), max(entries) filter (where is_last))::bigint as raised,
           max(usage_before) filter (where is_first) as usage_before,
           max(usage_after) filter (where is_last) as usage_after,
           bool_or(wrote_board) as wrote_board,
           bool_or(is_last and notes <> '[]') as has_notes
    from (
        select tenant, budget_id, window_token, audit_id, at, entries, usage_before, usage_after,
               wrote_board, notes, counted_bound,
               case
                   when finished_at is not null then raised
                   else greatest(planned - coalesce(lead(planned) over in_time, 0), 0)
               end as counted,
               lag(audit_id) over in_time is null as is_first,
               lead(audit_id) over in_time is null as is_last
        from budget_recovery.restore_audit
        where incident_id = %(incident)s or run_id = %(run)s
        window in_time as (partition by tenant, budget_id, window_token order by at, audit_id)
    ) counted_entry
    group by tenant, budget_id, window_token
)"""
_COUNTS = """
select count(distinct tenant) filter (where raised > 0), count(*) filter (where raised > 0),
       coalesce(sum(raised), 0)::bigint, count(*) filter (where wrote_board)
from merged
"""
_RESTORED = f"{_MERGED}{_COUNTS}"
_WINDOWS_BEGUN = """
select distinct budget_id, window_token
from budget_recovery.restore_audit
where incident_id = %s
  and tenant = %s
  and (raised > 0 or (finished_at is null and planned > 0))
"""
# Each of the largest has the count; without any, the count is the only row. The wide notes are
# read only for these.
_TOTALS_AND_LARGEST = """
, totals as (
    select count(*) as windows from merged
),
largest as (
    select *
    from merged
    order by usage_after - usage_before desc, has_notes desc, tenant, budget_id, window_token
    limit %(count)s
)
select t.windows, a.tenant, a.budget_id, a.window_token, a.point_at, a.entries, a.planned,
       l.raised, a.kept, a.skipped, l.usage_before, l.usage_after, l.wrote_board, a.notes,
       m.usage_restored, m.usage_counted, m.counted_bound, m.shares, m.finished_at is null,
       m.losses
from totals t
left join largest l on true
left join budget_recovery.restore_audit a on a.audit_id = l.newest_id
left join budget_recovery.restore_audit m on m.audit_id = l.amounts_id
order by l.usage_after - l.usage_before desc, l.has_notes desc, a.tenant, a.budget_id,
         a.window_token
"""
_LARGEST = f"{_MERGED}{_TOTALS_AND_LARGEST}"
_AMOUNTS_OF = """
select distinct on (budget_id, window_token) budget_id, window_token,
       usage_restored, usage_counted, counted_bound, shares, finished_at is null, losses
from budget_recovery.restore_audit
where incident_id = %s and tenant = %s and counted_bound is not null
order by budget_id, window_token, at desc, audit_id desc
"""
# Windows in which nothing was done, such as those that only a verification compared, cost nothing.
_AMOUNTS = """
, amounts as (
    select l.tenant, l.budget_id, l.window_token,
           coalesce(m.usage_restored, 0) as restored, m.usage_counted as counted,
           coalesce(m.counted_bound, 'unknown') as bound,
           coalesce(m.finished_at is null, false) as is_begun
    from merged l
    left join budget_recovery.restore_audit m on m.audit_id = l.amounts_id
    where l.amounts_id is not null or l.raised > 0
)
"""
_COUNT_AMOUNTS = """
select count(*) filter (where restored > 0), count(*) filter (where counted > 0),
       count(*) filter (where bound = 'unknown')
from amounts
"""
_BY_AMOUNT: LiteralString = """
select tenant, budget_id, window_token, restored, counted, bound, is_begun
from amounts
where {0} > 0
order by {0} desc, tenant, budget_id, window_token
limit %(count)s
"""
_AMOUNT_COUNTS = f"{_MERGED}{_AMOUNTS}{_COUNT_AMOUNTS}"
_LARGEST_RESTORED = _MERGED + _AMOUNTS + _BY_AMOUNT.format("restored")
_LARGEST_COUNTED = _MERGED + _AMOUNTS + _BY_AMOUNT.format("counted")
# An automatic restore records its attempt before it audits anything.
_MANUAL = """
select run_id, min(at), min(who), min(why), min(incident_id),
       coalesce(array_agg(distinct tenant) filter (where finished_at is null and planned > 0), '{}')
from budget_recovery.restore_audit a
where at > %s
  and not exists (select from budget_recovery.restore_attempt t where t.run_id = a.run_id)
group by run_id
having bool_or(raised > 0 or (finished_at is null and planned > 0))
order by max(audit_id) desc
limit %s
"""
# The server's time limit is per statement.
_AT_ONCE = 10_000


def storable_trail(trail: AuditTrail) -> AuditTrail:
    """Return the audit trail of a restore in its stored form."""
    return replace(
        trail,
        run_id=storable_id(trail.run_id),
        who=storable(trail.who),
        why=storable(trail.why),
        entries=tuple(
            replace(entry, notes=_storable_notes(entry.notes)) for entry in trail.entries
        ),
    )


def _storable_notes(notes: Sequence[str]) -> tuple[str, ...]:
    kept = tuple(storable(note) for note in notes[:MAX_NAMED])
    left = len(notes) - len(kept)
    return (*kept, f"and {left} more") if left else kept


@dataclass(frozen=True, slots=True)
class PostgresRestoreAudits:
    """The table of audits: a row for each budget and window of a restore."""

    _database: Database

    def begin(self, trail: AuditTrail) -> None:
        """Insert what a restore is about to do, or replace unfinished rows; finished ones stay."""
        with self._database.writing() as connection:
            _store(connection, _BEGIN, trail, finished_at=None)

    def finish(self, trail: AuditTrail) -> None:
        """Insert what a restore did, or replace its rows."""
        with self._database.writing() as connection:
            _store(connection, _FINISH, trail, finished_at=self._database.time_on(connection))

    def restored_in(self, incident_id: str) -> Restored:
        """Count what was raised in an incident."""
        with self._database.reading() as connection:
            return _restored(connection, _scope(incident=incident_id))

    def windows_begun(self, incident_id: str, tenant: str) -> frozenset[BudgetWindow]:
        """Return a tenant's windows in which restores of an incident raised counters, or began."""
        rows = self._database.rows(_WINDOWS_BEGUN, (incident_id, tenant))
        return frozenset(BudgetWindow(budget, Window.parse(token)) for budget, token in rows)

    def largest(self, incident_id: str, count: int) -> MergedAudits:
        """Merge the entries of each budget and window in an incident, and return the largest."""
        with self._database.reading() as connection:
            return _merged(connection, _scope(incident=incident_id), count)

    def manual_restores(self, since: datetime, count: int) -> tuple[ManualRestore, ...]:
        """Return the newest manual restores that began after a time, newest first."""
        return tuple(
            ManualRestore(run_id, at.astimezone(UTC), who, why, incident_id, tuple(unfinished))
            for run_id, at, who, why, incident_id, unfinished in (
                self._database.rows(_MANUAL, (since, count))
            )
        )

    def raised_by(self, run_id: str, count: int) -> tuple[Restored, MergedAudits]:
        """Return what one run or command raised, and at most ``count`` of the largest entries."""
        scope = _scope(run=run_id)
        with self._database.reading() as connection:
            return _restored(connection, scope), _merged(connection, scope, count)

    def amounts_of(self, incident_id: str, tenant: str) -> Mapping[BudgetWindow, LossAmounts]:
        """Return the amounts of a tenant's windows by their newest rows that have amounts."""
        rows = self._database.rows(_AMOUNTS_OF, (incident_id, tenant))
        return {
            BudgetWindow(budget, Window.parse(token)): found
            for budget, token, *amounts in rows
            if (found := _amounts(*amounts)) is not None
        }

    def amounts_in(self, incident_id: str, count: int) -> IncidentAmounts:
        """Return what an incident cost, by the newest rows of its windows that have amounts."""
        scope = {**_scope(incident=incident_id), "count": count}
        with self._database.reading() as connection:
            [counts] = connection.execute(_AMOUNT_COUNTS, scope).fetchall()
            restored = connection.execute(_LARGEST_RESTORED, scope).fetchall()
            counted = connection.execute(_LARGEST_COUNTED, scope).fetchall()
        restored_windows, counted_windows, unknown_windows = counts
        return IncidentAmounts(
            restored_windows,
            counted_windows,
            unknown_windows,
            tuple(_window_amounts(*row) for row in restored),
            tuple(_window_amounts(*row) for row in counted),
        )


def _scope(*, incident: str | None = None, run: str | None = None) -> dict[str, object]:
    return {"incident": incident, "run": run}


def _restored(connection: Connection, scope: Mapping[str, object]) -> Restored:
    [counts] = connection.execute(_RESTORED, scope).fetchall()
    return Restored(*counts)


def _merged(connection: Connection, scope: Mapping[str, object], count: int) -> MergedAudits:
    rows = connection.execute(_LARGEST, {**scope, "count": count}).fetchall()
    largest = tuple(_entry(*row[1:]) for row in rows if row[1] is not None)
    return MergedAudits(rows[0][0], largest)


def _store(
    connection: Connection, query: LiteralString, trail: AuditTrail, *, finished_at: datetime | None
) -> None:
    kept = storable_trail(trail)
    common = (kept.at, kept.run_id, kept.who, kept.why, kept.incident_id, finished_at)
    entries = iter(kept.entries)
    while some := list(islice(entries, _AT_ONCE)):
        rows = [
            (*_audit_row(entry), Jsonb(list(entry.notes)), *_amounts_row(entry.amounts))
            for entry in some
        ]
        columns = [list(column) for column in zip(*rows, strict=True)]
        connection.execute(query, (*common, *columns))


# In the order of the columns.
_audit_row = attrgetter(
    "tenant",
    "of.budget",
    "of.window.token",
    "point_at",
    "entries",
    "planned",
    "raised",
    "kept",
    "skipped",
    "before",
    "after",
    "wrote_board",
)


def _amounts_row(amounts: LossAmounts | None) -> tuple[Any, ...]:
    if amounts is None:
        return (None,) * 5
    shares = amounts.shares
    kept = None
    if shares is not None:
        kept = Jsonb({entity or "": format_usage(share) for entity, share in shares.items()})
    return amounts.restored, amounts.counted, amounts.bound.value, kept, amounts.losses


def _amounts(
    restored: Decimal | None, counted: Decimal | None, bound: str | None, *rest: Any
) -> LossAmounts | None:
    if restored is None or bound is None:
        return None
    shares, is_begun, losses = rest
    known = None
    if shares is not None:
        known = {entity or None: Decimal(share) for entity, share in shares.items()}
    return LossAmounts(restored, counted, Bound(bound), known, is_begun, losses)


def _window_amounts(
    tenant: str, budget: str, token: str, restored: Decimal, *rest: Any
) -> WindowAmounts:
    counted, bound, is_begun = rest
    of, shown = BudgetWindow(budget, Window.parse(token)), Bound(bound)
    return WindowAmounts(tenant, of, restored, counted, shown.from_below if is_begun else shown)


def _entry(tenant: str, budget: str, token: str, point_at: datetime, *rest: Any) -> AuditEntry:
    *facts, wrote_board, notes = rest[:-_AMOUNT_COLUMNS]
    of = BudgetWindow(budget, Window.parse(token))
    amounts = _amounts(*rest[-_AMOUNT_COLUMNS:])
    return AuditEntry(
        tenant, of, point_at.astimezone(UTC), *(*facts, tuple(notes), wrote_board, amounts)
    )


_AMOUNT_COLUMNS = 6
