"""Upgrades keep all rows; databases of checkouts before the first release are refused."""

from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from hashlib import sha256

import psycopg
import pytest
from psycopg.types.json import Jsonb

from budget_recovery_dagster.adapters.postgres import Database, migrate
from budget_recovery_dagster.adapters.postgres.migrations import (
    v1_recovery,
    v1_snapshots,
    v2,
    v3,
    v4,
)
from budget_recovery_dagster.adapters.postgres.snapshots import PostgresSnapshots
from budget_recovery_dagster.domain import NO_EXPIRY, Check, Evidence, IncidentAmounts, Verdict
from budget_recovery_dagster.errors import SchemaVersionError
from budget_recovery_dagster.services.check import check_store
from tests.contract.control_planes import ControlPlane, on_postgres
from tests.fakes.usage_store import MemoryUsageStore

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
_DROPS = [
    _DROP | {"before": "40", "after": "0.5"},
    _DROP | {"entity": "bo", "before": "2", "after": None},
    _DROP | {"window": "2026-11", "before": "50", "after": None},
    _DROP | {"window": "2026-11", "entity": None, "before": "40.5", "after": "0.5"},
]


VERSIONS = {
    "v1": (*v1_snapshots.BLOCKS, *v1_recovery.BLOCKS),
    "v2": v2.BLOCKS,
    "v3": v3.BLOCKS,
    "v4": v4.BLOCKS,
}


def make_version(version: str, url: str, rows: str = "") -> None:
    with psycopg.connect(url) as connection:
        connection.execute("create schema budget_recovery")
        for name, blocks in VERSIONS.items():
            if name <= version:
                for block in blocks:
                    connection.execute(block.encode())
        connection.execute(
            "create table budget_recovery.alembic_version (version_num varchar(32) primary key);"
            f"insert into budget_recovery.alembic_version values ('{version}')"
        )
        connection.execute(rows.encode())


def test_versions_that_databases_may_have_are_not_edited() -> None:
    # A change of one of them would be missing in all databases that it made. Add another version.
    made_by = {
        version: sha256("".join(blocks).encode()).hexdigest()[:16]
        for version, blocks in VERSIONS.items()
    }
    assert made_by == {
        "v1": "1e694a94b98bacb5",
        "v2": "bc2f513871b00b77",
        "v3": "b6b6ad8d7b01b389",
        "v4": "de87f88992ccda70",
    }


def test_an_upgrade_finds_what_a_budget_and_window_lacked_most_where_all_drops_are_named(
    empty_database_url: str,
) -> None:
    make_version("v1", empty_database_url)
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        for tenant, count, drops in (("all", 4, _DROPS), ("cut", 5, _DROPS), ("none", 0, [])):
            connection.execute(_CAPTURE_OF_VERSION_1, (tenant, count, Jsonb(drops)))
        assert migrate(empty_database_url).from_version == "v1"
        usages = connection.execute(
            "select tenant, most_missing from budget_recovery.capture order by tenant"
        )
        # Of the lifetime alice's 39.5 and bo's 2, of the month the aggregate's 40.
        assert usages.fetchall() == [("all", Decimal("41.5")), ("cut", None), ("none", 0)]
    with Database(empty_database_url) as database:
        (listed,) = PostgresSnapshots(database).listed(None)
        assert (listed.drops, listed.most_missing) == (9, None)


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
    make_version("v1", empty_database_url, VERSION_1_ROWS)
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
    make_version("v1", empty_database_url, SNAPSHOT_OF_VERSION_1)
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


