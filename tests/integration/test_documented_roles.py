"""The PostgreSQL roles of docs/operations.md have exactly the privileges that they need.

The tests run the code blocks of that page.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import errors

from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.doctor import missing_privileges, open_database
from budget_recovery_dagster.embedded import PostgresServer, find_binaries
from budget_recovery_dagster.services.restore import RestoreRequest
from tests import services
from tests.documentation import block, blocks
from tests.integration.commands import run
from tests.integration.doctor_command import doctor
from tests.integration.manual_runs import Operator
from tests.integration.recovery_harness import Harness, opened_harness
from tests.integration.recovery_runs import usages
from tests.nats_servers import Bucket
from tests.waiting import wait_until

PAGE = "docs/operations.md"
BUCKET = "budget-usage"
LIFETIME = "lifetime"
NATS_URL, POSTGRES_URL = "BUDGET_RECOVERY_NATS_URL", "BUDGET_RECOVERY_POSTGRES_URL"


ROLES, GRANTS, READER = blocks(PAGE, "sql")
_NAMES = re.compile(r"\brecovery_(?:owner|runtime|dagster|control|reader)\b")


@dataclass(frozen=True)
class Documented:
    """The roles and databases of the page, created under unique names."""

    server: PostgresServer
    suffix: str

    def named(self, text: str) -> str:
        return _NAMES.sub(lambda name: f"{name[0]}_{self.suffix}", text)

    def url(self, role: str, database: str = "recovery_control") -> str:
        return self.server.url(self.named(database)).replace("postgres@", f"{self.named(role)}:x@")

    def execute(self, script: str, url: str) -> None:
        """Run a block of the page, statement by statement, as psql does."""
        statements = re.sub(r"--.*", "", self.named(script)).split(";")
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in filter(str.strip, statements):
                connection.execute(statement.encode())

    def migrate(self) -> None:
        """Migrate as the owner, and grant."""
        ended = CliRunner().invoke(
            main, ["migrate"], env={POSTGRES_URL: self.url("recovery_owner")}
        )
        assert ended.exit_code == 0, ended.output
        self.execute(GRANTS, self.url("recovery_owner"))


@contextmanager
def documented_roles(server: PostgresServer) -> Iterator[Documented]:
    documented = Documented(server, uuid4().hex[:8])
    try:
        documented.execute(ROLES, server.url())
        yield documented
    finally:
        documented.execute(
            "drop database if exists recovery_control with (force);"
            "drop database if exists recovery_dagster with (force);"
            "drop role if exists recovery_owner; drop role if exists recovery_runtime;"
            "drop role if exists recovery_dagster; drop role if exists recovery_reader",
            server.url(),
        )


@pytest.fixture(scope="module")
def documented(postgres_server: PostgresServer) -> Iterator[Documented]:
    with documented_roles(postgres_server) as documented:
        documented.migrate()
        yield documented


def writes(documented: Documented) -> set[tuple[str, str]]:
    """Return which kinds of writes each table has had, from the server's statistics."""
    url = documented.server.url(documented.named("recovery_control"))
    with psycopg.connect(url, autocommit=True) as connection:
        counts = connection.execute(
            "select relname, n_tup_ins > 0, n_tup_upd > 0, n_tup_del > 0 from pg_stat_user_tables"
            " where schemaname = 'budget_recovery'"
        ).fetchall()
    return {
        (table, kind)
        for table, *did in counts
        for kind, done in zip(("INSERT", "UPDATE", "DELETE"), did, strict=True)
        if done
    }


def granted(documented: Documented) -> set[tuple[str, str]]:
    """Return which kinds of writes the runtime role may do to each table."""
    with psycopg.connect(documented.url("recovery_owner")) as connection:
        return set(
            connection.execute(
                "select table_name, privilege_type from information_schema.role_table_grants"
                " where grantee = %s and privilege_type <> 'SELECT'",
                (documented.named("recovery_runtime"),),
            ).fetchall()
        )


# Cascading deletes run with the rights of the owner, and migrations write their version.
BY_THE_OWNER = {
    ("restore_preview_window", "DELETE"),
    ("alembic_version", "INSERT"),
    ("alembic_version", "UPDATE"),
}


