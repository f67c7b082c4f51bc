"""The ``store`` row and its checks: state, accepted baseline, intended marker."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

from budget_recovery_dagster.adapters.postgres.database import Connection, Database, storable
from budget_recovery_dagster.domain import moves
from budget_recovery_dagster.domain.incident import RecoveryState, StoreRecord
from budget_recovery_dagster.domain.moves import Standing
from budget_recovery_dagster.domain.snapshots import CHECKS_KEPT_FOR
from budget_recovery_dagster.domain.store import (
    Baseline,
    Check,
    Marker,
    StoreIdentity,
    Verdict,
    require_bucket,
)
from budget_recovery_dagster.errors import DatabaseError


def identity_in(
    created_at: datetime | None, last_sequence: Decimal | int | None
) -> StoreIdentity | None:
    """Read an identity; a sequence is exact over the whole unsigned range."""
    if created_at is None or last_sequence is None:
        return None
    return StoreIdentity(created_at, int(last_sequence))


def identity_columns(identity: StoreIdentity | None) -> tuple[datetime | None, int | None]:
    """Return an identity as its columns."""
    return (identity.created_at, identity.last_sequence) if identity else (None, None)


def baseline_in(columns: Sequence[Any]) -> Baseline | None:
    """Read a baseline with its marker, if it has one, from the columns of ``columns_of``."""
    created_at, last_sequence, version, nonce, revision, marked_at, intended = columns
    identity = identity_in(created_at, last_sequence)
    if identity is None or version is None:
        return None
    marker = None if nonce is None or revision is None else Marker(nonce, int(revision))
    return Baseline(identity, version, marker, marked_at, intended)


def columns_of(baseline: Baseline | None) -> tuple[Any, ...]:
    """Return a baseline as its columns.

    Creation, last sequence, version; the marker's nonce, revision and time; the intended nonce.
    """
    if baseline is None:
        return (None,) * 7
    identity, marker = baseline.identity, baseline.marker
    return (
        identity.created_at,
        identity.last_sequence,
        baseline.version,
        *((marker.nonce, marker.revision) if marker else (None, None)),
        baseline.marked_at,
        baseline.intended,
    )


# The first use inserts the row; of two at once, one inserts it and both read it.
_MAKE_STORE = """
insert into budget_recovery.store (bucket, deployment_id) values (%s, %s) on conflict do nothing
"""
_READ_STORE = """
select bucket, deployment_id, state,
       baseline_created_at, baseline_last_sequence, baseline_version,
       marker_nonce, marker_revision, marked_at, intended_nonce
from budget_recovery.store
"""
# Commits, prunes, and moves of the state or the baseline take this lock first, so they run one
# after another. It is not FOR SHARE, although a commit mostly reads: two commits that share the row
# and then both move the baseline would deadlock.
_LOCK_STORE = f"{_READ_STORE} for no key update"
_MOVE_STATE = "update budget_recovery.store set state = %s"
_MOVE_BASELINE = """
update budget_recovery.store
set baseline_created_at = %s, baseline_last_sequence = %s, baseline_version = %s,
    marker_nonce = %s, marker_revision = %s, marked_at = %s, intended_nonce = %s
"""


def read_store(connection: Connection) -> StoreRecord:
    """Return the store's row in this transaction."""
    return _record(connection.execute(_READ_STORE).fetchone())


def lock_store(connection: Connection) -> StoreRecord:
    """Lock the store's row until the transaction ends, and return it."""
    return _record(connection.execute(_LOCK_STORE).fetchone())


def move_state(connection: Connection, state: RecoveryState) -> None:
    """Replace the state of the locked row."""
    connection.execute(_MOVE_STATE, (state.value,))


def move_baseline(connection: Connection, baseline: Baseline) -> None:
    """Replace the baseline and marker of the locked row."""
    connection.execute(_MOVE_BASELINE, columns_of(baseline))


def _record(row: tuple[Any, ...] | None) -> StoreRecord:
    if row is None:
        raise DatabaseError(
            "The database does not belong to a store yet.",
            "wait for the first check or snapshot, which records the store.",
        )
    bucket, deployment_id, state = row[:3]
    return StoreRecord(bucket, deployment_id, RecoveryState(state), baseline_in(row[3:]))


