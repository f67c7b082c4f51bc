"""An upgrade of a database that is in use keeps all that is in it."""

import psycopg
import pytest
import sqlalchemy
from alembic import command
from alembic.config import Config
from sqlalchemy.pool import NullPool

from budget_recovery_dagster.adapters.postgres import Migration, migrate
from budget_recovery_dagster.domain import (
    Baseline,
    Held,
    Hour,
    Recovery,
    RecoveryState,
    StoreIdentity,
    Waiting,
)
from tests.contract.control_planes import BORN, BUCKET, NOON, on_postgres, point_of
from tests.contract.incident_scene import LOSS, TARGET, claim_attempt

DEPLOYMENT = "01234567-89ab-cdef-0123-456789abcdef"
# As the first two versions write it: a baseline, a held lease, a snapshot, a failure, a budget.
DATA = f"""
insert into budget_recovery.store (
    bucket, deployment_id, baseline_created_at, baseline_last_sequence, baseline_version
) values ('{BUCKET}', '{DEPLOYMENT}', '{BORN}', 9007199254740993, 41);
insert into budget_recovery.lease (name, token, holder, acquired_at, expires_at)
values ('capture', 7, 'a host', '{NOON}', '{NOON}');
insert into budget_recovery.capture (
    tenant, captured_at, stored_at, run_id, source, store_created_at, store_last_sequence,
    record_count, entry_count, omitted_count, unreadable_count, unreadable, drop_count, drops,
    is_partial
) values (
    'acme', '{NOON}', '{NOON}', 'a run', 'counters', '{BORN}', 9007199254740993,
    1, 1, 0, 0, '[]', 0, '[]', false
);
insert into budget_recovery.budget_content (content_hash, entities, usages)
values (sha256('5:alice=1.5;'), '{{alice}}', '{{1.5}}');
insert into budget_recovery.budget_record (
    tenant, captured_at, budget_id, window_token, content_id, omitted_count, is_truncated,
    covers_earlier
) select 'acme', '{NOON}', 'team', 'lifetime', content_id, 0, false, true
from budget_recovery.budget_content;
insert into budget_recovery.capture_failure (run_id, kind, name, hour, failed_at, reason, hint)
values ('a run', 'tenant', 'b', '{NOON}', '{NOON}', 'why', 'what');
insert into budget_recovery.budget (
    tenant, budget_id, period, limit_amount, split_by, enforcement
) values ('acme', 'team', 'month', 10, 'user', 'enforce');
"""
TABLES = (
    "store",
    "lease",
    "capture",
    "budget_content",
    "budget_record",
    "capture_failure",
    "budget",
)
INCIDENT = "89abcdef-89ab-cdef-0123-456789abcdef"
# As the third version writes it: an incident that waits, with a first attempt.
INCIDENT_DATA = f"""
update budget_recovery.store set state = 'RECOVERING';
insert into budget_recovery.incident (
    incident_id, opened_at, attempts, launches, launches_before,
    waiting_since, waiting_reason, waits
) values ('{INCIDENT}', '{NOON}', 1, 2, 1, '{NOON}', 'no leader', 1);
insert into budget_recovery.store_loss (
    incident_id, position, found_at, found_by, verdict, reason,
    before_created_at, before_last_sequence
) values ('{INCIDENT}', 1, '{NOON}', 'tick 7', 'recreated', 'why', '{BORN}', 7);
insert into budget_recovery.restore_attempt (
    incident_id, loss, number, run_id, holder, started_at
) values ('{INCIDENT}', 1, 1, 'a run', 'a host', '{NOON}');
insert into budget_recovery.store_check (checked_at, checked_by, verdict, reason, incident_id)
values ('{NOON}', 'tick 7', 'recreated', 'why', '{INCIDENT}');
insert into budget_recovery.restore_audit (
    at, run_id, who, why, incident_id, tenant, budget_id, window_token, point_at,
    entries, planned, raised, kept, skipped, usage_before, usage_after, notes, finished_at
) values (
    '{NOON}', 'a run', 'a host', 'why', '{INCIDENT}', 'acme', 'team', 'lifetime', '{NOON}',
    2, 1, 1, 1, 0, 1.5, 2.5, '[]', '{NOON}'
);
"""
RECOVERY_TABLES = ("incident", "store_loss", "restore_attempt", "store_check", "restore_audit")


