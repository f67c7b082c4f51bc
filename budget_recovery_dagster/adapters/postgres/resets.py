"""Deliberate resets in PostgreSQL."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from budget_recovery_dagster.adapters.postgres.connection import Connection
from budget_recovery_dagster.adapters.postgres.database import Database
from budget_recovery_dagster.adapters.postgres.storable import storable_reset
from budget_recovery_dagster.domain.resets import EVERYONE, Reset

_RECORD = """
insert into budget_recovery.budget_reset (
    tenant, budget_id, window_token, of_everyone, entity, at, reset_by, reason, recorded_at
) values (%s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
_RESETS = """
select tenant, budget_id, window_token, of_everyone, entity, at, reset_by, reason, recorded_at
from budget_recovery.budget_reset
"""
_OF_TENANT = f"{_RESETS} where tenant = %s order by reset_id"
_RECENT = f"{_RESETS} order by reset_id desc limit %s"
# For each window, the resets that exclude a usage of an older intact record. Usually the newest of
# these records has it. The server compares the entities, so no content is transferred.
_KEEPING_OUT = """
select w.budget_id, w.window_token,
       s.tenant, s.budget_id, s.window_token, s.of_everyone, s.entity, s.at, s.reset_by, s.reason,
       s.recorded_at
from unnest(%(budgets)s::text[], %(windows)s::text[]) as w (budget_id, window_token)
join budget_recovery.budget_reset s
  on s.tenant = %(tenant)s
 and s.budget_id = w.budget_id
 and (s.window_token is null or s.window_token = w.window_token)
cross join lateral (
    select
    from (
        select r.content_id
        from budget_recovery.budget_record r
        join budget_recovery.budget_content c using (content_id)
        where r.tenant = s.tenant
          and r.budget_id = w.budget_id
          and r.window_token = w.window_token
          and r.captured_at <= s.at
          and case when s.of_everyone then cardinality(c.entities) > 0
                   else coalesce(s.entity, '') = any(c.entities) end
        order by r.captured_at desc
        offset 0
    ) r
    where budget_recovery.is_stored_intact(r.content_id)
    limit 1
) older
"""
_Row = tuple[str, str, str | None, bool, str | None, datetime, str, str, datetime]


@dataclass(frozen=True, slots=True)
class PostgresResets:
    """The table of resets."""

    _database: Database

    def record(self, reset: Reset) -> Reset:
        """Store a reset, and return it as it is stored."""
        kept = storable_reset(reset)
        with self._database.writing() as connection:
            connection.execute(
                _RECORD,
                (
                    kept.tenant,
                    kept.budget,
                    kept.window,
                    kept.is_of_everyone,
                    None if kept.is_of_everyone else kept.entity,
                    kept.at,
                    kept.by,
                    kept.reason,
                    kept.recorded_at,
                ),
            )
        return kept

    def of_tenant(self, tenant: str) -> tuple[Reset, ...]:
        """Return the resets of a tenant, in the order of their recording."""
        with self._database.reading() as connection:
            return read_resets(connection, tenant)

    def recent(self, count: int) -> tuple[Reset, ...]:
        """Return the newest recorded resets of any tenant, newest first."""
        with self._database.reading() as connection:
            return tuple(_reset(row) for row in connection.execute(_RECENT, (count,)))


def read_resets(connection: Connection, tenant: str) -> tuple[Reset, ...]:
    """Return the resets of a tenant, in the order of their recording."""
    return tuple(_reset(row) for row in connection.execute(_OF_TENANT, (tenant,)))


def read_keeping_out(
    connection: Connection, tenant: str, windows: Collection[tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], Reset]]:
    """Yield each window, by budget and token, with the resets that exclude usages from it."""
    scope = {
        "tenant": tenant,
        "budgets": [budget for budget, _ in windows],
        "windows": [token for _, token in windows],
    }
    for budget, token, *row in connection.execute(_KEEPING_OUT, scope):
        yield (budget, token), _reset(cast(_Row, row))


def _reset(row: _Row) -> Reset:
    tenant, budget, window, of_everyone, entity, at, by, reason, recorded_at = row
    who = EVERYONE if of_everyone else entity
    return Reset(tenant, budget, window, who, at, by, reason, recorded_at)