def storable_check(check: Check) -> Check:
    """Return a check in its stored form."""
    return replace(check, checked_by=storable(check.checked_by), reason=storable(check.reason))


_GOOD = [verdict.value for verdict in Verdict if verdict.is_good]
_INSERT_CHECK = """
insert into budget_recovery.store_check (
    checked_at, checked_by, verdict, reason, store_created_at, store_last_sequence, incident_id
) values (%s, %s, %s, %s, %s, %s, %s)
"""
# The newest good check is kept: it is the last time at which the store was known to be intact.
# While an incident is open, no check is good.
_PRUNE_CHECKS = """
delete from budget_recovery.store_check
where checked_at < %(cutoff)s
  and check_id is distinct from (
      select check_id
      from budget_recovery.store_check
      where verdict = any(%(good)s) and incident_id is null
      order by checked_at desc, check_id desc
      limit 1
  )
"""
_READ_CHECKS = """
select checked_at, checked_by, verdict, reason, store_created_at, store_last_sequence, incident_id
from budget_recovery.store_check
"""
_FIRST_CHECK = "select min(checked_at) from budget_recovery.store_check"
_READ_NEWEST = f"{_READ_CHECKS} order by checked_at desc, check_id desc limit %s"
_READ_NEWEST_GOOD = f"""{_READ_CHECKS}
where verdict = any(%s) and incident_id is null
order by checked_at desc, check_id desc
limit 1
"""


@dataclass(frozen=True, slots=True)
class PostgresStoreRegistry:
    """The row of the one store of this database, and the table of its checks."""

    _database: Database
    _bucket: str

    def claim(self) -> StoreRecord:
        """Read the row of the store, after inserting it at the first use."""
        with self._database.writing() as connection:
            connection.execute(_MAKE_STORE, (self._bucket, str(uuid4())))
            record = read_store(connection)
        require_bucket(record.bucket, self._bucket)
        return record

    def accept(self, baseline: Baseline, *, judged: Baseline | None) -> Baseline:
        """Replace the baseline, under the lock on the row of the store."""
        with self._database.writing() as connection:
            store = lock_store(connection)
            standing = Standing(store.state, store.baseline)
            accepted = moves.accept(standing, baseline, judged=judged)
            move_baseline(connection, accepted)
            return accepted

    def record_check(self, check: Check) -> None:
        """Insert a check, and delete old ones except the newest good one."""
        kept = storable_check(check)
        values = (
            kept.checked_at,
            kept.checked_by,
            kept.verdict.value,
            kept.reason,
            *identity_columns(kept.identity),
            kept.incident_id,
        )
        with self._database.writing() as connection:
            connection.execute(_INSERT_CHECK, values)
            cutoff = self._database.time_on(connection) - CHECKS_KEPT_FOR
            connection.execute(_PRUNE_CHECKS, {"cutoff": cutoff, "good": _GOOD})

    def newest_checks(self, count: int) -> tuple[Check, ...]:
        """Return the newest checks, newest first."""
        return tuple(_check(*row) for row in self._database.rows(_READ_NEWEST, (count,)))

    def first_checked_at(self) -> datetime | None:
        """Return the time of the oldest retained check."""
        [(at,)] = self._database.rows(_FIRST_CHECK)
        return None if at is None else at.astimezone(UTC)

    def newest_good_check(self) -> Check | None:
        """Return the newest check that identified the store as the accepted one."""
        with self._database.reading() as connection:
            return read_newest_good_check(connection)


def read_newest_good_check(connection: Connection) -> Check | None:
    """Return the newest check that found the store intact, in this transaction."""
    row = connection.execute(_READ_NEWEST_GOOD, (_GOOD,)).fetchone()
    return None if row is None else _check(*row)


def _check(checked_at: datetime, checked_by: str, verdict: str, reason: str, *seen: Any) -> Check:
    created_at, last_sequence, incident_id = seen
    identity = identity_in(created_at, last_sequence)
    return Check(checked_at, checked_by, Verdict(verdict), reason, identity, incident_id)
