"""The attempts at restoring as rows: reading and writing them within a transaction."""

from datetime import datetime

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.recovery_ports import Attempt

_INSERT = """
insert into budget_recovery.restore_attempt (
    incident_id, loss, number, run_id, holder, started_at
) values (%s, %s, %s, %s, %s, %s)
"""

# Not what the incident counts: that begins again while the attempts that there were stay.
_NEXT_NUMBER = """
select coalesce(max(number), 0) + 1
from budget_recovery.restore_attempt
where incident_id = %s and loss = %s
"""

# What has been said once of how an attempt ended stands.
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

_READ = """
select incident_id, loss, number, run_id, holder, started_at, ended_at, outcome
from budget_recovery.restore_attempt
where incident_id = %s
order by loss, number
"""


def insert_attempt(connection: Connection, attempt: Attempt) -> None:
    """Write an attempt that has just been claimed."""
    connection.execute(
        _INSERT,
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
    """Write how the newest attempt of an incident ended, unless that is known."""
    values = {"incident_id": incident_id, "outcome": outcome, "ended_at": ended_at}
    connection.execute(_END_NEWEST, values)


def read_attempts(connection: Connection, incident_id: str) -> tuple[Attempt, ...]:
    """Return the attempts of an incident, oldest first."""
    return tuple(Attempt(*row) for row in connection.execute(_READ, (incident_id,)))
