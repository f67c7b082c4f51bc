"""Verifies the stored snapshots of an hour, and reads complete retained snapshots."""

from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from budget_recovery_dagster.adapters.postgres.contents import as_captured, stream_verified
from budget_recovery_dagster.adapters.postgres.database import Connection, Database
from budget_recovery_dagster.domain.counters import BudgetWindow, Usages
from budget_recovery_dagster.domain.snapshots import CaptureSource, StoredRecord
from budget_recovery_dagster.domain.windows import Hour, InvalidWindowError, Window
from budget_recovery_dagster.errors import DatabaseError

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
_Counts = tuple[int, int, int]
_COUNTED = ("records", "counters", "omitted counters")


def find_damage(connection: Connection, hour: Hour) -> Iterator[str]:
    """Yield a sentence for each damage in the snapshots of an hour."""
    for tenant, captured_at, is_pruned, *captured in connection.execute(
        _CAPTURES, (hour.start, hour.end)
    ).fetchall():
        name = f"tenant {tenant!r}, {captured_at:%Y-%m-%d %H:%M:%S} UTC"
        for sentence in _damage(connection, tenant, captured_at, is_pruned, tuple(captured)):
            yield f"{name}: {sentence}."


def _damage(
    connection: Connection,
    tenant: str,
    captured_at: datetime,
    is_pruned: bool,  # noqa: FBT001 - a column of the row
    captured: _Counts,
) -> Iterator[str]:
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
    for what, count, expected in zip(_COUNTED, stored, captured, strict=True):
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


def _as_text(moment: datetime | None) -> str | None:
    """Write a time in UTC in the form of the server in our sessions."""
    return None if moment is None else f"{moment.replace(tzinfo=None).isoformat(sep=' ')}+00"


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


class RecordRow(NamedTuple):
    """A stored record without its usages."""

    captured_at: datetime
    source: str
    budget: str
    window: str
    is_truncated: bool
    is_partial: bool
    omitted_count: int
    content_id: int

    @property
    def of(self) -> BudgetWindow:
        """The budget and window of the record."""
        return BudgetWindow(self.budget, Window.parse(self.window))

    def holding(self, usages: Usages) -> StoredRecord:
        """Return the record with usages."""
        return StoredRecord(
            captured_at=self.captured_at.astimezone(UTC),
            source=CaptureSource(self.source),
            of=self.of,
            usages=usages,
            is_truncated=self.is_truncated,
            is_partial=self.is_partial,
            omitted_count=self.omitted_count,
        )


@dataclass(frozen=True, slots=True)
class PostgresRetainedSnapshots:
    """The complete snapshots within retention."""

    _database: Database

    def tenants_in(self, hour: Hour) -> tuple[str, ...]:
        """Return the tenants that have a retained snapshot of an hour, by name."""
        with self._database.reading() as connection:
            rows = connection.execute(_TENANTS_IN, (hour.start, hour.end))
            return tuple(tenant for (tenant,) in rows)

    def hours_of(self, tenants: Collection[str]) -> Mapping[str, frozenset[Hour]]:
        """Return the hours in which these tenants have a retained snapshot; none: no key."""
        hours: defaultdict[str, set[Hour]] = defaultdict(set)
        with self._database.reading() as connection:
            for tenant, start in connection.execute(_HOURS_OF, (list(tenants),)):
                hours[tenant].add(Hour(start))
        return {tenant: frozenset(each) for tenant, each in hours.items()}

    @contextmanager
    def records_of(self, tenant: str, hour: Hour) -> Iterator[Iterator[StoredRecord] | None]:
        """Yield the records of a tenant's retained snapshots of an hour, read as they are used."""
        scope = {"tenant": tenant, "start": hour.start, "end": hour.end}
        with self._database.reading() as connection:
            if connection.execute(_IS_RETAINED, scope).fetchone() is None:
                yield None
                return
            rows = [RecordRow(*row) for row in connection.execute(_STORED_RECORDS, scope)]
            # Closed before the transaction, even if the reader stops early.
            with closing(_records(connection, tenant, rows)) as records:
                yield records


def _records(connection: Connection, tenant: str, rows: list[RecordRow]) -> Generator[StoredRecord]:
    contents = stream_verified(connection, [row.content_id for row in rows])
    for row, (_, usages) in zip(rows, contents, strict=True):
        if usages is None:
            raise DatabaseError(
                f"A stored record is damaged (checksum mismatch): tenant {tenant!r},"
                f" {row.captured_at:%Y-%m-%d %H:%M:%S} UTC, budget {row.budget!r},"
                f" window {row.window}.",
                "restore the database from its own backup; other snapshots are not affected.",
            )
        yield row.holding(usages)
