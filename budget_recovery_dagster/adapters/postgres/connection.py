"""Connections to PostgreSQL: how they are opened, and how the driver's errors become ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import PoolTimeout

from budget_recovery_dagster.errors import DatabaseError, DatabaseUnreachableError

Connection = psycopg.Connection[tuple[Any, ...]]
OLDEST_SERVER = 150000
PREPARE_THRESHOLD = None
"""No statement is prepared, so that a migration cannot break the sessions of running services."""
# What a URL does not say itself. The keepalives notice a server's host that is gone.
_CONNECTION_DEFAULTS = {
    "application_name": "budget-recovery",
    "connect_timeout": "5",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
# Set in every session, whatever defaults the role, the database or the host's environment has.
_SESSION = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "default_transaction_isolation": "read committed",
    "statement_timeout": "120s",
    "lock_timeout": "30s",
    # A client whose host died must not hold its locks for hours: the server asks whether it is
    # there, and ends a transaction in which nothing happens.
    "idle_in_transaction_session_timeout": "60s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
_SET_SESSION = """
select set_config(name, value, false) from unnest(%s::text[], %s::text[]) as s (name, value)
"""
# While a statement runs, or waits for a lock, the server looks whether its client is still there: a
# run that is terminated closes its connections, and does not cancel what they were at.
_WATCH_CLIENT = "set client_connection_check_interval = '2s'"
_UNREACHABLE_HINT = "check that PostgreSQL runs and that BUDGET_RECOVERY_POSTGRES_URL leads to it."
_MISSING_HINT = "create it, or correct BUDGET_RECOVERY_POSTGRES_URL."
_USER_HINT = "correct the user and password in BUDGET_RECOVERY_POSTGRES_URL."
# What a server, and the driver where the URL has no password, say of a user who is not let in; a
# server whose messages are in another language is only told to be unreachable.
_USER_REFUSED = ("password authentication failed", "no password supplied", "no pg_hba.conf entry")
_SQLSTATE_HINTS = {
    "25006": "point BUDGET_RECOVERY_POSTGRES_URL at the primary: this server is read-only.",
    "3F000": "run `budget-recovery migrate`.",
    "42501": "grant the database user the right that the message names.",
    "42P01": "run `budget-recovery migrate`.",
    "53100": "free disk space on the database server.",
    "55P03": "look in pg_locks for who holds the lock, and try again.",
    "57014": "look in pg_stat_activity for what slows the database down, and try again.",
}
_OTHER_HINT = "look into the log of the PostgreSQL server, and try again."
# Connection exceptions, and a server that is shutting down, crashed or starting.
_UNREACHABLE_STATES = ("08", "57P")


def connection_parameters(url: str) -> dict[str, str]:
    """Read a libpq URL into parameters for psycopg.

    Raises:
        DatabaseError: it is no such URL. The driver's own error is not kept: it quotes the URL.
    """
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except psycopg.Error:
        given = {}
    # A password with an unescaped / or @ spills into port, host or dbname, which libpq quotes.
    ports = given.get("port", "").replace(",", "")
    spilt = "@" in given.get("host", "") + given.get("dbname", "")
    if not given or spilt or (ports and not ports.isdecimal()):
        raise DatabaseError(
            "The database URL cannot be read.",
            "set BUDGET_RECOVERY_POSTGRES_URL to a form such as postgresql://user:password@host/"
            "database, without +psycopg2, special characters of the password written as %XX.",
        ) from None
    # Names may hold any character, whatever PGCLIENTENCODING says.
    return {**_CONNECTION_DEFAULTS, **given, "client_encoding": "utf8"}


def prepare_session(connection: Connection) -> None:
    """Give a new connection the settings that every session of ours has."""
    connection.execute(_SET_SESSION, (list(_SESSION), list(_SESSION.values())))
    connection.commit()
    try:
        connection.execute(_WATCH_CLIENT)
        connection.commit()
    except psycopg.errors.InvalidParameterValue:
        # A server on Windows cannot; there the limits above must do.
        connection.rollback()


def connect(parameters: dict[str, str]) -> Connection:
    """Open a connection of its own, outside any pool.

    Raises:
        psycopg.Error: it cannot be opened.
    """
    connection = psycopg.connect(make_conninfo(**parameters), prepare_threshold=PREPARE_THRESHOLD)
    try:
        prepare_session(connection)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def driver_errors() -> Iterator[None]:
    """Turn the driver's errors inside the context into ours, with a hint.

    Raises:
        DatabaseUnreachableError: there is or was no connection. Only where it broke during a
            commit is it unknown whether the whole transaction stands or nothing of it.
        DatabaseError: the server refused.
    """
    try:
        yield
    except PoolTimeout as error:
        raise DatabaseUnreachableError(
            "No connection to the control-plane database within the time given.", _UNREACHABLE_HINT
        ) from error
    except psycopg.Error as error:
        raise as_database_error(error) from error
    except UnicodeEncodeError as error:
        raise DatabaseError(
            f"A text for the control-plane database is not valid Unicode: {error.reason}.",
            "look for the name or reason that holds half of a surrogate pair.",
        ) from error


def as_database_error(error: psycopg.Error) -> DatabaseError:
    """Describe an error of the driver in our terms."""
    said = " ".join((error.diag.message_primary or str(error)).split()).rstrip(".?")
    state = error.sqlstate
    lost = isinstance(error, psycopg.OperationalError) and state is None
    if lost or (state is not None and state.startswith(_UNREACHABLE_STATES)):
        # The driver gives no code for what fails before the session begins.
        return DatabaseUnreachableError(
            f"The control-plane database cannot be reached: {said}.", _hint_of_unreachable(said)
        )
    return DatabaseError(
        f"The control-plane database refused: {said}.",
        _hint_of_refused(state, said),
    )


def _hint_of_refused(state: str | None, said: str) -> str:
    # So a standby says it, before anything is tried.
    if "read-write mode during recovery" in said:
        state = "25006"
    return _SQLSTATE_HINTS.get(state or "", _OTHER_HINT)


def _hint_of_unreachable(said: str) -> str:
    if any(refusal in said for refusal in _USER_REFUSED):
        return _USER_HINT
    return _MISSING_HINT if said.endswith("does not exist") else _UNREACHABLE_HINT