# As versions 2 and 3 stored it: keys that expire, keys without a TTL, and keys that differ, once
# damaged. Ann was pardoned before the fall of one counter, and bob after it.
SNAPSHOT_OF_VERSION_2 = """
insert into budget_recovery.capture (
    tenant, captured_at, source, store_created_at, store_last_sequence, run_id, record_count,
    entry_count, omitted_count, drop_count, unreadable_count, is_partial, unreadable, drops,
    stored_at
) values (
    'acme', '2026-11-25T11:00Z', 'counters', '2026-11-01T00:00Z', 7, 'a run', 5, 9, 0, 0, 0, false,
    '[]', '[]', '2026-11-25T11:00Z'
);
insert into budget_recovery.budget_content (content_hash, entities, usages, expiries, expiry_hash)
values (sha256('5:alice=5;'), '{alice}', '{5}', null, null),
       (sha256('5:alice=5;3:bob=6;'), '{alice,bob}', '{5,6}', '{3600,null}',
        sha256('5:alice=3600;3:bob=never;')),
       (sha256('5:alice=5;3:bob=6;'), '{bob,alice}', '{6,5}', '{null,3600}', sha256('damaged'));
insert into budget_recovery.budget_record (
    tenant, captured_at, budget_id, window_token, window_start, window_end, content_id,
    omitted_count, is_truncated, value_shape, expiry_seconds, never_expires, covers_earlier
)
select 'acme', '2026-11-25T11:00Z', budget, '2026-11', '2026-11-01T00:00Z', '2026-12-01T00:00Z',
       content_id, 0, false, 'object_text', expiry, is_never, true
from (values
    ('a: all expire', 1, 3600, null), ('b: none has a TTL', 1, null, true),
    ('c: they differ', 2, null, false), ('d: damaged', 3, null, false),
    ('e: unknown', 1, null, null)
) as v (budget, content_id, expiry, is_never);
insert into budget_recovery.budget_reset (
    tenant, budget_id, of_everyone, entity, at, reset_by, reason, recorded_at, last_excluded
) values
    ('acme', 'x', false, 'ann', '2026-11-25T10:00Z', 'ann', 'ok', '2026-11-25T10:00Z', 0),
    ('acme', 'x', false, 'bob', '2026-11-25T12:00Z', 'ann', 'ok', '2026-11-25T12:00Z', 0);
insert into budget_recovery.usage_fall (
    tenant, budget_id, window_token, found_at, judged_at, counters, usage
) values ('acme', 'x', 'lifetime', '2026-11-25T11:00Z', '2026-11-25T11:00Z', 1, 1);
"""


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_an_upgrade_keeps_what_later_versions_know(empty_database_url: str, version: str) -> None:
    make_version(version, empty_database_url, SNAPSHOT_OF_VERSION_2)
    assert migrate(empty_database_url).from_version == version
    with on_postgres(empty_database_url) as plane:
        point = plane.points.point_of("acme", plane.clock.now())
        assert point is not None
        assert {each.of.budget[0]: each.expiries for each in point.windows} == {
            "a": {"alice": 3600},
            "b": {"alice": NO_EXPIRY},
            "c": {"alice": 3600, "bob": NO_EXPIRY},
            "d": {},
            "e": {},
        }
        assert [each.corrupt for each in point.windows] == [()] * 5
        assert [fall.resets_before for fall in plane.falls.open()] == [1]
        # The next snapshot shares the old content, and stores the damaged one anew.
        plane.capture("acme", {("a: all expire", "2026-11"): {"alice": "5"}})


DEPLOYMENT = "00000000-0000-4000-8000-000000000001"
BORN = datetime(2026, 11, 1, tzinfo=UTC)
# As version 1 stored an open incident, and what a restore did in it.
AUDIT_OF_VERSION_1 = f"""
insert into budget_recovery.incident (
    incident_id, opened_at, attempts, launches, launches_before,
    target_created_at, target_last_sequence, target_version
) values ('{DEPLOYMENT}', '2026-11-24Z', 1, 1, 0, '2026-11-24Z', 7, 1);
insert into budget_recovery.restore_audit (
    at, run_id, who, why, incident_id, tenant, budget_id, window_token, point_at, entries, planned,
    raised, kept, skipped, usage_before, usage_after, notes, finished_at
) values (
    '2026-11-24Z', 'a run', 'a host', 'lost', '{DEPLOYMENT}', 'acme', 'team', 'lifetime',
    '2026-11-24Z', 2, 2, 2, 0, 0, 3, 10, '[]', '2026-11-24Z'
);
"""


def test_what_an_incident_of_an_earlier_version_cost_is_unknown_and_not_zero(
    empty_database_url: str,
) -> None:
    make_version("v1", empty_database_url, AUDIT_OF_VERSION_1)
    assert migrate(empty_database_url).from_version == "v1"
    with on_postgres(empty_database_url) as plane:
        assert plane.audits.amounts_in(DEPLOYMENT, 9) == IncidentAmounts(unknown_windows=1)
        assert plane.audits.amounts_of(DEPLOYMENT, "acme") == {}
        [entry] = plane.audits.largest(DEPLOYMENT, 9).largest
        assert (entry.before, entry.after) == (Decimal(3), Decimal(10))
        assert entry.amounts is None
    with psycopg.connect(empty_database_url) as connection:
        began_empty = connection.execute("select target_began_empty from budget_recovery.incident")
        assert began_empty.fetchall() == [(None,)]


