"""What is missing from an intact store: counts of keys, falls, and the bucket's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from psycopg.types.json import Jsonb

from budget_recovery_dagster.adapters.postgres.database import Connection, Database, storable
from budget_recovery_dagster.adapters.postgres.resets import read_resets
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.falls import (
    FALLS_KEPT_FOR,
    Configuration,
    ConfigurationChange,
    EndedFall,
    Fall,
    JudgedFalls,
    KeyCount,
    TenantWindow,
    changes_between,
    counts_of,
    judge_falls,
)
from budget_recovery_dagster.domain.snapshots import TenantSnapshot
from budget_recovery_dagster.domain.windows import Window, tokens_at

_OPEN_COUNTS = """
select tenant, budget_id, window_token, keys, sequence, counted_at, missing, missing_since,
    is_outdated
from budget_recovery.key_count
where window_token = any(%s)
"""
_TAKE_COUNTS = """
delete from budget_recovery.key_count
where tenant = %s
returning tenant, budget_id, window_token, keys, sequence, counted_at, missing, missing_since,
    is_outdated
"""
_ADD_COUNT = """
insert into budget_recovery.key_count (
    tenant, budget_id, window_token, keys, sequence, counted_at, missing, missing_since, is_outdated
) values (%s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
_RESTORED = """
select budget_id, window_token, max(finished_at)
from budget_recovery.restore_audit
where tenant = %s and raised > 0 and finished_at is not null
group by budget_id, window_token
"""
_UPDATE_COUNTS = """
update budget_recovery.key_count k
set keys = n.keys, sequence = n.sequence, counted_at = n.counted_at, missing = n.missing,
    missing_since = n.missing_since, is_outdated = n.is_outdated
from unnest(
    %s::text[], %s::text[], %s::text[], %s::bigint[], %s::numeric[], %s::timestamptz[],
    %s::bigint[], %s::timestamptz[], %s::boolean[]
) as n (
    tenant, budget_id, window_token, keys, sequence, counted_at, missing, missing_since, is_outdated
)
where k.tenant = n.tenant and k.budget_id = n.budget_id and k.window_token = n.window_token
"""
# A capture removes those of its tenant. Others may only seem closed, by a clock that is ahead.
_PRUNE_COUNTS = """
delete from budget_recovery.key_count k
where k.window_token <> all(%s)
  and not exists (select from budget_recovery.capture c where c.tenant = k.tenant)
"""
_READ_UNTIL = "select deletions_until from budget_recovery.store"
# Captures hold a lock on this row until they commit, so no count changes meanwhile.
_LOCK_COUNTS = f"{_READ_UNTIL} for update"
_MOVE_UNTIL = "update budget_recovery.store set deletions_until = %s"
_OUTDATE_COUNTS = "update budget_recovery.key_count set is_outdated = true"
_FORGET_UNTIL = "update budget_recovery.store set deletions_until = null"
_FALLS = """
select tenant, budget_id, window_token, found_at, judged_at, counters, usage, resets_before
from budget_recovery.usage_fall
where ended_at is null
"""
_FALLS_OF = f"{_FALLS} and tenant = %s"
_OPEN_FALLS = f"""{_FALLS} and window_token = any(%s)
order by usage desc, counters desc, tenant, budget_id, window_token
"""
_KEEP_FALL = """
insert into budget_recovery.usage_fall (
    tenant, budget_id, window_token, found_at, judged_at, counters, usage, resets_before
) values (%s, %s, %s, %s, %s, %s, %s, %s)
on conflict (tenant, budget_id, window_token, found_at) do update
set judged_at = excluded.judged_at, counters = excluded.counters, usage = excluded.usage
"""
_END_FALL = """
update budget_recovery.usage_fall
set ended_at = %s, outcome = %s
where tenant = %s and budget_id = %s and window_token = %s and found_at = %s
"""
_PRUNE_FALLS = "delete from budget_recovery.usage_fall where ended_at < %s"
_TOUCHED = """
select f.tenant, max(t.at)
from budget_recovery.usage_fall f
cross join lateral (
    select a.finished_at as at
    from budget_recovery.restore_audit a
    where a.tenant = f.tenant and a.raised > 0 and a.finished_at > f.judged_at
    union all
    select r.recorded_at
    from budget_recovery.budget_reset r
    where r.tenant = f.tenant and r.recorded_at > f.judged_at
) t
where f.ended_at is null and f.window_token = any(%s)
group by f.tenant
order by f.tenant
"""
_CONFIGURATIONS = """
select found_at, settings
from budget_recovery.bucket_configuration
order by number desc
"""
_ADD_CONFIGURATION = """
insert into budget_recovery.bucket_configuration (found_at, settings) values (%s, %s)
"""
# The newest one is compared with the next, however old it is.
_PRUNE_CONFIGURATIONS = """
delete from budget_recovery.bucket_configuration
where found_at < %s
  and number < (select max(number) from budget_recovery.bucket_configuration)
"""


def record_findings(connection: Connection, snapshot: TenantSnapshot) -> None:
    """Store the falls and counts that follow from a snapshot, in the transaction of its commit."""
    tenant = snapshot.tenant
    known = [_fall(*row) for row in connection.execute(_FALLS_OF, (tenant,))]
    rows = connection.execute(_TAKE_COUNTS, (tenant,))
    counted = {count.at.of: count for count in (_count(*row) for row in rows)}
    is_missing = any(count.missing for count in counted.values())
    # Resets matter only to what is missing, or is found missing now.
    resets = read_resets(connection, tenant) if known or is_missing or snapshot.drops else ()
    restored = _restored_at(connection, tenant) if is_missing else {}
    counts = counts_of(snapshot, counted, restored=restored, resets=resets)
    record_falls(connection, judge_falls(known, snapshot, resets))
    with connection.cursor() as cursor:
        cursor.executemany(_ADD_COUNT, [_count_row(count) for count in counts])


def record_falls(connection: Connection, falls: JudgedFalls) -> None:
    """Store falls that were judged, in the transaction that changes what they rest on."""
    with connection.cursor() as cursor:
        cursor.executemany(_KEEP_FALL, [_fall_row(fall) for fall in falls.still_open])
        cursor.executemany(_END_FALL, [_end_row(each) for each in falls.ended])


def outdate_counts(connection: Connection) -> None:
    """Mark the counts of the store before an incident, in the transaction that ends it.

    Times cannot tell: a clock may be wrong when it ends.
    """
    connection.execute(_OUTDATE_COUNTS)
    connection.execute(_FORGET_UNTIL)


def _restored_at(connection: Connection, tenant: str) -> Mapping[BudgetWindow, datetime]:
    """Return when the counters of each budget and window of a tenant were last raised."""
    rows = connection.execute(_RESTORED, (tenant,))
    return {_window(tenant, budget, token).of: at.astimezone(UTC) for budget, token, at in rows}


@dataclass(frozen=True, slots=True)
class PostgresFalls:
    """The tables of counts, falls and configurations."""

    _database: Database

    def counts(self) -> tuple[tuple[KeyCount, ...], int | None]:
        """Return the counts of open windows, and the sequence of the last known deletions."""
        with self._database.reading() as connection:
            tokens = list(tokens_at(self._database.time_on(connection)))
            rows = connection.execute(_OPEN_COUNTS, (tokens,)).fetchall()
            [(until,)] = connection.execute(_READ_UNTIL).fetchall()
        return tuple(_count(*row) for row in rows), None if until is None else int(until)

    def record_counts(self, counts: Mapping[KeyCount, KeyCount], *, until: int) -> None:
        """Replace counts, and remove those of closed windows and old ended falls."""
        with self._database.writing() as connection:
            connection.execute(_LOCK_COUNTS)
            now = self._database.time_on(connection)
            tokens = list(tokens_at(now))
            rows = connection.execute(_OPEN_COUNTS, (tokens,))
            if {_count(*row) for row in rows} == counts.keys():
                changed = [_count_row(after) for known, after in counts.items() if after != known]
                if changed:
                    columns = [list(column) for column in zip(*changed, strict=True)]
                    connection.execute(_UPDATE_COUNTS, columns)
                connection.execute(_MOVE_UNTIL, (until,))
            connection.execute(_PRUNE_COUNTS, (tokens,))
            connection.execute(_PRUNE_FALLS, (now - FALLS_KEPT_FOR,))

    def open(self) -> tuple[Fall, ...]:
        """Return the open falls whose window has not ended, the largest missing usage first."""
        return tuple(_fall(*row) for row in self._of_open_windows(_OPEN_FALLS))

    def touched(self) -> Mapping[str, datetime]:
        """Return the tenants with an open fall that a restore or a reset may have ended."""
        return {tenant: at.astimezone(UTC) for tenant, at in self._of_open_windows(_TOUCHED)}

    def record_configuration(self, found: Configuration) -> tuple[ConfigurationChange, ...]:
        """Store the configuration of the bucket if it has changed, and return what changed."""
        kept = {storable(name): storable(value) for name, value in found.items()}
        with self._database.writing() as connection:
            now = self._database.time_on(connection)
            row = connection.execute(f"{_CONFIGURATIONS} limit 1").fetchone()
            if row is not None and row[1] == kept:
                return ()
            connection.execute(_ADD_CONFIGURATION, (now, Jsonb(kept)))
            connection.execute(_PRUNE_CONFIGURATIONS, (now - FALLS_KEPT_FOR,))
        return () if row is None else changes_between(row[1], kept, now)

    def configuration_changes(self, since: datetime) -> tuple[ConfigurationChange, ...]:
        """Return the changes that were found after a time, newest first, then by name."""
        rows = self._database.rows(_CONFIGURATIONS)
        return tuple(
            change
            for (found_at, after), (_, before) in pairwise(rows)
            if found_at > since
            for change in changes_between(before, after, found_at.astimezone(UTC))
        )

    def _of_open_windows(self, query: Any) -> list[tuple[Any, ...]]:
        with self._database.reading() as connection:
            tokens = list(tokens_at(self._database.time_on(connection)))
            return connection.execute(query, (tokens,)).fetchall()


def _names(at: TenantWindow) -> tuple[str, str, str]:
    return at.tenant, at.of.budget, at.of.window.token


def _window(tenant: str, budget: str, token: str) -> TenantWindow:
    return TenantWindow(tenant, BudgetWindow(budget, Window.parse(token)))


def _count(tenant: str, budget: str, token: str, *row: Any) -> KeyCount:
    keys, sequence, counted_at, missing, since, is_outdated = row
    return KeyCount(
        _window(tenant, budget, token),
        keys,
        int(sequence),
        counted_at.astimezone(UTC),
        missing,
        since and since.astimezone(UTC),
        is_outdated,
    )


def _count_row(count: KeyCount) -> tuple[Any, ...]:
    return (
        *_names(count.at),
        count.keys,
        count.sequence,
        count.counted_at,
        count.missing,
        count.missing_since,
        count.is_outdated,
    )


def _fall(tenant: str, budget: str, token: str, *row: Any) -> Fall:
    found_at, judged_at, *found = row
    at = _window(tenant, budget, token)
    return Fall(at, found_at.astimezone(UTC), judged_at.astimezone(UTC), *found)


def _fall_row(fall: Fall) -> tuple[Any, ...]:
    amounts = (fall.counters, fall.usage, fall.resets_before)
    return (*_names(fall.at), fall.found_at, fall.judged_at, *amounts)


def _end_row(ended: EndedFall) -> tuple[Any, ...]:
    fall = ended.fall
    return (ended.ended_at, ended.outcome.value, *_names(fall.at), fall.found_at)
