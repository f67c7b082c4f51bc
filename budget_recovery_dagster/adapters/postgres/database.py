"""The control-plane database: connection pool, clock, schema version and migrations."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from types import TracebackType
from typing import Self, cast

import psycopg
import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg import IsolationLevel
from psycopg_pool import ConnectionPool
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from budget_recovery_dagster.adapters.postgres.connection import (
    OLDEST_SERVER,
    PREPARE_THRESHOLD,
    Connection,
    as_database_error,
    connect,
    connection_parameters,
    driver_errors,
    prepare_session,
)
from budget_recovery_dagster.domain.windows import require_aware
from budget_recovery_dagster.errors import DatabaseError, SchemaVersionError

SCHEMA = "budget_recovery"
# In this transaction alone: the second of two migrations waits for as long as the first takes, and
# a step may have much data to go through.
_NO_TIME_LIMITS = "set local statement_timeout = 0; set local lock_timeout = 0"
# Held to the end of the transaction, so that of two migrations the second finds all done. Unlike
# a lease it needs no table; a host that dies with it is noticed by the session's keepalives.
_LOCK = "select pg_advisory_xact_lock(hashtextextended('budget_recovery/migrate', 0))"
_SCHEMA_EXISTS = "select to_regnamespace('budget_recovery') is not null"
_VERSION_TABLE_EXISTS = "select to_regclass('budget_recovery.alembic_version') is not null"
_VERSION = "select version_num from budget_recovery.alembic_version"
# Checkouts before the first release had these versions; their history has ended.
_UNRELEASED = frozenset({"0001", "0002", "0003", "0004", "0005", "0006"})


@dataclass(frozen=True, slots=True)
class Migration:
    """What a migration did: from which version (None: there was no schema) to which."""

    from_version: str | None
    to_version: str

    @property
    def changed(self) -> bool:
        """Whether there was anything to do."""
        return self.from_version != self.to_version


def migrate(url: str) -> Migration:
    """Bring the schema of the database at a libpq URL to this project's version, all or nothing.

    Two at once are safe: the second waits and finds nothing to do.

    Raises:
        SchemaVersionError: the schema is newer than this project, or of an unreleased checkout.
        DatabaseError: the database cannot be reached, or refused.
    """
    parameters = connection_parameters(url)
    # The creator spares translating a libpq URL, of any form, into one of SQLAlchemy.
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: connect(parameters), poolclass=NullPool
    )
    try:
        with driver_errors(), engine.begin() as connection:
            return _migrate(connection)
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.Error):
            raise as_database_error(error.orig) from error
        raise


def _migrate(connection: sqlalchemy.Connection) -> Migration:
    driver: Connection = connection.connection.driver_connection  # type: ignore[assignment]
    require_usable_server(driver)
    connection.exec_driver_sql(_NO_TIME_LIMITS)
    connection.exec_driver_sql(_LOCK)
    before = _version(driver)
    newest = _versions()[0]
    # An older schema is about to be upgraded; a newer one must not be touched.
    if before not in (None, *_versions()):
        refuse_unless_newest(before, _versions())
    # `create schema if not exists` asks for the right to create one even where one exists.
    if not connection.exec_driver_sql(_SCHEMA_EXISTS).scalar_one():
        connection.exec_driver_sql(f"create schema {SCHEMA}")
    config = _alembic()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    return Migration(from_version=before, to_version=newest)


def require_current(connection: Connection) -> None:
    """Refuse a database whose schema is not the one that this version of the project works on.

    Raises:
        SchemaVersionError: the schema is missing, older, newer or of an unreleased checkout.
        DatabaseError: the server is too old.
    """
    require_usable_server(connection)
    require_newest(connection)


def require_newest(connection: Connection) -> str:
    """Return the schema's version, refused unless it is the one that this project works on.

    Raises:
        SchemaVersionError: the schema is missing, older, newer or of an unreleased checkout.
    """
    version, known = _version(connection), _versions()
    refuse_unless_newest(version, known)
    return known[0]


def refuse_unless_newest(version: str | None, known: Sequence[str]) -> None:
    """Refuse every version of a schema but the newest of the ``known`` ones, newest first.

    Raises:
        SchemaVersionError: it is missing, older, newer or of an unreleased checkout.
    """
    if version is None:
        raise SchemaVersionError(
            f"The database has no schema {SCHEMA} of this project.",
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
            f"The schema {SCHEMA} has version {version}, unknown to this project, whose newest is"
            f" {known[0]}.",
            "upgrade the project to the version that made it.",
        )
    if version != known[0]:
        raise SchemaVersionError(
            f"The schema {SCHEMA} has version {version}, older than this project's {known[0]}.",
            "run `budget-recovery migrate`.",
        )


def _version(connection: Connection) -> str | None:
    row = connection.execute(_VERSION_TABLE_EXISTS).fetchone()
    if row == (False,):
        return None
    row = connection.execute(_VERSION).fetchone()
    return None if row is None else str(row[0])


def require_usable_server(connection: Connection) -> None:
    """Refuse a server that is too old, and a database that cannot hold every name.

    Raises:
        DatabaseError: it is.
    """
    if connection.info.server_version < OLDEST_SERVER:
        raise DatabaseError(
            f"The server is PostgreSQL {connection.info.server_version // 10000}.",
            f"use PostgreSQL {OLDEST_SERVER // 10000} or newer.",
        )
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise DatabaseError(
            f"The database's encoding is {encoding}, which cannot hold every name.",
            "create the database with encoding UTF8.",
        )


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", f"{__package__}:migrations")
    return config


@cache
def _versions() -> tuple[str, ...]:
    """List the versions that this project knows, newest first."""
    scripts = ScriptDirectory.from_config(_alembic())
    return tuple(script.revision for script in scripts.walk_revisions())


MAX_CONNECTIONS = 4
_CHECKOUT_SECONDS = 10
# The database's clock and this host's need not go equally fast, or may be set.
_LONGEST_SLEEP = 0.25


def server_clock(connection: Connection) -> datetime:
    """Read the server's clock; it moves on within a transaction."""
    [(moment,)] = connection.execute("select clock_timestamp()").fetchall()
    return cast(datetime, moment)


