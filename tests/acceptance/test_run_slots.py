"""Runs of this project that fill Dagster's slots or pools: a restore and the next capture start."""

import re
import signal
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster import DagsterRunStatus

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.settings import load_settings
from budget_recovery_dagster.wiring import opened_control_plane, usage_tables
from tests import services
from tests.acceptance.deployment import (
    Deployment,
    Pages,
    deployed,
    patient_gate,
    project_dagster_yaml,
)
from tests.integration.live_capture import capture_now
from tests.integration.recovery_runs import usages
from tests.nats_servers import Bucket
from tests.waiting import wait_until

pytestmark = [pytest.mark.disaster, pytest.mark.slow]

SLOTS, HOURS = 4, 14
CAPTURE, TABLES = "hourly_snapshot_job", "tenant_tables_job"
# A check, its confirmation, a tick and the start of a run on a busy machine.
_DETECT_SECONDS = 180
# The daemon takes runs from the queue every five seconds.
_START_SECONDS = 30
# Without pools, runs that wait for the lock of the tables fill the slots for this long.
_WITHOUT_POOLS_SECONDS = 90

_SLOTS = f"""
concurrency:
  runs:
    max_concurrent_runs: {SLOTS}
"""
# As an instance of other teams may be: this project has no say in it.
_DEFAULTS = re.sub(r"(?ms)^concurrency:.*?^(?=\S)", "", project_dagster_yaml()) + _SLOTS
_RECOMMENDED = project_dagster_yaml().replace("concurrency:\n", _SLOTS.lstrip("\n"))


@pytest.fixture
def bucket(
    nats_server: NatsServer, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """Create a store that was captured; set the settings to it."""
    with Bucket.connected(nats_server.url, f"b-{uuid.uuid4().hex[:12]}") as bucket:
        monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", nats_server.url)
        monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", bucket.name)
        monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", database_url)
        monkeypatch.setenv("BUDGET_RECOVERY_TABLES_DIR", str(tmp_path / "tables"))
        monkeypatch.setenv("BUDGET_RECOVERY_CHECK_INTERVAL_SECONDS", "30")
        bucket.create()
        bucket.spend("acme", "total", "lifetime", {None: "80"})
        with opened_control_plane(load_settings()) as plane:
            capture_now(Hour.containing(plane.clock.now()))
            services.check(plane)
        yield bucket


@contextmanager
def running(
    database_url: str, dagster_url: str, yaml: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Deployment, Pages, int]]:
    """Start the pages and the code server, whose pid is the last, with these settings."""
    _, _, address = dagster_url.partition("://")
    monkeypatch.setenv("BUDGET_RECOVERY_DAGSTER_POSTGRES_URL", f"postgresql+psycopg2://{address}")
    with (
        # The path must be short enough for a socket.
        tempfile.TemporaryDirectory(prefix="deployed-") as home,
        deployed(Path(home), database_url, yaml) as deployment,
    ):
        server = deployment.start_code_server()
        yield deployment, deployment.start_pages(), server


@contextmanager
def locked_tables() -> Iterator[None]:
    """Hold the lock of the tables, as a run that hangs."""
    settings = load_settings()
    with opened_control_plane(settings) as plane:
        owner = plane.registry.claim().deployment_id
    with usage_tables(settings).opened(owner):
        yield


def status(instance: dg.DagsterInstance, run_id: str) -> DagsterRunStatus:
    run = instance.get_run_by_id(run_id)
    assert run is not None
    return run.status


def fill_slots(pages: Pages) -> list[str]:
    """Launch many runs of tables, and captures of the current hour; return those of tables."""
    with opened_control_plane(load_settings()) as plane:
        current = Hour.containing(plane.clock.now())
    for _ in range(SLOTS):
        pages.launch(job=CAPTURE, tags={"dagster/partition": current.key})
    hours = [Hour(current.start - timedelta(hours=number)) for number in range(HOURS)]
    return [pages.launch(job=TABLES, tags={"dagster/partition": hour.key}) for hour in hours]


@pytest.mark.parametrize(
    ("yaml", "tables_at_once", "start_seconds"),
    [(_RECOMMENDED, 1, _START_SECONDS), (_DEFAULTS, SLOTS, _WITHOUT_POOLS_SECONDS)],
    ids=["recommended settings", "default settings"],
)
def test_a_restore_starts_while_runs_of_this_project_fill_every_slot(
    yaml: str,
    tables_at_once: int,
    start_seconds: int,
    bucket: Bucket,
    database_url: str,
    empty_database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        locked_tables(),
        running(database_url, empty_database_url, yaml, monkeypatch) as (deployment, pages, _),
    ):
        tables = fill_slots(pages)
        deployment.start_daemon()
        instance = deployment.instance

        def have_started() -> bool:
            found = [status(instance, run) for run in tables]
            return found.count(DagsterRunStatus.STARTED) >= tables_at_once

        wait_until(have_started, seconds=_DETECT_SECONDS, every=0.2)
        bucket.destroy()
        bucket.create()
        wait_until(lambda: deployment.runs() != [], seconds=_DETECT_SECONDS, every=0.5)
        (restore,) = deployment.runs()
        wait_until(
            lambda: status(instance, restore.run_id) is not DagsterRunStatus.QUEUED,
            seconds=start_seconds,
            every=0.2,
        )
        waiting = [status(instance, run) for run in tables]
        assert DagsterRunStatus.QUEUED in waiting
        wait_until(lambda: deployment.incident()["closed_at"] is not None, seconds=_DETECT_SECONDS)
    assert usages(bucket, "acme", "total", "lifetime") == {None: "80"}


def test_the_next_capture_starts_after_one_was_killed_with_its_code_server(
    bucket: Bucket,
    database_url: str,
    empty_database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(database_url, empty_database_url, project_dagster_yaml(), monkeypatch) as (
        deployment,
        pages,
        server,
    ):
        instance = deployment.instance
        with opened_control_plane(load_settings()) as plane:
            tags = {"dagster/partition": Hour.containing(plane.clock.now()).key}
        killed = pages.launch(job=CAPTURE, tags=tags)
        with patient_gate(database_url, "acme", "capture") as gate:
            daemon = deployment.start_daemon()
            wait_until(lambda: gate.has_waiting, seconds=_DETECT_SECONDS)
            worker = deployment.worker_pid("capture")
            deployment.end(signal.SIGKILL, daemon, server, worker)
        deployment.start_code_server()
        deployment.start_daemon()
        following = pages.launch(job=CAPTURE, tags=tags)
        wait_until(
            lambda: status(instance, following) is DagsterRunStatus.SUCCESS,
            seconds=300,
            every=0.5,
        )
        assert status(instance, killed) is DagsterRunStatus.FAILURE
