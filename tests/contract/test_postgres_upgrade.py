"""Version 1 is upgraded; databases of checkouts before the first release are refused."""

from decimal import Decimal

import psycopg
import pytest
from psycopg.types.json import Jsonb

from budget_recovery_dagster.adapters.postgres import Database, migrate
from budget_recovery_dagster.adapters.postgres.migrations import v1_recovery, v1_snapshots
from budget_recovery_dagster.adapters.postgres.snapshots import PostgresSnapshots
from budget_recovery_dagster.errors import SchemaVersionError

UNRELEASED = ["0001", "0002", "0003", "0004", "0005", "0006"]
EARLIER_SCHEMA = """
create schema budget_recovery;
create table budget_recovery.alembic_version (version_num varchar(32) primary key);
create table budget_recovery.store (bucket text);
insert into budget_recovery.store values ('a bucket');
"""


def make_earlier_schema(url: str, version: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(EARLIER_SCHEMA.encode())
        connection.execute("insert into budget_recovery.alembic_version values (%s)", (version,))


def everything_in(url: str) -> list[tuple[object, ...]]:
    """Return the relations, the version and the row of the earlier schema."""
    with psycopg.connect(url) as connection:
        return connection.execute(
            "select array(select relname from pg_class"
            "             where relnamespace = 'budget_recovery'::regnamespace order by 1),"
            "       version_num, bucket"
            " from budget_recovery.alembic_version, budget_recovery.store"
        ).fetchall()


@pytest.mark.parametrize("version", UNRELEASED)
def test_a_database_of_an_unreleased_checkout_is_not_migrated(
    empty_database_url: str, version: str
) -> None:
    make_earlier_schema(empty_database_url, version)
    before = everything_in(empty_database_url)
    with pytest.raises(SchemaVersionError) as refused:
        migrate(empty_database_url)
    assert f"version {version} of an unreleased checkout" in refused.value.message
    assert "drop schema budget_recovery cascade" in refused.value.hint
    assert everything_in(empty_database_url) == before


@pytest.mark.parametrize("version", UNRELEASED)
def test_a_database_of_an_unreleased_checkout_is_not_opened(
    empty_database_url: str, version: str
) -> None:
    make_earlier_schema(empty_database_url, version)
    with pytest.raises(SchemaVersionError) as refused, Database(empty_database_url):
        pytest.fail("opened")
    assert f"version {version} of an unreleased checkout" in refused.value.message
    assert "budget-recovery migrate" in refused.value.hint


def test_the_hint_of_the_refusal_works(empty_database_url: str) -> None:
    make_earlier_schema(empty_database_url, "0006")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("drop schema budget_recovery cascade")
    assert migrate(empty_database_url).from_version is None
    with Database(empty_database_url) as database:
        assert database.now()


_CAPTURE_OF_VERSION_1 = """
insert into budget_recovery.capture (
    tenant, captured_at, stored_at, run_id, source, store_created_at, store_last_sequence,
    record_count, entry_count, omitted_count, unreadable_count, unreadable, drop_count, drops,
    is_partial
) values (%s, '2026-11-25 12:00Z', '2026-11-25 12:00Z', 'a run', 'counters', '2026-11-01Z', 7,
          0, 0, 0, 0, '[]', %s, %s, false)
"""
_DROP = {"budget": "team", "window": "lifetime", "entity": "alice"}
_DROPS = [_DROP | {"before": "40", "after": "0.5"}, _DROP | {"before": "2", "after": None}]


def make_version_1(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("create schema budget_recovery")
        for block in (*v1_snapshots.BLOCKS, *v1_recovery.BLOCKS):
            connection.execute(block.encode())
        connection.execute(
            "create table budget_recovery.alembic_version (version_num varchar(32) primary key);"
            "insert into budget_recovery.alembic_version values ('v1')"
        )


def test_the_usage_of_drops_is_added_up_where_version_1_named_all(empty_database_url: str) -> None:
    make_version_1(empty_database_url)
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        for tenant, count, drops in (("all", 2, _DROPS), ("cut", 3, _DROPS), ("none", 0, [])):
            connection.execute(_CAPTURE_OF_VERSION_1, (tenant, count, Jsonb(drops)))
        assert migrate(empty_database_url).from_version == "v1"
        usages = connection.execute(
            "select tenant, drop_usage from budget_recovery.capture order by tenant"
        )
        assert usages.fetchall() == [("all", Decimal("41.5")), ("cut", None), ("none", 0)]
    with Database(empty_database_url) as database:
        (listed,) = PostgresSnapshots(database).listed(None)
        assert (listed.drops, listed.drop_usage) == (5, None)


def test_the_columns_of_recoveries_and_restores_are_described(admin: psycopg.Connection) -> None:
    undescribed = admin.execute(
        "select c.relname, a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid"
        " where c.relname in ('store', 'store_check', 'incident', 'store_loss', 'restore_attempt',"
        " 'restore_audit', 'budget_reset') and c.relnamespace = 'budget_recovery'::regnamespace"
        " and a.attnum > 0 and not a.attisdropped and col_description(c.oid, a.attnum) is null"
    ).fetchall()
    assert undescribed == []
