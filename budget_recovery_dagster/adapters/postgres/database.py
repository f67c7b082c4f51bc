"""The control-plane database: connections, driver errors, clock, stored texts, schema version."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, LiteralString, Self, cast

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool, PoolTimeout

from budget_recovery_dagster.adapters.postgres.migrations import VERSIONS
from budget_recovery_dagster.errors import (
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnreachableError,
    SchemaVersionError,
)

Connection = psycopg.Connection[tuple[Any, ...]]
OLDEST_SERVER = 150000
MAX_CONNECTIONS = 4
_CHECKOUT_SECONDS = 10
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
# Set at the start of every transaction, and only for it; overrides the defaults of role, database
# and environment. A session is not ours alone: a connection pooler in transaction mode gives it to
# another program after each transaction. A client on a dead host must not hold its locks for hours:
# the server sends keepalives and ends idle transactions.
_LIMITS: LiteralString = """
set local timezone = 'UTC';
set local datestyle = 'ISO, YMD';
set local statement_timeout = '120s';
set local lock_timeout = '30s';
set local idle_in_transaction_session_timeout = '60s';
set local tcp_keepalives_idle = '30';
set local tcp_keepalives_interval = '10';
set local tcp_keepalives_count = '3';
"""
# While a statement runs or waits for a lock, the server checks that its client is connected: a
# terminated run closes its connections without cancelling their statements.
_CHECK_CLIENT: LiteralString = "set local client_connection_check_interval = '2s';"
# Explicit, because the defaults may be others. One statement sees what was committed before it; all
# statements of a reading transaction see the same.
_BEGIN_WRITING: LiteralString = "begin isolation level read committed read write;"
_BEGIN_READING: LiteralString = "begin isolation level repeatable read read only;"
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
# Parts of PgBouncer's messages, which have no code of their own.
_POOLER_HINTS = {
    "unsupported startup parameter": "remove this parameter from BUDGET_RECOVERY_POSTGRES_URL and"
    " from PGOPTIONS, or add it to PgBouncer's ignore_startup_parameters.",
    "statement pooling mode": "set PgBouncer's pool_mode to transaction or session.",
    "query_wait_timeout": "raise PgBouncer's pool size, or find what uses its server connections.",
}
# A deadlock, a lock that was not given in time, and the limit of a statement.
_BUSY_STATES = frozenset({"40P01", "55P03", "57014"})
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


class Session(psycopg.Connection[tuple[Any, ...]]):
    """The driver's connection, which begins transactions only by ``transaction``.

    A failed attempt to connect leaves no socket open.
    """

    _limits: LiteralString = _LIMITS

    @classmethod
    def connect(cls, conninfo: str = "", **options: Any) -> Self:
        """Connect, or take one of ``already_open``, so that a pool can begin with it."""
        already_open: list[Self] = options.pop("already_open", [])
        if already_open:
            return already_open.pop()
        # Otherwise the driver begins transactions by itself, without their settings.
        session = cls._new(conninfo, {**options, "autocommit": True})
        try:
            session.try_client_check()
        except BaseException:
            session.close()
            raise
        return session

    @classmethod
    def _new(cls, conninfo: str, options: Mapping[str, Any]) -> Self:
        try:
            return super().connect(conninfo, **options)
        except psycopg.Error as error:
            # The driver's frames refer to the error and to a socket that has timed out. It would
            # stay open until the next garbage collection, or as long as a log keeps the error.
            error.__context__ = None
            raise error.with_traceback(None) from None

    def try_client_check(self) -> None:
        """Use this check if the server supports it, which one on Windows does not."""
        try:
            self.execute(f"begin; {_CHECK_CLIENT} commit")
        except psycopg.errors.InvalidParameterValue:
            self.rollback()
        else:
            self._limits += _CHECK_CLIENT

    def begin(self, *, read_only: bool) -> None:
        """Begin a transaction with the settings of ours, in one round trip."""
        self.execute((_BEGIN_READING if read_only else _BEGIN_WRITING) + self._limits)


def connect(parameters: dict[str, str]) -> Session:
    """Open a connection outside the pool.

    Raises:
        psycopg.Error: the connection failed.
    """
    return Session.connect(make_conninfo(**parameters), prepare_threshold=PREPARE_THRESHOLD)


@contextmanager
def transaction(session: Session, *, read_only: bool) -> Iterator[Session]:
    """Provide a transaction that commits at the end, or rolls back on any exception.

    Everything that it sets ends with it, also the limits of time.

    Raises:
        psycopg.Error: the connection failed, or the server returned an error.
    """
    try:
        session.begin(read_only=read_only)
        yield session
    except BaseException:
        # Of a connection that is lost there is nothing to roll back.
        with suppress(psycopg.Error):
            session.rollback()
        raise
    session.commit()


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
    kind = DatabaseBusyError if state in _BUSY_STATES else DatabaseError
    return kind(
        f"Error from the control-plane database: {message}.",
        _SQLSTATE_HINTS.get(state or "", _OTHER_HINT),
    )


def _unreachable_hint(message: str) -> str:
    for part, hint in _POOLER_HINTS.items():
        if part in message:
            return hint
    if any(rejection in message for rejection in _USER_REJECTED):
        return _USER_HINT
    return _MISSING_HINT if message.endswith("does not exist") else _UNREACHABLE_HINT


MAX_NAMED = 100
"""How many drops, unreadable keys or omitted counters a list names; the total is stored too."""
_MAX_TEXT_LENGTH = 2000
# An index entry is limited to about 2,700 bytes; a character takes up to four.
_MAX_ID_LENGTH = 250


def storable(text: str) -> str:
    """Return a text in a form that PostgreSQL can store, cut to 2,000 characters."""
    return _clean(text, _MAX_TEXT_LENGTH)


def storable_id(text: str) -> str:
    """Return an id, such as a run's, that PostgreSQL can store and index: 250 characters."""
    return _clean(text, _MAX_ID_LENGTH)


