"""Leases in PostgreSQL: rows that expire by the server's clock unless their holder renews them.

Not advisory locks: those of a dead host last until the server notices, which can be hours. A lease
locks nothing while it is held; instead, every transaction made under one checks it
(``require_lease``), and whoever cannot renew in time learns so without asking (``require_held``).

How the locks on a lease's row fit together: work takes KEY SHARE, which a renewal (NO KEY UPDATE)
passes by, however long the work takes; taking the lease over (FOR UPDATE) waits for both.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg

from budget_recovery_dagster.adapters.postgres.connection import Connection
from budget_recovery_dagster.adapters.postgres.database import Database
from budget_recovery_dagster.adapters.postgres.storable import storable
from budget_recovery_dagster.domain.admission import (
    Holding,
    holder_at,
    lease_lost,
    require_free,
    require_lease_of,
    require_ours,
)
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.ports import Lease, LeaseState

_log = logging.getLogger(__name__)
# A lease's row is made once, held by nobody.
_MAKE = """
insert into budget_recovery.lease (name, token) values (%s, 0) on conflict do nothing
"""
# To look at it: locks nothing, and makes no row where there is none.
_LOOK = """
select holder, token, acquired_at, expires_at from budget_recovery.lease where name = %s
"""
# To take it: nobody else may look at the row until it is decided.
_LOCK_TO_TAKE = """
select holder, token, acquired_at, expires_at from budget_recovery.lease where name = %s for update
"""
_TAKE = """
update budget_recovery.lease
set holder = %(holder)s, token = token + 1, acquired_at = %(now)s, expires_at = %(expires_at)s
where name = %(name)s
returning token
"""
# To work under it: it cannot change hands before this transaction ends.
_LOCK_TO_WORK = """
select holder, token, acquired_at, expires_at from budget_recovery.lease where name = %s
for key share
"""
# One that has expired is not revived: its holder may have been told that it is lost.
_RENEW = """
update budget_recovery.lease set expires_at = %(expires_at)s
where name = %(name)s and token = %(token)s and expires_at > %(now)s
"""
_RELEASE = """
update budget_recovery.lease set holder = null, acquired_at = null, expires_at = null
where name = %s and token = %s
"""


def require_lease(connection: Connection, database: Database, lease: Lease, *, name: str) -> None:
    """Keep the lease of ``name`` from changing hands until the transaction ends.

    Raises:
        LeaseLostError: it is not held any more.
        ValueError: it is of another name.
    """
    require_lease_of(lease.name, name)
    lease.require_held()
    row = connection.execute(_LOCK_TO_WORK, (lease.name,)).fetchone()
    # The clock is read after the lock: waiting for it may have taken the rest of the lease.
    now = database.moment(connection)
    require_ours(lease.name, lease.token, _holding(row), now)


class PostgresLeases:
    """Gives out leases of ``duration``; a thread for each renews it every ``renew_every``."""

    def __init__(
        self,
        database: Database,
        *,
        duration: timedelta = timedelta(seconds=30),
        renew_every: timedelta = timedelta(seconds=5),
    ) -> None:
        self._database = database
        self._duration = duration
        self._renew_every = renew_every

    def state_of(self, name: str) -> LeaseState:
        """Return how a lease stands, without touching it."""
        with self._database.reading() as connection:
            row = connection.execute(_LOOK, (name,)).fetchone()
            now = self._database.moment(connection)
        return LeaseState(row[1] if row else 0, holder_at(_holding(row), now))

    @contextmanager
    def hold(self, name: str, holder: str, *, at_most: timedelta | None = None) -> Iterator[Lease]:
        """Hold a lease until the context ends; after ``at_most`` it is not renewed any more.

        Raises:
            LeaseHeldError: another holder has it, also where that is this same process.
        """
        lease = self._take(name, holder, at_most)
        try:
            with _renewing(self._database, lease, self._duration, self._renew_every):
                yield lease
        finally:
            self._release(lease)

    def _take(self, name: str, holder: str, at_most: timedelta | None) -> "_HeldLease":
        with self._database.writing() as connection:
            connection.execute(_MAKE, (name,))
            holding = _holding(connection.execute(_LOCK_TO_TAKE, (name,)).fetchone())
            asked_at = time.monotonic()
            now = self._database.moment(connection)
            require_free(name, holding, now)
            values = {
                "name": name,
                "holder": storable(holder),
                "now": now,
                "expires_at": now + self._duration,
            }
            (token,) = connection.execute(_TAKE, values).fetchall()[0]
        return _HeldLease(
            name,
            token,
            deadline=asked_at + self._duration.total_seconds(),
            renewed_until=float("inf") if at_most is None else asked_at + at_most.total_seconds(),
        )

    def _release(self, lease: "_HeldLease") -> None:
        try:
            with self._database.writing() as connection:
                connection.execute(_RELEASE, (lease.name, lease.token))
        except DatabaseError as error:
            # The work is over, and its outcome matters more: the lease ends by itself.
            _log.warning("The lease of %s is left to expire: %s", lease.name, error)


class _HeldLease:
    """A lease as its holder knows it: held until a deadline that renewals push forward.

    The deadline counts from before the server was asked, so it never lies after the server's. From
    ``renewed_until`` on it is not pushed any more.
    """

    def __init__(self, name: str, token: int, *, deadline: float, renewed_until: float) -> None:
        self._name = name
        self._token = token
        self._deadline = deadline
        self._renewed_until = renewed_until

    @property
    def name(self) -> str:
        return self._name

    @property
    def token(self) -> int:
        return self._token

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    @property
    def is_to_be_renewed(self) -> bool:
        return time.monotonic() < self._renewed_until

    def require_held(self) -> None:
        if self.is_over:
            raise lease_lost(self._name, "it could not be renewed in time")

    def extend(self, deadline: float) -> None:
        # What is over stays over: it may have been acted upon.
        if not self.is_over:
            self._deadline = deadline

    def end(self) -> None:
        self._deadline = float("-inf")


@contextmanager
def _renewing(
    database: Database, lease: _HeldLease, duration: timedelta, renew_every: timedelta
) -> Iterator[None]:
    """Renew a lease in a thread, on a connection of its own, until the context ends."""
    stopped = threading.Event()

    def renew_until_stopped() -> None:
        connection: Connection | None = None
        try:
            while not stopped.wait(renew_every.total_seconds()) and not lease.is_over:
                if not lease.is_to_be_renewed:
                    _log.warning("The lease of %s has been held for too long.", lease.name)
                    return
                try:
                    connection = connection or database.connect()
                    _renew(database, connection, lease, duration)
                except psycopg.Error as error:
                    _log.warning("The lease of %s was not renewed: %s", lease.name, error)
                    if connection is not None:
                        connection.close()
                        connection = None
        finally:
            if connection is not None:
                connection.close()

    thread = threading.Thread(
        target=renew_until_stopped, name=f"renew lease {lease.name}", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _renew(
    database: Database, connection: Connection, lease: _HeldLease, duration: timedelta
) -> None:
    asked_at = time.monotonic()
    with connection.transaction():
        now = database.moment(connection)
        values = {
            "name": lease.name,
            "token": lease.token,
            "now": now,
            "expires_at": now + duration,
        }
        is_renewed = connection.execute(_RENEW, values).rowcount == 1
    if is_renewed:
        lease.extend(asked_at + duration.total_seconds())
    else:
        lease.end()


def _holding(row: tuple[Any, ...] | None) -> Holding | None:
    return None if row is None or row[0] is None else Holding(*row)
