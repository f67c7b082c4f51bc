"""The control-plane schema: bringing it up to date, and refusing to work on another one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import psycopg
import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from budget_recovery_dagster.adapters.postgres_connection import (
    OLDEST_SERVER,
    Connection,
    as_database_error,
    connect,
    connection_parameters,
    driver_errors,
)
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
        SchemaVersionError: the schema is newer than this project.
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
        SchemaVersionError: the schema is missing, older or newer.
        DatabaseError: the server is too old.
    """
    require_usable_server(connection)
    require_newest(connection)


def require_newest(connection: Connection) -> str:
    """Return the schema's version, refused unless it is the one that this project works on.

    Raises:
        SchemaVersionError: the schema is missing, older or newer.
    """
    version, known = _version(connection), _versions()
    refuse_unless_newest(version, known)
    return known[0]


def refuse_unless_newest(version: str | None, known: Sequence[str]) -> None:
    """Refuse every version of a schema but the newest of the ``known`` ones, newest first.

    Raises:
        SchemaVersionError: it is missing, older or newer.
    """
    if version is None:
        raise SchemaVersionError(
            f"The database has no schema {SCHEMA} of this project.",
            "run `budget-recovery migrate`.",
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
    config.set_main_option("script_location", "budget_recovery_dagster.adapters:migrations")
    return config


@cache
def _versions() -> tuple[str, ...]:
    """List the versions that this project knows, newest first."""
    scripts = ScriptDirectory.from_config(_alembic())
    return tuple(script.revision for script in scripts.walk_revisions())
