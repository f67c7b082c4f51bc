"""Recorded resets, and the windows from which they keep usages."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from budget_recovery_dagster.adapters.postgres.database import Connection, Database, storable
from budget_recovery_dagster.adapters.postgres.store import add_landmark, lock_store
from budget_recovery_dagster.domain.recovery_point import EVERYONE, Reset, last_excluded
from budget_recovery_dagster.domain.snapshots import Commit
from budget_recovery_dagster.domain.store import LandmarkKind

WindowKey = tuple[str, str]
"""Budget and token of a window."""
_COPY_RESETS = """
copy budget_recovery.budget_reset (
    tenant, budget_id, window_token, of_everyone, entity, at, reset_by, reason, recorded_at,
    last_excluded, batch
) from stdin
"""
_COMMITS = """
select commit_number, captured_at, stored_at from budget_recovery.capture where tenant = %s
"""
# One row for each reset, with its entities; the aggregate is an empty text.
_GROUPED_RESETS = """
with s as (
    select tenant, budget_id, window_token, of_everyone, batch is not null as is_several,
           array_agg(coalesce(entity, '')) as entities, at, reset_by, reason, recorded_at,
           last_excluded, min(reset_id) as reset_id
    from budget_recovery.budget_reset
    where tenant = %(tenant)s
    group by coalesce(batch::text, reset_id::text), tenant, budget_id, window_token, of_everyone,
             batch, at, reset_by, reason, recorded_at, last_excluded
)
"""
_AS_RECORDED = """
select tenant, budget_id, window_token, of_everyone, is_several, entities, at, reset_by, reason,
       recorded_at, last_excluded
from s
order by reset_id
"""
_RESETS = f"{_GROUPED_RESETS}{_AS_RECORDED}"
# For each window, the resets that exclude a usage of an older intact record. Usually the newest of
# these records has it. The server compares the entities, so no content is transferred.
_EXCLUDING = """
select w.budget_id, w.window_token,
       s.tenant, s.budget_id, s.window_token, s.of_everyone, s.is_several, s.entities, s.at,
       s.reset_by, s.reason, s.recorded_at, s.last_excluded
from unnest(%(budgets)s::text[], %(windows)s::text[]) as w (budget_id, window_token)
join s
  on s.budget_id = w.budget_id
 and (s.window_token is null or s.window_token = w.window_token)
cross join lateral (
    select
    from (
        select r.content_id
        from budget_recovery.budget_record r
        join budget_recovery.capture p on p.tenant = r.tenant and p.captured_at = r.captured_at
        join budget_recovery.budget_content c using (content_id)
        where r.tenant = s.tenant
          and r.budget_id = w.budget_id
          and r.window_token = w.window_token
          and budget_recovery.reset_excludes(
              s.last_excluded, s.at, s.recorded_at, p.commit_number, p.captured_at, p.stored_at
          )
          and case when s.of_everyone then cardinality(c.entities) > 0
                   else s.entities && c.entities end
        order by p.commit_number desc
        offset 0
    ) r
    where budget_recovery.is_stored_intact(r.content_id)
    limit 1
) older
"""
_KEEPING_OUT = f"{_GROUPED_RESETS}{_EXCLUDING}"


def storable_reset(reset: Reset) -> Reset:
    """Return a reset in its stored form."""
    return replace(reset, by=storable(reset.by), reason=storable(reset.reason))


@dataclass(frozen=True, slots=True)
class PostgresResets:
    """The table of resets."""

    _database: Database

    def record(self, reset: Reset) -> Reset:
        """Store a reset, and return it as it is stored, with the last commit that it excludes."""
        kept = storable_reset(reset)
        with self._database.writing() as connection:
            # No snapshot is committed meanwhile: it is either before the reset or after it.
            lock_store(connection)
            [kept] = insert_resets(connection, [kept])
            # A database without this reset would restore what it excludes.
            add_landmark(connection, LandmarkKind.RESET, at=kept.recorded_at)
        return kept


def insert_resets(connection: Connection, resets: Sequence[Reset]) -> list[Reset]:
    """Insert resets in their stored form; one of several entities has a row for each.

    The caller holds the lock on the store's row. Returned are the resets with the last commits that
    they exclude.
    """
    commits = {
        tenant: [as_commit(*row) for row in connection.execute(_COMMITS, (tenant,))]
        for tenant in {reset.tenant for reset in resets}
    }
    kept = [
        replace(each, last_excluded=last_excluded(commits[each.tenant], each.at, each.recorded_at))
        for each in resets
    ]
    with connection.cursor() as cursor, cursor.copy(_COPY_RESETS) as copy:
        for reset in kept:
            batch = uuid4() if isinstance(reset.entity, frozenset) else None
            for entity in (None,) if reset.is_of_everyone else reset.names:
                copy.write_row(
                    (
                        *(reset.tenant, reset.budget, reset.window, reset.is_of_everyone, entity),
                        *(reset.at, reset.by, reset.reason, reset.recorded_at),
                        *(reset.last_excluded, batch),
                    )
                )
    return kept


def read_resets(connection: Connection, tenant: str) -> tuple[Reset, ...]:
    """Return the resets of a tenant, in the order of their recording."""
    return tuple(_reset(row) for row in connection.execute(_RESETS, {"tenant": tenant}))


def read_keeping_out(
    connection: Connection, tenant: str, windows: Collection[tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], Reset]]:
    """Yield each window, by budget and token, with the resets that exclude usages from it."""
    for budget, token, *row in connection.execute(_KEEPING_OUT, window_scope(tenant, windows)):
        yield (budget, token), _reset(row)


def _reset(row: Sequence[Any]) -> Reset:
    tenant, budget, window, of_everyone, is_several, entities, *rest = row
    names = frozenset(entity or None for entity in entities)
    who = names if is_several else next(iter(names))
    return Reset(tenant, budget, window, EVERYONE if of_everyone else who, *rest)


def window_scope(tenant: str, windows: Collection[WindowKey]) -> dict[str, Any]:
    """Return the parameters of a query about these windows of a tenant."""
    return {
        "tenant": tenant,
        "budgets": [budget for budget, _ in windows],
        "windows": [token for _, token in windows],
    }


def as_commit(number: int, captured_at: datetime, stored_at: datetime) -> Commit:
    """Return a commit from the columns of a capture."""
    return Commit(number, captured_at.astimezone(UTC), stored_at.astimezone(UTC))
