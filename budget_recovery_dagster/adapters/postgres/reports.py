"""Reports of captures: what runs captured, missed and dropped, and damage to it since."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, LiteralString

from psycopg.rows import dict_row

from budget_recovery_dagster.adapters.postgres.contents import as_captured
from budget_recovery_dagster.adapters.postgres.database import Connection, Database, storable_id
from budget_recovery_dagster.domain.counters import UnreadableKey
from budget_recovery_dagster.domain.recovery_point import latest_time
from budget_recovery_dagster.domain.snapshots import (
    CaptureFailure,
    CaptureSource,
    CaptureSummary,
    FailingTenant,
    NamedDrop,
    NamedOmission,
    RecordedRun,
    RunOutcome,
    RunResult,
    Stopped,
    Uncaptured,
)
from budget_recovery_dagster.domain.store import StoreIdentity
from budget_recovery_dagster.domain.windows import Hour, InvalidWindowError, Window

_SUMMARIES = """
select tenant, captured_at, source, store_created_at, store_last_sequence, run_id,
       record_count, entry_count, omitted_count, drop_count, most_missing, unreadable_count,
       unreadable, is_partial,
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
order by (d.value ->> 'before')::numeric - coalesce((d.value ->> 'after')::numeric, 0) desc,
         c.tenant, c.captured_at, d.position
"""
_OMISSIONS = """
select r.tenant, o.value ->> 'key', o.value ->> 'reason'
from budget_recovery.capture c
join budget_recovery.budget_record r using (tenant, captured_at)
cross join lateral jsonb_array_elements(r.omitted) with ordinality as o (value, position)
where c.run_id = %s and c.omitted_count > 0
order by r.tenant, r.captured_at, r.budget_id, r.window_token, o.position
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
_NEWEST_SNAPSHOTS = """
select distinct on (tenant) tenant, captured_at
from budget_recovery.capture
order by tenant, captured_at > %(latest)s, commit_number desc
"""
_FAILING = """
select o.tenant, newest.captured_at, o.at, o.reason, o.hint
from budget_recovery.tenant_outcome o
left join lateral (
    select c.captured_at
    from budget_recovery.capture c
    where c.tenant = o.tenant
    order by captured_at > %(latest)s, commit_number desc
    limit 1
) newest on true
where o.outcome = 'failed'
order by o.tenant
"""
_ABSENT = "select tenant from budget_recovery.tenant_outcome where outcome = 'absent'"
_NEWEST_RUNS = """
select run_id, hour, started_at, ended_at,
       outcome, stored, absent, failed, code, reason, hint, clock_skew
from budget_recovery.capture_run
order by number desc
limit %s
"""


