"""``budget-recovery doctor``: all is well, settings, this host, and where it looks."""

import json
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from budget_recovery_dagster.sandbox.data_directory import held_data_dir
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from budget_recovery_dagster.sandbox.running_dev import RunningDev, announced
from tests.free_ports import unused_port
from tests.integration.doctor_command import (
    DAGSTER_URL,
    NATS_URL,
    POSTGRES_URL,
    STORAGE,
    dagster_home,
    doctor,
    page,
    require_unseen,
    run_doctor,
    untouched,
)
from tests.nats_servers import Bucket


def test_all_is_well_and_nothing_is_touched(
    configured: Bucket,
    database_url: str,
    database: psycopg.Connection,
    tmp_path: Path,
    tables: Path,
) -> None:
    configured.spend("acme", "total", "lifetime", {None: "80"})
    home = dagster_home(tmp_path / "home", database_url.replace("://", "+psycopg2://"))
    with untouched(configured):
        told = doctor(**home)
        said = page(**home)
    assert told.exit_code == 0
    # What NATS does not tell is not called well.
    assert told.names("not_looked_at") == {("bucket", "sync")}
    assert told.names("advice") == told.wrong == set()
    assert told["database", "version"]["found"].startswith("PostgreSQL 1")
    assert told["bucket", "kind"]["found"] == "a key-value bucket; messages in it: 1"
    assert told[STORAGE]["found"].startswith("PostgreSQL, postgresql+psycopg2://postgres@")
    assert said.splitlines()[-1].startswith("Nothing is wrong; ")
    [(rows,)] = database.execute("select count(*) from budget_recovery.store").fetchall()
    assert rows == 0
    # Dagster would have made its tables.
    [(tables_made,)] = database.execute("select to_regclass('public.runs') is not null").fetchall()
    assert not tables_made
    assert not tables.exists()


def test_every_wrong_setting_is_named_and_nothing_is_done_on_its_default(
    configured: Bucket, database: psycopg.Connection
) -> None:
    told = doctor(
        BUDGET_RECOVERY_BUCKET="usage.>",
        BUDGET_RECOVERY_RETENTION_DAYS="x",
        BUDGET_RECOVERY_TABLES_DIR="relative",
    )
    assert told.wrong == {("installation", "settings"), ("installation", "tables")}
    said = [each["found"] for each in told.findings["installation", "settings"]]
    assert [each.split(" is ")[0] for each in said] == [
        "BUDGET_RECOVERY_BUCKET",
        "BUDGET_RECOVERY_RETENTION_DAYS",
        "BUDGET_RECOVERY_TABLES_DIR",
    ]
    assert told["servers", "connection"]["state"] == "ok"
    require_unseen(told, "bucket", "existence", "a reading")
    require_unseen(told, "permissions", "raising counters")
    require_unseen(told, "database", "bucket")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (NATS_URL, "nats://h/x", "The NATS URL goes on"),
        (NATS_URL, None, f"{NATS_URL} is not set."),
        ("BUDGET_RECOVERY_NATS_CREDS", "/missing.creds", "/missing.creds cannot be read"),
        ("BUDGET_RECOVERY_NATS_CA", "/missing.pem", "/missing.pem cannot be used"),
        (POSTGRES_URL, "postgresql+psycopg2://h/d", "The database URL cannot be read."),
        (POSTGRES_URL, None, f"{POSTGRES_URL} is not set."),
    ],
)
def test_a_setting_of_a_connection_that_is_wrong_is_named(
    configured: Bucket, tmp_path: Path, name: str, value: str | None, said: str
) -> None:
    told = doctor(**{name: value, "BUDGET_RECOVERY_DATA_DIR": str(tmp_path / "no dev")})
    topic = "database" if name == POSTGRES_URL else "servers"
    assert told.wrong == {(topic, "connection")}
    assert said in told[topic, "connection"]["found"]
    assert value is None or name in told[topic, "connection"]["to_do"]


