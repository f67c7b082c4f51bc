"""The ``store`` row and its checks: state, accepted baseline, intended marker."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from secrets import token_hex
from typing import Any
from uuid import uuid4

from budget_recovery_dagster.adapters.postgres.database import Connection, Database, storable
from budget_recovery_dagster.domain import moves
from budget_recovery_dagster.domain.incident import RecoveryState, StoreRecord
from budget_recovery_dagster.domain.moves import Standing
from budget_recovery_dagster.domain.recovery_point import latest_time
from budget_recovery_dagster.domain.snapshots import CHECKS_KEPT, CHECKS_KEPT_FOR
from budget_recovery_dagster.domain.store import (
    Baseline,
    IntendedMarker,
    LandmarkKind,
    Marker,
    StoreIdentity,
    require_bucket,
)
from budget_recovery_dagster.domain.verdict import (
    CREATION_TOLERANCE,
    Check,
    Evidence,
    FoundMarker,
    Memory,
    Observation,
    Verdict,
)
from budget_recovery_dagster.errors import DatabaseError

_NONCE_BYTES = 16


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
    created_at, last_sequence, version, *marks, seen_at, others = columns
    nonce, revision, number, marked_at, keeps_for, intended, *intention = marks
    identity = identity_in(created_at, last_sequence)
    if identity is None or version is None:
        return None
    return Baseline(
        identity=identity,
        version=version,
        marker=None if nonce is None else Marker(nonce, int(revision), number),
        marked_at=marked_at,
        intended=None if intended is None else IntendedMarker(intended, *intention),
        keeps_for=keeps_for,
        seen_at=seen_at,
        others=None if others is None else frozenset(others),
    )


BASELINE_COLUMNS = 13
"""How many columns a baseline has."""


def columns_of(baseline: Baseline | None) -> tuple[Any, ...]:
    """Return a baseline as its columns.

    Creation, last sequence, version; the marker's nonce, revision, number, time and age limit; the
    nonce, number and landmark of the intended one; the leader's time, and other markers.
    """
    if baseline is None:
        return (*(None,) * 5, 0, *(None,) * 3, 0, *(None,) * 3)
    identity, marker, intended = baseline.identity, baseline.marker, baseline.intended
    return (
        identity.created_at,
        identity.last_sequence,
        baseline.version,
        *((marker.nonce, marker.revision, marker.number) if marker else (None, None, 0)),
        baseline.marked_at,
        baseline.keeps_for,
        *((intended.nonce, intended.number, intended.landmark) if intended else (None, 0, None)),
        baseline.seen_at,
        None if baseline.others is None else sorted(baseline.others),
    )


# The first use inserts the row; of two at once, one inserts it and both read it. If the row was
# lost, the landmarks still know the installation and the numbers that it gave out.
_MAKE_STORE = """
insert into budget_recovery.store (bucket, deployment_id, given_number)
select %(bucket)s,
       coalesce(
           (select deployment_id from budget_recovery.landmark order by position desc limit 1),
           %(deployment_id)s
       ),
       coalesce((select max(marker_number) from budget_recovery.landmark), 0)
on conflict do nothing
"""
_READ_STORE = """
select bucket, deployment_id, state,
       baseline_created_at, baseline_last_sequence, baseline_version,
       marker_nonce, marker_revision, marker_number, marked_at, marker_keeps_for,
       intended_nonce, intended_number, intended_landmark, seen_at, other_markers
from budget_recovery.store
"""
# Commits, prunes, and moves of the state or the baseline take this lock first, so they run one
# after another. It is not FOR SHARE, although a commit mostly reads: two commits that share the row
# and then both move the baseline would deadlock.
_LOCK_STORE = f"{_READ_STORE} for no key update"
_MOVE_STATE = "update budget_recovery.store set state = %s"
# Later markers get higher numbers than one that is taken over.
_MOVE_BASELINE = """
update budget_recovery.store
set given_number = greatest(given_number, %s),
    given_nonce = case when given_number > %s then given_nonce else coalesce(%s, given_nonce) end,
    baseline_created_at = %s, baseline_last_sequence = %s, baseline_version = %s,
    marker_nonce = %s, marker_revision = %s, marker_number = %s, marked_at = %s,
    marker_keeps_for = %s,
    intended_nonce = %s, intended_number = %s, intended_landmark = %s,
    seen_at = %s, other_markers = %s
