"""What restores did, in PostgreSQL."""

from datetime import UTC, datetime
from typing import Any

from psycopg.types.json import Jsonb

from budget_recovery_dagster.adapters.audit_trails import join_trails
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.adapters.stored_recovery import storable_trail
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.windows import Window
from budget_recovery_dagster.restore_ports import AuditEntry, AuditTrail

_INSERT = """
insert into budget_recovery.restore_audit (
    at, run_id, who, why, incident_id, tenant, budget_id, window_token, point_at,
    entries, raised, kept, skipped, usage_before, usage_after, notes
) values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""

_OF_INCIDENT = """
select at, run_id, who, why, incident_id, tenant, budget_id, window_token, point_at,
       entries, raised, kept, skipped, usage_before, usage_after, notes
from budget_recovery.restore_audit
where incident_id = %s
order by at, audit_id
"""


class PostgresRestoreAudits:
    """The table of audits: a row for each budget and window of a restore."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, trail: AuditTrail) -> None:
        """Keep what a restore did."""
        kept = storable_trail(trail)
        common = (kept.at, kept.run_id, kept.who, kept.why, kept.incident_id)
        with self._database.writing() as connection, connection.cursor() as cursor:
            cursor.executemany(_INSERT, [(*common, *_columns(entry)) for entry in kept.entries])

    def of_incident(self, incident_id: str) -> tuple[AuditTrail, ...]:
        """Return the trails of an incident, oldest first; one of each run and time."""
        with self._database.reading() as connection:
            rows = connection.execute(_OF_INCIDENT, (incident_id,))
            return join_trails(
                AuditTrail(at.astimezone(UTC), run_id, who, why, incident, (_entry(*columns),))
                for at, run_id, who, why, incident, *columns in rows
            )


def _columns(entry: AuditEntry) -> tuple[object, ...]:
    return (
        entry.tenant,
        entry.of.budget,
        entry.of.window.token,
        entry.point_at,
        entry.entries,
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
    entries, raised, kept, skipped, before, after, notes = numbers_and_notes
    return AuditEntry(
        tenant=tenant,
        of=BudgetWindow(budget, Window.parse(token)),
        point_at=point_at.astimezone(UTC),
        entries=entries,
        raised=raised,
        kept=kept,
        skipped=skipped,
        before=before,
        after=after,
        notes=tuple(notes),
    )
