import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import (
    Database,
    Migration,
    migrate,
    refuse_unless_newest,
)
from budget_recovery_dagster.adapters.postgres.migrations import (
    v1_recovery,
    v1_snapshots,
    v2,
    v3,
    v4,
)
from budget_recovery_dagster.embedded import PostgresServer
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    DatabaseError,
    SchemaVersionError,
)
from tests.contract.control_planes import NOON, ControlPlane, Counters, reading

NEWEST = "v4"
UNKNOWN = "v9999"


def relations(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "select n.nspname || '.' || c.relname"
            " from pg_class c join pg_namespace n on n.oid = c.relnamespace"
            " where n.nspname !~ '^(pg_|information_schema)' and c.relkind in ('r', 'v')"
        )
        return {name for (name,) in rows}


# Migrations


def test_a_migration_creates_the_schema_and_a_second_does_nothing(empty_database_url: str) -> None:
    assert migrate(empty_database_url) == Migration(from_version=None, to_version=NEWEST)
    made = relations(empty_database_url)
    assert made
    assert {name.partition(".")[0] for name in made} == {"budget_recovery"}
    assert migrate(empty_database_url) == Migration(from_version=NEWEST, to_version=NEWEST)
    assert relations(empty_database_url) == made


_V1_CAPTURES = """
insert into budget_recovery.capture
select tenant, at, at, 'run', 'counters', at, 1, 0, 0, 0, 0, '[]', 0, '[]', false, null
from (values
    ('mended', timestamptz '2026-11-25 12:00Z'), ('mended', timestamptz '2026-11-25 13:00Z'),
    ('failing', timestamptz '2026-11-25 12:00Z'), ('as failed', timestamptz '2026-11-25 12:00Z')
) taken (tenant, at);
insert into budget_recovery.capture_failure (run_id, kind, name, hour, failed_at, reason, hint)
select 'run ' || at, kind, name, date_trunc('hour', at), at, 'at ' || at, 'look.'
from (values
    ('tenant', 'mended', timestamptz '2026-11-25 12:30Z'),
    ('tenant', 'failing', timestamptz '2026-11-25 12:30Z'),
    ('tenant', 'failing', timestamptz '2026-11-25 13:30Z'),
    ('tenant', 'never', timestamptz '2026-11-25 12:00Z'),
    ('tenant', 'as failed', timestamptz '2026-11-25 12:00Z'),
    ('key', 'usage.x', timestamptz '2026-11-25 12:00Z')
) failed (kind, name, at);
"""


def test_an_upgrade_from_version_1_knows_how_the_last_captures_ended(
    empty_database_url: str,
) -> None:
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("create schema budget_recovery; set time zone 'UTC'")
        for block in (
            *v1_snapshots.BLOCKS,
            *v1_recovery.BLOCKS,
            _V1_CAPTURES,
            *v2.BLOCKS,
            *v3.BLOCKS,
            *v4.BLOCKS,
        ):
            connection.execute(block.encode())
        found = connection.execute(
            "select tenant, outcome, at, reason from budget_recovery.tenant_outcome"
        ).fetchall()
    half_past_one = NOON + timedelta(minutes=90)
    assert sorted(found) == [
        ("as failed", "stored", NOON, None),
        ("failing", "failed", half_past_one, "at 2026-11-25 13:30:00+00"),
        ("mended", "stored", NOON + timedelta(hours=1), None),
        ("never", "failed", NOON, "at 2026-11-25 12:00:00+00"),
    ]


def test_only_one_of_concurrent_migrations_does_the_work(empty_database_url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(migrate, [empty_database_url] * 4))
    assert sorted(migration.changed for migration in done) == [False, False, False, True]


_SPY = """
create schema spy;
create table spy.limits (statement_timeout text, lock_timeout text);
create function spy.note() returns event_trigger language plpgsql as $$ begin
    insert into spy.limits
    values (current_setting('statement_timeout'), current_setting('lock_timeout'));
end $$;
create event trigger spy on ddl_command_start when tag in ('CREATE VIEW')
    execute function spy.note();
"""


def test_a_migration_has_no_time_limit_except_for_locks(empty_database_url: str) -> None:
    """The server records the limits of the last steps."""
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(_SPY)
        assert migrate(empty_database_url).changed
        limits = connection.execute("select * from spy.limits").fetchall()
    assert set(limits) == {("0", "5s")}


