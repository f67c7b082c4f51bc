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
from tests.integration.hung_servers import hung
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
def there(
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


def wait_for_the_end(there: Deployment) -> None:
    def is_over() -> bool:
        incident = there.incident()
        is_held = incident["held_at"] is not None and (
            incident["released_at"] is None or incident["released_at"] < incident["held_at"]
        )
        assert not is_held, incident["held_reason"]
        return incident["closed_at"] is not None

    wait_until(is_over, seconds=_TAKE_OVER_SECONDS)


def assert_restored(bucket: Bucket, there: Deployment) -> None:
    assert there.incident()["outcome"] == "restored"
    assert usages(bucket, "acme", "total", LIFETIME) == {None: "80"}
    assert usages(bucket, "globex", "total", LIFETIME) == {None: "5"}
    assert usages(bucket, "initech", "total", LIFETIME) == {None: "7"}


def see_the_worker_left_alone(there: Deployment, since: float) -> None:
    """Wait for a tick of the supervisor that finds the worker."""
    wait_until(
        lambda: any("is restoring." in told for told in there.ticks_since(since)),
        seconds=_BEGIN_SECONDS,
    )


@pytest.mark.disaster
def test_a_restarted_daemon_launches_no_second_worker(bucket: Bucket, there: Deployment) -> None:
    with patient_gate(there.postgres_url, "globex") as gate:
        there.start_code_server()
        daemon = there.start_daemon()
        wait_at(gate)
        worker = there.worker_pid()
        there.end(signal.SIGKILL, daemon)
        again = time.time()
        there.start_daemon()
        see_the_worker_left_alone(there, again)
        assert is_running(worker)
        gate.open()
        wait_for_the_end(there)
    wait_until(lambda: there.statuses() == ["SUCCESS"])
    assert there.incident()["launches"] == 1
    assert_restored(bucket, there)


@pytest.mark.disaster
def test_a_worker_that_outlives_its_code_server_closes_the_incident(
    bucket: Bucket, there: Deployment
) -> None:
    with patient_gate(there.postgres_url, "globex") as gate:
        server = there.start_code_server()
        there.start_daemon()
        wait_at(gate)
        worker = there.worker_pid()
        there.end(signal.SIGKILL, server)
        again = time.time()
        there.start_code_server()
        see_the_worker_left_alone(there, again)
        assert is_running(worker)
        assert there.statuses() == ["STARTED"]
        gate.open()
        wait_for_the_end(there)
    wait_until(lambda: there.statuses() == ["SUCCESS"])
    assert there.incident()["launches"] == 1
    assert len({run_id for _, run_id in there.attempts()}) == 1
    assert_restored(bucket, there)


@pytest.mark.disaster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_that_ends_with_its_code_server_is_replaced(
    bucket: Bucket, there: Deployment, number: signal.Signals
) -> None:
    # A new version is deployed; or both are killed, and the run stays started.
    with patient_gate(there.postgres_url, "globex") as gate:
        server = there.start_code_server()
        there.start_daemon()
        wait_at(gate)
        there.end(number, there.worker_pid(), server)
        gate.open()
        there.start_code_server()
        if number is signal.SIGKILL:
            there.let_leases_run_out()
        wait_for_the_end(there)
    wait_until(lambda: there.statuses() == ["SUCCESS", "FAILURE"])
    assert there.incident()["launches"] == 2
    assert [number for number, _ in there.attempts()] == [1, 2]
    assert_restored(bucket, there)


@pytest.mark.disaster
def test_canceling_a_run_holds_the_incident_and_stops_its_worker_before_the_next_tenant(
    bucket: Bucket, there: Deployment
) -> None:
    with patient_gate(there.postgres_url, "globex") as gate:
        server = there.start_code_server()
        daemon = there.start_daemon()
        wait_at(gate)
        worker = there.worker_pid()
        # Without its code server, the run can no longer be terminated.
        there.end(signal.SIGKILL, server)
        there.start_code_server()
        pages = there.start_pages()
        (run,) = there.runs()
        pages.terminate(run.run_id, force=True)
        assert there.statuses() == ["CANCELED"]
        wait_until(lambda: there.incident()["held_at"], seconds=_BEGIN_SECONDS)
        assert f"run {run.run_id[:8]} was terminated" in there.incident()["held_reason"]
        assert is_running(worker)
        gate.open()
        wait_until(lambda: not is_running(worker), seconds=_BEGIN_SECONDS)
    assert usages(bucket, "globex", "total", LIFETIME) == {None: "5"}
    assert usages(bucket, "initech", "total", LIFETIME) == {}

    # A manual run after the release, terminated before it has started.
    with hung(daemon):
        release()
        by_hand = pages.launch()
        assert there.statuses()[0] == "QUEUED"
        pages.terminate(by_hand)
        assert there.statuses()[0] == "CANCELED"
    reason = f"run {by_hand[:8]} was terminated"
    wait_until(lambda: reason in there.incident()["held_reason"], seconds=_BEGIN_SECONDS)
    assert (there.incident()["launches"], len(there.attempts())) == (1, 1)
    assert usages(bucket, "initech", "total", LIFETIME) == {}

    release()
    wait_for_the_end(there)
    assert_restored(bucket, there)


def release() -> None:
    """Release the restore, like the command."""
    with opened_control_plane(load_settings()) as plane:
        release_restore(plane, by="ann")