class Database:
    """The database at a libpq URL; a context manager, and the project's Clock.

    ``clock`` tells the moment by which everything is judged: hours, leases, retention.
    """

    def __init__(self, url: str, *, clock: Callable[[Connection], datetime] = server_clock) -> None:
        self._parameters = connection_parameters(url)
        self._clock = clock
        self._pool: ConnectionPool[Connection] | None = None

    def __enter__(self) -> Self:
        """Open the pool.

        Raises:
            DatabaseUnreachableError: there is no connection; the message says why.
            SchemaVersionError: the schema is not the one this version of the project works on.
        """
        # First a connection by hand: unlike the pool, it says what is wrong.
        with driver_errors(), self.connect() as connection:
            require_current(connection)
        self._pool = ConnectionPool(
            "",
            kwargs={**self._parameters, "prepare_threshold": PREPARE_THRESHOLD},
            min_size=1,
            max_size=MAX_CONNECTIONS,
            timeout=_CHECKOUT_SECONDS,
            num_workers=1,
            configure=prepare_session,
            # After a restart of the server every idle connection is dead; without the check,
            # whoever takes one first would fail for it.
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

    def connect(self) -> Connection:
        """Open a connection outside the pool, for work that must not wait for others.

        Raises:
            psycopg.Error: it cannot be opened.
        """
        return connect(self._parameters)

    def now(self) -> datetime:
        """Return the present moment."""
        with self.reading() as connection:
            return self.moment(connection)

    def wait_until(self, moment: datetime) -> None:
        """Return once ``now`` is not before ``moment``."""
        require_aware(moment)
        while (left := (moment - self.now()).total_seconds()) > 0:
            time.sleep(min(left, _LONGEST_SLEEP))

    def moment(self, connection: Connection) -> datetime:
        """Return the present moment, asked on a connection that is already in use."""
        return self._clock(connection).astimezone(UTC)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Give a transaction that commits at the end, or leaves nothing if anything is raised.

        Each statement sees what was committed before it, so a check after a lock sees what the
        lock's former holder left.
        """
        with self._transaction(IsolationLevel.READ_COMMITTED, read_only=False) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Give a read-only transaction in which every statement sees the same moment."""
        with self._transaction(IsolationLevel.REPEATABLE_READ, read_only=True) as connection:
            yield connection

    @contextmanager
    def _transaction(self, isolation: IsolationLevel, *, read_only: bool) -> Iterator[Connection]:
        if self._pool is None:
            raise RuntimeError("the database has not been opened")
        with driver_errors(), self._pool.connection() as connection:
            connection.isolation_level = isolation
            connection.read_only = read_only
            yield connection
