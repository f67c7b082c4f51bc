"""A restore while services of its deployment die or are replaced by a new version."""

import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.services.restore import release_restore
from budget_recovery_dagster.settings import load_settings
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.acceptance.deployment import Deployment, deployed, patient_gate
from tests.hung_servers import hung
from tests.integration.live_capture import capture_now
from tests.integration.recovery_runs import usages
from tests.nats_servers import Bucket
from tests.processes import is_running
from tests.shut_gates import Gate
from tests.waiting import wait_until

LIFETIME = "lifetime"
# A start, a check and a run on a busy machine.
_BEGIN_SECONDS = 120
# In addition, a minute without a worker and two ticks of the supervisor.
_TAKE_OVER_SECONDS = 240


@pytest.fixture
def bucket(
    nats_server: NatsServer, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """Create a store of three tenants that was captured and lost; set the settings to it."""
    with Bucket.connected(nats_server.url, f"b-{uuid.uuid4().hex[:12]}") as bucket:
        monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", nats_server.url)
        monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", bucket.name)
        monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", database_url)
        bucket.create()
        bucket.spend("acme", "total", LIFETIME, {None: "80"})
        bucket.spend("globex", "total", LIFETIME, {None: "5"})
        bucket.spend("initech", "total", LIFETIME, {None: "7"})
        with opened_control_plane(load_settings()) as plane:
            capture_now(Hour.containing(plane.clock.now()))
            services.check(plane)
        bucket.destroy()
        bucket.create()
        yield bucket


@pytest.fixture
def deployment(
    bucket: Bucket,
    database_url: str,
    empty_database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Deployment]:
    _, _, address = empty_database_url.partition("://")
    monkeypatch.setenv("BUDGET_RECOVERY_DAGSTER_POSTGRES_URL", f"postgresql+psycopg2://{address}")
    # The path must be short enough for a socket.
    with (
        tempfile.TemporaryDirectory(prefix="deployed-") as home,
        deployed(Path(home), database_url) as deployment,
    ):
        yield deployment


def wait_at(gate: Gate) -> None:
    wait_until(lambda: gate.has_waiting, seconds=_BEGIN_SECONDS)


def wait_for_the_end(deployment: Deployment) -> None:
    def is_over() -> bool:
        incident = deployment.incident()
        is_held = incident["held_at"] is not None and (
            incident["released_at"] is None or incident["released_at"] < incident["held_at"]
        )
        assert not is_held, incident["held_reason"]
        return incident["closed_at"] is not None

    wait_until(is_over, seconds=_TAKE_OVER_SECONDS)


def assert_restored(bucket: Bucket, deployment: Deployment) -> None:
    assert deployment.incident()["outcome"] == "restored"
    assert usages(bucket, "acme", "total", LIFETIME) == {None: "80"}
    assert usages(bucket, "globex", "total", LIFETIME) == {None: "5"}
    assert usages(bucket, "initech", "total", LIFETIME) == {None: "7"}


def wait_for_a_tick_that_finds_the_worker(deployment: Deployment, since: float) -> None:
    """Wait for a tick of the supervisor that finds the worker."""
    wait_until(
        lambda: any("is restoring." in reason for reason in deployment.ticks_since(since)),
        seconds=_BEGIN_SECONDS,
    )


@pytest.mark.disaster
def test_a_restarted_daemon_launches_no_second_worker(
    bucket: Bucket, deployment: Deployment
) -> None:
    with patient_gate(deployment.postgres_url, "globex") as gate:
        deployment.start_code_server()
        daemon = deployment.start_daemon()
        wait_at(gate)
        worker = deployment.worker_pid()
        deployment.end(signal.SIGKILL, daemon)
        again = time.time()
        deployment.start_daemon()
        wait_for_a_tick_that_finds_the_worker(deployment, again)
        assert is_running(worker)
        gate.open()
        wait_for_the_end(deployment)
    wait_until(lambda: deployment.statuses() == ["SUCCESS"])
    assert deployment.incident()["launches"] == 1
    assert_restored(bucket, deployment)


@pytest.mark.disaster
def test_a_worker_that_outlives_its_code_server_closes_the_incident(
    bucket: Bucket, deployment: Deployment
) -> None:
    with patient_gate(deployment.postgres_url, "globex") as gate:
        server = deployment.start_code_server()
        deployment.start_daemon()
        wait_at(gate)
        worker = deployment.worker_pid()
        deployment.end(signal.SIGKILL, server)
        again = time.time()
        deployment.start_code_server()
        wait_for_a_tick_that_finds_the_worker(deployment, again)
        assert is_running(worker)
        assert deployment.statuses() == ["STARTED"]
        gate.open()
        wait_for_the_end(deployment)
    wait_until(lambda: deployment.statuses() == ["SUCCESS"])
    assert deployment.incident()["launches"] == 1
    assert len({run_id for _, run_id in deployment.attempts()}) == 1
    assert_restored(bucket, deployment)


@pytest.mark.disaster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_that_ends_with_its_code_server_is_replaced(
    bucket: Bucket, deployment: Deployment, number: signal.Signals
) -> None:
    # A new version is deployed; or both are killed, and the run stays started.
    with patient_gate(deployment.postgres_url, "globex") as gate:
        server = deployment.start_code_server()
        deployment.start_daemon()
        wait_at(gate)
        deployment.end(number, deployment.worker_pid(), server)
        gate.open()
        deployment.start_code_server()
        if number is signal.SIGKILL:
            deployment.let_leases_run_out()
        wait_for_the_end(deployment)
    wait_until(lambda: deployment.statuses() == ["SUCCESS", "FAILURE"])
    assert deployment.incident()["launches"] == 2
    assert [number for number, _ in deployment.attempts()] == [1, 2]
    assert_restored(bucket, deployment)


@pytest.mark.disaster
def test_canceling_a_run_holds_the_incident_and_stops_its_worker_before_the_next_tenant(
    bucket: Bucket, deployment: Deployment
) -> None:
    with patient_gate(deployment.postgres_url, "globex") as gate:
        server = deployment.start_code_server()
        daemon = deployment.start_daemon()
        wait_at(gate)
        worker = deployment.worker_pid()
        # Without its code server, the run can no longer be terminated.
        deployment.end(signal.SIGKILL, server)
        deployment.start_code_server()
        pages = deployment.start_pages()
        (run,) = deployment.runs()
        pages.terminate(run.run_id, force=True)
        assert deployment.statuses() == ["CANCELED"]
        wait_until(lambda: deployment.incident()["held_at"], seconds=_BEGIN_SECONDS)
        assert f"run {run.run_id[:8]} was terminated" in deployment.incident()["held_reason"]
        assert is_running(worker)
        gate.open()
        wait_until(lambda: not is_running(worker), seconds=_BEGIN_SECONDS)
    assert usages(bucket, "globex", "total", LIFETIME) == {None: "5"}
    assert usages(bucket, "initech", "total", LIFETIME) == {}

    # A manual run after the release, terminated before it has started.
    with hung(daemon):
        release()
        manual_run = pages.launch()
        assert deployment.statuses()[0] == "QUEUED"
        pages.terminate(manual_run)
        assert deployment.statuses()[0] == "CANCELED"
    reason = f"run {manual_run[:8]} was terminated"
    wait_until(lambda: reason in deployment.incident()["held_reason"], seconds=_BEGIN_SECONDS)
    assert (deployment.incident()["launches"], len(deployment.attempts())) == (1, 1)
    assert usages(bucket, "initech", "total", LIFETIME) == {}

    release()
    wait_for_the_end(deployment)
    assert_restored(bucket, deployment)


def release() -> None:
    """Release the restore, like the command."""
    with opened_control_plane(load_settings()) as plane:
        release_restore(plane, by="ann")
