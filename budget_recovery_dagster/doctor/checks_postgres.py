"""Checks of the control-plane database, in read-only transactions, and of other clocks.

The clock of PostgreSQL is the one that the others are compared with.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg

from budget_recovery_dagster.adapters.postgres.database import (
    Connection,
    Session,
    connect,
    connection_parameters,
    driver_errors,
    require_newest,
    require_usable_server,
    server_clock,
    transaction,
)
from budget_recovery_dagster.doctor.model import Check, Result, fail, ok, warn
from budget_recovery_dagster.domain.store import require_bucket
from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, RESTORE_CLOCK_SKEW, clock_skew
from budget_recovery_dagster.settings import Settings

_SESSION = "select current_database(), current_user"
_VERSION = "select current_setting('server_version')"
_IS_STANDBY = "select pg_is_in_recovery(), current_setting('default_transaction_read_only')::bool"
_PID = "select pg_backend_pid()"
# Another client may take a session of the pooler in between, and give it back.
_POOLING_TRIES = 3
_POOLING_SECONDS = 3

# Every table is read. Only migrations write Alembic's own table, and only people write definitions
# of budgets. The server removes what cascades from another table's rows.
_WRITTEN = {
    "bucket_configuration": ("insert", "delete"),
    "budget_content": ("insert", "delete"),
    "budget_record": ("insert", "delete"),
    "budget_reset": ("insert",),
    "capture": ("insert", "update", "delete"),
    "capture_failure": ("insert", "update", "delete"),
    "discarded_capture": ("insert",),
    "capture_run": ("insert", "update", "delete"),
    "incident": ("insert", "update"),
    "key_count": ("insert", "update", "delete"),
    "lease": ("insert", "update"),
    "restore_attempt": ("insert", "update"),
    "restore_audit": ("insert", "update"),
    "restore_preview": ("insert", "update", "delete"),
    "restore_preview_window": ("insert",),
    "landmark": ("insert",),
    "store": ("insert", "update"),
    "store_check": ("insert", "delete"),
    "store_loss": ("insert",),
    "tenant_outcome": ("insert", "update", "delete"),
    "usage_fall": ("insert", "update", "delete"),
}

_MISSING_PRIVILEGES = """
with written (name, privilege) as (select * from unnest(%s::text[], %s::text[]))
select c.relname, array_agg(p.name order by p.place)
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
cross join unnest(array['select', 'insert', 'update', 'delete']) with ordinality p (name, place)
where n.nspname = 'budget_recovery' and c.relkind in ('r', 'v', 'm', 'p')
  and (p.name = 'select'
       or exists (select from written w where w.name = c.relname and w.privilege = p.name))
  and not has_table_privilege(c.oid, p.name)