def live_long(harness: Harness, now: datetime) -> None:
    """Capture, check and preview long ago, and then now with pruning."""
    old = now - timedelta(days=40)
    day = f"{old:%Y-%m-%d}"
    # Its captures are past retention soon after, and that it left is past retention at the end.
    before = old - timedelta(days=10)
    harness.bucket.spend("left", "team", f"{before:%Y-%m-%d}", {"alice": "1"})
    harness.capture(before)
    harness.bucket.purge("usage.left.")
    harness.bucket.spend("acme", "team", LIFETIME, {"alice": "5", "bob": "3"})
    harness.bucket.spend("acme", "team", day, {"alice": "1"})
    # A key without a valid tenant; its failure is updated, because both captures have one run id.
    harness.bucket.put("usage.=FF.team.lifetime.x", b"1")
    for left in reversed(range(25)):
        harness.capture(old - left * timedelta(minutes=1))
    harness.capture()
    harness.check()
    # A fall that ended long ago, and a configuration that changed since.
    harness.bucket.spend("acme", "team", LIFETIME, {"bob": "2"})
    harness.capture()
    harness.bucket.spend("acme", "team", LIFETIME, {"bob": "3"})
    harness.capture()
    harness.bucket.reconfigure(max_bytes=2**24)
    Operator(harness.plane).preview(RestoreRequest())
    # Only the old record contains alice, so this part of its snapshot is kept.
    harness.bucket.remove("usage.acme.team.lifetime.alice")
    harness.bucket.purge(f"usage.acme.team.{day}.")
    harness.bucket.purge("usage.=FF.")
    # After a gap, so many captures must follow before anything is pruned.
    for left in reversed(range(24)):
        harness.capture(now - left * timedelta(minutes=1))
    harness.check()


# More than are kept whatever their age.
LONG_AGO = """
insert into budget_recovery.store_check (checked_at, checked_by, verdict, reason)
select now() - interval '60 days', 'a check', 'same', 'The same.' from generate_series(1, 1001);
insert into budget_recovery.capture_run (run_id, hour, started_at)
select 'run', date_trunc('hour', now() - interval '60 days', 'UTC'), now() - interval '60 days'
from generate_series(1, 169);
"""


