"""Incidents and their losses as rows: reading and writing them within a transaction."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, LiteralString

from psycopg.rows import dict_row

from budget_recovery_dagster.adapters.postgres_baseline_columns import (
    baseline_in,
    columns_of,
    identity_columns,
    identity_in,
)
from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.domain.identity import StoreIdentity, Verdict
from budget_recovery_dagster.domain.incident import (
    Ended,
    FailureReason,
    GivenUp,
    Held,
    Incident,
    Loss,
    Outcome,
    Restored,
    Waiting,
)

_READ = """
select incident_id, opened_at,
       ground_created_at, ground_last_sequence, ground_version, ground_marker_nonce,
       ground_marker_revision, ground_marked_at, ground_intended_nonce,
       newest_point_at, last_good_at, attempts, launches, launches_before, next_launch_at,
       waiting_since, waiting_reason, waits, held_at, held_by, held_reason, released_at,
       failed_at, failure, failure_detail, closed_at, outcome, outcome_detail,
       restored_tenants, restored_windows, restored_counters, restored_boards
from budget_recovery.incident
"""

_READ_OPEN = f"{_READ} where closed_at is null"

# After the lock on the store's row, which whoever moves an incident takes first.
_LOCK_OPEN = f"{_READ_OPEN} for no key update"

_READ_RECENT = f"{_READ} order by opened_at desc, closed_at desc nulls first, incident_id limit %s"

_LOSSES = """
select incident_id, found_at, found_by, verdict, reason,
       before_created_at, before_last_sequence, after_created_at, after_last_sequence
from budget_recovery.store_loss
where incident_id = any(%s)
order by incident_id, position
"""

# What is known from the beginning and never changes; the rest follows at once, as an update.
_INSERT = """
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

_UPDATE = """
update budget_recovery.incident
set ground_created_at = %s, ground_last_sequence = %s, ground_version = %s,
    ground_marker_nonce = %s, ground_marker_revision = %s, ground_marked_at = %s,
    ground_intended_nonce = %s,
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
    """Return the open incident, and how many of its launches the backoff does not count."""
    return _open(connection, _READ_OPEN)


def lock_open(connection: Connection) -> tuple[Incident | None, int]:
    """Return the same as ``read_open``, and keep it as it is until the transaction ends."""
    return _open(connection, _LOCK_OPEN)


def read_recent(connection: Connection, count: int) -> tuple[Incident, ...]:
    """Return the newest incidents, newest first."""
    return tuple(_incidents(connection, _rows(connection, _READ_RECENT, (count,))))


def insert_incident(connection: Connection, incident: Incident) -> None:
    """Write an incident as it is when it is opened, with its loss."""
    connection.execute(
        _INSERT,
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
    """Write the last of an incident's losses."""
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
    """Write all of an incident that may change, but not its losses."""
    waiting, held = incident.waiting, incident.held
    given_up, ended = incident.given_up, incident.ended
    restored = ended.restored if ended else None
    connection.execute(
        _UPDATE,
        (
            *columns_of(incident.ground),
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
        ground=baseline_in(
            (
                row["ground_created_at"],
                row["ground_last_sequence"],
                row["ground_version"],
                row["ground_marker_nonce"],
                row["ground_marker_revision"],
                row["ground_marked_at"],
                row["ground_intended_nonce"],
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
