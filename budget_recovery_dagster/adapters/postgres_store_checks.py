"""The checks of the store in PostgreSQL."""

from datetime import datetime
from typing import Any

from budget_recovery_dagster.adapters.postgres_baseline_columns import (
    identity_columns,
    identity_in,
)
from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.adapters.stored_recovery import storable_check
from budget_recovery_dagster.domain.identity import Verdict
from budget_recovery_dagster.domain.retention import CHECKS_KEPT_FOR
from budget_recovery_dagster.recovery_ports import Check

_GOOD = [verdict.value for verdict in Verdict if verdict.is_good]

_INSERT = """
insert into budget_recovery.store_check (
    checked_at, checked_by, verdict, reason, store_created_at, store_last_sequence, incident_id
) values (%s, %s, %s, %s, %s, %s, %s)
"""

# The newest good one tells until when the store was whole, however long ago that was. While an
# incident is open, no check finds that.
_PRUNE = """
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

_READ = """
select checked_at, checked_by, verdict, reason, store_created_at, store_last_sequence, incident_id
from budget_recovery.store_check
"""

_READ_NEWEST = f"{_READ} order by checked_at desc, check_id desc limit %s"

_READ_NEWEST_GOOD = f"""{_READ}
where verdict = any(%s) and incident_id is null
order by checked_at desc, check_id desc
limit 1
"""


class PostgresStoreChecks:
    """The table of checks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, check: Check) -> None:
        """Keep a check, and drop what is older than is kept, but not the newest good one."""
        kept = storable_check(check)
        with self._database.writing() as connection:
            connection.execute(
                _INSERT,
                (
                    kept.checked_at,
                    kept.checked_by,
                    kept.verdict.value,
                    kept.reason,
                    *identity_columns(kept.identity),
                    kept.incident_id,
                ),
            )
            cutoff = self._database.moment(connection) - CHECKS_KEPT_FOR
            connection.execute(_PRUNE, {"cutoff": cutoff, "good": _GOOD})

    def newest(self, count: int) -> tuple[Check, ...]:
        """Return the newest checks."""
        with self._database.reading() as connection:
            return tuple(_check(row) for row in connection.execute(_READ_NEWEST, (count,)))

    def newest_good(self) -> Check | None:
        """Return the newest check that found the store whole."""
        with self._database.reading() as connection:
            return _newest_good(connection)


def read_newest_good_time(connection: Connection) -> datetime | None:
    """Return when the store was found whole by a check for the last time."""
    newest = _newest_good(connection)
    return newest.checked_at if newest else None


def _newest_good(connection: Connection) -> Check | None:
    row = connection.execute(_READ_NEWEST_GOOD, (_GOOD,)).fetchone()
    return None if row is None else _check(row)


def _check(row: tuple[Any, ...]) -> Check:
    checked_at, checked_by, verdict, reason, created_at, last_sequence, incident_id = row
    return Check(
        checked_at=checked_at,
        checked_by=checked_by,
        verdict=Verdict(verdict),
        reason=reason,
        identity=identity_in(created_at, last_sequence),
        incident_id=incident_id,
    )
