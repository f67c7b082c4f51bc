"""The incidents of the store in PostgreSQL: moves of the state, each one transaction."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from budget_recovery_dagster.adapters.postgres_attempts import (
    end_newest_attempt,
    insert_attempt,
    next_number,
    read_attempts,
)
from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.adapters.postgres_incident_rows import (
    insert_incident,
    insert_newest_loss,
    lock_open,
    read_open,
    read_recent,
    update_incident,
)
from budget_recovery_dagster.adapters.postgres_leases import require_lease
from budget_recovery_dagster.adapters.postgres_registry import (
    lock_store,
    move_baseline,
    move_state,
    read_store,
)
from budget_recovery_dagster.adapters.postgres_restore_points import read_newest_point_time
from budget_recovery_dagster.adapters.postgres_store_checks import read_newest_good_time
from budget_recovery_dagster.adapters.stored_forms import storable
from budget_recovery_dagster.adapters.stored_recovery import (
    attempt_after,
    ended_by,
    held_by,
    storable_loss,
)
from budget_recovery_dagster.domain import holds, moves
from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.identity import Baseline
from budget_recovery_dagster.domain.incident import FailureReason, Incident, Loss, Recovery
from budget_recovery_dagster.domain.moves import Opening
from budget_recovery_dagster.domain.standing import Move, Standing
from budget_recovery_dagster.ports import Lease
from budget_recovery_dagster.recovery_ports import Attempt, Closing

_log = logging.getLogger(__name__)


class PostgresIncidents:
    """The incidents, and with them the state of the store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def recovery(self) -> Recovery:
        """Return the state, and the open incident."""
        with self._database.reading() as connection:
            incident, _ = read_open(connection)
            return Recovery(read_store(connection).state, incident)

    def recent(self, count: int) -> tuple[Incident, ...]:
        """Return the newest incidents, newest first."""
        with self._database.reading() as connection:
            return read_recent(connection, count)

    def open(self, loss: Loss, *, ground: Baseline | None, judged: Baseline | None) -> Incident:
        """Open an incident for a loss: the store is RECOVERING, and captures are paused.

        Raises:
            BaselineMovedError: the baseline is not the ``judged`` one any more.
            IncidentMovedError: an incident is open already.
        """
        with self._locked() as (connection, standing):
            # Read under the lock: no capture can land after these and before the incident.
            opening = Opening(
                incident_id=str(uuid4()),
                at=self._database.moment(connection),
                newest_point_at=read_newest_point_time(connection),
                newest_good_check_at=read_newest_good_time(connection),
            )
            move = moves.open_incident(
                standing, storable_loss(loss), ground=ground, judged=judged, opening=opening
            )
            insert_incident(connection, move.incident)
            move_state(connection, move.state)
            return move.incident

    def join(self, loss: Loss, *, ground: Baseline | None, judged: Incident) -> Incident:
        """Add a further loss to the open incident; its attempts begin again, and it waits no more.

        Raises:
            IncidentMovedError: its ground is not that of ``judged`` any more, or it is closed.
        """
        with self._locked() as (connection, standing):
            move = moves.join(standing, storable_loss(loss), ground=ground, judged=judged)
            insert_newest_loss(connection, move.incident)
            return _keep(connection, standing, move)

    def stand_on(self, ground: Baseline, *, judged: Incident) -> Incident:
        """Let the recovery stand on this store from now on.

        Raises:
            IncidentMovedError: as ``join``.
        """
        with self._locked() as (connection, standing):
            return _keep(connection, standing, moves.stand_on(standing, ground, judged=judged))

    def claim_launch(self, *, judged: Incident) -> Incident | None:
        """Count one more launch of a restore; None if somebody else has, or it is not time."""
        with self._locked() as (connection, standing):
            now = self._database.moment(connection)
            move = moves.claim_launch(standing, judged=judged, now=now)
            return None if move is None else _keep(connection, standing, move)

    def wait(self, reason: str, *, judged: Incident, lease: Lease) -> Incident:
        """Note that a restore waits for the store, and put the next launch off by the backoff.

        Raises:
            IncidentMovedError: as ``join``.
            LeaseLostError: the lease is no longer held.
        """
        with self._leased(lease) as (connection, standing):
            now = self._database.moment(connection)
            move = moves.wait(standing, storable(reason), judged=judged, now=now)
            return _keep(connection, standing, move)

    def claim_attempt(
        self, *, judged: Incident, run_id: str, holder: str, lease: Lease
    ) -> Incident:
        """Count one more attempt, before its work begins; the incident waits no more.

        Raises:
            IncidentHeldError: it is on hold.
            AttemptsUsedUpError: the loss has had all its attempts.
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not RECOVERING.
        """
        with self._leased(lease) as (connection, standing):
            move = moves.claim_attempt(standing, judged=judged)
            started_at = self._database.moment(connection)
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
        """Say how the newest attempt ended.

        Raises:
            LeaseLostError: the lease is no longer held.
        """
        with self._database.writing() as connection:
            require_lease(connection, self._database, lease, name=RESTORE_LEASE)
            end_newest_attempt(
                connection,
                judged.incident_id,
                outcome=storable(outcome),
                ended_at=self._database.moment(connection),
            )

    def give_up(
        self, reason: FailureReason, detail: str, *, judged: Incident, lease: Lease
    ) -> Incident:
        """Put the store to FAILED: a person has to look.

        Raises:
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not RECOVERING.
        """
        with self._leased(lease) as (connection, standing):
            now = self._database.moment(connection)
            move = moves.give_up(standing, reason, storable(detail), judged=judged, now=now)
            return _keep(connection, standing, move)

    def close(self, closing: Closing, *, judged: Incident, lease: Lease) -> Incident:
        """Accept a new baseline, close the incident and put the store to HEALTHY, all or nothing.

        Raises:
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not
                RECOVERING, unless a person ends it.
        """
        with self._leased(lease) as (connection, standing):
            ended = ended_by(closing, self._database.moment(connection))
            move = moves.close(standing, ended, baseline=closing.baseline, judged=judged)
            return _keep(connection, standing, move)

    def hold(self, reason: str, by: str, *, judged: Incident) -> Incident:
        """Keep the restore from being launched and from going on; held already: nothing changes.

        Raises:
            IncidentMovedError: it is closed, or not RECOVERING.
        """
        with self._locked() as (connection, standing):
            held = held_by(by, reason, self._database.moment(connection))
            return _keep(connection, standing, holds.hold(standing, held, judged=judged))

    def release(self, by: str, *, judged: Incident) -> Incident:
        """Let the restore go on, at once and with all its attempts; not held: nothing changes.

        Raises:
            IncidentMovedError: as ``hold``.
        """
        with self._locked() as (connection, standing):
            now = self._database.moment(connection)
            move = holds.release(standing, judged=judged, now=now)
            released = _keep(connection, standing, move)
            if released != standing.incident:
                _log.info("Incident %s is released by %s.", released.short_id, by)
            return released

    def attempts_of(self, incident_id: str) -> tuple[Attempt, ...]:
        """Return the attempts of an incident, oldest first."""
        with self._database.reading() as connection:
            return read_attempts(connection, incident_id)

    @contextmanager
    def _leased(self, lease: Lease) -> Iterator[tuple[Connection, Standing]]:
        """Give a transaction that holds, in this order, the lease, the store and the incident."""
        with self._database.writing() as connection:
            require_lease(connection, self._database, lease, name=RESTORE_LEASE)
            yield connection, _lock_standing(connection)

    @contextmanager
    def _locked(self) -> Iterator[tuple[Connection, Standing]]:
        """Give a transaction that holds, in this order, the store and the incident."""
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
