"""The row about the store in PostgreSQL: bucket, state and baseline."""

from datetime import datetime
from decimal import Decimal
from uuid import uuid4

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.domain.admission import require_bucket
from budget_recovery_dagster.domain.identity import Baseline, StoreIdentity
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.ports import StoreRecord

# At first use; of two at once, one makes the row and both read it.
_MAKE = """
insert into budget_recovery.store (bucket, deployment_id) values (%s, %s) on conflict do nothing
"""

_READ = """
select bucket, deployment_id, state,
       baseline_created_at, baseline_last_sequence, baseline_version
from budget_recovery.store
"""

# Whoever changes what snapshots depend on takes this lock first, and so one after the other:
# commits, prunes, and moves of the state or the baseline. It is not FOR SHARE, although a commit
# mostly reads: two commits that both share the row and then both move the baseline would wait for
# each other for ever.
_LOCK = f"{_READ} for no key update"

_MOVE_BASELINE = """
update budget_recovery.store
set baseline_created_at = %s, baseline_last_sequence = %s, baseline_version = %s
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
            record = _record(connection.execute(_READ).fetchone())
        require_bucket(record.bucket, bucket)
        return record


def lock_store(connection: Connection) -> StoreRecord:
    """Keep the store's row as it is until the transaction ends, and return it."""
    return _record(connection.execute(_LOCK).fetchone())


def move_baseline(connection: Connection, baseline: Baseline) -> None:
    """Replace the baseline of the locked row."""
    identity = baseline.identity
    connection.execute(
        _MOVE_BASELINE, (identity.created_at, identity.last_sequence, baseline.version)
    )


def _record(
    row: tuple[str, str, str, datetime | None, Decimal | None, int | None] | None,
) -> StoreRecord:
    if row is None:
        raise DatabaseError(
            "The database does not know yet to which store it belongs.",
            "claim the bucket first, as every start of the project does.",
        )
    bucket, deployment_id, state, created_at, last_sequence, version = row
    baseline = None
    if created_at is not None and last_sequence is not None and version is not None:
        baseline = Baseline(StoreIdentity(created_at, int(last_sequence)), version)
    return StoreRecord(bucket, deployment_id, RecoveryState(state), baseline)
