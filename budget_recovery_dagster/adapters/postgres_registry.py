"""The row about the store in PostgreSQL: bucket, state and baseline."""

from typing import Any
from uuid import uuid4

from budget_recovery_dagster.adapters.postgres_baseline_columns import (
    baseline_in,
    columns_of,
)
from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.domain.admission import require_bucket
from budget_recovery_dagster.domain.identity import Baseline
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.ports import StoreRecord

# At first use; of two at once, one makes the row and both read it.
_MAKE = """
insert into budget_recovery.store (bucket, deployment_id) values (%s, %s) on conflict do nothing
"""

_READ = """
select bucket, deployment_id, state,
       baseline_created_at, baseline_last_sequence, baseline_version,
       marker_nonce, marker_revision, marked_at, intended_nonce
from budget_recovery.store
"""

# Whoever changes what snapshots depend on takes this lock first, and so one after the other:
# commits, prunes, and moves of the state or the baseline. It is not FOR SHARE, although a commit
# mostly reads: two commits that both share the row and then both move the baseline would wait for
# each other for ever.
_LOCK = f"{_READ} for no key update"

_MOVE_STATE = "update budget_recovery.store set state = %s"

_MOVE_BASELINE = """
update budget_recovery.store
set baseline_created_at = %s, baseline_last_sequence = %s, baseline_version = %s,
    marker_nonce = %s, marker_revision = %s, marked_at = %s, intended_nonce = %s
"""


class PostgresStoreRegistry:
    """The one store that the database's schema belongs to."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, bucket: str) -> StoreRecord:
        """Return the store's record, making it at first use.

        Raises:
            SettingsError: this database schema already belongs to another bucket.
        """
        with self._database.writing() as connection:
            connection.execute(_MAKE, (bucket, str(uuid4())))
            record = read_store(connection)
        require_bucket(record.bucket, bucket)
        return record


def read_store(connection: Connection) -> StoreRecord:
    """Return the store's row as the transaction sees it."""
    return _record(connection.execute(_READ).fetchone())


def lock_store(connection: Connection) -> StoreRecord:
    """Keep the store's row as it is until the transaction ends, and return it."""
    return _record(connection.execute(_LOCK).fetchone())


def move_state(connection: Connection, state: RecoveryState) -> None:
    """Replace the state of the locked row."""
    connection.execute(_MOVE_STATE, (state.value,))


def move_baseline(connection: Connection, baseline: Baseline) -> None:
    """Replace the baseline of the locked row, with all that belongs to it."""
    connection.execute(_MOVE_BASELINE, columns_of(baseline))


def _record(row: tuple[Any, ...] | None) -> StoreRecord:
    if row is None:
        raise DatabaseError(
            "The database does not know yet to which store it belongs.",
            "wait for the first check or snapshot, which notes it.",
        )
    bucket, deployment_id, state = row[:3]
    return StoreRecord(bucket, deployment_id, RecoveryState(state), baseline_in(row[3:]))
