"""The control-plane database: a small pool of checked connections, transactions, and its clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Self, cast

from psycopg import IsolationLevel
from psycopg_pool import ConnectionPool

from budget_recovery_dagster.adapters.postgres_connection import (
    PREPARE_THRESHOLD,
    Connection,
    connect,
    connection_parameters,
    driver_errors,
    prepare_session,
)
from budget_recovery_dagster.adapters.postgres_schema import require_current
from budget_recovery_dagster.domain.moments import require_aware

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
