"""A failed run names its cause: settings, passwords, permissions, credentials and schemas."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import Hour, Loss, Verdict
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import SettingsError
from budget_recovery_dagster.jobs.restore import restore
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.contract.nats_credentials import Operator
from tests.integration.confined_user import documented_permissions
from tests.integration.locked_postgres import locked_database
from tests.integration.recovery_runs import check, incidents, outcome, requested, run_restore
from tests.integration.snapshot_job import failure_text, run_job
from tests.nats_servers import PASSWORD, Bucket, users, with_user

NATS_URL = "BUDGET_RECOVERY_NATS_URL"
POSTGRES_URL = "BUDGET_RECOVERY_POSTGRES_URL"
BUCKET = "budget-usage"
LIFETIME = "lifetime"
RAISE = f"$KV.{BUCKET}.usage.>"
PULL = f"$JS.API.CONSUMER.MSG.NEXT.KV_{BUCKET}.*"


@pytest.fixture(scope="module")
def guarded(server_dir: Path) -> Iterator[NatsServer]:
    """Start a server with a user who has all permissions, and users who lack one."""

    def user(name: str, denied: str = "") -> dict[str, object]:
        publish = [each for each in documented_permissions() if each != denied]
        permissions = {"publish": publish, "subscribe": ["_INBOX_budget_recovery.>"]}
        return {"user": name, "password": PASSWORD, "permissions": permissions}

    config = users(
        {"user": "gateway", "password": PASSWORD},
        user("recovery"),
        user("puller", PULL),
        user("reader", RAISE),
    )
    with NatsServer(server_dir / "named", config=config) as server:
        yield server


@pytest.fixture
def store(
    guarded: NatsServer, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """Create a bucket with a counter on that server; set the settings to its recovery user."""
    with Bucket.connected(with_user(guarded.url, "gateway", PASSWORD), BUCKET) as bucket:
        bucket.create()
        bucket.spend("acme", "total", LIFETIME, {None: "80"})
        monkeypatch.setenv(NATS_URL, with_user(guarded.url, "recovery", PASSWORD))
        monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", BUCKET)
        monkeypatch.setenv(POSTGRES_URL, database_url)
        monkeypatch.setenv("BUDGET_RECOVERY_CONVERGENCE_TIMEOUT_SECONDS", "0")
        yield bucket
        bucket.destroy()


@pytest.fixture
def lost(store: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> None:
    """Take a snapshot and open an incident, as if the bucket had been recreated."""
    assert run_job(instance, current_hour).success
    with opened_control_plane(services.present_settings()) as plane:
        baseline = plane.registry.claim().baseline
        assert baseline is not None
        loss = Loss(plane.clock.now(), "a test", Verdict.LOST, "It was.", baseline.identity, None)
        plane.incidents.open(loss, target=None, judged=baseline)


@pytest.fixture(scope="module")
def locked_database_url(server_dir: Path) -> Iterator[str]:
    with locked_database(server_dir / "named-postgres") as url:
        yield url


@pytest.fixture
def expired_credentials(
    server_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Set the settings to expired credentials."""
    operator = Operator()
    file = tmp_path / "expired.creds"
    file.write_text(operator.credentials(expires_in=-60))
    with NatsServer(server_dir / f"named-{tmp_path.name}", config=operator.config) as server:
        monkeypatch.setenv(NATS_URL, server.url)
        monkeypatch.setenv("BUDGET_RECOVERY_NATS_CREDS", str(file))
        yield file


def restore_error(instance: dg.DagsterInstance) -> str:
    """Run one restore without retries, which fails; return the error of the run."""

    @dg.job(resource_defs=services.definitions().resources)
    def restore_without_retries() -> None:
        restore.with_retry_policy(dg.RetryPolicy(max_retries=0))()

    result = restore_without_retries.execute_in_process(instance=instance, raise_on_error=False)
    assert not result.success
    return failure_text(result)


def capture_error(instance: dg.DagsterInstance, hour: Hour) -> str:
    """Run a capture, which fails; return its error."""
    error = failure_text(run_job(instance, hour))
    assert "Try: " in error
    assert "wr0ng" not in error
    return error


