"""Databases of checkouts before the first release are refused and not changed."""

import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import Database, migrate
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


def test_the_columns_of_recoveries_and_restores_are_described(admin: psycopg.Connection) -> None:
    undescribed = admin.execute(
        "select c.relname, a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid"
        " where c.relname in ('store', 'store_check', 'incident', 'store_loss', 'restore_attempt',"
        " 'restore_audit', 'budget_reset') and c.relnamespace = 'budget_recovery'::regnamespace"
        " and a.attnum > 0 and not a.attisdropped and col_description(c.oid, a.attnum) is null"
    ).fetchall()
    assert undescribed == []