def _clean(text: str, max_length: int) -> str:
    clean = text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
    return clean if len(clean) <= max_length else f"{clean[: max_length - 1]}…"


def server_clock(connection: Connection) -> datetime:
    """Return the server's time; it advances within a transaction."""
    [(now,)] = connection.execute("select clock_timestamp()").fetchall()
    return cast(datetime, now)


class Database:
    """The database at a libpq URL; a context manager, and the project's Clock.

    ``clock`` returns the time that hours, leases and retention depend on.
    """

    def __init__(self, url: str, *, clock: Callable[[Connection], datetime] = server_clock) -> None:
        self._parameters = connection_parameters(url)
        self._clock = clock
        self._pool: ConnectionPool[Session] | None = None
        self._already_open: list[Session] = []

    def __enter__(self) -> Self:
        """Open the pool.

        Raises:
            DatabaseUnreachableError: the connection failed; the message gives the reason.
            SchemaVersionError: the schema is missing, older or newer.
        """
        # Unlike the pool, a single connection reports the reason of a failure.
        with driver_errors():
            first = self.connect()
            try:
                with transaction(first, read_only=True):
                    require_current(first)
            except BaseException:
                first.close()
                raise
        # The pool begins with it.
        self._already_open = [first]
        self._pool = ConnectionPool(
            "",
            connection_class=Session,
            kwargs={
                **self._parameters,
                "prepare_threshold": PREPARE_THRESHOLD,
                "already_open": self._already_open,
            },
            min_size=1,
            max_size=MAX_CONNECTIONS,
            timeout=_CHECKOUT_SECONDS,
            num_workers=1,
            # After a server restart every idle connection is dead; without the check, the first
            # use of each would fail.
            check=ConnectionPool.check_connection,
            name="budget-recovery",
            open=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        # The pool may have been closed before it took it.
        while self._already_open:
            self._already_open.pop().close()

    def connect(self) -> Session:
        """Open a connection outside the pool, for work that must not wait for the pool.

        Raises:
            psycopg.Error: the connection failed.
        """
        return connect(self._parameters)

    def now(self) -> datetime:
        """Return the present time (UTC)."""
        with self.reading() as connection:
            return self.time_on(connection)

    def host_time(self) -> datetime:
        """Return the present time by the clock of this host."""
        return datetime.now(UTC)

    def wait(self, span: timedelta) -> None:
        """Sleep, by the monotonic clock of this host: the database's clock may be set meanwhile."""
        time.sleep(max(span.total_seconds(), 0))

    def time_on(self, connection: Connection) -> datetime:
        """Return the present time (UTC), read on a connection that is already in use."""
        return self._clock(connection).astimezone(UTC)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Provide a transaction that commits at the end, or rolls back on any exception.

        Each statement sees what was committed before it, so a check after taking a lock sees the
        changes of the lock's previous holder.
        """
        with self._transaction(read_only=False) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Provide a read-only transaction; all its statements see the same snapshot."""
        with self._transaction(read_only=True) as connection:
            yield connection

    def rows(
        self, query: LiteralString, parameters: Sequence[object] | Mapping[str, object] = ()
    ) -> list[tuple[Any, ...]]:
        """Return the rows of one query, read in a transaction of its own."""
        with self.reading() as connection:
            return connection.execute(query, parameters).fetchall()

    @contextmanager
    def _transaction(self, *, read_only: bool) -> Iterator[Connection]:
        if self._pool is None:
            raise RuntimeError("the database has not been opened")
        with (
            driver_errors(),
            self._pool.connection() as session,
            transaction(session, read_only=read_only) as connection,
        ):
            yield connection


SCHEMA = "budget_recovery"
_VERSION_TABLE_EXISTS = "select to_regclass('budget_recovery.alembic_version') is not null"
_VERSION = "select version_num from budget_recovery.alembic_version"
# Checkouts before the first release had these versions; their history has ended.
_UNRELEASED = frozenset({"0001", "0002", "0003", "0004", "0005", "0006"})


def require_current(connection: Connection) -> None:
    """Check that the server is usable and that the schema has the newest version.

    Raises:
        SchemaVersionError: the schema is missing, older or newer.
        DatabaseError: the server is too old, or its encoding is not UTF8.
    """
    require_usable_server(connection)
    require_newest(connection)


def require_newest(connection: Connection) -> str:
    """Return the schema's version, after checking that it is the newest one.

    Raises:
        SchemaVersionError: the schema is missing, older or newer.
    """
    version, known = schema_version(connection), VERSIONS
    refuse_unless_newest(version, known)
    return known[0]


def refuse_unless_newest(version: str | None, known: Sequence[str]) -> None:
    """Check that ``version`` is the newest, which is the first of the ``known`` versions.

    Raises:
        SchemaVersionError: the schema is missing (None), older or newer.
    """
    if version is None:
        raise SchemaVersionError(
            f"The database has no schema {SCHEMA}.",
            "run `budget-recovery migrate`.",
        )
    if version in _UNRELEASED:
        raise SchemaVersionError(
            f"The schema {SCHEMA} has version {version} of an unreleased checkout, which cannot be"
            " upgraded.",
            f"use the checkout that created it, or give up its snapshots: `drop schema {SCHEMA}"
            " cascade`, then run `budget-recovery migrate`.",
        )
    if version not in known:
        raise SchemaVersionError(
            f"The schema {SCHEMA} has version {version}, unknown to this project"
            f" (newest: {known[0]}).",
            "upgrade the project to the version that created the schema.",
        )
    if version != known[0]:
        raise SchemaVersionError(
            f"The schema {SCHEMA} has version {version}, older than the required {known[0]}.",
            "run `budget-recovery migrate`.",
        )


def require_usable_server(connection: Connection) -> None:
    """Check the server's version and the database's encoding.

    Raises:
        DatabaseError: the server is too old, or the encoding is not UTF8.
    """
    if connection.info.server_version < OLDEST_SERVER:
        raise DatabaseError(
            f"PostgreSQL {connection.info.server_version // 10000} is too old.",
            f"use PostgreSQL {OLDEST_SERVER // 10000} or newer.",
        )
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise DatabaseError(
            f"The database's encoding is {encoding}, which cannot store every name.",
            "create the database with encoding UTF8.",
        )


def schema_version(connection: Connection) -> str | None:
    """Return the version of the schema; None: there is none."""
    row = connection.execute(_VERSION_TABLE_EXISTS).fetchone()
    if row == (False,):
        return None
    row = connection.execute(_VERSION).fetchone()
    return None if row is None else str(row[0])
