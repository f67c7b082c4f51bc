"""Leases in PostgreSQL: rows that expire by the server's clock unless their holder renews them.

Advisory locks would not do: the server keeps those of a dead host until it detects its death, which
can take hours. A held lease locks nothing. Instead, every transaction under a lease checks it
(``require_lease``), and a holder that cannot renew in time knows it locally (``require_held``).

Locks on a lease's row: work takes KEY SHARE, which does not block a renewal (NO KEY UPDATE),
however long the work takes. Taking over the lease (FOR UPDATE) waits for both.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from typing import Any

import psycopg

from budget_recovery_dagster.adapters.postgres.database import (
    Connection,
    Database,
    Session,
    storable,
    transaction,
)
from budget_recovery_dagster.domain.admission import (
    Holding,
    LeaseState,
    lease_lost,
    require_free,
    require_lease_of,
    require_ours,
)
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.ports import Lease
from budget_recovery_dagster.stopwatch import HOST_CLOCKS, HostClock, Stopwatch

_log = logging.getLogger(__name__)
# The holdings of this process that it could not release, because the database was away. Each try
# of a run opens the database anew, so they are kept here.
_GIVEN_UP: set[tuple[str, str, int, datetime]] = set()
# A lease's row is created once, without a holder.
_CREATE = """
insert into budget_recovery.lease (name, token) values (%s, 0) on conflict do nothing
"""
# To observe a lease: no lock, and no row is created.
_OBSERVE = """
select holder, token, acquired_at, expires_at from budget_recovery.lease where name = %s
"""
# To take a lease: others wait for the row until this transaction ends.
_LOCK_FOR_TAKEOVER = """
select holder, token, acquired_at, expires_at from budget_recovery.lease where name = %s for update
"""
_TAKE = """
update budget_recovery.lease
set holder = %(holder)s, token = token + 1, acquired_at = %(now)s, expires_at = %(expires_at)s
where name = %(name)s
returning token
"""
# To work under a lease: no takeover before this transaction ends.
_LOCK_FOR_WORK = """
select holder, token, acquired_at, expires_at from budget_recovery.lease where name = %s
for key share
"""
# An expired lease is not renewed: its holder may already have acted on the expiry.
_RENEW = """
update budget_recovery.lease set expires_at = %(expires_at)s
where name = %(name)s and token = %(token)s and expires_at > %(now)s
"""
_RELEASE = """
update budget_recovery.lease set holder = null, acquired_at = null, expires_at = null
where name = %s and token = %s
"""


def require_lease(connection: Connection, database: Database, lease: Lease, *, name: str) -> None:
    """Prevent a takeover of the lease ``name`` until the transaction ends.

    Raises:
        LeaseLostError: the lease has expired or was taken over.
        ValueError: the lease has another name.
    """
    require_lease_of(lease.name, name)
    lease.require_held()
    row = connection.execute(_LOCK_FOR_WORK, (lease.name,)).fetchone()
    # Read the clock after the lock: the lease may have expired while waiting for it.
    now = database.time_on(connection)
    require_ours(lease.name, lease.token, _holding(row), now)


@dataclass(frozen=True, slots=True)
class PostgresLeases:
    """Leases of ``duration``; a thread for each lease renews it every ``renew_every``."""

    _database: Database
    _: KW_ONLY
    duration: timedelta = timedelta(seconds=30)
    renew_every: timedelta = timedelta(seconds=5)
    host_clocks: Sequence[HostClock] = HOST_CLOCKS

    def state_of(self, name: str) -> LeaseState:
        """Return the token and the holder of a lease, without locking it."""
        with self._database.reading() as connection:
            row = connection.execute(_OBSERVE, (name,)).fetchone()
            now = self._database.time_on(connection)
        return LeaseState.of(row[1] if row else 0, _holding(row), now)

    @contextmanager
    def hold(self, name: str, holder: str, *, at_most: timedelta | None = None) -> Iterator[Lease]:
        """Hold a lease until the context ends; after ``at_most`` it is no longer renewed.

        A lease that this process has given up, and could not release, is free to it at once: the
        next try of the same run need not wait for its expiry.

        Raises:
            LeaseHeldError: the lease is held, possibly by this process itself.
        """
        lease = self._take(name, holder, at_most)
        try:
            with _renewing(self._database, lease, self.duration, self.renew_every):
                yield lease
        finally:
            self._release(lease)

    def _take(self, name: str, holder: str, at_most: timedelta | None) -> "_HeldLease":
        with self._database.writing() as connection:
            connection.execute(_CREATE, (name,))
            holding = _holding(connection.execute(_LOCK_FOR_TAKEOVER, (name,)).fetchone())
            since = Stopwatch(self.host_clocks)
            now = self._database.time_on(connection)
            if holding is None or _identity(name, holding) not in _GIVEN_UP:
                require_free(name, holding, now)
            values = {
                "name": name,
                "holder": storable(holder),
                "now": now,
                "expires_at": now + self.duration,
            }
            (token,) = connection.execute(_TAKE, values).fetchall()[0]
        taken = Holding(storable(holder), token, now, now + self.duration)
        return _HeldLease(name, taken, self.duration, since, at_most=at_most)

    def _release(self, lease: "_HeldLease") -> None:
        try:
            with self._database.writing() as connection:
                connection.execute(_RELEASE, (lease.name, lease.token))
        except DatabaseError as error:
            # The result of the work matters more, and the lease expires anyway.
            _GIVEN_UP.add(_identity(lease.name, lease.holding))
            _log.warning("Could not release the lease %s; it expires: %s", lease.name, error)


class _HeldLease:
    """A lease as its holder knows it: held for a duration after it was taken or last renewed.

    The time counts from before the request to the server, and goes on while this host is
    suspended, so it expires here before it expires on the server. ``at_most`` after it was taken,
    it is no longer renewed.
    """

    def __init__(
        self,
        name: str,
        holding: Holding,
        duration: timedelta,
        taken: Stopwatch,
        *,
        at_most: timedelta | None,
    ) -> None:
        self.name = name
        self.token = holding.token
        self.holding = holding
        self._duration = duration.total_seconds()
        self.taken = taken
        self._at_most = float("inf") if at_most is None else at_most.total_seconds()
        self._renewed: Stopwatch | None = taken

    @property
    def has_expired(self) -> bool:
        renewed = self._renewed
        return renewed is None or renewed.seconds() >= self._duration

    @property
    def is_renewable(self) -> bool:
        return self.taken.seconds() < self._at_most

    def require_held(self) -> None:
        if self.has_expired:
            raise lease_lost(self.name, "it could not be renewed in time")

    def extend(self, renewed: Stopwatch) -> None:
        # An expired lease stays expired: its holder may already have acted on it.
        if self.has_expired:
            self.end()
        else:
            self._renewed = renewed

    def end(self) -> None:
        self._renewed = None


@contextmanager
def _renewing(
    database: Database, lease: _HeldLease, duration: timedelta, renew_every: timedelta
) -> Iterator[None]:
    """Renew a lease in a thread, on a separate connection, until the context ends."""
    stopped = threading.Event()

    def renew_until_stopped() -> None:
        session: Session | None = None
        try:
            while not stopped.wait(renew_every.total_seconds()) and not lease.has_expired:
                if not lease.is_renewable:
                    _log.warning("The lease %s reached its maximum duration.", lease.name)
                    return
                try:
                    session = session or database.connect()
                    _renew(database, session, lease, duration)
                except psycopg.Error as error:
                    _log.warning("Could not renew the lease %s: %s", lease.name, error)
                    if session is not None:
                        session.close()
                        session = None
        finally:
            if session is not None:
                session.close()

    thread = threading.Thread(
        target=renew_until_stopped, name=f"renew lease {lease.name}", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _renew(database: Database, session: Session, lease: _HeldLease, duration: timedelta) -> None:
    since = lease.taken.anew()
    with transaction(session, read_only=False) as connection:
        now = database.time_on(connection)
        values = {
            "name": lease.name,
            "token": lease.token,
            "now": now,
            "expires_at": now + duration,
        }
        is_renewed = connection.execute(_RENEW, values).rowcount == 1
    if is_renewed:
        lease.extend(since)
    else:
        lease.end()


def _identity(name: str, holding: Holding) -> tuple[str, str, int, datetime]:
    """Return what no other holding of any lease in any database has in common with this one."""
    return name, holding.holder, holding.token, holding.acquired_at


def _holding(row: tuple[Any, ...] | None) -> Holding | None:
    return None if row is None or row[0] is None else Holding(*row)
