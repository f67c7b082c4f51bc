"""``budget-recovery doctor``: a healthy installation, settings, this host, and its sources."""

import json
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.sandbox import RunningDev, announced, held_data_dir
from tests.free_ports import unused_port
from tests.integration.doctor_command import (
    DAGSTER_URL,
    NATS_URL,
    POSTGRES_URL,
    STORAGE,
    dagster_home,
    doctor,
    page,
    require_skipped,
    run_doctor,
    untouched,
)
from tests.nats_servers import Bucket


def test_a_healthy_installation_passes_and_nothing_is_changed(
    configured: Bucket,
    database_url: str,
    database: psycopg.Connection,
    tmp_path: Path,
    tables: Path,
) -> None:
    configured.spend("acme", "total", "lifetime", {None: "80"})
    home = dagster_home(tmp_path / "home", database_url.replace("://", "+psycopg2://"))
    with untouched(configured):
        checked = doctor(**home)
        text = page(**home)
    assert checked.exit_code == 0
    # A setting that NATS does not report is skipped, not ok.
    assert checked.ended("skipped") == {"bucket_sync"}
    assert checked.ended("warn") == checked.failed == set()
    assert checked["database_version"]["message"].startswith("PostgreSQL 1")
    assert checked["bucket_kind"]["message"] == "key-value bucket; messages: 1"
    assert checked[STORAGE]["message"].startswith("PostgreSQL, postgresql+psycopg2://postgres@")
    assert text.splitlines()[-1].endswith(" ok, 0 warn, 0 fail, 1 skipped")
    [(rows,)] = database.execute("select count(*) from budget_recovery.store").fetchall()
    assert rows == 0
    # Dagster would have created its tables.
    [(tables_made,)] = database.execute("select to_regclass('public.runs') is not null").fetchall()
    assert not tables_made
    assert not tables.exists()


def test_every_invalid_setting_is_reported_and_no_check_uses_its_default(
    configured: Bucket, database: psycopg.Connection
) -> None:
    checked = doctor(
        BUDGET_RECOVERY_BUCKET="usage.>",
        BUDGET_RECOVERY_RETENTION_DAYS="x",
        BUDGET_RECOVERY_TABLES_DIR="relative",
    )
    assert checked.failed == {"settings", "tables_directory"}
    names = [
        "BUDGET_RECOVERY_BUCKET",
        "BUDGET_RECOVERY_RETENTION_DAYS",
        "BUDGET_RECOVERY_TABLES_DIR",
    ]
    assert checked["settings"]["facts"] == {"settings": names}
    for name in names:
        assert f"{name} is " in checked["settings"]["message"]
        assert f"set {name} to " in checked["settings"]["hint"]
    assert checked["nats_connection"]["outcome"] == "ok"
    require_skipped(checked, "bucket_exists", "bucket_read")
    require_skipped(checked, "permission_raise_counters")
    require_skipped(checked, "database_bucket")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (NATS_URL, "nats://h/x", "The NATS URL has a path"),
        (NATS_URL, None, f"{NATS_URL} is not set."),
        (
            "BUDGET_RECOVERY_NATS_CREDS",
            "/missing.creds",
            "Cannot read the NATS credentials /missing.creds",
        ),
        (
            "BUDGET_RECOVERY_NATS_CA",
            "/missing.pem",
            "Cannot load the certificate authority /missing.pem",
        ),
        (POSTGRES_URL, "postgresql+psycopg2://h/d", "The database URL is invalid."),
        (POSTGRES_URL, None, f"{POSTGRES_URL} is not set."),
    ],
)
def test_an_invalid_connection_setting_is_reported(
    configured: Bucket, tmp_path: Path, name: str, value: str | None, message: str
) -> None:
    checked = doctor(**{name: value, "BUDGET_RECOVERY_DATA_DIR": str(tmp_path / "no dev")})
    check = "database_connection" if name == POSTGRES_URL else "nats_connection"
    assert checked.failed == {check}
    assert checked[check]["code"] == (
        "settings" if name != POSTGRES_URL or not value else "database"
    )
    assert message in checked[check]["message"]
    assert value is None or name in checked[check]["hint"]


