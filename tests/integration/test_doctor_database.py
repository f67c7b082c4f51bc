"""``budget-recovery doctor`` on the control-plane database."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import Database, PostgresLeases, migrate
from budget_recovery_dagster.errors import DatabaseError
from tests.free_ports import unused_port
from tests.integration.doctor_command import POSTGRES_URL, doctor, require_skipped
from tests.integration.locked_postgres import locked_database
from tests.integration.recovery_harness import opened_harness
from tests.integration.recovery_runs import usages
from tests.nats_servers import PASSWORD, Bucket
from tests.postgres_servers import standby_server
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def locked_database_url(server_dir: Path) -> Iterator[str]:
    """Start a server that requires a password; return a URL with the password."""
    with locked_database(server_dir / "doctor-postgres") as url:
        yield url


@pytest.fixture
def standby_url(server_dir: Path) -> Iterator[str]:
    with standby_server(server_dir / "standby") as url:
        yield url


def test_an_unreachable_database_is_reported_and_the_rest_is_checked(configured: Bucket) -> None:
    checked = doctor(**{POSTGRES_URL: f"postgresql://me:s3cret@127.0.0.1:{unused_port()}/database"})
    assert checked.failed == {"database_connection"}
    assert (
        "Cannot connect to the control-plane database" in checked["database_connection"]["message"]
    )
    assert "s3cret" not in str(checked)
    require_skipped(
        checked,
        "database_version",
        "database_writable",
        "database_schema",
        "database_privileges",
        "database_bucket",
    )
    require_skipped(checked, "store_clock", "host_clock")
    assert checked["bucket_read"]["outcome"] == "ok"


def test_a_wrong_postgresql_password_is_reported_and_not_shown(
    configured: Bucket, locked_database_url: str
) -> None:
    checked = doctor(**{POSTGRES_URL: locked_database_url.replace(PASSWORD, "wr0ng")})
    assert checked.failed == {"database_connection"}
    assert "password authentication failed for user" in checked["database_connection"]["message"]
    assert "user and password" in checked["database_connection"]["hint"]
    assert "wr0ng" not in str(checked)


@pytest.mark.parametrize(
    ("version", "found", "to_do"),
    [
        ("0001", "has version 0001 of an unreleased checkout", "budget-recovery migrate"),
        ("9999", "has version 9999, unknown to", "upgrade the project"),
        (None, "has no schema", "budget-recovery migrate"),
    ],
)
def test_an_old_a_newer_and_a_missing_schema_are_reported(
    configured: Bucket,
    database: psycopg.Connection,
    empty_database_url: str,
    version: str | None,
    found: str,
    to_do: str,
) -> None:
    if version is None:
        checked = doctor(**{POSTGRES_URL: empty_database_url})
    else:
        database.execute("update budget_recovery.alembic_version set version_num = %s", (version,))
        checked = doctor()
    assert checked.failed == {"database_schema"}
    assert found in checked["database_schema"]["message"]
    assert to_do in checked["database_schema"]["hint"]
    require_skipped(checked, "database_privileges", "database_bucket")


def test_missing_privileges_of_the_role_are_reported(
    configured: Bucket, database: psycopg.Connection, database_url: str
) -> None:
    database.execute("create role doctor_reader login")
    try:
        database.execute("grant usage on schema budget_recovery to doctor_reader")
        database.execute("grant select on all tables in schema budget_recovery to doctor_reader")
        database.execute("revoke select on budget_recovery.budget_entry from doctor_reader")
        checked = doctor(**{POSTGRES_URL: database_url.replace("postgres@", "doctor_reader@")})
    finally:
        database.execute("drop owned by doctor_reader")
        database.execute("drop role doctor_reader")
    assert checked.failed == {"database_privileges"}
    message = checked["database_privileges"]["message"]
    assert message.startswith(
        "The role doctor_reader lacks insert, delete on bucket_configuration;"
    )
    assert "; insert, delete on budget_content; select on budget_entry;" in message
    assert "doctor_reader" in checked["database_privileges"]["hint"]


def test_a_database_that_is_read_only_by_default_suits_doctor_and_work(
    configured: Bucket, database: psycopg.Connection, database_url: str
) -> None:
    name = database.info.dbname
    database.execute(f"alter database {name} set default_transaction_read_only = on")
    checked = doctor()
    assert checked.failed == set()
    assert checked["database_writable"]["facts"] == {"default_read_only": True}
    assert "read-only by default" in checked["database_writable"]["message"]
    with psycopg.connect(database_url) as connection:
        connection.execute("set transaction read write")
        connection.execute("drop schema budget_recovery cascade")
    migrate(database_url)
    configured.spend("acme", "team", "lifetime", {"alice": "5"})
    renewed = "select expires_at - acquired_at > interval '30 s' from budget_recovery.lease"
    with Database(database_url) as opened:
        leases = PostgresLeases(opened, renew_every=timedelta(milliseconds=10))
        with leases.hold("a lease", "a test"):
            wait_until(lambda: (True,) in database.execute(renewed).fetchall())
    with opened_harness(configured, database_url) as harness:
        harness.capture()
        harness.lose()
        harness.find_loss()
        harness.recover()
    assert usages(configured, "acme", "team", "lifetime") == {"alice": "5"}


def test_a_standby_is_refused_by_doctor_and_work(
    configured: Bucket, standby_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = doctor(**{POSTGRES_URL: standby_url})
    assert checked.failed == {"database_writable"}
    assert checked["database_writable"]["code"] == "read_only"
    hint = "point BUDGET_RECOVERY_POSTGRES_URL at the primary"
    assert hint in checked["database_writable"]["hint"]
    with Database(standby_url) as database:
        assert database.now()
        with pytest.raises(DatabaseError) as refused, database.writing():
            pytest.fail("begun")
    assert hint in refused.value.hint
    with pytest.raises(DatabaseError) as refused:
        migrate(standby_url)
    assert hint in refused.value.hint


def test_a_database_of_another_bucket_is_reported(
    configured: Bucket, database: psycopg.Connection
) -> None:
    database.execute(
        "insert into budget_recovery.store (bucket, deployment_id)"
        " values ('other', gen_random_uuid())"
    )
    checked = doctor()
    assert checked.failed == {"database_bucket"}
    assert "this database belongs to the bucket 'other'" in checked["database_bucket"]["message"]