group by c.relname
order by c.relname
"""

_HAS_EXPIRIES = """
select exists (
    select from budget_recovery.budget_record r
    join budget_recovery.budget_content c using (content_id)
    where (r.window_end is null or r.window_end > now())
      and (
          r.expiry_seconds is not null
          or r.expiry_kind = 'per_key' and cardinality(array_remove(c.expiries, null)) > 0
      )
)
"""

_BUCKET = "select bucket from budget_recovery.store"

_SHOWN_TABLES = 4
_SHOWN_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Database:
    """A connection for transactions that only read, and the bucket of the settings."""

    session: Session
    bucket: str
    parameters: dict[str, str]

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Provide a read-only transaction: a session may belong to others, so it stays as it is.

        Raises:
            DatabaseError: the server refused something, or the connection is lost.
        """
        with driver_errors(), transaction(self.session, read_only=True) as connection:
            yield connection

    def query(self, sql: LiteralString, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query, which does not affect the next one.

        Raises:
            DatabaseError: the server refused it, or the connection is lost.
        """
        with self.reading() as connection:
            return connection.execute(sql, parameters).fetchall()

    def now(self) -> datetime:
        """Return the time of the server, in UTC."""
        with self.reading() as connection:
            return server_clock(connection).astimezone(UTC)

    def has_expiries(self) -> bool:
        """Whether keys of open windows had an expiry when they were captured.

        Raises:
            DatabaseError: the server refused the query, or the connection is lost.
        """
        [(has_expiries,)] = self.query(_HAS_EXPIRIES)
        return bool(has_expiries)


@contextmanager
def open_database(settings: Settings) -> Iterator[Database]:
    """Connect to the database of the settings, whatever its schema.

    Raises:
        SettingsError: the URL is not set.
        DatabaseError: the URL is invalid or the connection fails; the message says why.
    """
    parameters = connection_parameters(settings.require_postgres_url())
    with driver_errors():
        session = connect(parameters)
    with closing(session):
        yield Database(session, settings.bucket, parameters)


def database_connection(database: Database) -> Result:
    """Check that the role can connect."""
    [(name, role)] = database.query(_SESSION)
    return ok(f"database {name} as {role}", database=name, role=role)


def database_pooling(database: Database) -> Result:
    """Report whether a connection pooler is in between, and how it shares its sessions."""
    pooling = find_pooling(database)
    return ok(_POOLING[pooling], pooling=pooling)


_POOLING = {
    "none": "no connection pooler",
    "session": "connection pooler in session mode: a session per connection",
    "transaction": "connection pooler in transaction mode: a session per transaction",
}


def find_pooling(database: Database) -> str:
    """Return ``transaction``, ``session`` or ``none``, by the processes that serve transactions."""
    mine = set()
    for _ in range(_POOLING_TRIES):
        mine.update(database.query(_PID))
        other = _process_of_another_connection(database.parameters)
        mine.update(database.query(_PID))
        # A session of ours that serves another connection, while ours is open.
        if len(mine) > 1 or other in mine:
            return "transaction"
    return "none" if mine == {(database.session.info.backend_pid,)} else "session"


def _process_of_another_connection(parameters: dict[str, str]) -> tuple[Any, ...] | None:
    """Return the process that serves a second connection; None: none does for some seconds.

    A pooler whose sessions are all in use keeps it waiting, and the driver has no time limit.
    """
    found: list[tuple[Any, ...]] = []

    def ask() -> None:
        with (
            suppress(psycopg.Error),
            closing(connect(parameters)) as session,
            transaction(session, read_only=True) as connection,
        ):
            found.extend(connection.execute(_PID).fetchall())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_POOLING_SECONDS)
    return found[0] if found else None


def database_version(database: Database) -> Result:
    """Check that version and encoding of the server are supported."""
    require_usable_server(database.session)
    [(version,)] = database.query(_VERSION)
    return ok(f"PostgreSQL {version}", version=version)


def database_writable(database: Database) -> Result:
    """Check that the server accepts transactions that write, as services begin them."""
    [(is_standby, is_read_only)] = database.query(_IS_STANDBY)
    if is_standby:
        return fail(
            "read_only",
            "The server is read-only.",
            "point BUDGET_RECOVERY_POSTGRES_URL at the primary.",
            default_read_only=is_read_only,
        )
    # Fails where the services fail. It writes nothing.
    with driver_errors(), transaction(database.session, read_only=False):
        pass
    if is_read_only:
        return ok(
            "primary; read-only by default, which the services override", default_read_only=True
        )
    return ok("primary", default_read_only=False)


def database_schema(database: Database) -> Result:
    """Check that the schema is the one that this version of the project needs."""
    with database.reading() as connection:
        version = require_newest(connection)
    return ok(f"version {version}, current", version=version)


def database_privileges(database: Database) -> Result:
    """Check that the role may read every table, and write those that services write."""
    missing = missing_privileges(database)
    if not missing:
        return ok("the role has all privileges that it needs")
    [(_, role)] = database.query(_SESSION)
    tables = [f"{', '.join(privileges)} on {table}" for table, privileges in missing.items()]
    more = len(tables) - _SHOWN_TABLES
    shown = [*tables[:_SHOWN_TABLES], *([f"{more} more"] if more > 0 else [])]
    return fail(
        "missing_privileges",
        f"The role {role} lacks {'; '.join(shown)}.",
        f"as the owner of the schema, run the grants in docs/operations.md for {role}.",
        role=role,
        missing=missing,
    )


def missing_privileges(database: Database) -> Mapping[str, Sequence[str]]:
    """Return the privileges that the role lacks, by table."""
    written = [(table, each) for table, privileges in _WRITTEN.items() for each in privileges]
    tables, privileges = zip(*written, strict=True)
    return dict(database.query(_MISSING_PRIVILEGES, (list(tables), list(privileges))))


def database_bucket(database: Database) -> Result:
    """Check that the database belongs to the bucket of the settings, or to none yet."""
    rows = database.query(_BUCKET)
    if not rows:
        return ok("not recorded yet; the first check or snapshot records it", bucket=None)
    [(bucket,)] = rows
    require_bucket(bucket, database.bucket)
    return ok(bucket, bucket=bucket)


def host_clock(database: Database) -> Result:
    """Compare the clock of this host with PostgreSQL's."""
    return judge_host_clock(datetime.now(UTC), database.now(), datetime.now(UTC))


def judge_store_clock(
    before: datetime, store: datetime | None, after: datetime, *, version: str
) -> Result:
    """Compare the store's time with PostgreSQL's ``before`` and ``after`` it was asked."""
    if store is None:
        return warn(
            "no_server_time",
            f"nats-server {version} does not report its time, so clock skew is not detected.",
            "upgrade to nats-server 2.10 or newer.",
            version=version,
        )
    skew = clock_skew(before, store, after)
    if abs(skew) <= RESTORE_CLOCK_SKEW:
        return ok(_describe_skew(skew), skew_seconds=skew.total_seconds())
    blocks_captures = abs(skew) > MAX_CLOCK_SKEW
    return fail(
        "clock_skew",
        f"The store's clock is {_describe_skew(skew)}."
        f" {'Captures and restores' if blocks_captures else 'Restores'} are refused.",
        "synchronize the clocks of the NATS and PostgreSQL servers with NTP.",
        skew_seconds=skew.total_seconds(),
        blocks=["capture", "restore"] if blocks_captures else ["restore"],
    )


def judge_host_clock(before: datetime, database: datetime, after: datetime) -> Result:
    """Compare this host's time with PostgreSQL's, asked between ``before`` and ``after``."""
    skew = -clock_skew(before, database, after)
    if abs(skew) <= MAX_CLOCK_SKEW:
        return ok(_describe_skew(skew), skew_seconds=skew.total_seconds())
    return warn(
        "clock_skew",
        f"This host's clock is {_describe_skew(skew)}. If Dagster runs on this host, its schedule"
        " ticks for other hours than PostgreSQL names.",
        "synchronize the clock of this host with NTP.",
        skew_seconds=skew.total_seconds(),
    )


def _describe_skew(skew: timedelta) -> str:
    seconds = skew.total_seconds()
    if abs(seconds) < _SHOWN_SECONDS:
        return "in sync with PostgreSQL"
    return f"{abs(seconds):,.1f} s {'ahead of' if seconds > 0 else 'behind'} PostgreSQL"


POSTGRES_CHECKS = (
    Check("database_connection", database_connection),
    Check("database_pooling", database_pooling),
    Check("database_version", database_version),
    Check("database_writable", database_writable),
    Check("database_schema", database_schema),
    # Other tables need other privileges.
    Check("database_privileges", database_privileges, ("database_schema",)),
    Check(
        "database_bucket",
        database_bucket,
        ("database_schema", "BUDGET_RECOVERY_BUCKET"),
    ),
    Check("host_clock", host_clock),
)