def test_a_place_for_tables_that_cannot_be_used_is_named(
    configured: Bucket, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "tables"
    told = doctor(BUDGET_RECOVERY_TABLES_DIR=str(place))
    assert told.wrong == {("installation", "tables")}
    assert f"{place} cannot be used for tables" in told["installation", "tables"]["found"]


@pytest.mark.parametrize(
    ("content", "url", "state", "said"),
    [
        ("", "", "advice", "SQLite"),
        (None, "", "wrong", f"{DAGSTER_URL}, by which"),
        (None, "postgresql://me@localhost/dagster", "wrong", "the driver psycopg, on which"),
        (None, "postgresql+nothing://me@localhost/d", "wrong", "postgresql+nothing"),
        (None, "not a url", "wrong", "names no URL"),
        ("storage: {custom: {module: m}}", "", "advice", "'custom'"),
        ("{", "", "wrong", "it is no YAML"),
    ],
)
def test_the_storage_of_dagster_is_looked_at(
    configured: Bucket, tmp_path: Path, content: str | None, url: str, state: str, said: str
) -> None:
    told = doctor(**dagster_home(tmp_path / "home", url, content=content))
    assert told[STORAGE]["state"] == state
    assert said in told[STORAGE]["found"]
    assert "s3cret" not in str(told)
    assert told.wrong <= {STORAGE}


def test_a_storage_of_dagster_that_is_down_is_named(configured: Bucket, tmp_path: Path) -> None:
    url = f"postgresql+psycopg2://me:s3cret@127.0.0.1:{unused_port()}/d"
    told = doctor(**dagster_home(tmp_path / "home", url, content=None))
    assert told.wrong == {STORAGE}
    assert "refused" in told[STORAGE]["found"]
    assert "s3cret" not in str(told)


def test_the_parts_of_a_url_may_be_given_one_by_one(
    configured: Bucket, database_url: str, tmp_path: Path
) -> None:
    server = conninfo_to_dict(database_url)
    parts = {
        "username": server["user"],
        "hostname": "",
        "port": int(str(server["port"])),
        "db_name": {"env": "THE_DATABASE"},
        "params": {"host": server["host"]},
        "scheme": "postgresql+psycopg2",
    }
    single = {"module": "dagster_postgres.event_log", "config": {"postgres_db": parts}}
    for content in (
        {"storage": {"postgres": {"postgres_db": parts}}},
        {"event_log_storage": single},
    ):
        home = tmp_path / next(iter(content))
        environment = dagster_home(home, "", content=json.dumps(content))
        told = doctor(**environment, THE_DATABASE=str(server["dbname"]))
        assert told[STORAGE]["state"] == "ok", told[STORAGE]


def test_without_settings_it_looks_at_the_running_dev(
    configured: Bucket,
    nats_server: NatsServer,
    database_url: str,
    tmp_path: Path,
) -> None:
    running = RunningDev("http://127.0.0.1:1", configured.name, 600, nats_server.url, database_url)
    unset = {NATS_URL: None, POSTGRES_URL: None, "BUDGET_RECOVERY_BUCKET": None}
    arguments = ("--data-dir", str(tmp_path / "data"))
    with held_data_dir(tmp_path / "data") as data_dir, announced(data_dir, running):
        told = doctor(*arguments, **unset)
    assert told.exit_code == 0
    assert told["bucket", "existence"]["found"] == configured.name
    assert told["bucket", "a reading"]["state"] == "ok"
    assert told[STORAGE]["state"] == "not_looked_at"

    for as_json in ((), ("--json",)):
        refused = run_doctor(*arguments, *as_json, **unset)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("Error: No budget-recovery dev runs on ")
    content = json.loads(refused.stdout)
    assert (content["exit_code"], content["findings"]) == (2, None)
    assert content["error"]["message"] in refused.stderr


def test_a_wrong_place_of_a_dev_is_refused_by_name() -> None:
    unset = {NATS_URL: None, POSTGRES_URL: None}
    refused = run_doctor(BUDGET_RECOVERY_DATA_DIR="relative", **unset)
    assert refused.exit_code == 2
    assert refused.stderr.startswith("Error: BUDGET_RECOVERY_DATA_DIR is ")


def test_a_mistyped_option_is_refused() -> None:
    assert run_doctor("--jsn").exit_code == 2
