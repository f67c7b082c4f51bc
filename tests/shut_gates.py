"""A gate in a database, at which a restore stands still in the middle of its work."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg

# Whoever is about to raise a tenant's counters first tells so in this table.
_BUILD = """
create function budget_recovery.wait_at_gate() returns trigger language plpgsql as $$
begin
    perform pg_advisory_xact_lock_shared(4711);
    return new;
end $$;
create trigger gate before insert on budget_recovery.restore_audit
for each row when (new.tenant = '{tenant}') execute function budget_recovery.wait_at_gate();
"""
_TAKE_DOWN = "drop function budget_recovery.wait_at_gate() cascade"
_WAITING = """
select count(*) from pg_locks
where locktype = 'advisory' and not granted
  and database = (select oid from pg_database where datname = current_database())
"""


class Gate:
    """Shut: no restore gets to the writing of a tenant, or to those after it."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    @property
    def has_waiting(self) -> bool:
        """Whether a restore stands before it."""
        [(count,)] = self._connection.execute(_WAITING).fetchall()
        return bool(count)

    def open(self) -> None:
        """Let go on who waits, and all who come. Doing it twice is harmless."""
        self._connection.execute("select pg_advisory_unlock_all()")


@contextmanager
def shut_gate(url: str, tenant: str) -> Iterator[Gate]:
    """Shut a gate before a tenant whose name needs no quotes; in the end nothing is left of it.

    The database breaks off whoever waits there for half a minute.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("select pg_advisory_lock(4711)")
        connection.execute(_BUILD.format(tenant=tenant).encode())
        gate = Gate(connection)
        try:
            yield gate
        finally:
            # A server that died has let all go on.
            with suppress(psycopg.OperationalError):
                gate.open()
                connection.execute(_TAKE_DOWN)