"""
# A capture that is run again with the same id has its landmark already.
_ADD_LANDMARK = """
insert into budget_recovery.landmark (
    at, kind, about, deployment_id, marker_number, store_created_at
)
select %(at)s, %(kind)s, %(about)s, deployment_id, given_number, %(created_at)s
from budget_recovery.store
on conflict do nothing
"""
# The landmark that a marker names, known from the store alone, counts as known from now on.
_HOLD_LANDMARK = """
insert into budget_recovery.landmark (landmark_id, at, kind, deployment_id, marker_number)
select %(landmark)s, %(at)s, 'acceptance', deployment_id, given_number
from budget_recovery.store
on conflict do nothing
"""
_NEWEST_LANDMARK = """
select landmark_id from budget_recovery.landmark order by position desc limit 1
"""
_GIVE_NUMBER = """
update budget_recovery.store
set given_number = given_number + 1, given_nonce = %s
returning given_number
"""
_GO_ABOVE = """
update budget_recovery.store
set given_number = %(number)s, given_nonce = %(nonce)s
where given_number <= %(number)s
"""
_REMEMBERED = """
select given_number, given_nonce,
       %(landmark)s::text is null or exists (
           select from budget_recovery.landmark where landmark_id = %(landmark)s
       ),
       exists (
           select from budget_recovery.landmark
           where store_created_at > %(created_at)s::timestamptz - %(within)s
             and store_created_at < %(created_at)s::timestamptz + %(within)s
       ) and not coalesce(
           %(accepted_at)s::timestamptz > %(created_at)s::timestamptz - %(within)s
           and %(accepted_at)s::timestamptz < %(created_at)s::timestamptz + %(within)s,
           false
       )
from budget_recovery.store
"""
_RENEWALS_LOST_SINCE = """
select exists (
    select from budget_recovery.landmark where kind = 'renewals_lost' and at > %s
)
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
    marker = baseline.marker
    number, nonce = (marker.number, marker.nonce) if marker else (0, None)
    connection.execute(_MOVE_BASELINE, (number, number, nonce, *columns_of(baseline)))


def add_landmark(
    connection: Connection,
    kind: LandmarkKind,
    *,
    at: datetime,
    about: str | None = None,
    created_at: datetime | None = None,
) -> None:
    """Record an event in a transaction that locks the store's row.

    ``created_at`` is when the store was created that the event accepts; None: it accepts none.
    """
    values = {"at": at, "kind": kind.value, "about": about, "created_at": created_at}
    connection.execute(_ADD_LANDMARK, values)


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
    checked_at, checked_by, verdict, reason, store_created_at, store_last_sequence, incident_id,
    evidence
) values (%s, %s, %s, %s, %s, %s, %s, %s)
"""
# The newest good check is kept: it is the last time at which the store was known to be intact.
# While an incident is open, no check is good.
_PRUNE_CHECKS = """
delete from budget_recovery.store_check
where checked_at < %(cutoff)s
  and check_id < (
      select min(n.check_id)
      from (
          select check_id
          from budget_recovery.store_check
          order by check_id desc
          limit %(kept)s
      ) n
  )
  and check_id is distinct from (
      select check_id
      from budget_recovery.store_check
      where verdict = any(%(good)s) and incident_id is null
      order by checked_at > %(latest)s, checked_at desc, check_id desc
      limit 1
  )
"""
_READ_CHECKS = """
select checked_at, checked_by, verdict, reason, store_created_at, store_last_sequence, incident_id,
       evidence