# As version 1 left a store after an earlier one, an incident with a loss of each kind, and checks.
DETECTION_OF_VERSION_1 = f"""
insert into budget_recovery.store (
    bucket, deployment_id, baseline_created_at, baseline_last_sequence, baseline_version,
    marker_nonce, marker_revision, marked_at, intended_nonce
) values (
    'budget-usage', '{DEPLOYMENT}', '2026-11-01Z', 1, 7, 'left by v1', 1, '2026-11-25 12:00Z', null
);
insert into budget_recovery.incident (
    incident_id, opened_at, attempts, launches, launches_before, closed_at, outcome,
    outcome_detail, restored_tenants, restored_windows, restored_counters, restored_boards
) values (
    '{DEPLOYMENT}', '2026-11-24Z', 1, 1, 0, '2026-11-25Z', 'restored', 'Restored.', 1, 1, 1, 1
);
insert into budget_recovery.store_loss
select '{DEPLOYMENT}', position, '2026-11-24Z', 'a check', verdict, 'It differs.',
       '2026-10-01Z', 9, found::timestamptz, case when found is not null then 1 end
from (values
    (1, 'recreated', '2026-11-01Z'), (2, 'recreated', null),
    (3, 'regressed', '2026-10-01Z'), (4, 'marker_lost', '2026-10-01Z')
) l (position, verdict, found);
insert into budget_recovery.store_check (
    checked_at, checked_by, verdict, reason, store_created_at, store_last_sequence
)
select '2026-11-25Z', 'a check', verdict, 'As found.', found::timestamptz,
       case when found is not null then 1 end
from (values
    ('unknown', null), ('first_seen', '2026-10-01Z'), ('unchanged', '2026-10-01Z'),
    ('advanced', '2026-10-01Z'), ('recreated', '2026-11-01Z'), ('recreated', null),
    ('regressed', '2026-10-01Z'), ('marker_lost', '2026-10-01Z')
) c (verdict, found);
insert into budget_recovery.capture
select 'acme', captured_at, captured_at, run, 'counters', born::timestamptz, 1,
       0, 0, 0, 0, '[]', 0, '[]', false
from (values
    ('2026-10-02Z'::timestamptz, 'one', '2026-10-01Z'), ('2026-11-02Z', 'two', '2026-11-01Z')
) c (captured_at, run, born);
"""
LOST = ("lost", "recreated"), ("lost", "gone"), ("lost", "sequence_back"), ("lost", "marker_gone")


@pytest.fixture
def upgraded(empty_database_url: str) -> Iterator[ControlPlane]:
    """Yield version 1's installation after the upgrade, at the last renewal of its marker."""
    make_version("v1", empty_database_url, DETECTION_OF_VERSION_1)
    assert migrate(empty_database_url).from_version == "v1"
    with on_postgres(empty_database_url) as plane:
        yield plane


def store_of_version_1(created_at: datetime) -> MemoryUsageStore:
    store = MemoryUsageStore(created_at)
    content = b'{"nonce": "left by v1", "written_by": "budget-recovery"}'
    store.put(f"__guard.{DEPLOYMENT}", content)
    return store


def check(plane: ControlPlane, store: MemoryUsageStore) -> Check:
    return check_store(plane, lambda: nullcontext(store), checked_by="a check").check


def test_verdicts_of_version_1_become_a_verdict_and_its_evidence(
    upgraded: ControlPlane, empty_database_url: str
) -> None:
    with psycopg.connect(empty_database_url) as connection:
        losses = connection.execute(
            "select verdict, evidence from budget_recovery.store_loss order by position"
        ).fetchall()
    assert losses == [*LOST]
    checks = reversed(upgraded.registry.newest_checks(10))
    assert [(each.verdict, each.evidence) for each in checks] == [
        ("unknown", None),
        ("first_seen", None),
        ("same", None),
        ("same", None),
        *LOST,
    ]


def test_a_marker_of_version_1_is_accepted_and_gets_a_number_and_a_landmark(
    upgraded: ControlPlane,
) -> None:
    store = store_of_version_1(BORN)
    assert check(upgraded, store).verdict is Verdict.SAME
    marker = store.observe(DEPLOYMENT).marker
    assert marker is not None
    assert (marker.number, marker.landmark is None) == (1, False)
    assert check(upgraded, store).verdict is Verdict.SAME


def test_the_store_before_the_accepted_one_is_known_after_the_upgrade(
    upgraded: ControlPlane,
) -> None:
    former = MemoryUsageStore(datetime(2026, 10, 1, tzinfo=UTC))
    found = check(upgraded, former)
    assert (found.verdict, found.evidence) == (Verdict.OTHER_STORE, Evidence.FORMER_STORE)


def test_a_store_that_is_lost_after_the_upgrade_is_lost(upgraded: ControlPlane) -> None:
    emptied = MemoryUsageStore(BORN + timedelta(days=25))
    found = check(upgraded, emptied)
    assert (found.verdict, found.evidence) == (Verdict.LOST, Evidence.RECREATED)
