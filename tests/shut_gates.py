"""A gate in the database at which a restore waits in the middle of its work."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg

# A restore writes into this table before it raises a tenant's counters.
_BUILD = """
create function budget_recovery.wait_at_gate() returns trigger language plpgsql as $$
begin
    perform pg_advisory_xact_lock_shared(4711);
    return new;
end $$;
create trigger gate before {event} on budget_recovery.{table}
for each row when (new.tenant = '{tenant}') execute function budget_recovery.wait_at_gate();
"""
_TAKE_DOWN = "drop function budget_recovery.wait_at_gate() cascade"
_WAITING = """
select count(*) from pg_locks
where locktype = 'advisory' and not granted
  and database = (select oid from pg_database where datname = current_database())
"""


class Gate:
    """A shut gate: no restore raises counters of a tenant or of later ones."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    @property
    def has_waiting(self) -> bool:
        """Return whether a restore waits at the gate."""
        [(count,)] = self._connection.execute(_WAITING).fetchall()
        return bool(count)

    def open(self) -> None:
        """Let waiting and later restores pass. Opening twice is harmless."""
        self._connection.execute("select pg_advisory_unlock_all()")


@contextmanager
def shut_gate(
    url: str, tenant: str, table: str = "restore_audit", event: str = "insert"
) -> Iterator[Gate]:
    """Shut a gate before a tenant whose name needs no quotes; remove it at the end.

    A capture waits at the gate of the table ``capture``. With the event ``update``, a restore waits
    after it has raised the tenant's counters.

    The database cancels a restore that waits there for 30 s.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("select pg_advisory_lock(4711)")
        connection.execute(_BUILD.format(tenant=tenant, table=table, event=event).encode())
        gate = Gate(connection)
        try:
            yield gate
        finally:
            # A dead server has already released the lock.
            with suppress(psycopg.OperationalError):
                gate.open()
                connection.execute(_TAKE_DOWN)
