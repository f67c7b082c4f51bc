"""Migrates the control-plane schema: one migration at a time, which waits for nobody for long.

A statement that waits for a lock holds up everyone who comes after it, readers too. So it waits for
seconds. The refusal names the processes that hold the lock.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg

from budget_recovery_dagster.adapters.postgres.database import (
    SCHEMA,
    Session,
    as_database_error,
    connect,
    connection_parameters,
    refuse_unless_newest,
    require_usable_server,
    schema_version,
    transaction,
)
from budget_recovery_dagster.adapters.postgres.migrations import VERSIONS
from budget_recovery_dagster.errors import DatabaseError

if TYPE_CHECKING:
    import sqlalchemy

_LOCK_SECONDS = 5
# A step may process much data. Each statement that waits for a lock has its own time.
_LIMITS = f"set local statement_timeout = 0; set local lock_timeout = '{_LOCK_SECONDS}s'"
# Held until the transaction ends, so that the second of two migrations has nothing to do. Unlike a
# lease it needs no table; the limits of the transaction end that of a dead holder. It is tried and
# not waited for, so that the waiting one occupies no session of a pooler.
_TRY_LOCK = "select pg_try_advisory_xact_lock(hashtextextended('budget_recovery/migrate', 0))"
_RETRY_SECONDS = 1
_TELL_EVERY = 10
_WAIT_AT_MOST = timedelta(minutes=10)
# User and application of a process are visible to every role, its state to few.
_DESCRIBED = """
select p.pid, a.usename, a.application_name, a.state,
       extract(epoch from clock_timestamp() - a.xact_start)::int
from ({}) p (pid) left join pg_stat_activity a using (pid) order by p.pid
"""
_MIGRATING = _DESCRIBED.format("""
    select l.pid from pg_locks l join pg_database d on d.oid = l.database
    where l.locktype = 'advisory' and l.granted and d.datname = current_database()
      and (l.classid::bigint << 32) | l.objid::bigint
          = hashtextextended('budget_recovery/migrate', 0)