def test_an_unusable_directory_for_tables_is_reported(configured: Bucket, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "tables"
    checked = doctor(BUDGET_RECOVERY_TABLES_DIR=str(place))
    assert checked.failed == {"tables_directory"}
    assert f"Cannot use {place} for tables" in checked["tables_directory"]["message"]


@pytest.mark.parametrize(
    ("content", "url", "outcome", "code", "fact"),
    [
        ("", "", "warn", "sqlite_storage", "sqlite"),
        (None, "", "fail", "storage_variable_not_set", DAGSTER_URL),
        (
            None,
            "postgresql://me:s3cret@localhost/dagster",
            "fail",
            "storage_driver_unsupported",
            "psycopg",
        ),
        (
            None,
            "postgresql+nothing://me@localhost/d",
            "fail",
            "storage_driver_unsupported",
            "postgresql+nothing",
        ),
        (None, "not a url", "fail", "storage_url_invalid", "dagster.yaml"),
        ("storage: {custom: {module: m}}", "", "warn", "untested_storage", "custom"),
        ("{", "", "fail", "dagster_yaml_unreadable", "dagster.yaml"),
    ],
)
def test_the_storage_of_dagster_is_checked(
    configured: Bucket,
    tmp_path: Path,
    content: str | None,
    url: str,
    outcome: str,
    code: str,
    fact: str,
) -> None:
    checked = doctor(**dagster_home(tmp_path / "home", url, content=content))
    assert (checked[STORAGE]["outcome"], checked[STORAGE]["code"]) == (outcome, code)
    assert fact in str(checked[STORAGE]["facts"])
    assert "s3cret" not in str(checked)
    assert checked.failed <= {STORAGE}


_POSTGRES = f"storage: {{postgres: {{postgres_url: {{env: {DAGSTER_URL}}}}}}}"


@pytest.mark.parametrize(
    ("concurrency", "limits", "code", "facts"),
    [
        ("{pools: {default_limit: 1}}", {}, "ok", {"run_slots": 10}),
        (
            "{pools: {default_limit: 1}, runs: {max_concurrent_runs: 4}}",
            {},
            "few_run_slots",
            {"run_slots": 4},
        ),
        (
            "{pools: {default_limit: 1}, runs: {max_concurrent_runs: -1}}",
            {},
            "ok",
            {"run_slots": -1},
        ),
        ("{}", None, "pools_not_limited", {"pools": ["usage_store", "usage_tables"]}),
        (
            "{}",
            {"usage_store": 1, "usage_tables": 2},
            "pools_not_limited",
            {"pools": ["usage_tables"]},
        ),
        ("{}", {"usage_store": 1, "usage_tables": 1}, "ok", {"run_slots": 10}),
        (
            "{pools: {default_limit: 1}}",
            {"usage_tables": 5},
            "pools_not_limited",
            {"pools": ["usage_tables"]},
        ),
    ],
)
def test_the_run_slots_and_pools_of_dagster_are_checked(
    configured: Bucket,
    empty_database_url: str,
    tmp_path: Path,
    concurrency: str,
    limits: dict[str, int] | None,
    code: str,
    facts: dict[str, object],
) -> None:
    if limits is not None:
        with psycopg.connect(empty_database_url) as connection:
            connection.execute(
                'create table concurrency_limits (concurrency_key text, "limit" int)'
            )
            for pool, limit in limits.items():
                connection.execute("insert into concurrency_limits values (%s, %s)", (pool, limit))
    content = f"{_POSTGRES}\nconcurrency: {concurrency}\n"
    url = empty_database_url.replace("://", "+psycopg2://")
    slots = doctor(**dagster_home(tmp_path / "home", url, content=content))["dagster_slots"]
    assert (slots["code"], slots["facts"]) == (code, facts)


def test_an_unreachable_storage_of_dagster_is_reported(configured: Bucket, tmp_path: Path) -> None:
    url = f"postgresql+psycopg2://me:s3cret@127.0.0.1:{unused_port()}/d"
    checked = doctor(**dagster_home(tmp_path / "home", url, content=None))
    assert checked.failed == {STORAGE}
    assert "refused" in checked[STORAGE]["message"]
    assert "s3cret" not in str(checked)


def test_the_storage_url_may_be_given_in_parts(
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
        checked = doctor(**environment, THE_DATABASE=str(server["dbname"]))
        assert checked[STORAGE]["outcome"] == "ok", checked[STORAGE]


def test_doctor_checks_the_running_dev_without_settings(
    configured: Bucket,
    nats_server: NatsServer,
    database_url: str,
    tmp_path: Path,
) -> None:
    running = RunningDev("http://127.0.0.1:1", configured.name, 600, nats_server.url, database_url)
    unset = {NATS_URL: None, POSTGRES_URL: None, "BUDGET_RECOVERY_BUCKET": None}
    arguments = ("--data-dir", str(tmp_path / "data"))
    with held_data_dir(tmp_path / "data") as data_dir, announced(data_dir, running):
        checked = doctor(*arguments, **unset)
    assert checked.exit_code == 0
    assert checked["bucket_exists"]["message"] == configured.name
    assert checked["bucket_read"]["outcome"] == "ok"
    assert checked[STORAGE]["outcome"] == "skipped"

    for as_json in ((), ("--json",)):
        refused = run_doctor(*arguments, *as_json, **unset)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("Error: No budget-recovery dev runs on ")
    content = json.loads(refused.stdout)
    assert (content["schema"], content["exit_code"], content["checks"]) == (1, 2, None)
    assert content["error"]["code"] == "no_running_dev"
    assert content["error"]["message"] in refused.stderr


def test_an_invalid_data_directory_is_refused() -> None:
    unset = {NATS_URL: None, POSTGRES_URL: None}
    refused = run_doctor(BUDGET_RECOVERY_DATA_DIR="relative", **unset)
    assert refused.exit_code == 2
    assert refused.stderr.startswith("Error: BUDGET_RECOVERY_DATA_DIR is ")


def test_a_mistyped_option_is_refused() -> None:
    assert run_doctor("--jsn").exit_code == 2