def migrate_to(url: str, version: str) -> None:
    """Bring an empty database to an older version, as the project did when that was its newest."""
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(url), poolclass=NullPool
    )
    config = Config()
    steps = "budget_recovery_dagster.adapters.postgres:migrations"
    config.set_main_option("script_location", steps)
    with engine.begin() as connection:
        connection.exec_driver_sql("create schema budget_recovery")
        config.attributes["connection"] = connection
        command.upgrade(config, version)


def contents(url: str, *tables: str) -> dict[str, list[dict[str, object]]]:
    """Return every row of the tables that the older version has."""
    with psycopg.connect(url, row_factory=psycopg.rows.dict_row) as connection:
        return {
            table: connection.execute(f"select * from budget_recovery.{table}".encode()).fetchall()
            for table in tables
        }


@pytest.mark.parametrize("is_in_use", [False, True], ids=["empty", "in use"])
def test_an_upgrade_keeps_every_row_of_the_version_before(
    empty_database_url: str, *, is_in_use: bool
) -> None:
    url = empty_database_url
    migrate_to(url, "0002")
    if is_in_use:
        with psycopg.connect(url) as connection:
            connection.execute(DATA.encode())
    before = contents(url, *TABLES)
    assert all(len(rows) == is_in_use for rows in before.values())
    assert migrate(url) == Migration(from_version="0002", to_version="0006")
    after = contents(url, *TABLES)
    added = {"marker_nonce", "marker_revision", "marked_at", "intended_nonce"}
    for row in after["store"]:
        assert {row.pop(column) for column in added} == {None}
    assert after == before


def test_an_upgraded_database_goes_on_from_what_it_knew(empty_database_url: str) -> None:
    url = empty_database_url
    migrate_to(url, "0002")
    with psycopg.connect(url) as connection:
        connection.execute(DATA.encode())
    migrate(url)
    accepted = Baseline(StoreIdentity(BORN, 9007199254740993), version=41)
    with on_postgres(url) as plane:
        assert plane.registry.claim().deployment_id == DEPLOYMENT
        assert plane.baseline == accepted
        assert plane.incidents.recovery() == Recovery(RecoveryState.HEALTHY, None)
        assert plane.reports.damaged_in(Hour(NOON)) == ()
        point = plane.restore_points.point_of("acme", NOON)
        assert point is not None
        assert {each.of: each.usages for each in point.windows} == point_of(
            {("team", "lifetime"): {"alice": "1.5"}}
        )
        intended = plane.registry.intend_marker("n", judged=accepted)
        assert intended.version == 42
        incident = plane.incidents.open(LOSS, target=TARGET, judged=intended)
        assert incident.newest_point_at == NOON


def test_an_upgrade_in_the_midst_of_a_recovery_keeps_every_row_and_goes_on(
    empty_database_url: str,
) -> None:
    url = empty_database_url
    migrate_to(url, "0003")
    with psycopg.connect(url) as connection:
        connection.execute(DATA.encode())
        connection.execute(INCIDENT_DATA.encode())
    before = contents(url, *TABLES, *RECOVERY_TABLES)
    assert all(len(rows) == 1 for rows in before.values())
    assert migrate(url) == Migration(from_version="0003", to_version="0006")
    after = contents(url, *TABLES, *RECOVERY_TABLES)
    added = {"held_at", "held_by", "held_reason", "released_at"}
    assert [{row.pop(column) for column in added} for row in after["incident"]] == [{None}]
    assert after == before
    with on_postgres(url) as plane:
        incident = plane.incidents.recovery().incident
        assert incident is not None
        assert (incident.held, incident.released_at, incident.attempts) == (None, None, 1)
        assert incident.waiting == Waiting(NOON, "no leader", 1)
        held = plane.incidents.hold("why", "ann", judged=incident)
        assert held.held == Held(NOON, "ann", "why")
        claim_attempt(plane, plane.incidents.release("ann", judged=held))
        assert [each.number for each in plane.incidents.attempts_of(INCIDENT)] == [1, 2]


def test_the_columns_of_recoveries_and_restores_are_described(admin: psycopg.Connection) -> None:
    undescribed = admin.execute(
        "select c.relname, a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid"
        " where c.relname in ('store', 'store_check', 'incident', 'store_loss', 'restore_attempt',"
        " 'restore_audit', 'budget_reset') and c.relnamespace = 'budget_recovery'::regnamespace"
        " and a.attnum > 0 and not a.attisdropped and col_description(c.oid, a.attnum) is null"
    ).fetchall()
    assert undescribed == []
