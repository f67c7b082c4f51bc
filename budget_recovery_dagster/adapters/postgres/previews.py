"""Stored previews, and the budget definitions that previews use."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from budget_recovery_dagster.adapters.postgres.database import Database
from budget_recovery_dagster.adapters.postgres.storable import storable
from budget_recovery_dagster.domain.budgets import BudgetDefinition, Enforcement, SplitBy
from budget_recovery_dagster.domain.counters import BudgetWindow
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
_OF_TENANT = """
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
            cursor.executemany(
                _DEFINE,
                [
                    (
                        each.tenant,
                        each.budget,
                        each.period.value,
                        each.limit,
                        each.split_by.value,
                        each.metadata_key,
                        each.enforcement.value,
                    )
                    for each in definitions
                ],
            )

    def of_tenant(self, tenant: str) -> tuple[BudgetDefinition, ...]:
        """Return the definitions of a tenant's budgets, by budget and period."""
        with self._database.reading() as connection:
            rows = connection.execute(_OF_TENANT, (tenant,)).fetchall()
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
            for budget, period, limit, split_by, enforcement, metadata_key in rows
        )


_DROP_OLD = "delete from budget_recovery.restore_preview where at < %s"
_BEGIN = """
insert into budget_recovery.restore_preview (
    preview_id, at, previewed_by, tenant, budget_id, captured_at, despite_resets,
    store_created_at, store_last_sequence, is_complete
) values (%s, %s, %s, %s, %s, %s, %s, %s, %s, false)
"""
_ADD = """
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
_COLUMNS = """
select preview_id, at, previewed_by, tenant, budget_id, captured_at, despite_resets,
       store_created_at, store_last_sequence
from budget_recovery.restore_preview
where is_complete
  and at >= %s
"""
_GET = f"{_COLUMNS}and preview_id = %s"
_NEWEST = f"""{_COLUMNS}
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
_ENTRIES = """
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
        """Start to store a preview, and remove those that are too old."""
        with self._database.writing() as connection:
            oldest = self._database.moment(connection) - PREVIEWS_KEPT_FOR
            connection.execute(_DROP_OLD, (oldest,))
            connection.execute(
                _BEGIN,
                (
                    preview.preview_id,
                    preview.at,
                    storable(preview.by),
                    *_columns(preview.choice),
                    preview.identity.created_at,
                    preview.identity.last_sequence,
                ),
            )

    def add(self, preview_id: str, tenant: str, entries: Sequence[PlannedEntry]) -> None:
        """Store the plan of a tenant."""
        by_window = RecoveryPlan(tenant, tuple(entries)).by_window()
        with self._database.writing() as connection, connection.cursor() as cursor:
            cursor.executemany(
                _ADD,
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
        """Complete a preview once all its tenants are stored; until then it is not used."""
        with self._database.writing() as connection:
            connection.execute(_COMPLETE, (preview_id,))
            oldest = self._database.moment(connection) - OUTDATED_KEPT_FOR
            connection.execute(_DROP_OUTDATED, (preview_id, oldest))

    def get(self, preview_id: str) -> KeptPreview | None:
        """Return a complete preview; None: there is none with this id."""
        with self._database.reading() as connection:
            oldest = self._database.moment(connection) - PREVIEWS_KEPT_FOR
            row = connection.execute(_GET, (oldest, preview_id)).fetchone()
        return None if row is None else _kept(*row)

    def newest(self, choice: RestoreChoice) -> KeptPreview | None:
        """Return the newest complete preview with exactly this choice; None: there is none."""
        with self._database.reading() as connection:
            oldest = self._database.moment(connection) - PREVIEWS_KEPT_FOR
            row = connection.execute(_NEWEST, (oldest, *_columns(choice))).fetchone()
        return None if row is None else _kept(*row)

    def tenants_of(self, preview_id: str) -> frozenset[str]:
        """Return the tenants with a stored plan."""
        with self._database.reading() as connection:
            return frozenset(tenant for (tenant,) in connection.execute(_TENANTS, (preview_id,)))

    def entries_of(self, preview_id: str, tenant: str) -> tuple[PlannedEntry, ...]:
        """Return the plan of a tenant, by budget, window and entity."""
        with self._database.reading() as connection:
            rows = connection.execute(_ENTRIES, (preview_id, tenant)).fetchall()
        return tuple(entry for row in rows for entry in _entries(*row))


def _kept(preview_id: str, at: datetime, by: str, *rest: Any) -> KeptPreview:
    tenant, budget, captured_at, despite_resets, created_at, last_sequence = rest
    snapshot = captured_at and captured_at.astimezone(UTC)
    return KeptPreview(
        preview_id,
        at.astimezone(UTC),
        by,
        RestoreChoice(tenant, budget, snapshot, despite_resets),
        StoreIdentity(created_at.astimezone(UTC), int(last_sequence)),
    )


def _columns(choice: RestoreChoice) -> tuple[Any, ...]:
    return choice.tenant, choice.budget, choice.snapshot, choice.despite_resets


def _entries(budget: str, token: str, *lists: list[Any]) -> Iterator[PlannedEntry]:
    of = BudgetWindow(budget, Window.parse(token))
    for entity, live, recorded, action in zip(*lists, strict=True):
        yield PlannedEntry(of, entity or None, recorded, live, Action(action))