""")
_BLOCKING = _DESCRIBED.format("select distinct unnest(pg_blocking_pids(%s))")
_PID = "select pg_backend_pid()"
_OBSERVE_EVERY_SECONDS = 0.25
_SCHEMA_EXISTS = "select to_regnamespace('budget_recovery') is not null"

OnWait = Callable[[str], None]
"""Receives a sentence while a migration waits, from any thread."""


@dataclass(frozen=True, slots=True)
class Migration:
    """The result of a migration: the versions before (None: no schema) and after it."""

    from_version: str | None
    to_version: str

    @property
    def changed(self) -> bool:
        """Whether the migration changed the schema."""
        return self.from_version != self.to_version


@dataclass(frozen=True, slots=True)
class Process:
    """A server process that holds a lock; ``pid`` 0 is a prepared transaction.

    What only privileged roles may see is None.
    """

    pid: int
    user: str | None
    application: str | None
    state: str | None
    seconds: int | None

    def __str__(self) -> str:
        if self.pid == 0:
            return "a prepared transaction (see pg_prepared_xacts)"
        known = [
            f"user {self.user}" if self.user else "",
            f"application {self.application}" if self.application else "",
            self.state or "",
            "" if self.seconds is None else f"transaction open for {self.seconds:,} s",
        ]
        details = ", ".join(filter(None, known))
        return f"process {self.pid}" + (f" ({details})" if details else "")


def migrate(
    url: str, *, on_wait: OnWait = lambda _: None, wait_at_most: timedelta = _WAIT_AT_MOST
) -> Migration:
    """Migrate the database at a libpq URL to the newest version, in one transaction.

    Concurrent migrations are safe: the second one waits, ``wait_at_most``, then has nothing to do.
    ``on_wait`` receives sentences meanwhile, and while a statement waits for a lock.

    Raises:
        SchemaVersionError: the schema is newer than this project, or of an unreleased checkout.
        DatabaseError: the database is unreachable, returned an error, or another process holds a
            lock that the migration needs: the message names it. Nothing has changed.
    """
    # Imported only to migrate: they would delay the start of every command.
    import sqlalchemy  # noqa: PLC0415

    parameters = connection_parameters(url)
    # With a creator, no form of libpq URL needs a translation for SQLAlchemy.
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(parameters),
        poolclass=sqlalchemy.pool.NullPool,
    )
    turn = _Turn(on_wait, wait_at_most)
    watch = _Watch(parameters, on_wait)
    try:
        while True:
            with watch, engine.begin() as connection:
                if migration := _migrate(connection, turn, watch):
                    return migration
            turn.wait()
    except (psycopg.Error, sqlalchemy.exc.DBAPIError) as error:
        cause = error if isinstance(error, psycopg.Error) else error.orig
        if isinstance(cause, psycopg.errors.LockNotAvailable):
            raise _blocked(watch.blocking) from error
        if isinstance(cause, psycopg.Error):
            raise as_database_error(cause) from error
        raise


def _migrate(
    connection: "sqlalchemy.Connection", turn: "_Turn", watch: "_Watch"
) -> Migration | None:
    """Migrate in the transaction of SQLAlchemy; None: another migration runs."""
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415

    session: Session = connection.connection.driver_connection  # type: ignore[assignment]
    require_usable_server(session)
    session.begin(read_only=False)
    connection.exec_driver_sql(_LIMITS)
    if not connection.exec_driver_sql(_TRY_LOCK).scalar_one():
        turn.holders = _processes(session.execute(_MIGRATING).fetchall())
        return None
    watch.start(connection.exec_driver_sql(_PID).scalar_one())
    before = schema_version(session)
    newest = VERSIONS[0]
    # A newer schema must not be changed.
    if before not in (None, *VERSIONS):
        refuse_unless_newest(before, VERSIONS)
    # `create schema if not exists` needs the privilege to create even if the schema exists.
    if not connection.exec_driver_sql(_SCHEMA_EXISTS).scalar_one():
        connection.exec_driver_sql(f"create schema {SCHEMA}")
    config = Config()
    config.set_main_option("script_location", f"{__package__}:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    return Migration(from_version=before, to_version=newest)


class _Turn:
    """Waits for another migration, which ``holders`` are."""

    def __init__(self, on_wait: OnWait, at_most: timedelta) -> None:
        self.holders: Sequence[Process] = ()
        self._on_wait = on_wait
        self._at_most = at_most.total_seconds()
        self._since = time.monotonic()
        self._next_sentence = 0.0

    def wait(self) -> None:
        """Wait before the next try.

        Raises:
            DatabaseError: it took too long.
        """
        waited = time.monotonic() - self._since
        if waited >= self._at_most:
            raise DatabaseError(
                f"The schema was not migrated: another migration has not ended for {waited:,.0f} s:"
                f" {_named(self.holders)}. Nothing has changed.",
                f"wait until it ends, or end it{_how_to_end(self.holders)}, then run"
                " `budget-recovery migrate` again.",
            )
        if self.holders and waited >= self._next_sentence:
            self._on_wait(
                f"Waiting for another migration, {waited:,.0f} s so far: {_named(self.holders)}"
            )
            self._next_sentence = waited + _TELL_EVERY
        time.sleep(_RETRY_SECONDS)


class _Watch:
    """Observes which processes block a migration, on a connection of its own.

    Only while it waits for a lock does the server know. ``blocking`` are the last ones, also after
    the end; empty: none, or a pooler had no session left for this connection.
    """

    def __init__(self, parameters: dict[str, str], on_wait: OnWait) -> None:
        self.blocking: Sequence[Process] = ()
        self._parameters = parameters
        self._on_wait = on_wait
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._ended.clear()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread is not None:
            # A pooler without a free session keeps it waiting longer than the migration.
            self._thread.join(_LOCK_SECONDS)

    def start(self, pid: int) -> None:
        """Observe this process until the context ends."""
        self._thread = threading.Thread(target=self._observe, args=(pid,), daemon=True)
        self._thread.start()

    def _observe(self, pid: int) -> None:
        # Without observations the migration goes on; only its refusal names nobody.
        with suppress(psycopg.Error), closing(connect(self._parameters)) as session:
            while not self._ended.wait(_OBSERVE_EVERY_SECONDS):
                with transaction(session, read_only=True):
                    blocking = _processes(session.execute(_BLOCKING, (pid,)).fetchall())
                if blocking and not self._ended.is_set():
                    self._tell(blocking)
                    self.blocking = blocking

    def _tell(self, blocking: Sequence[Process]) -> None:
        if [each.pid for each in blocking] != [each.pid for each in self.blocking]:
            self._on_wait(f"Waiting up to {_LOCK_SECONDS} s for a lock of {_named(blocking)}")


def _blocked(blocking: Sequence[Process]) -> DatabaseError:
    return DatabaseError(
        f"The schema was not migrated: for {_LOCK_SECONDS} s it waited for a lock of"
        f" {_named(blocking)}. Nothing has changed.",
        f"wait until that transaction ends, or end it{_how_to_end(blocking)}, then run"
        " `budget-recovery migrate` again.",
    )


def _processes(rows: Sequence[tuple[Any, ...]]) -> tuple[Process, ...]:
    return tuple(Process(*row) for row in rows)


def _named(processes: Sequence[Process]) -> str:
    return "; ".join(map(str, processes)) or "a process that is not known; see pg_locks"


def _how_to_end(processes: Sequence[Process]) -> str:
    pids = [str(each.pid) for each in processes if each.pid]
    if not pids:
        return ""
    ends = ", ".join(f"pg_terminate_backend({pid})" for pid in pids)
    return f" with `select {ends}`"
