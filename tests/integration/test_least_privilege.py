"""The NATS users and PostgreSQL roles of docs/operations.md: they are enough, and no more.

What is started and run here are the very blocks of that page.
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

import nats
import psycopg
import pytest
from anyio.from_thread import start_blocking_portal
from click.testing import CliRunner
from psycopg import errors

from budget_recovery_dagster.adapters.postgres_examination import open_examination
from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.domain.identity import Verdict
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from budget_recovery_dagster.sandbox.postgres_binaries import find_binaries
from budget_recovery_dagster.sandbox.postgres_server import PostgresServer
from budget_recovery_dagster.services.chosen_points import RestoreRequest
from budget_recovery_dagster.services.recovery import Recovered
from tests.boards import board_key
from tests.documentation import block, blocks, code, rows
from tests.integration.confined_user import documented_permissions
from tests.integration.doctor_command import doctor
from tests.integration.hand_runs import Hand
from tests.integration.recovery_house import House, opened_house
from tests.integration.recovery_runs import usages
from tests.integration.timeless_store import capture
from tests.nats_servers import Bucket, with_user
from tests.waiting import wait_until

PAGE = "docs/operations.md"
BUCKET = "budget-usage"
LIFETIME = "lifetime"
NATS_URL, POSTGRES_URL = "BUDGET_RECOVERY_NATS_URL", "BUDGET_RECOVERY_POSTGRES_URL"


def run(*arguments: str, code: int = 0) -> str:
    """Run a command; return what it says."""
    ended = CliRunner().invoke(main, list(arguments))
    assert ended.exit_code == code, ended.output
    return ended.stdout


# NATS

CONFIG = block(PAGE, "conf", "authorization")
PASSWORDS = dict(re.findall(r'user: (\w+), password: "([^"]+)"', CONFIG))


def allowed(name: str, what: str) -> list[str]:
    """Return what a user of the page may publish or subscribe to."""
    (of_user,) = re.findall(rf"user: {name}, .*?\n    \}} \}}", CONFIG, re.DOTALL)
    (listed,) = re.findall(rf"{what}: \{{ allow: \[(.*?)\]", of_user, re.DOTALL)
    return re.findall(r'"([^"]+)"', listed)


FULL = documented_permissions()
CAPTURING = allowed("budget_recovery_capture", "publish")
FAILING = {code(subject): cells for subject, _, *cells in rows(PAGE, "publish to", "for")}


def test_every_form_lists_the_same_subjects() -> None:
    assert list(FAILING) == FULL
    nsc = block(PAGE, "sh", "nsc add user")
    assert re.findall(r"--allow-pub '(.+)'", nsc) == FULL
    inbox = allowed("budget_recovery", "subscribe")
    assert re.findall(r"--allow-sub '(.+)'", nsc) == inbox
    assert allowed("budget_recovery_capture", "subscribe") == inbox
    assert set(CAPTURING) < set(FULL)


def without(number: int) -> str:
    """Name the user that lacks one of the subjects."""
    return f"without_{number}"


def confined(name: str, publish: list[str], subscribe: str = "_INBOX_budget_recovery.>") -> str:
    permissions = {"publish": {"allow": publish}, "subscribe": {"allow": [subscribe]}}
    return json.dumps({"user": name, "password": "s3cret", "permissions": permissions})


@pytest.fixture(scope="module")
def guarded(server_dir: Path) -> Iterator[NatsServer]:
    """A server with the users of the page, and others that lack one thing each."""
    others = [
        *(
            confined(without(number), [each for each in FULL if each != denied])
            for number, denied in enumerate(FULL)
        ),
        confined("deaf", FULL, "_INBOX_of_another.>"),
    ]
    users, end = CONFIG.rsplit("]", 1)
    config = "\n".join([users, *others, "]", end])
    with NatsServer(server_dir / "least-privilege", config=config) as server:
        yield server


@dataclass(frozen=True)
class Guarded:
    """A house whose store is entered as one of the users."""

    house: House
    server: NatsServer
    monkeypatch: pytest.MonkeyPatch

    def url(self, user: str) -> str:
        return with_user(self.server.url, user, PASSWORDS.get(user, "s3cret"))

    def enter_as(self, user: str) -> None:
        self.monkeypatch.setenv(NATS_URL, self.url(user))


@pytest.fixture
def guarded_house(
    guarded: NatsServer, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Guarded]:
    """A bucket of the gateway with a tenant, entered as the documented user."""
    monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", BUCKET)
    monkeypatch.setenv("BUDGET_RECOVERY_CONVERGENCE_TIMEOUT_SECONDS", "0")
    monkeypatch.setenv(POSTGRES_URL, database_url)
    gateway = with_user(guarded.url, "gateway", PASSWORDS["gateway"])
    monkeypatch.setenv(NATS_URL, gateway)
    with Bucket.connected(gateway, BUCKET) as bucket:
        bucket.create()
        spend(bucket)
        with opened_house(bucket, database_url) as house:
            entered = Guarded(house, guarded, monkeypatch)
            entered.enter_as("budget_recovery")
            yield entered
        bucket.destroy()


def spend(bucket: Bucket) -> None:
    spent = {None: "9", "alice": "7.5"}
    bucket.spend("acme", "team", LIFETIME, spent)
    bucket.rank("acme", "team", LIFETIME, spent)


def test_the_documented_user_captures_checks_previews_and_restores(guarded_house: Guarded) -> None:
    house = guarded_house.house
    assert house.check().check.verdict is Verdict.FIRST_SEEN
    marker = f"__guard.{house.plane.registry.claim(BUCKET).deployment_id}"
    first = house.bucket.stored(marker)
    house.capture()
    house.capture_boards()
    checked = house.check()
    assert (checked.check.verdict, checked.hint) == (Verdict.UNCHANGED, "")
    assert first is not None
    assert house.bucket.stored(marker) != first

    house.lose()
    house.find_loss()
    house.recover()
    guarded_house.enter_as("gateway")
    assert usages(house.bucket, "acme", "team", LIFETIME) == {None: "9", "alice": "7.5"}
    guarded_house.enter_as("budget_recovery")
    rebuilt = house.bucket.stored(board_key("acme", "team", LIFETIME))
    assert rebuilt is not None
    assert [each["usage"] for each in json.loads(rebuilt.data)["entries"]] == ["9", "7.5"]

    house.lose()
    house.find_loss()
    assert json.loads(run("preview", "--json"))["raised"] == 2
    told = json.loads(run("restore", "--reason", "a test", "--yes", "--json"))
    assert (told["raised"], told["incident"]["is_closed"]) == (2, True)
    assert doctor().names("wrong") == set()


def test_the_user_for_captures_captures_checks_and_previews_and_restores_nothing(
    guarded_house: Guarded,
) -> None:
    house = guarded_house.house
    guarded_house.enter_as("budget_recovery_capture")
    house.check()
    house.capture()
    checked = house.check()
    assert (checked.check.verdict, checked.hint) == (Verdict.UNCHANGED, "")
    assert doctor().names("wrong") == {
        ("permissions", "reading leaderboards"),
        ("permissions", "raising counters"),
        ("permissions", "rebuilding leaderboards"),
    }
    house.lose()
    house.find_loss()
    assert json.loads(run("preview", "--json"))["raised"] == 2
    while house.plane.incidents.recovery().state is RecoveryState.RECOVERING:
        assert trouble_in_restore(house)
    assert house.plane.incidents.recovery().state is RecoveryState.FAILED
    guarded_house.enter_as("budget_recovery")
    told = json.loads(run("restore", "--reason", "a test", "--yes", "--json"))
    assert (told["raised"], told["incident"]["is_closed"]) == (2, True)


def trouble_in_check(house: House) -> str:
    try:
        checked = house.check()
    except BudgetRecoveryError as error:
        return error.message
    if checked.check.verdict is Verdict.UNKNOWN:
        return checked.check.reason
    # What keeps the marker from being renewed is told with a check that is good.
    return f"warns: {checked.check.reason}" if checked.hint else ""


def trouble_in_capture(house: House) -> str:
    try:
        captured = capture(house.plane, house.clock)
    except BudgetRecoveryError as error:
        return error.message
    return " ".join([*(each.reason for each in captured.failed), str(captured.stopped_by or "")])


def trouble_in_restore(house: House) -> str:
    house.told.clear()
    try:
        result = house.run()
    except BudgetRecoveryError as error:
        return " ".join([*house.told, error.message])
    return "" if isinstance(result, Recovered) else " ".join([*house.told, str(result)])


@pytest.mark.parametrize("number", range(len(FULL)), ids=FULL)
def test_without_any_single_subject_fails_what_is_told_and_names_it(
    guarded_house: Guarded, number: int
) -> None:
    house, denied = guarded_house.house, FULL[number]
    house.check()
    house.capture()
    guarded_house.enter_as(without(number))
    trouble = [trouble_in_check(house), trouble_in_capture(house).strip()]
    guarded_house.enter_as("budget_recovery")
    house.lose()
    house.find_loss()
    guarded_house.enter_as(without(number))
    trouble.append(trouble_in_restore(house))

    named = re.escape(denied).replace(r"\*", r"[^.\s]+").replace(">", r"\S+")
    for told, said in zip(FAILING[denied], trouble, strict=True):
        if not told:
            assert said == ""
        else:
            assert re.search(named, said), said
            assert said.startswith("warns: ") is (told == "warns")


def test_without_its_inbox_nothing_works(guarded_house: Guarded) -> None:
    house = guarded_house.house
    guarded_house.enter_as("deaf")
    for trouble in (trouble_in_check, trouble_in_capture):
        assert "_INBOX_budget_recovery.>" in trouble(house)


FOREIGN = [
    *(f"$KV.{BUCKET}.{key}" for key in ("blocked.a.b.lifetime.=", "ratelimit.a", "other")),
    "$KV.other.usage.a.b.lifetime.=",
    "anything",
    *(
        f"$JS.API.{call}"
        for call in (
            "INFO",
            "STREAM.NAMES",
            "STREAM.LIST",
            f"STREAM.PURGE.KV_{BUCKET}",
            f"STREAM.DELETE.KV_{BUCKET}",
            f"STREAM.UPDATE.KV_{BUCKET}",
            f"STREAM.CREATE.KV_{BUCKET}",
            f"STREAM.SNAPSHOT.KV_{BUCKET}",
            f"STREAM.RESTORE.KV_{BUCKET}",
            f"STREAM.MSG.DELETE.KV_{BUCKET}",
            f"STREAM.LEADER.STEPDOWN.KV_{BUCKET}",
            "STREAM.INFO.KV_other",
            "STREAM.MSG.GET.KV_other",
            f"DIRECT.GET.KV_{BUCKET}",
            f"CONSUMER.CREATE.KV_{BUCKET}",
            f"CONSUMER.CREATE.KV_{BUCKET}.c",
            f"CONSUMER.CREATE.KV_{BUCKET}.c.$KV.{BUCKET}.>",
            f"CONSUMER.CREATE.KV_{BUCKET}.c.$KV.{BUCKET}.blocked.>",
            f"CONSUMER.DURABLE.CREATE.KV_{BUCKET}.c",
            f"CONSUMER.LIST.KV_{BUCKET}",
            "CONSUMER.MSG.NEXT.KV_other.c",
        )
    ),
]


def refused_publishes(url: str, subjects: list[str]) -> set[str]:
    """Publish to each; return those that the server refuses, in its lower case."""
    refused: set[str] = set()

    async def on_error(error: Exception) -> None:
        refused.update(re.findall(r'for publish to "([^"]+)"', str(error), re.IGNORECASE))

    async def publish() -> None:
        client = await nats.connect(url, error_cb=on_error, inbox_prefix="_INBOX_budget_recovery")
        for subject in subjects:
            await client.publish(subject, b"")
        # The driver's first ping goes before what it still keeps back.
        await client.flush()
        await client.flush()
        await client.close()

    with start_blocking_portal() as portal:
        portal.call(publish)
    return refused


@pytest.mark.parametrize("user", ["budget_recovery", "budget_recovery_capture"])
def test_the_documented_users_can_touch_nothing_else(guarded_house: Guarded, user: str) -> None:
    bucket = guarded_house.house.bucket
    bucket.put("blocked.a.b.lifetime.=", b"{}")
    before = bucket.info()
    writing = [each for each in FULL if each not in CAPTURING] if "capture" in user else []
    own = [each.replace("*", "c").replace(">", "x.x") for each in writing]
    subjects = [*FOREIGN, *own]
    refused = refused_publishes(guarded_house.url(user), subjects)
    assert refused == {subject.lower() for subject in subjects}
    after = bucket.info()
    assert (after.created, after.config, after.state) == (
        before.created,
        before.config,
        before.state,
    )


# PostgreSQL

ROLES, GRANTS, READER = blocks(PAGE, "sql")
_NAMES = re.compile(r"\brecovery_(?:owner|runtime|dagster|control|reader)\b")


@dataclass(frozen=True)
class Documented:
    """The roles and databases of the page, made under names of this test's own."""

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
    """Return what was done to which table since it was made, by the server's own account."""
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
    """Return what the runtime role may do to which table, besides reading it."""
    with psycopg.connect(documented.url("recovery_owner")) as connection:
        return set(
            connection.execute(
                "select table_name, privilege_type from information_schema.role_table_grants"
                " where grantee = %s and privilege_type <> 'SELECT'",
                (documented.named("recovery_runtime"),),
            ).fetchall()
        )


