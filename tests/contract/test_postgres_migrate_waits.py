"""A migration waits for seconds, reports for whom, and then refuses with nothing changed."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
from click.testing import CliRunner

from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.adapters.postgres.schema import Process
from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.errors import DatabaseError
from tests.contract.test_postgres_upgrade import make_version
from tests.waiting import wait_until

LOCK = "select pg_advisory_xact_lock(hashtextextended('budget_recovery/migrate', 0))"
# Of an idle transaction: a reader's, and a writer's.
BLOCKERS = {
    "reader": "select from budget_recovery.capture",
    "writer": "insert into budget_recovery.store (bucket, deployment_id)"
    " values ('b', gen_random_uuid())",
    "locker": "lock table budget_recovery.alembic_version",
}


@contextmanager
def blocker(url: str, statement: str) -> Iterator[psycopg.Connection]:
    """Hold an idle transaction of another application."""
    with psycopg.connect(url, application_name="nightly report") as connection:
        connection.execute(statement.encode())
        yield connection
        connection.rollback()


@pytest.fixture
def owner_url(empty_database_url: str) -> Iterator[str]:
    """Return the URL of a role that owns a schema of version 1, and has no other privileges."""
    role = f"role_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(f"create role {role} login".encode())
        connection.execute(
            f'grant create on database "{connection.info.dbname}" to {role}'.encode()
        )
        url = f"{empty_database_url}&user={role}"
        make_version("v1", url)
        yield url
        connection.execute(f"drop owned by {role} cascade".encode())
        connection.execute(f"drop role {role}".encode())


def columns_of(url: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(
            "select table_name, column_name from information_schema.columns"
            " where table_schema = 'budget_recovery' order by 1, 2"
        ).fetchall()


@pytest.mark.parametrize("statement", BLOCKERS.values(), ids=BLOCKERS)
def test_a_blocked_migration_names_who_blocks_it_and_changes_nothing(
    empty_database_url: str, owner_url: str, statement: str
) -> None:
    before = columns_of(empty_database_url)
    sentences: list[str] = []
    with blocker(empty_database_url, statement) as connection:
        pid = connection.info.backend_pid
        with pytest.raises(DatabaseError) as refused:
            migrate(owner_url, on_wait=sentences.append)
        # Its transaction is as before.
        assert connection.execute("select 1").fetchone() == (1,)
    who = f"process {pid} (user postgres, application nightly report)"
    assert f"for 5 s it waited for a lock of {who}. Nothing has changed." in refused.value.message
    assert f"`select pg_terminate_backend({pid})`" in refused.value.hint
    assert sentences == [f"Waiting up to 5 s for a lock of {who}"]
    assert columns_of(empty_database_url) == before
    assert migrate(owner_url).from_version == "v1"


def test_readers_queue_behind_a_blocked_migration_for_seconds_only(
    empty_database_url: str, owner_url: str
) -> None:
    with blocker(empty_database_url, BLOCKERS["reader"]), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(migrate, owner_url)
        with psycopg.connect(empty_database_url, autocommit=True) as reader:
            waits = (
                "select exists (select from pg_locks where not granted and locktype = 'relation')"
            )
            wait_until(lambda: reader.execute(waits).fetchone() == (True,))
            reader.execute("set statement_timeout = '10s'")
            assert reader.execute(BLOCKERS["reader"].encode()).fetchall() == []
        with pytest.raises(DatabaseError, match="nightly report"):
            waiting.result()


def test_the_command_reports_the_wait_and_the_refusal(
    empty_database_url: str, owner_url: str
) -> None:
    environment = {"BUDGET_RECOVERY_POSTGRES_URL": owner_url}
    with blocker(empty_database_url, BLOCKERS["reader"]) as connection:
        ended = CliRunner().invoke(main, ["migrate"], env=environment)
        pid = connection.info.backend_pid
    assert ended.exit_code == 1
    waited, error, hint = ended.output.splitlines()
    assert waited.startswith(f"Waiting up to 5 s for a lock of process {pid} (user postgres")
    assert error.startswith("Error: The schema was not migrated")
    assert f"pg_terminate_backend({pid})" in hint


def test_a_second_migration_reports_that_it_waits_for_the_first(
    empty_database_url: str, owner_url: str
) -> None:
    sentences: list[str] = []
    with blocker(empty_database_url, LOCK) as first:

        def end_the_first(sentence: str) -> None:
            sentences.append(sentence)
            first.rollback()

        assert migrate(owner_url, on_wait=end_the_first).changed
        (sentence,) = sentences
        assert sentence.startswith("Waiting for another migration, 0 s so far: process")
        assert f"{first.info.backend_pid} (user postgres, application nightly report" in sentence


def test_a_second_migration_does_not_wait_without_end(
    empty_database_url: str, owner_url: str
) -> None:
    with blocker(empty_database_url, LOCK) as first:
        with pytest.raises(DatabaseError, match="another migration has not ended") as refused:
            migrate(owner_url, wait_at_most=timedelta(0))
        assert f"pg_terminate_backend({first.info.backend_pid})" in refused.value.hint


def test_a_prepared_transaction_is_named_without_a_process() -> None:
    assert "pg_prepared_xacts" in str(Process(0, None, None, None, None))