def waiting_reason(instance: dg.DagsterInstance, database: psycopg.Connection) -> str:
    """Run a restore, which waits without using an attempt; return why."""
    result = run_restore(instance)
    assert outcome(instance, result) == "waiting"
    (incident,) = incidents(database)
    assert incident["attempts"] == 0
    reason = str(incident["waiting_reason"])
    assert "wr0ng" not in reason
    return reason


def test_a_wrong_nats_password_is_named_by_restores_and_captures(
    guarded: NatsServer,
    lost: None,
    database: psycopg.Connection,
    locked_database_url: str,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NATS_URL, with_user(guarded.url, "recovery", "wr0ng"))
    refused = f"{guarded.url} rejected the NATS user: Authorization Violation."
    assert refused in waiting_reason(instance, database)
    # The other database has no incident, so captures are not paused.
    monkeypatch.setenv(POSTGRES_URL, locked_database_url)
    error = capture_error(instance, current_hour)
    assert refused in error
    assert f"correct the user and password in {NATS_URL}" in error


def test_expired_credentials_are_named_by_a_capture(
    store: Bucket, expired_credentials: Path, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    error = capture_error(instance, current_hour)
    assert f"rejected the NATS user: the credentials {expired_credentials} expired at " in error
    assert "BUDGET_RECOVERY_NATS_CREDS" in error


def test_expired_credentials_are_named_by_a_restore(
    lost: None,
    expired_credentials: Path,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
) -> None:
    assert f"the credentials {expired_credentials} expired at " in waiting_reason(
        instance, database
    )


def test_a_missing_permission_is_named_by_a_capture(
    guarded: NatsServer,
    store: Bucket,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NATS_URL, with_user(guarded.url, "puller", PASSWORD))
    error = capture_error(instance, current_hour)
    assert f"The NATS user may not publish to {PULL.removesuffix('*')}" in error


def test_a_missing_permission_is_named_by_a_restore_and_uses_no_attempt(
    guarded: NatsServer,
    store: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_job(instance, current_hour).success
    store.destroy()
    store.create()
    requested(check(instance))
    monkeypatch.setenv(NATS_URL, with_user(guarded.url, "reader", PASSWORD))
    reason = waiting_reason(instance, database)
    assert (
        f"The NATS user may not publish to {RAISE.removesuffix('>')}acme.total.lifetime.=" in reason
    )
    # The permission is granted: the restore succeeds, although it was refused before.
    monkeypatch.setenv(NATS_URL, with_user(guarded.url, "recovery", PASSWORD))
    assert outcome(instance, run_restore(instance)) == "restored"


def test_a_wrong_postgresql_password_is_named_by_captures_and_restores(
    store: Bucket,
    locked_database_url: str,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(POSTGRES_URL, locked_database_url.replace(PASSWORD, "wr0ng"))
    for error in (capture_error(instance, current_hour), restore_error(instance)):
        assert "password authentication failed for user" in error
        assert f"correct the user and password in {POSTGRES_URL}" in error


@pytest.mark.parametrize(
    ("version", "named"),
    [("0001", "has version 0001 of an unreleased"), ("9999", "has version 9999, unknown to")],
)
def test_an_old_or_newer_schema_is_named_by_captures_and_restores(
    store: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    version: str,
    named: str,
) -> None:
    database.execute("update budget_recovery.alembic_version set version_num = %s", (version,))
    for error in (capture_error(instance, current_hour), restore_error(instance)):
        assert named in error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (NATS_URL, "http://host"),
        (POSTGRES_URL, "postgresql+psycopg2://host/database"),
    ],
)
def test_an_invalid_url_is_named_by_a_capture(
    store: Bucket,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(name, value)
    assert name in capture_error(instance, current_hour)


@pytest.mark.parametrize(
    ("name", "value"),
    [("BUDGET_RECOVERY_RETENTION_DAYS", "x"), ("BUDGET_RECOVERY_BUCKET", "usage.>")],
)
def test_an_invalid_setting_prevents_loading_the_definitions(
    store: Bucket, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=f"{name} is '{value}'") as refused:
        services.definitions()
    assert f"set {name} to a valid value" in refused.value.hint


def test_the_bucket_of_another_database_is_named_by_a_capture(
    store: Bucket,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_job(instance, current_hour).success
    monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", "another")
    error = capture_error(instance, current_hour)
    assert "this database belongs to the bucket 'budget-usage'" in error