@dataclass(frozen=True, slots=True)
class PostgresCaptureReports:
    """Reports from the tables of captures, records and failures."""

    _database: Database

    def captured_in(self, hour: Hour) -> tuple[CaptureSummary, ...]:
        """Return the snapshots captured in an hour, by tenant and time."""
        return self._summaries(_CAPTURED_IN, hour.start, hour.end)

    def captured_by(self, run_id: str) -> tuple[CaptureSummary, ...]:
        """Return the snapshots that a run stored, by tenant."""
        return self._summaries(_CAPTURED_BY, storable_id(run_id))

    def failures_of(self, run_id: str) -> tuple[CaptureFailure, ...]:
        """Return what a run could not capture: tenants, then keys, each by name."""
        return tuple(
            CaptureFailure(name, Hour(hour), reason, hint, Uncaptured(kind))
            for name, hour, reason, hint, kind in self._database.rows(
                _FAILURES, (storable_id(run_id),)
            )
        )

    def drops_of(self, run_id: str) -> tuple[NamedDrop, ...]:
        """Return the drops in the snapshots of a run, the largest missing usage first."""
        rows = self._database.rows(_DROPS, (storable_id(run_id),))
        return tuple(NamedDrop(tenant=tenant, **drop) for tenant, drop in rows)

    def omissions_of(self, run_id: str) -> tuple[NamedOmission, ...]:
        """Return the omissions in the snapshots of a run; long lists are cut when stored."""
        rows = self._database.rows(_OMISSIONS, (storable_id(run_id),))
        return tuple(NamedOmission(*row) for row in rows)

    def newest_run(self, hour: Hour) -> str | None:
        """Return the newest run that stored a snapshot of an hour, or recorded a failure in it."""
        rows = self._database.rows(_NEWEST_RUN, {"start": hour.start, "end": hour.end})
        return str(rows[0][0]) if rows else None

    def newest_snapshots(self) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest snapshot, for all that have one."""
        rows = self._rows_of_now(_NEWEST_SNAPSHOTS)
        return {tenant: captured_at.astimezone(UTC) for tenant, captured_at in rows}

    def failing(self) -> Mapping[str, FailingTenant]:
        """Return the tenants whose last capture failed, by name."""
        return {
            tenant: FailingTenant(newest and newest.astimezone(UTC), at.astimezone(UTC), *why)
            for tenant, newest, at, *why in self._rows_of_now(_FAILING)
        }

    def absent(self) -> frozenset[str]:
        """Return the tenants whose last capture found nothing of them, with nothing expected."""
        return frozenset(tenant for (tenant,) in self._database.rows(_ABSENT))

    def newest_runs(self, count: int) -> tuple[RecordedRun, ...]:
        """Return the newest captures, newest first."""
        return tuple(_run(*row) for row in self._database.rows(_NEWEST_RUNS, (count,)))

    def damaged_in(
        self, hour: Hour, *, on_progress: Callable[[str], None] = lambda _: None
    ) -> tuple[str, ...]:
        """Verify the stored snapshots of an hour; return a sentence for each damage."""
        with self._database.reading() as connection:
            return tuple(_find_damage(connection, hour, on_progress))

    def _rows_of_now(self, query: LiteralString) -> list[tuple[Any, ...]]:
        """Return the rows of a query that depends on what is in the future."""
        with self._database.reading() as connection:
            latest = latest_time(self._database.time_on(connection))
            return connection.execute(query, {"latest": latest}).fetchall()

    def _summaries(self, query: LiteralString, *scope: object) -> tuple[CaptureSummary, ...]:
        with (
            self._database.reading() as connection,
            connection.cursor(row_factory=dict_row) as cursor,
        ):
            rows = cursor.execute(query, scope).fetchall()
        return tuple(
            CaptureSummary(
                source=CaptureSource(row.pop("source")),
                identity=StoreIdentity(
                    row.pop("store_created_at"), int(row.pop("store_last_sequence"))
                ),
                unreadable=tuple(UnreadableKey(**key) for key in row.pop("unreadable")),
                **row,
            )
            for row in rows
        )


def _run(
    run_id: str, hour: datetime, started_at: datetime, ended_at: datetime | None, *result: Any
) -> RecordedRun:
    started_at = started_at.astimezone(UTC)
    if ended_at is None:
        return RecordedRun(run_id, Hour(hour), started_at)
    outcome, stored, absent, failed, *error, clock_skew = result
    return RecordedRun(
        run_id,
        Hour(hour),
        started_at,
        ended_at.astimezone(UTC),
        RunResult(
            outcome=RunOutcome(outcome),
            stored=stored,
            absent=absent,
            failed=failed,
            error=None if error[0] is None else Stopped(*error),
            clock_skew=clock_skew,
        ),
    )


_CAPTURES = """
select tenant, captured_at, pruned_at is not null, record_count, entry_count, omitted_count
from budget_recovery.capture
where captured_at >= %s and captured_at < %s
order by tenant, captured_at
"""
# Start and end as text: a damaged one may be a time that Python cannot represent, such as infinity.
_RECORDS = """
select r.budget_id, r.window_token, r.window_start::text, r.window_end::text, r.omitted_count,
       c.content_hash, c.entities, c.usages
from budget_recovery.budget_record r
left join budget_recovery.budget_content c using (content_id)
where r.tenant = %s and r.captured_at = %s
order by r.budget_id, r.window_token
"""
_COUNTED = ("records", "counters", "omitted counters")


def _find_damage(
    connection: Connection, hour: Hour, on_progress: Callable[[str], None]
) -> Iterator[str]:
    """Yield a sentence for each damage in the snapshots of an hour."""
    captures = connection.execute(_CAPTURES, (hour.start, hour.end)).fetchall()
    for number, (tenant, captured_at, *captured) in enumerate(captures, 1):
        on_progress(f"{hour}: snapshot {number} of {len(captures)} is verified.")
        name = f"tenant {tenant!r}, {captured_at:%Y-%m-%d %H:%M:%S} UTC"
        for sentence in _damage(connection, tenant, captured_at, *captured):
            yield f"{name}: {sentence}."


def _damage(
    connection: Connection, tenant: str, captured_at: datetime, *captured: int
) -> Iterator[str]:
    """Compare the records of a snapshot with their checksums and with what was captured."""
    is_pruned, *expected_counts = captured
    records = entry_count = omitted_count = 0
    rows = connection.execute(_RECORDS, (tenant, captured_at))
    for budget, token, start, end, omitted, content_hash, entities, usages in rows:
        records += 1
        omitted_count += omitted
        entry_count += len(entities or ())
        name = f"budget {budget!r}, window {token}"
        if (damage := _window_damage(token, start, end)) is not None:
            yield f"{name}: {damage}"
        if as_captured(content_hash, entities, usages) is None:
            yield f"{name}: usages differ from the capture (checksum mismatch)"
    stored = (records, entry_count, omitted_count)
    for what, count, expected in zip(_COUNTED, stored, expected_counts, strict=True):
        # Retention removes whole records from an old snapshot, and marks it.
        if count > expected or (count < expected and not is_pruned):
            yield f"{count} {what} are stored, but {expected} were captured"


def _window_damage(token: str, start: str | None, end: str | None) -> str | None:
    try:
        window = Window.parse(token)
    except InvalidWindowError:
        return "not a window of the calendar"
    if (_as_text(window.start), _as_text(window.end)) != (start, end):
        return "stored with the start or end of another window"
    return None


def _as_text(at: datetime | None) -> str | None:
    """Write a time in UTC in the form of the server in our sessions."""
    return None if at is None else f"{at.replace(tzinfo=None).isoformat(sep=' ')}+00"
