"""Incidents, their losses and restore attempts."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from typing import Any, LiteralString, TypeVar
from uuid import uuid4

from budget_recovery_dagster.adapters.postgres.database import (
    Connection,
    Database,
    storable,
    storable_id,
)
from budget_recovery_dagster.adapters.postgres.falls import outdate_counts
from budget_recovery_dagster.adapters.postgres.leases import require_lease
from budget_recovery_dagster.adapters.postgres.recovery_point import (
    read_newest_point_time,
    read_oldest_failing_time,
)
from budget_recovery_dagster.adapters.postgres.resets import insert_resets, storable_reset
from budget_recovery_dagster.adapters.postgres.store import (
    BASELINE_COLUMNS,
    add_landmark,
    baseline_in,
    columns_of,
    identity_columns,
    identity_in,
    lock_store,
    move_baseline,
    move_state,
    read_newest_good_check,
    read_store,
)
from budget_recovery_dagster.domain import moves
from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.incident import (
    ITSELF,
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
from budget_recovery_dagster.domain.recovery_point import Reset
from budget_recovery_dagster.domain.store import Baseline, LandmarkKind, StoreIdentity
from budget_recovery_dagster.domain.verdict import Evidence, Verdict
from budget_recovery_dagster.ports import Lease

_log = logging.getLogger(__name__)
_INSERT_ATTEMPT = """
insert into budget_recovery.restore_attempt (
    incident_id, loss, number, run_id, holder, started_at, ended_at, outcome
) values (%s, %s, %s, %s, %s, %s, %s, %s)
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
# The columns that a move may change, in the order of ``_keep`` and ``_incident``.
_MOVED = """
    launches_before,
    target_created_at, target_last_sequence, target_version,
    target_marker_nonce, target_marker_revision, target_marker_number, target_marked_at,
    target_marker_keeps_for,
    target_intended_nonce, target_intended_number, target_intended_landmark,
    target_seen_at, target_other_markers, target_began_empty,
    attempts, launches, next_launch_at, next_attempt_at, released_at,
    waiting_since, waiting_reason, waits,
    held_at, held_by, held_reason,
    failed_at, failure, failure_detail, failure_code,
    closed_at, outcome, outcome_detail,
    restored_tenants, restored_windows, restored_counters, restored_boards
"""
_SELECT = "select incident_id, opened_at, newest_point_at, last_good_at,"
_READ_INCIDENTS = f"{_SELECT}{_MOVED}from budget_recovery.incident"
_READ_OPEN = f"{_READ_INCIDENTS} where closed_at is null"
# After the lock on the store's row, which every move of an incident takes first.
_LOCK_OPEN = f"{_READ_OPEN} for no key update"
_READ_RECENT = (
    f"{_READ_INCIDENTS} order by opened_at desc, closed_at desc nulls first, incident_id limit %s"
)
_LOSSES = """
select incident_id, found_at, found_by, verdict, reason,
       before_created_at, before_last_sequence, after_created_at, after_last_sequence, evidence
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
    before_created_at, before_last_sequence, after_created_at, after_last_sequence, evidence
) values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
_VALUES = """
    %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s,
    %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s
