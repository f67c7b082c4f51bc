"""``budget-recovery doctor`` on the control-plane database."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.free_ports import unused_port
from tests.integration.doctor_command import POSTGRES_URL, doctor, require_skipped
from tests.integration.locked_postgres import locked_database
from tests.nats_servers import PASSWORD, Bucket


@pytest.fixture(scope="module")
def locked_database_url(server_dir: Path) -> Iterator[str]:
    """Start a server that requires a password; return a URL with the password."""
    with locked_database(server_dir / "doctor-postgres") as url:
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


def test_a_read_only_database_is_reported(
    configured: Bucket, database: psycopg.Connection, database_url: str
) -> None:
    name = database.info.dbname
    database.execute(f"alter database {name} set default_transaction_read_only = on")
    checked = doctor()
    assert checked.failed == {"database_writable"}
    assert (
        "point BUDGET_RECOVERY_POSTGRES_URL at the primary"
        in (checked["database_writable"]["hint"])
    )


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
