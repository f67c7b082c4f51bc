"""What the database keeps of checks, losses and the accepted store."""

from typing import Any

import dagster as dg
import psycopg
from psycopg.rows import dict_row

from tests.integration.recovery_runs import check, incidents, skipped, state, verdict

Row = dict[str, Any]


def store_row(database: psycopg.Connection) -> Row:
    """Return all that is accepted of the store."""
    (row,) = _rows(database, "select * from budget_recovery.store")
    return row


def store_checks(database: psycopg.Connection) -> list[Row]:
    """Return the checks, oldest first."""
    return _rows(database, "select * from budget_recovery.store_check order by check_id")


def losses(database: psycopg.Connection) -> list[Row]:
    """Return the losses of all incidents, oldest first."""
    return _rows(database, "select * from budget_recovery.store_loss order by found_at")


def assert_whole(instance: dg.DagsterInstance, database: psycopg.Connection) -> None:
    """Two checks find the store whole, are quiet, and renew the marker each time."""
    for _ in range(2):
        before = store_row(database)["marker_revision"]
        result = check(instance)
        assert verdict(result) in ("unchanged", "advanced")
        assert "Try:" not in skipped(result)
        assert store_row(database)["marker_revision"] > before
        assert store_row(database)["intended_nonce"] is None
    assert state(database) == "healthy"
    assert incidents(database) == []


def _rows(database: psycopg.Connection, query: str) -> list[Row]:
    with database.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query).fetchall()