"""
_UPDATE = "update budget_recovery.incident set"
_UPDATE_INCIDENT = f"{_UPDATE} ({_MOVED}) = ({_VALUES}) where incident_id = %s"
Part = TypeVar("Part")


def storable_loss(loss: Loss) -> Loss:
    """Return a loss in its stored form."""
    return replace(loss, found_by=storable(loss.found_by), reason=storable(loss.reason))


def ended_by(closing: Closing, at: datetime) -> Ended:
    """Return the end of an incident in its stored form."""
    return Ended(at, closing.outcome, storable(closing.detail), closing.restored)


def held_by(by: str, reason: str, at: datetime) -> Held:
    """Return a hold in its stored form."""
    return Held(at, storable(by), storable(reason))


def held_by_itself(reason: str | None, at: datetime) -> Held | None:
    """Return a hold by this program in its stored form; None: no hold."""
    return None if reason is None else held_by(ITSELF, reason, at)


def given_up_for(reason: FailureReason, detail: str, code: str | None, at: datetime) -> GivenUp:
    """Return a final failure in its stored form."""
    return GivenUp(at, reason, storable(detail), code)


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


@dataclass(frozen=True, slots=True)
class PostgresIncidents:
    """The tables of incidents, losses and attempts, and with them the state of the store.

    A move locks the store and its open incident, decides in ``domain.moves``, and writes the result
    in the same transaction.
    """

    _database: Database

    def recovery(self) -> Recovery:
        """Return the state, and the open incident."""
        with self._database.reading() as connection:
            incident, _ = _read_open(connection, _READ_OPEN)
            return Recovery(read_store(connection).state, incident)

    def recent(self, count: int) -> tuple[Incident, ...]:
        """Return the newest incidents, newest first."""
        with self._database.reading() as connection:
            rows = connection.execute(_READ_RECENT, (count,)).fetchall()
            return tuple(_incidents(connection, rows))

    def open(
        self,
        loss: Loss,
        *,
        target: Baseline | None,
        judged: Baseline | None,
        hold: str | None = None,
        began_empty: bool = False,
    ) -> Incident:
        """Insert an incident with its loss, and set the store to RECOVERING."""
        with self._locked() as (connection, standing):
            # Read under the lock: no capture can land after these and before the incident.
            now = self._database.time_on(connection)
            good = read_newest_good_check(connection, now)
            opening = Opening(
                incident_id=str(uuid4()),
                at=now,
                newest_point_at=read_newest_point_time(connection, now),
                newest_good_check_at=good.checked_at if good else None,
                oldest_failing_at=read_oldest_failing_time(connection, now),
            )
            move = moves.open_incident(
                standing,
                storable_loss(loss),
                target=target,
                judged=judged,
                opening=opening,
                held=held_by_itself(hold, opening.at),
                began_empty=began_empty,
            )
            opened = move.incident
            values = (
                opened.incident_id,
                opened.opened_at,
                opened.newest_point_at,
                opened.last_good_at,
            )
            connection.execute(_INSERT_INCIDENT, values)
            _insert_newest_loss(connection, opened)
            add_landmark(connection, LandmarkKind.INCIDENT_OPENED, at=now, about=opened.incident_id)
            return _keep(connection, standing, move)

    def join(
        self,
        loss: Loss,
        *,
        target: Baseline | None,
        judged: Incident,
        hold: str | None = None,
        began_empty: bool = False,
    ) -> Incident:
        """Insert a further loss."""
        with self._locked() as (connection, standing):
            held = held_by_itself(hold, self._database.time_on(connection))
            kept = storable_loss(loss)
            move = moves.join(
                standing, kept, target=target, judged=judged, held=held, began_empty=began_empty
            )
            _insert_newest_loss(connection, move.incident)
            return _keep(connection, standing, move)

    def adopt_target(
        self, target: Baseline, *, judged: Incident, began_empty: bool = False
    ) -> Incident:
        """Replace the restore target of the open incident."""
        with self._locked() as (connection, standing):
            move = moves.adopt_target(standing, target, judged=judged, began_empty=began_empty)
            return _keep(connection, standing, move)

    def claim_launch(self, *, judged: Incident) -> Incident | None:
        """Count one more launch; None if another process counted it, or none is due."""
        with self._locked() as (connection, standing):
            now = self._database.time_on(connection)
            move = moves.claim_launch(standing, judged=judged, now=now)
            return None if move is None else _keep(connection, standing, move)

    def wait(self, reason: str, *, judged: Incident, lease: Lease) -> Incident:
        """Record that a restore waits for the store, and delay the next launch by the backoff."""
        with self._locked(lease) as (connection, standing):
            now = self._database.time_on(connection)
            move = moves.wait(standing, storable(reason), judged=judged, now=now)
            return _keep(connection, standing, move)

    def claim_attempt(
        self, *, judged: Incident, run_id: str, holder: str, lease: Lease
    ) -> Incident:
        """Insert an attempt, count it and end the waiting."""
        with self._locked(lease) as (connection, standing):
            now = self._database.time_on(connection)
            move = moves.claim_attempt(standing, judged=judged, now=now)
            claimed = move.incident
            scope = (claimed.incident_id, len(claimed.losses))
            [(number,)] = connection.execute(_NEXT_NUMBER, scope).fetchall()
            attempt = attempt_after(
                claimed,
                number=number,
                run_id=run_id,
                holder=holder,
                started_at=now,
            )
            connection.execute(_INSERT_ATTEMPT, astuple(attempt))
            return _keep(connection, standing, move)

    def end_attempt(self, outcome: str, *, judged: Incident, lease: Lease) -> None:
        """Write the outcome of the newest attempt, unless it has one."""
        with self._database.writing() as connection:
            require_lease(connection, self._database, lease, name=RESTORE_LEASE)
            self._end_newest(connection, judged, outcome)

    def fail_attempt(self, outcome: str, *, judged: Incident, lease: Lease) -> None:
        """Write the outcome of the newest attempt, and delay the next one."""
        with self._locked(lease) as (connection, standing):
            self._end_newest(connection, judged, outcome)
            now = self._database.time_on(connection)
            if move := moves.fail_attempt(standing, judged=judged, now=now):
                _keep(connection, standing, move)

    def return_attempt(
        self, outcome: str, *, judged: Incident, lease: Lease, waited: Waiting | None
    ) -> Incident:
        """Write the outcome of the newest attempt, and count one attempt less."""
        with self._locked(lease) as (connection, standing):
            move = moves.return_attempt(standing, judged=judged, waited=waited)
            self._end_newest(connection, judged, outcome)
            return _keep(connection, standing, move)

    def _end_newest(self, connection: Connection, judged: Incident, outcome: str) -> None:
        values = {
            "incident_id": judged.incident_id,
            "outcome": storable(outcome),
            "ended_at": self._database.time_on(connection),
        }
        connection.execute(_END_NEWEST, values)

    def give_up(
        self,
        reason: FailureReason,
        detail: str,
        *,
        judged: Incident,
        lease: Lease,
        code: str | None = None,
    ) -> Incident:
        """Set the store to FAILED: an operator must act."""
        with self._locked(lease) as (connection, standing):
            given_up = given_up_for(reason, detail, code, self._database.time_on(connection))
            return _keep(connection, standing, moves.give_up(standing, given_up, judged=judged))

    def close(
        self, closing: Closing, *, judged: Incident, lease: Lease, resets: Collection[Reset] = ()
    ) -> Incident:
        """Close the incident, accept its baseline, record resets, and set the store to HEALTHY."""
        with self._locked(lease) as (connection, standing):
            now = self._database.time_on(connection)
            ended = ended_by(closing, now)
            move = moves.close(standing, ended, baseline=closing.baseline, judged=judged)
            add_landmark(
                connection,
                LandmarkKind.INCIDENT_CLOSED,
                at=now,
                about=move.incident.incident_id,
                created_at=closing.baseline.identity.created_at,
            )
            if resets:
                insert_resets(connection, [storable_reset(reset) for reset in resets])
            outdate_counts(connection)
            return _keep(connection, standing, move)

    def hold(self, reason: str, by: str, *, judged: Incident) -> Incident:
        """Stop the restore and further launches; an existing hold stays unchanged."""
        with self._locked() as (connection, standing):
            held = held_by(by, reason, self._database.time_on(connection))
            return _keep(connection, standing, moves.hold(standing, held, judged=judged))

    def release(self, by: str, *, judged: Incident) -> Incident:
        """End a hold, if there is one; only the log has the person who released it."""
        with self._locked() as (connection, standing):
            now = self._database.time_on(connection)
            move = moves.release(standing, judged=judged, now=now)
            released = _keep(connection, standing, move)
            if released != standing.incident:
                _log.info("Incident %s was released by %s.", released.short_id, by)
            return released

    def attempts_of(self, incident_id: str) -> tuple[Attempt, ...]:
        """Return the attempts of an incident, oldest first."""
        rows = self._database.rows(_READ_ATTEMPTS, (incident_id,))
        return tuple(Attempt(*row) for row in rows)

    @contextmanager
    def _locked(self, lease: Lease | None = None) -> Iterator[tuple[Connection, Standing]]:
        """Open a transaction that locks, in this order, the lease, the store and the incident."""
        with self._database.writing() as connection:
            if lease is not None:
                require_lease(connection, self._database, lease, name=RESTORE_LEASE)
            store = lock_store(connection)
            incident, launches_before = _read_open(connection, _LOCK_OPEN)
            yield connection, Standing(store.state, store.baseline, incident, launches_before)


def _insert_newest_loss(connection: Connection, incident: Incident) -> None:
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
            loss.evidence.value if loss.evidence else None,
        ),
    )


def _keep(connection: Connection, before: Standing, move: Move) -> Incident:
    """Update what a move may change, except the losses."""
    incident, ended = move.incident, move.incident.ended
    values = (
        move.launches_before,
        *columns_of(incident.target),
        incident.began_empty,
        incident.attempts,
        incident.launches,
        incident.next_launch_at,
        incident.next_attempt_at,
        incident.released_at,
        *_columns(incident.waiting, 3),
        *_columns(incident.held, 3),
        *_columns(incident.given_up, 4),
        *((ended.at, ended.outcome.value, ended.detail) if ended else (None, None, None)),
        *_columns(ended.restored if ended else None, 4),
        incident.incident_id,
    )
    connection.execute(_UPDATE_INCIDENT, values)
    if move.state is not before.state:
        move_state(connection, move.state)
    if move.baseline is not None and move.baseline != before.baseline:
        move_baseline(connection, move.baseline)
    return incident


def _columns(part: Waiting | Held | GivenUp | Restored | None, count: int) -> tuple[Any, ...]:
    """Return a part of an incident as its columns, in the order of its fields."""
    return (None,) * count if part is None else astuple(part)


def _read_open(connection: Connection, query: LiteralString) -> tuple[Incident | None, int]:
    """Return the open incident, and the number of its launches that the backoff does not count."""
    row = connection.execute(query).fetchone()
    if row is None:
        return None, 0
    [incident] = _incidents(connection, [row])
    launches_before = row[4]
    return incident, launches_before


def _incidents(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> list[Incident]:
    losses: defaultdict[str, list[Loss]] = defaultdict(list)
    for incident_id, *loss in connection.execute(_LOSSES, ([row[0] for row in rows],)):
        losses[incident_id].append(_loss(*loss))
    return [_incident(row, tuple(losses[row[0]])) for row in rows]


def _loss(found_at: datetime, found_by: str, verdict: str, reason: str, *seen: Any) -> Loss:
    created_at, last_sequence, *after, evidence = seen
    return Loss(
        found_at,
        found_by,
        Verdict(verdict),
        reason,
        before=StoreIdentity(created_at, int(last_sequence)),
        after=identity_in(*after),
        evidence=Evidence(evidence) if evidence else None,
    )


def _incident(row: tuple[Any, ...], losses: tuple[Loss, ...]) -> Incident:
    incident_id, opened_at, newest_point_at, last_good_at, _, *moved = row
    target, moved = moved[:BASELINE_COLUMNS], moved[BASELINE_COLUMNS:]
    began_empty, *moved = moved
    attempts, launches, next_launch_at, next_attempt_at, released_at = moved[:5]
    return Incident(
        incident_id=incident_id,
        opened_at=opened_at,
        losses=losses,
        target=baseline_in(target),
        newest_point_at=newest_point_at,
        last_good_at=last_good_at,
        attempts=attempts,
        launches=launches,
        next_launch_at=next_launch_at,
        next_attempt_at=next_attempt_at,
        waiting=_part(Waiting, moved[5:8]),
        held=_part(Held, moved[8:11]),
        released_at=released_at,
        given_up=_part(_given_up, moved[11:15]),
        ended=_part(_ended, moved[15:]),
        # Earlier versions did not judge it.
        began_empty=bool(began_empty),
    )


def _part(kind: Callable[..., Part], columns: list[Any]) -> Part | None:
    """Make a part of an incident from its columns; None if they are null."""
    return None if columns[0] is None else kind(*columns)


def _given_up(at: datetime, reason: str, detail: str, code: str | None) -> GivenUp:
    return GivenUp(at, FailureReason(reason), detail, code)


def _ended(at: datetime, outcome: str, detail: str, *restored: int) -> Ended:
    return Ended(at, Outcome(outcome), detail, Restored(*restored))