# Rows that go along with another table's are removed by the server, with the owner's rights; and
# migrations note their version.
BY_THE_OWNER = {
    ("restore_preview_window", "DELETE"),
    ("alembic_version", "INSERT"),
    ("alembic_version", "UPDATE"),
}


def live_long(house: House, now: datetime) -> None:
    """Capture, check and preview long ago, then now, when what is past retention is pruned."""
    old = now - timedelta(days=40)
    day = f"{old:%Y-%m-%d}"
    house.bucket.spend("acme", "team", LIFETIME, {"alice": "5", "bob": "3"})
    house.bucket.spend("acme", "team", day, {"alice": "1"})
    # Of a tenant that nobody can name; noted twice, since both are of one run.
    house.bucket.put("usage.=FF.team.lifetime.x", b"1")
    house.capture(old)
    house.capture()
    house.check()
    Hand(house.plane).preview(RestoreRequest())
    # The old record alone knows alice, so this part of its snapshot is kept.
    house.bucket.remove("usage.acme.team.lifetime.alice")
    house.bucket.purge(f"usage.acme.team.{day}.")
    house.bucket.purge("usage.=FF.")
    house.capture(now)
    house.check()


def test_the_runtime_role_does_everything_and_may_do_nothing_that_it_does_not(
    documented: Documented,
    configured: Bucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = documented.url("recovery_runtime")
    monkeypatch.setenv(POSTGRES_URL, url)
    with opened_house(configured, url) as house:
        live_long(house, datetime.now(UTC))
        assert run("status").startswith("HEALTHY")
        assert doctor().names("wrong") == set()
        run("record-reset", "--tenant", "acme", "--budget", "team", "--reason", "a test")
        assert json.loads(run("snapshots", "--json"))["snapshots"]

        house.lose()
        house.find_loss()
        run("hold", "--reason", "a test")
        run("release")
        house.recover()
        house.lose()
        house.find_loss()
        run("preview", "--despite-resets")
        run("restore", "--despite-resets", "--reason", "a test", "--yes")
        assert usages(configured, "acme", "team", LIFETIME) == {"alice": "5", "bob": "3"}
        house.lose()
        house.find_loss()
        run("resolve", "--reason", "a test", "--yes")
    may = granted(documented)
    # A session tells of what it did when it ends, which nobody waits for.
    wait_until(lambda: may <= writes(documented), seconds=5)
    assert writes(documented) - may == BY_THE_OWNER


def test_doctor_misses_each_right_that_is_taken_away(
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
            with open_examination(documented.url("recovery_runtime")) as examination:
                missing = examination.missing_rights()
        finally:
            documented.execute(GRANTS, documented.url("recovery_owner"))
    told = {
        (table, right.upper())
        for each in missing
        for kinds, table in [each.split(" on ")]
        for right in kinds.split(", ")
    }
    assert told == set(rights)


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
def test_the_runtime_role_can_not(documented: Documented, statement: str) -> None:
    with (
        psycopg.connect(documented.url("recovery_runtime")) as connection,
        pytest.raises(errors.InsufficientPrivilege),
    ):
        connection.execute(statement.encode())


def test_it_does_not_reach_the_other_database_nor_others_this_one(documented: Documented) -> None:
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


def test_the_reader_reads_also_what_a_later_migration_makes(documented: Documented) -> None:
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


def test_a_dump_is_put_back_with_its_grants(
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

        with opened_house(bucket, runtime) as house:
            first = house.capture().captured_at
            shell(dump)
            house.capture()
        shell(restore)
        (listed,) = json.loads(run("snapshots", "--json"))["snapshots"]
        assert datetime.fromisoformat(listed["captured_at"]) == first
        with opened_house(bucket, runtime) as house:
            house.capture()
