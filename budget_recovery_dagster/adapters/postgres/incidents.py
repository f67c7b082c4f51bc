"""Incidents, their losses and restore attempts."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, LiteralString
from uuid import uuid4

from psycopg.rows import dict_row

from budget_recovery_dagster.adapters.postgres.database import (
    Connection,
    Database,
    storable,
    storable_id,
)
from budget_recovery_dagster.adapters.postgres.leases import require_lease
from budget_recovery_dagster.adapters.postgres.recovery_point import read_newest_point_time
from budget_recovery_dagster.adapters.postgres.store import (
    baseline_in,
    columns_of,
    identity_columns,
    identity_in,
    lock_store,
    move_baseline,
    move_state,
    read_newest_good_time,
    read_store,
)
from budget_recovery_dagster.domain import moves
from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.incident import (
    Attempt,
    Closing,
    Ended,
    FailureReason,
    GivenUp,
    Held,
    Incident,
    Loss,
    Outcome,
    Recovery,
    Restored,
    Waiting,
)
from budget_recovery_dagster.domain.moves import Move, Opening, Standing
from budget_recovery_dagster.domain.store import Baseline, StoreIdentity, Verdict
from budget_recovery_dagster.ports import Lease

_INSERT_ATTEMPT = """
insert into budget_recovery.restore_attempt (
    incident_id, loss, number, run_id, holder, started_at
) values (%s, %s, %s, %s, %s, %s)
"""
# Not the incident's own count: a release resets that, but earlier attempts stay stored.
_NEXT_NUMBER = """
select coalesce(max(number), 0) + 1
from budget_recovery.restore_attempt
where incident_id = %s and loss = %s
"""
# The outcome of an attempt is never replaced.
_END_NEWEST = """
update budget_recovery.restore_attempt a
set ended_at = %(ended_at)s, outcome = %(outcome)s
from (
    select incident_id, loss, number
    from budget_recovery.restore_attempt
    where incident_id = %(incident_id)s
    order by loss desc, number desc
    limit 1
) newest
where a.incident_id = newest.incident_id
  and a.loss = newest.loss
  and a.number = newest.number
  and a.ended_at is null
"""
_READ_ATTEMPTS = """
select incident_id, loss, number, run_id, holder, started_at, ended_at, outcome
from budget_recovery.restore_attempt
where incident_id = %s
order by loss, number
"""


def insert_attempt(connection: Connection, attempt: Attempt) -> None:
    """Insert an attempt that has just been claimed."""
    connection.execute(
        _INSERT_ATTEMPT,
        (
            attempt.incident_id,
            attempt.loss,
            attempt.number,
            attempt.run_id,
            attempt.holder,
            attempt.started_at,
        ),
    )


def next_number(connection: Connection, incident: Incident) -> int:
    """Return the number of the next attempt for an incident's newest loss, which is locked."""
    parameters = (incident.incident_id, len(incident.losses))
    ((number,),) = connection.execute(_NEXT_NUMBER, parameters).fetchall()
    return int(number)


def end_newest_attempt(
    connection: Connection, incident_id: str, *, outcome: str, ended_at: datetime
) -> None:
    """Write the outcome of the newest attempt of an incident, unless it has one."""
    values = {"incident_id": incident_id, "outcome": outcome, "ended_at": ended_at}
    connection.execute(_END_NEWEST, values)


def read_attempts(connection: Connection, incident_id: str) -> tuple[Attempt, ...]:
    """Return the attempts of an incident, oldest first."""
    return tuple(Attempt(*row) for row in connection.execute(_READ_ATTEMPTS, (incident_id,)))


