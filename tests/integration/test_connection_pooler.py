"""Everything works through a real PgBouncer in transaction mode, and leaves its sessions alone."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from click.testing import CliRunner

from budget_recovery_dagster.adapters.postgres import (
    Database,
    PostgresLeases,
    migrate,
    require_lease,
)
from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.embedded import PostgresServer
from budget_recovery_dagster.errors import DatabaseError
from tests.integration.commands import run
from tests.integration.doctor_command import POSTGRES_URL, doctor
from tests.integration.recovery_harness import opened_harness
from tests.integration.recovery_runs import usages
from tests.integration.test_documented_roles import GRANTS, Documented, documented_roles
from tests.integration.test_tenant_usage_tables import run_both
from tests.nats_servers import Bucket
from tests.pgbouncer import PgBouncer, running_pgbouncer
from tests.waiting import wait_until

RUNTIME, OWNER = "recovery_runtime", "recovery_owner"
LIFETIME = "lifetime"


@pytest.fixture
def roles(postgres_server: PostgresServer) -> Iterator[Documented]:
    with documented_roles(postgres_server) as roles:
        yield roles


@pytest.fixture
def pooler(
    postgres_server: PostgresServer, server_dir: Path, roles: Documented
) -> Iterator[PgBouncer]:
    names = [roles.named(RUNTIME), roles.named(OWNER)]
    with running_pgbouncer(
        postgres_server, server_dir / f"pgbouncer-{roles.suffix}", roles=names
    ) as pooler:
        yield pooler


@contextmanager
def strangers(pooler: PgBouncer, url: str) -> Iterator[None]:
    """Hold open transactions of other programs of the role, in half of the sessions.

    Each has read before, and reads at the end with the settings that it had.
    """
    with ExitStack() as exits:
        begun = []
        for _ in range(pooler.sessions // 2):
            stranger = exits.enter_context(psycopg.connect(pooler.url(url)))
            begun.append((stranger, settings_of(stranger)))
        yield
        for stranger, before in begun:
            assert settings_of(stranger) == before
            stranger.commit()


def settings_of(stranger: psycopg.Connection) -> list[tuple[object, ...]]:
    return stranger.execute(
        "select pg_backend_pid()::text, ''"
        " union all select name, setting from pg_settings"
        " where name ~ 'timeout|read_only|isolation|keepalives|client_connection' order by 1"
    ).fetchall()


def test_all_work_runs_through_a_pooler_and_changes_no_session(
    roles: Documented,
    pooler: PgBouncer,
    configured: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    tables: Path,
) -> None:
    owner, runtime = roles.url(OWNER), roles.url(RUNTIME)
    with strangers(pooler, owner):
        environment = {POSTGRES_URL: pooler.url(owner)}
        ended = CliRunner().invoke(main, ["migrate"], env=environment)
        assert ended.exit_code == 0, ended.output
    assert pooler.left_behind(owner) == []
    roles.execute(GRANTS, owner)

    monkeypatch.setenv(POSTGRES_URL, pooler.url(runtime))
    configured.spend("acme", "team", LIFETIME, {"alice": "5", "bob": "3"})
    with strangers(pooler, runtime):
        checked = doctor()
        assert checked.failed == set()
        assert checked["database_pooling"]["facts"] == {"pooling": "transaction"}
        assert all(each.success for each in run_both(instance, current_hour))
        assert len(list(tables.rglob("*.parquet"))) == 1
        assert json.loads(run("snapshots", "--json"))["snapshots"]
        with opened_harness(configured, pooler.url(runtime)) as harness:
            harness.check()
            harness.lose()
            harness.find_loss()
            harness.recover()
            assert usages(configured, "acme", "team", LIFETIME) == {"alice": "5", "bob": "3"}
            configured.remove("usage.acme.team.lifetime.alice")
            run("preview")
            run("restore", "--reason", "a test", "--yes")
            assert usages(configured, "acme", "team", LIFETIME) == {"alice": "5", "bob": "3"}
            run("record-reset", "--tenant", "acme", "--budget", "team", "--reason", "a test")
            harness.lose()
            harness.find_loss()
            run("hold", "--reason", "a test")
            run("status", code=2)
            run("resolve", "--reason", "a test", "--yes", "--keep-snapshots")
    assert pooler.left_behind(runtime) == []


def test_a_blocked_migration_names_the_server_process_behind_a_pooler(
    roles: Documented, pooler: PgBouncer
) -> None:
    owner = roles.url(OWNER)
    with psycopg.connect(pooler.url(owner), application_name="report") as blocker:
        blocker.execute("create schema budget_recovery")
        [(pid,)] = blocker.execute("select pg_backend_pid()").fetchall()
        with pytest.raises(DatabaseError) as refused:
            migrate(pooler.url(owner))
        assert f"process {pid} (user {roles.named(OWNER)}, application report" in str(refused.value)
        blocker.rollback()
    assert migrate(pooler.url(owner)).changed


def test_a_lease_is_renewed_beside_a_transaction_of_its_work(
    roles: Documented, pooler: PgBouncer
) -> None:
    owner = roles.url(OWNER)
    migrate(pooler.url(owner))
    renewed = "select expires_at - acquired_at > interval '30 s' from budget_recovery.lease"
    with Database(pooler.url(owner)) as database, psycopg.connect(owner) as observer:
        leases = PostgresLeases(database, renew_every=timedelta(milliseconds=10))
        with leases.hold("a lease", "a test") as lease, database.writing() as connection:
            require_lease(connection, database, lease, name="a lease")
            observer.autocommit = True
            wait_until(lambda: observer.execute(renewed).fetchall() == [(True,)])
    assert pooler.left_behind(owner) == []


@pytest.mark.parametrize("mode", ["session", None])
def test_doctor_tells_other_ways_to_connect_apart(
    postgres_server: PostgresServer,
    server_dir: Path,
    configured: Bucket,
    roles: Documented,
    mode: str | None,
) -> None:
    roles.migrate()
    url, expected = roles.url(RUNTIME), "none"
    with ExitStack() as exits:
        if mode is not None:
            expected = mode
            directory = server_dir / f"pgbouncer-{roles.suffix}"
            names = [roles.named(RUNTIME)]
            url = exits.enter_context(
                running_pgbouncer(postgres_server, directory, roles=names, mode=mode)
            ).url(url)
        checked = doctor(**{POSTGRES_URL: url})
        assert checked.failed == set()
        assert checked["database_pooling"]["facts"] == {"pooling": expected}


@pytest.mark.parametrize(
    ("mode", "options", "hint"),
    [
        ("statement", "", "set PgBouncer's pool_mode to transaction or session"),
        ("transaction", "&options=-cwork_mem%3D8MB", "ignore_startup_parameters"),
    ],
)
def test_what_a_pooler_refuses_has_a_hint(
    postgres_server: PostgresServer,
    server_dir: Path,
    roles: Documented,
    mode: str,
    options: str,
    hint: str,
) -> None:
    directory = server_dir / f"pgbouncer-{roles.suffix}"
    names = [roles.named(OWNER)]
    with (
        running_pgbouncer(postgres_server, directory, roles=names, mode=mode) as pooler,
        pytest.raises(DatabaseError) as refused,
    ):
        migrate(pooler.url(roles.url(OWNER)) + options)
    assert hint in refused.value.hint
