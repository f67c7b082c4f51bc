"""Upgrades keep all rows; databases of checkouts before the first release are refused."""

from decimal import Decimal

import psycopg
import pytest
from psycopg.types.json import Jsonb

from budget_recovery_dagster.adapters.postgres import Database, migrate
from budget_recovery_dagster.adapters.postgres.migrations import v1_recovery, v1_snapshots
from budget_recovery_dagster.adapters.postgres.snapshots import PostgresSnapshots
from budget_recovery_dagster.errors import SchemaVersionError
from tests.contract.control_planes import on_postgres

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


def make_version_1(url: str, rows: str = "") -> None:
    with psycopg.connect(url) as connection:
        connection.execute("create schema budget_recovery")
        for block in (*v1_snapshots.BLOCKS, *v1_recovery.BLOCKS):
            connection.execute(block.encode())
        connection.execute(
            "create table budget_recovery.alembic_version (version_num varchar(32) primary key);"
            "insert into budget_recovery.alembic_version values ('v1')"
        )
        connection.execute(rows.encode())


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


# The third snapshot was captured by a clock that was ahead, and the fourth once it was right.
VERSION_1_ROWS = """
insert into budget_recovery.capture
select tenant, captured_at::timestamptz, stored_at::timestamptz, 'run', 'counters', now(), 1,
       0, 0, 0, 0, '[]', 0, '[]', false
from (values
    ('acme', '2026-11-25 12:00Z', '2026-11-25 12:01Z'),
    ('acme', '2026-11-25 13:00Z', '2026-11-25 13:01Z'),
    ('b', '2027-01-04 13:00Z', '2027-01-04 13:01Z'),
    ('b', '2026-11-25 13:00Z', '2026-11-25 13:02Z')
) c (tenant, captured_at, stored_at);
insert into budget_recovery.budget_reset
    (tenant, budget_id, of_everyone, at, reset_by, reason, recorded_at)
select tenant, 'team', true, at::timestamptz, 'ann', 'pardoned', '2026-11-25 14:00Z'
from (values
    ('acme', '2026-11-25 12:30Z'), ('acme', '2026-11-25 11:00Z'), ('b', '2026-11-25 14:00Z')
) r (tenant, at);
"""


def test_an_upgrade_numbers_the_snapshots_in_the_order_of_their_storing(
    empty_database_url: str,
) -> None:
    make_version_1(empty_database_url, VERSION_1_ROWS)
    assert migrate(empty_database_url).from_version == "v1"
    with psycopg.connect(empty_database_url) as connection:
        numbers = connection.execute(
            "select tenant, extract(hour from captured_at at time zone 'UTC')::int, commit_number"
            " from budget_recovery.capture order by commit_number"
        ).fetchall()
        assert numbers == [("acme", 12, 1), ("acme", 13, 2), ("b", 13, 3), ("b", 13, 4)]
        # What a reset excluded by time, it excludes by number.
        excluded = connection.execute(
            "select tenant, last_excluded from budget_recovery.budget_reset order by reset_id"
        ).fetchall()
        assert excluded == [("acme", 1), ("acme", 0), ("b", 3)]
        [(following,)] = connection.execute(
            "insert into budget_recovery.capture (tenant, captured_at, stored_at, run_id, source,"
            " store_created_at, store_last_sequence, record_count, entry_count, omitted_count,"
            " unreadable_count, unreadable, drop_count, drops, is_partial) values ('acme', now(),"
            " now(), 'run', 'counters', now(), 1, 0, 0, 0, 0, '[]', 0, '[]', false)"
            " returning commit_number"
        ).fetchall()
        assert following == 5


def test_an_upgrade_of_a_database_without_snapshots_numbers_from_1(empty_database_url: str) -> None:
    migrate(empty_database_url)
    with psycopg.connect(empty_database_url) as connection:
        [(following,)] = connection.execute(
            "select nextval(pg_get_serial_sequence('budget_recovery.capture', 'commit_number'))"
        ).fetchall()
    assert following == 1


# As version 1 stored a snapshot of three windows, the hash of {"alice": 5} included.
SNAPSHOT_OF_VERSION_1 = """
insert into budget_recovery.capture (
    tenant, captured_at, source, store_created_at, store_last_sequence, run_id, record_count,
    entry_count, omitted_count, drop_count, unreadable_count, is_partial, unreadable, drops,
    stored_at
) values (
    'acme', '2026-11-25T11:00Z', 'counters', '2026-11-01T00:00Z', 7, 'a run', 3, 3, 0, 0, 0, false,
    '[]', '[]', '2026-11-25T11:00Z'
);
insert into budget_recovery.budget_content (content_hash, entities, usages)
values (sha256('5:alice=5;'), '{alice}', '{5}');
insert into budget_recovery.budget_record (
    tenant, captured_at, budget_id, window_token, window_start, window_end, content_id,
    omitted_count, is_truncated, value_shape, expiry_seconds, covers_earlier
)
select 'acme', '2026-11-25T11:00Z', budget, '2026-11', '2026-11-01T00:00Z', '2026-12-01T00:00Z',
       content_id, 0, false, 'object_text', expiry, true
from budget_recovery.budget_content,
     (values ('all expire', 3600), ('some or none expire', null)) as v (budget, expiry);
"""


def test_snapshots_of_version_1_keep_their_usages_and_what_they_know(
    empty_database_url: str,
) -> None:
    make_version_1(empty_database_url, SNAPSHOT_OF_VERSION_1)
    assert migrate(empty_database_url).from_version == "v1"
    with on_postgres(empty_database_url) as plane:
        point = plane.points.point_of("acme", plane.clock.now())
        assert point is not None
        known, unknown = point.windows
        assert (known.usages, known.corrupt) == (unknown.usages, unknown.corrupt)
        assert (unknown.usages, unknown.corrupt) == ({"alice": Decimal(5)}, ())
        # Null was stored if any of the keys has no expiry, so it says nothing about one of them.
        assert (known.expiries, unknown.expiries) == ({"alice": 3600}, {})
        assert (known.has_board, unknown.has_board) == (None, None)
        # The next snapshot shares the old content.
        plane.capture("acme", {("all expire", "2026-11"): {"alice": "5"}})
        assert plane.points.damaged(plane.clock.now()).records == {}
    with psycopg.connect(empty_database_url) as connection:
        contents = connection.execute("select count(*) from budget_recovery.budget_content")
        assert contents.fetchone() == (1,)