_READ_INCIDENTS = """
select incident_id, opened_at,
       target_created_at, target_last_sequence, target_version, target_marker_nonce,
       target_marker_revision, target_marked_at, target_intended_nonce,
       newest_point_at, last_good_at, attempts, launches, launches_before, next_launch_at,
       waiting_since, waiting_reason, waits, held_at, held_by, held_reason, released_at,
       failed_at, failure, failure_detail, closed_at, outcome, outcome_detail,
       restored_tenants, restored_windows, restored_counters, restored_boards
from budget_recovery.incident
"""
_READ_OPEN = f"{_READ_INCIDENTS} where closed_at is null"
# After the lock on the store's row, which every move of an incident takes first.
_LOCK_OPEN = f"{_READ_OPEN} for no key update"
_READ_RECENT = (
    f"{_READ_INCIDENTS} order by opened_at desc, closed_at desc nulls first, incident_id limit %s"
)
_LOSSES = """
select incident_id, found_at, found_by, verdict, reason,
       before_created_at, before_last_sequence, after_created_at, after_last_sequence
from budget_recovery.store_loss
where incident_id = any(%s)
order by incident_id, position
"""
# The columns that never change; an update of the others follows at once.
_INSERT_INCIDENT = """
insert into budget_recovery.incident (
    incident_id, opened_at, newest_point_at, last_good_at, attempts, launches, launches_before
) values (%s, %s, %s, %s, 0, 0, 0)
"""
_INSERT_LOSS = """
insert into budget_recovery.store_loss (
    incident_id, position, found_at, found_by, verdict, reason,
    before_created_at, before_last_sequence, after_created_at, after_last_sequence
) values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
_UPDATE_INCIDENT = """
update budget_recovery.incident
set target_created_at = %s, target_last_sequence = %s, target_version = %s,
    target_marker_nonce = %s, target_marker_revision = %s, target_marked_at = %s,
    target_intended_nonce = %s,
    attempts = %s, launches = %s, launches_before = %s, next_launch_at = %s,
    waiting_since = %s, waiting_reason = %s, waits = %s,
    held_at = %s, held_by = %s, held_reason = %s, released_at = %s,
    failed_at = %s, failure = %s, failure_detail = %s,
    closed_at = %s, outcome = %s, outcome_detail = %s,
    restored_tenants = %s, restored_windows = %s, restored_counters = %s, restored_boards = %s
