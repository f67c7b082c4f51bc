"""Looking at the control-plane database, on a connection that cannot write."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from budget_recovery_dagster.adapters.postgres.connection import (
    Connection,
    connect,
    connection_parameters,
    driver_errors,
)
from budget_recovery_dagster.adapters.postgres.database import (
    require_newest,
    require_usable_server,
    server_clock,
)
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.examination_ports import DatabaseServer

_SERVER = "select current_setting('server_version'), current_database(), current_user"

_READ_ONLY = "set default_transaction_read_only = on"

# Past what was set above: as role, database and server have it.
_TAKES_WRITINGS = """
select not pg_is_in_recovery() and reset_val = 'off'
from pg_settings where name = 'default_transaction_read_only'
"""

# Everything is read. Alembic's own table is written by migrations only, definitions of budgets by
# people, and what goes along with another table's rows is removed by the server.
_WRITTEN = {
    "budget_content": ("insert", "delete"),
    "budget_record": ("insert", "delete"),
    "budget_reset": ("insert",),
    "capture": ("insert", "update", "delete"),
    "capture_failure": ("insert", "update", "delete"),
    "incident": ("insert", "update"),
    "lease": ("insert", "update"),
    "restore_attempt": ("insert", "update"),
    "restore_audit": ("insert", "update"),
    "restore_preview": ("insert", "update", "delete"),
    "restore_preview_window": ("insert",),
    "store": ("insert", "update"),
    "store_check": ("insert", "delete"),
    "store_loss": ("insert",),
}

_MISSING_RIGHTS = """
with written (name, privilege) as (select * from unnest(%s::text[], %s::text[]))
select string_agg(r.name, ', ' order by r.place) || ' on ' || c.relname
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
cross join unnest(array['select', 'insert', 'update', 'delete']) with ordinality r (name, place)
where n.nspname = 'budget_recovery' and c.relkind in ('r', 'v', 'm', 'p')
  and (r.name = 'select'
       or exists (select from written w where w.name = c.relname and w.privilege = r.name))
  and not has_table_privilege(c.oid, r.name)
group by c.relname
order by c.relname
"""

_BUCKET = "select bucket from budget_recovery.store"


@contextmanager
def open_examination(url: str) -> Iterator["PostgresExamination"]:
    """Connect to the database at a libpq URL, whatever schema it has.

    Raises:
        DatabaseError: it is no such URL, or there is no connection; the message says why.
    """
    parameters = connection_parameters(url)
    with driver_errors():
        connection = connect(parameters)
    try:
        # Each statement by itself, so that one that is refused spoils no other.
        connection.autocommit = True
        with driver_errors():
            connection.execute(_READ_ONLY)
            examination = PostgresExamination(connection)
        yield examination
    finally:
        connection.close()


class PostgresExamination:
    """The port, on one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        [(version, database, role)] = connection.execute(_SERVER).fetchall()
        self.server = DatabaseServer(version, database, role)

    def require_usable(self) -> None:
        """See that version and encoding of the server are such as we need."""
        require_usable_server(self._connection)

    def require_primary(self) -> None:
        """See that the server takes writings."""
        with driver_errors():
            [(takes_writings,)] = self._connection.execute(_TAKES_WRITINGS).fetchall()
        if not takes_writings:
            raise DatabaseError(
                "The server is read-only.",
                "point BUDGET_RECOVERY_POSTGRES_URL at the primary.",
            )

    def require_current(self) -> str:
        """Return the version of the schema, which is the one that this project works on."""
        with driver_errors():
            return require_newest(self._connection)

    def missing_rights(self) -> tuple[str, ...]:
        """Name the rights that the role lacks, such as ``insert, update on capture``."""
        tables, rights = zip(*_written(), strict=True)
        with driver_errors():
            rows = self._connection.execute(
                _MISSING_RIGHTS, (list(tables), list(rights))
            ).fetchall()
        return tuple(name for (name,) in rows)

    def bucket(self) -> str | None:
        """Return the bucket to which the database belongs; None: not known yet."""
        with driver_errors():
            row = self._connection.execute(_BUCKET).fetchone()
        return None if row is None else str(row[0])

    def now(self) -> datetime:
        """Return the present moment by the server's clock."""
        with driver_errors():
            return server_clock(self._connection).astimezone(UTC)


def _written() -> Iterator[tuple[str, str]]:
    """Give each table with each right to write it."""
    for table, rights in _WRITTEN.items():
        for right in rights:
            yield table, right