def test_a_failed_migration_leaves_nothing(empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("create schema budget_recovery")
        connection.execute("create table budget_recovery.budget_record ()")
    with pytest.raises(DatabaseError, match="already exists"):
        migrate(empty_database_url)
    assert relations(empty_database_url) == {"budget_recovery.budget_record"}


def test_a_migration_needs_only_the_ownership_of_its_schema(empty_database_url: str) -> None:
    role = f"role_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(f"create role {role} login".encode())
        connection.execute(f"create schema budget_recovery authorization {role}".encode())
        try:
            assert migrate(f"{empty_database_url}&user={role}").changed
        finally:
            connection.execute(f"drop owned by {role}".encode())
            connection.execute(f"drop role {role}".encode())


def test_a_role_without_rights_gets_a_clear_error(database_url: str) -> None:
    role = f"role_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"create role {role} login".encode())
        try:
            with pytest.raises(DatabaseError, match="permission denied for schema") as refused:
                migrate(f"{database_url}&user={role}")
        finally:
            connection.execute(f"drop role {role}".encode())
    assert "grant" in refused.value.hint


def test_a_newer_schema_is_not_migrated(database_url: str) -> None:
    set_version(database_url, UNKNOWN)
    with pytest.raises(SchemaVersionError, match=UNKNOWN):
        migrate(database_url)


def test_a_database_without_utf8_is_refused(
    postgres_server: PostgresServer,
) -> None:
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(
            "create database latin encoding 'LATIN1' locale 'C' locale_provider libc"
            " template template0"
        )
        with pytest.raises(DatabaseError, match="encoding is LATIN1"):
            migrate(postgres_server.url("latin"))
        connection.execute("drop database latin")


# Opening a database


def set_version(url: str, version: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(
            "update budget_recovery.alembic_version set version_num = %s", (version,)
        )


def test_a_database_without_the_schema_is_refused(empty_database_url: str) -> None:
    with pytest.raises(SchemaVersionError) as refused, Database(empty_database_url):
        pytest.fail("opened")
    assert "has no schema budget_recovery" in refused.value.message
    assert "budget-recovery migrate" in refused.value.hint


def test_a_newer_schema_is_refused(database_url: str) -> None:
    set_version(database_url, UNKNOWN)
    with pytest.raises(SchemaVersionError) as refused, Database(database_url):
        pytest.fail("opened")
    assert f"version {UNKNOWN}, unknown to this project" in refused.value.message
    assert "upgrade the project" in refused.value.hint


def test_an_older_schema_is_refused() -> None:
    with pytest.raises(SchemaVersionError) as refused:
        refuse_unless_newest("v1", known=("v4", "v3", "v2", "v1"))
    assert "version v1, older than the required v4" in refused.value.message
    assert "budget-recovery migrate" in refused.value.hint
    refuse_unless_newest("v4", known=("v4", "v3", "v2", "v1"))


# What users read in psql


def test_every_table_and_view_is_described(admin: psycopg.Connection) -> None:
    undescribed = admin.execute(
        "select c.relname from pg_class c"
        " where c.relnamespace = 'budget_recovery'::regnamespace and c.relkind in ('r', 'v')"
        " and c.relname <> 'alembic_version' and obj_description(c.oid, 'pg_class') is null"
    ).fetchall()
    assert undescribed == []


def test_the_view_shows_every_counter(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    counters: Counters = {
        ("team", "lifetime"): {"alice": "1.50", None: "7"},
        ("b", "2026-11"): {"é": "2"},
    }
    postgres_plane.capture("acme", counters)
    rows = admin.execute(
        "select tenant, captured_at, budget_id, window_token, entity, usage::text"
        " from budget_recovery.budget_entry order by budget_id, entity nulls first"
    ).fetchall()
    assert rows == [
        ("acme", NOON, "b", "2026-11", "é", "2"),
        ("acme", NOON, "team", "lifetime", None, "7"),
        ("acme", NOON, "team", "lifetime", "alice", "1.50"),
    ]


def test_large_tables_are_vacuumed_every_few_hours(admin: psycopg.Connection) -> None:
    rows = admin.execute(
        "select c.relname, array_to_string(c.reloptions || t.reloptions, ' ') from pg_class c"
        " left join pg_class t on t.oid = c.reltoastrelid where c.oid = any(array["
        "'budget_recovery.capture', 'budget_recovery.budget_record',"
        " 'budget_recovery.budget_content']::regclass[])"
    ).fetchall()
    assert len(rows) == 3
    for _, options in rows:
        assert options.split() == ["autovacuum_vacuum_scale_factor=0.01"] * 2


# Constraints of the tables

INSERT_CONTENT = (
    "insert into budget_recovery.budget_content (content_hash, entities, usages)"
    " values (sha256('x'), {}, {})"
)


@pytest.mark.parametrize(
    ("entities", "usages"),
    [
        ("'{a}'", "'{NaN}'"),
        ("'{a}'", "'{Infinity}'"),
        ("'{a}'", "'{-Infinity}'"),
        ("'{a}'", "'{-0.01}'"),
        ("'{a}'", "'{100000000000000000000}'"),
        ("'{a,b}'", "'{1,NULL}'"),
        ("'{a,NULL}'", "'{1,2}'"),
        ("'{a,b}'", "'{1}'"),
        ("'{}'", "'{1}'"),
        ("null", "'{}'"),
        ("'{{a,b}}'", "'{1,2}'"),
    ],
)
def test_invalid_contents_are_refused(
    admin: psycopg.Connection, entities: str, usages: str
) -> None:
    with pytest.raises((psycopg.IntegrityError, psycopg.errors.FeatureNotSupported)):
        admin.execute(INSERT_CONTENT.format(entities, usages).encode())


def test_empty_and_largest_contents_are_accepted(admin: psycopg.Connection) -> None:
    largest = f"'{{99999999999999999999.{'9' * 18}}}'"
    admin.execute(INSERT_CONTENT.format("'{a}'", largest).encode())
    admin.execute(INSERT_CONTENT.replace("'x'", "'y'").format("'{}'", "'{}'").encode())


@pytest.mark.parametrize(
    "change",
    [
        "update budget_recovery.store set is_only_row = false",
        "insert into budget_recovery.store (bucket, deployment_id) values ('b', gen_random_uuid())",
        "update budget_recovery.store set state = 'SICK'",
        "update budget_recovery.store set baseline_version = null",
        "update budget_recovery.store set baseline_version = 0",
        "update budget_recovery.store set deployment_id = 'me'",
        "update budget_recovery.store set baseline_last_sequence = 18446744073709551616",
        "update budget_recovery.store set baseline_last_sequence = -1",
        "update budget_recovery.lease set expires_at = null",
        "update budget_recovery.capture set record_count = -1",
        "update budget_recovery.capture set drops = '{}'",
        "delete from budget_recovery.capture",
        "delete from budget_recovery.budget_content",
        "update budget_recovery.budget_record set window_end = window_start",
        "update budget_recovery.budget_record set window_end = null",
        "update budget_recovery.budget_record set window_end = null, window_start = null",
        "update budget_recovery.budget_record set omitted_count = 1",
        "update budget_recovery.tenant_outcome set outcome = 'gone'",
        "update budget_recovery.tenant_outcome set outcome = 'failed'",
    ],
)
def test_invalid_rows_are_refused(
    postgres_plane: ControlPlane, admin: psycopg.Connection, change: str
) -> None:
    postgres_plane.commit(postgres_plane.take(reading("acme", {("team", "2026-11"): {"a": "1"}})))
    with postgres_plane.lease(), pytest.raises(psycopg.IntegrityError):
        admin.execute(change.encode())


def test_a_value_that_the_tables_refuse_is_reported_with_a_hint(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    admin.execute("alter table budget_recovery.capture add check (tenant <> 'acme')")
    with pytest.raises(DatabaseError, match="capture_tenant_check") as refused:
        postgres_plane.capture("acme", {("team", "2026-11"): {"a": "1"}})
    assert isinstance(refused.value.__cause__, psycopg.IntegrityError)
    assert refused.value.hint
    assert postgres_plane.baseline is None


def test_a_schema_dropped_in_use_is_reported(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    admin.execute("drop schema budget_recovery cascade")
    with pytest.raises(BudgetRecoveryError) as refused:
        postgres_plane.snapshots.tenants()
    assert "budget-recovery migrate" in refused.value.hint