def test_the_runtime_role_has_exactly_the_write_privileges_that_it_uses(
    documented: Documented,
    configured: Bucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = documented.url("recovery_runtime")
    monkeypatch.setenv(POSTGRES_URL, url)
    documented.execute(LONG_AGO, documented.url("recovery_owner"))
    with opened_harness(configured, url) as harness:
        live_long(harness, datetime.now(UTC))
        assert run("status", code=4).startswith("ATTENTION")
        assert doctor().ended("fail") == set()
        run("record-reset", "--tenant", "acme", "--budget", "team", "--reason", "a test")
        harness.capture(datetime.now(UTC) + timedelta(days=40))
        harness.clock.time = datetime.now(UTC)
        run("discard-future", "--reason", "a test", "--yes")
        assert json.loads(run("snapshots", "--json"))["snapshots"]

        harness.lose()
        harness.find_loss()
        run("hold", "--reason", "a test")
        run("release")
        harness.recover()
        harness.lose()
        harness.find_loss()
        run("preview", "--despite-resets")
        run("restore", "--despite-resets", "--reason", "a test", "--yes")
        assert usages(configured, "acme", "team", LIFETIME) == {"alice": "5", "bob": "3"}
        harness.lose()
        harness.find_loss()
        run("resolve", "--reason", "a test", "--yes", "--record-resets")
    may = granted(documented)
    # A session reports its statistics only when it ends.
    wait_until(lambda: may <= writes(documented), seconds=5)
    assert writes(documented) - may == BY_THE_OWNER


def test_doctor_reports_each_revoked_privilege(
    documented: Documented, configured: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POSTGRES_URL, documented.url("recovery_runtime"))
    runtime = documented.named("recovery_runtime")
    rights = sorted(granted(documented))
    with psycopg.connect(documented.url("recovery_owner"), autocommit=True) as owner:
        try:
            for table, _ in rights:
                owner.execute(f"revoke all on {TABLES}.{table} from {runtime}".encode())
                owner.execute(f"grant select on {TABLES}.{table} to {runtime}".encode())
            with open_database(services.present_settings()) as database:
                missing = missing_privileges(database)
        finally:
            documented.execute(GRANTS, documented.url("recovery_owner"))
    found = {(table, each.upper()) for table, lacking in missing.items() for each in lacking}
    assert found == set(rights)


TABLES = "budget_recovery"


@pytest.mark.parametrize(
    "statement",
    [
        f"drop table {TABLES}.capture",
        f"drop view {TABLES}.budget_entry",
        f"drop schema {TABLES} cascade",
        f"alter table {TABLES}.capture add column x int",
        f"truncate {TABLES}.capture",
        f"create table {TABLES}.x ()",
        "create table public.x ()",
        "create temporary table x ()",
        "create schema x",
        f"delete from {TABLES}.restore_audit",
        f"delete from {TABLES}.incident",
        f"delete from {TABLES}.store_loss",
        f"delete from {TABLES}.restore_attempt",
        f"delete from {TABLES}.budget_reset",
        f"delete from {TABLES}.store",
        f"update {TABLES}.budget_reset set reason = ''",
        f"update {TABLES}.store_loss set reason = ''",
        f"update {TABLES}.budget_record set covers_earlier = true",
        f"update {TABLES}.budget_content set usages = '{{}}'",
        f"delete from {TABLES}.budget",
        f"update {TABLES}.alembic_version set version_num = '9999'",
    ],
)
def test_the_runtime_role_is_denied(documented: Documented, statement: str) -> None:
    with (
        psycopg.connect(documented.url("recovery_runtime")) as connection,
        pytest.raises(errors.InsufficientPrivilege),
    ):
        connection.execute(statement.encode())


def test_each_role_can_connect_only_to_its_own_database(documented: Documented) -> None:
    for role, database in (
        ("recovery_runtime", "recovery_dagster"),
        ("recovery_dagster", "recovery_control"),
    ):
        with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
            psycopg.connect(documented.url(role, database))


def test_the_runtime_role_does_not_migrate_an_older_schema(postgres_server: PostgresServer) -> None:
    with documented_roles(postgres_server) as documented:
        environment = {POSTGRES_URL: documented.url("recovery_runtime")}
        ended = CliRunner().invoke(main, ["migrate"], env=environment)
        assert ended.exit_code == 1
        assert "permission denied for database" in ended.output


def test_the_reader_can_read_tables_of_later_migrations(documented: Documented) -> None:
    documented.execute(READER, documented.server.url(documented.named("recovery_control")))
    owner, reader = documented.url("recovery_owner"), documented.url("recovery_reader")
    with psycopg.connect(owner, autocommit=True) as connection:
        connection.execute(f"create table {TABLES}.later ()")
        try:
            with psycopg.connect(reader) as reading:
                for table in ("budget_entry", "recovery_point", "restore_audit", "later"):
                    reading.execute(f"select * from {TABLES}.{table}".encode())
                with pytest.raises(errors.InsufficientPrivilege):
                    reading.execute(f"delete from {TABLES}.capture".encode())
        finally:
            connection.execute(f"drop table {TABLES}.later")


def test_a_dump_is_restored_with_its_grants(
    postgres_server: PostgresServer,
    bucket: Bucket,
    configured: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dump, restore = block(PAGE, "sh", "pg_dump"), block(PAGE, "sh", "pg_restore")
    with documented_roles(postgres_server) as documented:
        documented.migrate()
        runtime, owner = documented.url("recovery_runtime"), documented.url("recovery_owner")
        monkeypatch.setenv(POSTGRES_URL, runtime)
        bucket.spend("acme", "team", LIFETIME, {"alice": "5"})
        environment = {"URL": owner, "PATH": f"{find_binaries().programs}:{os.defpath}"}

        def shell(script: str) -> None:
            subprocess.run(["/bin/sh", "-ec", script], cwd=tmp_path, env=environment, check=True)

        with opened_harness(bucket, runtime) as harness:
            first = harness.capture().captured_at
            shell(dump)
            harness.capture()
        shell(restore)
        (listed,) = json.loads(run("snapshots", "--json"))["snapshots"]
        assert datetime.fromisoformat(listed["captured_at"]) == first
        with opened_harness(bucket, runtime) as harness:
            harness.capture()
