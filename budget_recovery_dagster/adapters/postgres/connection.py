"""Connections to PostgreSQL, and the driver's errors as errors of this project."""

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
"""Prepared statements are off, so that a migration does not break running services."""
# Defaults for what the URL does not set. The keepalives detect a dead server host.
_CONNECTION_DEFAULTS = {
    "application_name": "budget-recovery",
    "connect_timeout": "5",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
# Set in every session; overrides the defaults of role, database and environment.
_SESSION = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "default_transaction_isolation": "read committed",
    "statement_timeout": "120s",
    "lock_timeout": "30s",
    # A client on a dead host must not hold its locks for hours: the server sends keepalives and
    # ends idle transactions.
    "idle_in_transaction_session_timeout": "60s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
_SET_SESSION = """
select set_config(name, value, false) from unnest(%s::text[], %s::text[]) as s (name, value)
"""
# While a statement runs or waits for a lock, the server checks that its client is connected: a
# terminated run closes its connections without cancelling their statements.
_CHECK_CLIENT = "set client_connection_check_interval = '2s'"
_UNREACHABLE_HINT = (
    "check that PostgreSQL runs and that BUDGET_RECOVERY_POSTGRES_URL is its address."
)
_MISSING_HINT = "create it, or correct BUDGET_RECOVERY_POSTGRES_URL."
_USER_HINT = "correct the user and password in BUDGET_RECOVERY_POSTGRES_URL."
# Messages for a rejected user, of the server and (without a password in the URL) of the driver. In
# other languages they are not recognized, and the database counts as unreachable.
_USER_REJECTED = ("password authentication failed", "no password supplied", "no pg_hba.conf entry")
_SQLSTATE_HINTS = {
    "25006": "point BUDGET_RECOVERY_POSTGRES_URL at the primary: this server is read-only.",
    "3F000": "run `budget-recovery migrate`.",
    "42501": "grant the database user the privilege named in the message.",
    "42P01": "run `budget-recovery migrate`.",
    "53100": "free disk space on the database server.",
    "55P03": "find the holder of the lock in pg_locks, then retry.",
    "57014": "find the cause of the load in pg_stat_activity, then retry.",
}
_OTHER_HINT = "check the log of the PostgreSQL server, then retry."
# Connection errors, and a server that shuts down, has crashed or starts.
_UNREACHABLE_STATES = ("08", "57P")


def connection_parameters(url: str) -> dict[str, str]:
    """Parse a libpq URL into parameters for psycopg.

    Raises:
        DatabaseError: the URL is invalid. The driver's error is not the cause: it quotes the URL.
    """
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except psycopg.Error:
        given = {}
    # With an unescaped / or @, a part of the password is parsed as port, host or database name.
    ports = given.get("port", "").replace(",", "")
    has_password_part = "@" in given.get("host", "") + given.get("dbname", "")
    if not given or has_password_part or (ports and not ports.isdecimal()):
        raise DatabaseError(
            "The database URL is invalid.",
            "set BUDGET_RECOVERY_POSTGRES_URL to a URL such as postgresql://user:password@host/"
            "database, without +psycopg2; write special characters of the password as %XX.",
        ) from None
    # Names may contain any character, so PGCLIENTENCODING is overridden.
    return {**_CONNECTION_DEFAULTS, **given, "client_encoding": "utf8"}


def prepare_session(connection: Connection) -> None:
    """Apply the settings of every session to a new connection."""
    connection.execute(_SET_SESSION, (list(_SESSION), list(_SESSION.values())))
    connection.commit()
    try:
        connection.execute(_CHECK_CLIENT)
        connection.commit()
    except psycopg.errors.InvalidParameterValue:
        # Not supported by servers on Windows; the limits above still apply.
        connection.rollback()


def connect(parameters: dict[str, str]) -> Connection:
    """Open a connection outside the pool.

    Raises:
        psycopg.Error: the connection failed.
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
    """Turn the driver's errors inside the context into a DatabaseError with a hint.

    Raises:
        DatabaseUnreachableError: no connection, or it was lost. Only after a loss during a commit
            is it unknown whether the transaction, as a whole, was committed.
        DatabaseError: the server returned an error.
    """
    try:
        yield
    except PoolTimeout as error:
        raise DatabaseUnreachableError(
            "Timed out waiting for a connection to the control-plane database.", _UNREACHABLE_HINT
        ) from error
    except psycopg.Error as error:
        raise as_database_error(error) from error
    except UnicodeEncodeError as error:
        raise DatabaseError(
            f"A text for the control-plane database is not valid Unicode: {error.reason}.",
            "find the name or reason that contains half of a surrogate pair.",
        ) from error


def as_database_error(error: psycopg.Error) -> DatabaseError:
    """Return the error for an error of the driver."""
    message = " ".join((error.diag.message_primary or str(error)).split()).rstrip(".?")
    state = error.sqlstate
    lost = isinstance(error, psycopg.OperationalError) and state is None
    if lost or (state is not None and state.startswith(_UNREACHABLE_STATES)):
        # The driver gives no code for errors before the session starts.
        return DatabaseUnreachableError(
            f"Cannot connect to the control-plane database: {message}.", _unreachable_hint(message)
        )
    # The message of a standby that rejects the session's settings, with another code.
    if "read-write mode during recovery" in message:
        state = "25006"
    return DatabaseError(
        f"Error from the control-plane database: {message}.",
        _SQLSTATE_HINTS.get(state or "", _OTHER_HINT),
    )


def _unreachable_hint(message: str) -> str:
    if any(rejection in message for rejection in _USER_REJECTED):
        return _USER_HINT
    return _MISSING_HINT if message.endswith("does not exist") else _UNREACHABLE_HINT
