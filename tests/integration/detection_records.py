"""Checks, losses and the accepted store, as stored in the database."""

from typing import Any

import dagster as dg
import psycopg
from psycopg.rows import dict_row

from tests.integration.recovery_runs import check, incidents, skipped, state, verdict

Row = dict[str, Any]


def store_row(database: psycopg.Connection) -> Row:
    """Return the row of the store."""
    (row,) = _rows(database, "select * from budget_recovery.store")
    return row


def store_checks(database: psycopg.Connection) -> list[Row]:
    """Return the checks, oldest first."""
    return _rows(database, "select * from budget_recovery.store_check order by check_id")


def losses(database: psycopg.Connection) -> list[Row]:
    """Return the losses of all incidents, oldest first."""
    return _rows(database, "select * from budget_recovery.store_loss order by found_at")


def assert_intact(instance: dg.DagsterInstance, database: psycopg.Connection) -> None:
    """Require that two checks find the store intact, without hints, and renew the marker."""
    for _ in range(2):
        before = store_row(database)["marker_revision"]
        result = check(instance)
        assert verdict(result) == "same"
        assert "Try:" not in skipped(result)
        assert store_row(database)["marker_revision"] > before
        assert store_row(database)["intended_nonce"] is None
    assert state(database) == "healthy"
    assert incidents(database) == []


def _rows(database: psycopg.Connection, query: str) -> list[Row]:
    with database.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query).fetchall()