where incident_id = %s
"""
Row = dict[str, Any]


def read_open(connection: Connection) -> tuple[Incident | None, int]:
    """Return the open incident, and the number of its launches that the backoff does not count."""
    return _open(connection, _READ_OPEN)


def lock_open(connection: Connection) -> tuple[Incident | None, int]:
    """Return the same as ``read_open``, locked until the transaction ends."""
    return _open(connection, _LOCK_OPEN)


def read_recent(connection: Connection, count: int) -> tuple[Incident, ...]:
    """Return the newest incidents, newest first."""
    return tuple(_incidents(connection, _rows(connection, _READ_RECENT, (count,))))


def insert_incident(connection: Connection, incident: Incident) -> None:
    """Insert a new incident with its loss."""
    connection.execute(
        _INSERT_INCIDENT,
        (
            incident.incident_id,
            incident.opened_at,
            incident.newest_point_at,
            incident.last_good_at,
        ),
    )
    insert_newest_loss(connection, incident)
    update_incident(connection, incident, launches_before=0)


def insert_newest_loss(connection: Connection, incident: Incident) -> None:
    """Insert the newest loss of an incident."""
    loss = incident.losses[-1]
    connection.execute(
        _INSERT_LOSS,
        (
            incident.incident_id,
            len(incident.losses),
            loss.found_at,
            loss.found_by,
            loss.verdict.value,
            loss.reason,
            *identity_columns(loss.before),
            *identity_columns(loss.after),
        ),
    )


def update_incident(connection: Connection, incident: Incident, *, launches_before: int) -> None:
    """Update all columns of an incident that may change, but not its losses."""
    waiting, held = incident.waiting, incident.held
    given_up, ended = incident.given_up, incident.ended
    restored = ended.restored if ended else None
    connection.execute(
        _UPDATE_INCIDENT,
        (
            *columns_of(incident.target),
            incident.attempts,
            incident.launches,
            launches_before,
            incident.next_launch_at,
            *((waiting.since, waiting.reason, waiting.waits) if waiting else _nulls(3)),
            *((held.at, held.by, held.reason) if held else _nulls(3)),
            incident.released_at,
            *((given_up.at, given_up.reason.value, given_up.detail) if given_up else _nulls(3)),
            *((ended.at, ended.outcome.value, ended.detail) if ended else _nulls(3)),
            *(
                (restored.tenants, restored.windows, restored.counters, restored.boards)
                if restored
                else _nulls(4)
            ),
            incident.incident_id,
        ),
    )


def _nulls(count: int) -> tuple[None, ...]:
    return (None,) * count


def _open(connection: Connection, query: LiteralString) -> tuple[Incident | None, int]:
    rows = _rows(connection, query, ())
    if not rows:
        return None, 0
    [incident] = _incidents(connection, rows)
    return incident, int(rows[0]["launches_before"])


def _rows(connection: Connection, query: LiteralString, parameters: Sequence[object]) -> list[Row]:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, parameters).fetchall()


def _incidents(connection: Connection, rows: list[Row]) -> list[Incident]:
    losses: defaultdict[str, list[Loss]] = defaultdict(list)
    for row in _rows(connection, _LOSSES, ([row["incident_id"] for row in rows],)):
        losses[row["incident_id"]].append(_loss(row))
    return [_incident(row, tuple(losses[row["incident_id"]])) for row in rows]


def _loss(row: Row) -> Loss:
    return Loss(
        found_at=row["found_at"],
        found_by=row["found_by"],
        verdict=Verdict(row["verdict"]),
        reason=row["reason"],
        before=StoreIdentity(row["before_created_at"], int(row["before_last_sequence"])),
        after=identity_in(row["after_created_at"], row["after_last_sequence"]),
    )


def _incident(row: Row, losses: tuple[Loss, ...]) -> Incident:
    return Incident(
        incident_id=row["incident_id"],
        opened_at=row["opened_at"],
        losses=losses,
        target=baseline_in(
            (
                row["target_created_at"],
                row["target_last_sequence"],
                row["target_version"],
                row["target_marker_nonce"],
                row["target_marker_revision"],
                row["target_marked_at"],
                row["target_intended_nonce"],
            )
        ),
        newest_point_at=row["newest_point_at"],
        last_good_at=row["last_good_at"],
        attempts=row["attempts"],
        launches=row["launches"],
        next_launch_at=row["next_launch_at"],
        waiting=_waiting(row),
        held=_held(row),
        released_at=row["released_at"],
        given_up=_given_up(row),
        ended=_ended(row),
    )


def _waiting(row: Row) -> Waiting | None:
    if row["waiting_since"] is None:
        return None
    return Waiting(row["waiting_since"], row["waiting_reason"], row["waits"])


def _held(row: Row) -> Held | None:
    if row["held_at"] is None:
        return None
    return Held(row["held_at"], row["held_by"], row["held_reason"])


def _given_up(row: Row) -> GivenUp | None:
    if row["failed_at"] is None:
        return None
    return GivenUp(row["failed_at"], FailureReason(row["failure"]), row["failure_detail"])


def _ended(row: Row) -> Ended | None:
    if row["closed_at"] is None:
        return None
    return Ended(
        at=row["closed_at"],
        outcome=Outcome(row["outcome"]),
        detail=row["outcome_detail"],
        restored=Restored(
            tenants=row["restored_tenants"],
            windows=row["restored_windows"],
            counters=row["restored_counters"],
            boards=row["restored_boards"],
        ),
    )


def storable_loss(loss: Loss) -> Loss:
    """Return a loss in its stored form."""
    return replace(loss, found_by=storable(loss.found_by), reason=storable(loss.reason))


def ended_by(closing: Closing, at: datetime) -> Ended:
    """Return the end of an incident in its stored form."""
    return Ended(at, closing.outcome, storable(closing.detail), closing.restored)


def held_by(by: str, reason: str, at: datetime) -> Held:
    """Return a hold in its stored form."""
    return Held(at, storable(by), storable(reason))


def attempt_after(
    incident: Incident, *, number: int, run_id: str, holder: str, started_at: datetime
) -> Attempt:
    """Return the newest attempt of an incident, not yet ended, in its stored form."""
    return Attempt(
        incident_id=incident.incident_id,
        loss=len(incident.losses),
        number=number,
        run_id=storable_id(run_id),
        holder=storable(holder),
        started_at=started_at,
        ended_at=None,
        outcome=None,
    )


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PostgresIncidents:
    """The incidents, and with them the state of the store."""

    _database: Database

    def recovery(self) -> Recovery:
        """Return the state, and the open incident."""
        with self._database.reading() as connection:
            incident, _ = read_open(connection)
            return Recovery(read_store(connection).state, incident)

    def recent(self, count: int) -> tuple[Incident, ...]:
        """Return the newest incidents, newest first."""
        with self._database.reading() as connection:
            return read_recent(connection, count)

    def open(self, loss: Loss, *, target: Baseline | None, judged: Baseline | None) -> Incident:
        """Open an incident for a loss: the store becomes RECOVERING, and captures are paused.

        Raises:
            BaselineMovedError: the baseline is not the ``judged`` one any more.
            IncidentMovedError: an incident is already open.
        """
        with self._locked() as (connection, standing):
            # Read under the lock: no capture can land after these and before the incident.
            opening = Opening(
                incident_id=str(uuid4()),
                at=self._database.time_on(connection),
                newest_point_at=read_newest_point_time(connection),
                newest_good_check_at=read_newest_good_time(connection),
            )
            move = moves.open_incident(
                standing, storable_loss(loss), target=target, judged=judged, opening=opening
            )
            insert_incident(connection, move.incident)
            move_state(connection, move.state)
            return move.incident

    def join(self, loss: Loss, *, target: Baseline | None, judged: Incident) -> Incident:
        """Add a further loss to the open incident; its attempts start again, at once.

        Raises:
            IncidentMovedError: its restore target is not that of ``judged``, or it is closed.
        """
        with self._locked() as (connection, standing):
            move = moves.join(standing, storable_loss(loss), target=target, judged=judged)
            insert_newest_loss(connection, move.incident)
            return _keep(connection, standing, move)

    def adopt_target(self, target: Baseline, *, judged: Incident) -> Incident:
        """Make a store the restore target of the open incident.

        Raises:
            IncidentMovedError: as ``join``.
        """
        with self._locked() as (connection, standing):
            return _keep(connection, standing, moves.adopt_target(standing, target, judged=judged))

    def claim_launch(self, *, judged: Incident) -> Incident | None:
        """Count one more launch; None if another process counted it, or none is due."""
        with self._locked() as (connection, standing):
            now = self._database.time_on(connection)
            move = moves.claim_launch(standing, judged=judged, now=now)
            return None if move is None else _keep(connection, standing, move)

    def wait(self, reason: str, *, judged: Incident, lease: Lease) -> Incident:
        """Record that a restore waits for the store, and delay the next launch by the backoff.

        Raises:
            IncidentMovedError: as ``join``.
            LeaseLostError: the lease is no longer held.
        """
        with self._leased(lease) as (connection, standing):
            now = self._database.time_on(connection)
            move = moves.wait(standing, storable(reason), judged=judged, now=now)
            return _keep(connection, standing, move)

    def claim_attempt(
        self, *, judged: Incident, run_id: str, holder: str, lease: Lease
    ) -> Incident:
        """Count one more attempt, before its work starts, and end the waiting.

        Raises:
            IncidentHeldError: it is on hold.
            AttemptsUsedUpError: the loss has had all its attempts.
            IncidentMovedError, LeaseLostError: as ``wait``; also if it is not RECOVERING.
        """
        with self._leased(lease) as (connection, standing):
            move = moves.claim_attempt(standing, judged=judged)
            started_at = self._database.time_on(connection)
            insert_attempt(
                connection,
                attempt_after(
                    move.incident,
                    number=next_number(connection, move.incident),
                    run_id=run_id,
                    holder=holder,
                    started_at=started_at,
                ),
            )
            return _keep(connection, standing, move)

    def end_attempt(self, outcome: str, *, judged: Incident, lease: Lease) -> None:
        """Record the outcome of the newest attempt.

        Raises:
            LeaseLostError: the lease is no longer held.
        """
        with self._database.writing() as connection:
            require_lease(connection, self._database, lease, name=RESTORE_LEASE)
            end_newest_attempt(
                connection,
                judged.incident_id,
                outcome=storable(outcome),
                ended_at=self._database.time_on(connection),
            )

    def give_up(
        self, reason: FailureReason, detail: str, *, judged: Incident, lease: Lease
    ) -> Incident:
        """Set the store to FAILED: an operator must act.

        Raises:
            IncidentMovedError, LeaseLostError: as ``wait``; also if it is not RECOVERING.
        """
        with self._leased(lease) as (connection, standing):
            now = self._database.time_on(connection)
            move = moves.give_up(standing, reason, storable(detail), judged=judged, now=now)
            return _keep(connection, standing, move)

    def close(self, closing: Closing, *, judged: Incident, lease: Lease) -> Incident:
        """Accept a new baseline, close the incident and set the store to HEALTHY, all or nothing.

        Raises:
            IncidentMovedError, LeaseLostError: as ``wait``; also if it is not RECOVERING, unless
                a person ends it.
        """
        with self._leased(lease) as (connection, standing):
            ended = ended_by(closing, self._database.time_on(connection))
            move = moves.close(standing, ended, baseline=closing.baseline, judged=judged)
            return _keep(connection, standing, move)

    def hold(self, reason: str, by: str, *, judged: Incident) -> Incident:
        """Stop the restore and further launches; an existing hold stays unchanged.

        Raises:
            IncidentMovedError: it is closed, or not RECOVERING.
        """
        with self._locked() as (connection, standing):
            held = held_by(by, reason, self._database.time_on(connection))
            return _keep(connection, standing, moves.hold(standing, held, judged=judged))

    def release(self, by: str, *, judged: Incident) -> Incident:
        """Continue the restore, at once and with all its attempts; without a hold, nothing changes.

        Raises:
            IncidentMovedError: as ``hold``.
        """
        with self._locked() as (connection, standing):
            now = self._database.time_on(connection)
            move = moves.release(standing, judged=judged, now=now)
            released = _keep(connection, standing, move)
            if released != standing.incident:
                _log.info("Incident %s was released by %s.", released.short_id, by)
            return released

    def attempts_of(self, incident_id: str) -> tuple[Attempt, ...]:
        """Return the attempts of an incident, oldest first."""
        with self._database.reading() as connection:
            return read_attempts(connection, incident_id)

    @contextmanager
    def _leased(self, lease: Lease) -> Iterator[tuple[Connection, Standing]]:
        """Open a transaction that locks, in this order, the lease, the store and the incident."""
        with self._database.writing() as connection:
            require_lease(connection, self._database, lease, name=RESTORE_LEASE)
            yield connection, _lock_standing(connection)

    @contextmanager
    def _locked(self) -> Iterator[tuple[Connection, Standing]]:
        """Open a transaction that locks, in this order, the store and the incident."""
        with self._database.writing() as connection:
            yield connection, _lock_standing(connection)


def _lock_standing(connection: Connection) -> Standing:
    store = lock_store(connection)
    incident, launches_before = lock_open(connection)
    return Standing(store.state, store.baseline, incident, launches_before)


def _keep(connection: Connection, before: Standing, move: Move) -> Incident:
    update_incident(connection, move.incident, launches_before=move.launches_before)
    if move.state is not before.state:
        move_state(connection, move.state)
    if move.baseline is not None and move.baseline != before.baseline:
        move_baseline(connection, move.baseline)
    return move.incident