from budget_recovery.store_check
"""
_FIRST_CHECK = "select min(checked_at) from budget_recovery.store_check"
# A check dated in the future, by a clock that was wrong, comes after all others.
_READ_NEWEST = f"""{_READ_CHECKS}
order by checked_at > %s, checked_at desc, check_id desc
limit %s
"""
_READ_NEWEST_GOOD = f"""{_READ_CHECKS}
where verdict = any(%s) and incident_id is null
order by checked_at > %s, checked_at desc, check_id desc
limit 1
"""


@dataclass(frozen=True, slots=True)
class PostgresStoreRegistry:
    """The row of the one store of this database, and the table of its checks."""

    _database: Database
    _bucket: str

    def claim(self) -> StoreRecord:
        """Read the row of the store, after inserting it at the first use."""
        if (found := self.find()) is not None:
            return found
        with self._database.writing() as connection:
            connection.execute(_MAKE_STORE, {"bucket": self._bucket, "deployment_id": str(uuid4())})
            record = read_store(connection)
        require_bucket(record.bucket, self._bucket)
        return record

    def find(self) -> StoreRecord | None:
        """Read the row of the store, if there is one."""
        rows = self._database.rows(_READ_STORE)
        if not rows:
            return None
        record = _record(rows[0])
        require_bucket(record.bucket, self._bucket)
        return record

    def accept(self, baseline: Baseline, *, judged: Baseline | None) -> Baseline:
        """Replace the baseline, under the lock on the row of the store."""
        with self._database.writing() as connection:
            store = lock_store(connection)
            standing = Standing(store.state, store.baseline)
            accepted = moves.accept(standing, baseline, judged=judged)
            move_baseline(connection, accepted)
            if store.baseline is None:
                self._add_acceptance(connection, LandmarkKind.ACCEPTANCE, accepted)
            return accepted

    def accept_renewals(
        self, baseline: Baseline, found: FoundMarker, *, judged: Baseline | None
    ) -> Baseline:
        """Accept a store whose marker this database has forgotten, in one transaction."""
        with self._database.writing() as connection:
            store = lock_store(connection)
            standing = Standing(store.state, store.baseline)
            accepted = moves.accept(standing, baseline, judged=judged)
            self._go_above(connection, found)
            move_baseline(connection, accepted)
            self._add_acceptance(connection, LandmarkKind.RENEWALS_LOST, accepted)
            return accepted

    def acknowledge(self, found: FoundMarker) -> None:
        """Give out only higher numbers from now on, and hold the landmark that a marker names.

        The next marker must not name that landmark again: another copy of the database may have it,
        and would not see what this one decided. So a landmark of our own follows it.
        """
        with self._database.writing() as connection:
            lock_store(connection)
            self._go_above(connection, found)
            if found.landmark is not None:
                at = self._database.time_on(connection)
                held = connection.execute(_HOLD_LANDMARK, {"landmark": found.landmark, "at": at})
                if held.rowcount:
                    add_landmark(connection, LandmarkKind.ACCEPTANCE, at=at)

    def next_marker(self) -> IntendedMarker:
        """Give the next number to a new marker, which names the newest landmark."""
        nonce = token_hex(_NONCE_BYTES)
        with self._database.writing() as connection:
            [(number,)] = connection.execute(_GIVE_NUMBER, (nonce,)).fetchall()
            newest = connection.execute(_NEWEST_LANDMARK).fetchone()
            return IntendedMarker(nonce, number, None if newest is None else newest[0])

    def newest_landmark(self) -> str | None:
        """Return the id of the newest landmark; None: there is none."""
        rows = self._database.rows(_NEWEST_LANDMARK)
        return rows[0][0] if rows else None

    def memory_of(self, seen: Observation | None, accepted: Baseline | None) -> Memory:
        """Return what the row and the landmarks say about an observation."""
        values = {
            "landmark": seen.marker.landmark if seen and seen.marker else None,
            "created_at": seen.identity.created_at if seen else None,
            "accepted_at": accepted.identity.created_at if accepted else None,
            "within": CREATION_TOLERANCE,
        }
        [row] = self._database.rows(_REMEMBERED, values)
        return Memory(*row)

    def renewals_lost_since(self, at: datetime) -> bool:
        """Whether the database was accepted after a loss of renewals since then."""
        [(is_recent,)] = self._database.rows(_RENEWALS_LOST_SINCE, (at,))
        return bool(is_recent)

    def _go_above(self, connection: Connection, found: FoundMarker) -> None:
        connection.execute(_GO_ABOVE, {"number": found.number, "nonce": found.nonce})

    def _add_acceptance(
        self, connection: Connection, kind: LandmarkKind, accepted: Baseline
    ) -> None:
        at = self._database.time_on(connection)
        add_landmark(connection, kind, at=at, created_at=accepted.identity.created_at)

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
            kept.evidence.value if kept.evidence else None,
        )
        with self._database.writing() as connection:
            connection.execute(_INSERT_CHECK, values)
            now = self._database.time_on(connection)
            scope = {
                "cutoff": now - CHECKS_KEPT_FOR,
                "kept": CHECKS_KEPT,
                "latest": latest_time(now),
                "good": _GOOD,
            }
            connection.execute(_PRUNE_CHECKS, scope)

    def newest_checks(self, count: int) -> tuple[Check, ...]:
        """Return the newest checks, newest first."""
        with self._database.reading() as connection:
            latest = latest_time(self._database.time_on(connection))
            rows = connection.execute(_READ_NEWEST, (latest, count)).fetchall()
        return tuple(_check(*row) for row in rows)

    def first_checked_at(self) -> datetime | None:
        """Return the time of the oldest retained check."""
        [(at,)] = self._database.rows(_FIRST_CHECK)
        return None if at is None else at.astimezone(UTC)

    def newest_good_check(self) -> Check | None:
        """Return the newest check that identified the store as the accepted one."""
        with self._database.reading() as connection:
            return read_newest_good_check(connection, self._database.time_on(connection))


def read_newest_good_check(connection: Connection, now: datetime) -> Check | None:
    """Return the newest check that found the store intact, in this transaction."""
    row = connection.execute(_READ_NEWEST_GOOD, (_GOOD, latest_time(now))).fetchone()
    return None if row is None else _check(*row)


def _check(checked_at: datetime, checked_by: str, verdict: str, reason: str, *seen: Any) -> Check:
    created_at, last_sequence, incident_id, evidence = seen
    identity = identity_in(created_at, last_sequence)
    return Check(
        checked_at,
        checked_by,
        Verdict(verdict),
        reason,
        identity,
        incident_id,
        Evidence(evidence) if evidence else None,
    )
