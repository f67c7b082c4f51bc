"""Previews of ticks, in Dagster's pages and on its command line: they change nothing."""

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest
from dagster import DagsterRunStatus
from nats.js.errors import NotFoundError

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.sandbox import DEFINITIONS
from budget_recovery_dagster.settings import load_settings
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.acceptance.deployment import Deployment, Pages, deployed
from tests.integration.commands import run
from tests.integration.launched_runs import due, recorded
from tests.integration.live_capture import capture_now
from tests.integration.recovery_runs import check, requested
from tests.nats_servers import Bucket
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LOSS, SUPERVISOR, HOURLY = (
    "store_loss_sensor",
    "restore_supervisor_sensor",
    "hourly_snapshot_schedule",
)
RESTORED = dg.AssetKey("restored_usage")
# The first and two further ones, a minute later.
TICKS = 3
_TABLES = """
select table_name from information_schema.tables where table_schema = 'budget_recovery'
order by table_name
"""


@pytest.fixture
def bucket(
    nats_server: NatsServer, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """Create a bucket that nothing has checked yet, and set the settings to it."""
    with Bucket.connected(nats_server.url, f"b-{uuid.uuid4().hex[:12]}") as bucket:
        monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", nats_server.url)
        monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", bucket.name)
        monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", database_url)
        bucket.create()
        bucket.spend("acme", "total", "lifetime", {None: "80"})
        yield bucket


@pytest.fixture
def deployment(
    bucket: Bucket, database_url: str, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Deployment]:
    _, _, address = empty_database_url.partition("://")
    monkeypatch.setenv("BUDGET_RECOVERY_DAGSTER_POSTGRES_URL", f"postgresql+psycopg2://{address}")
    # The path must be short enough for a socket.
    with (
        tempfile.TemporaryDirectory(prefix="deployed-") as home,
        deployed(Path(home), database_url) as deployment,
    ):
        yield deployment


def everything(bucket: Bucket, deployment: Deployment) -> object:
    """Return all that a tick could change: every table, the store, runs and events of assets."""
    with psycopg.connect(deployment.postgres_url) as database:
        tables = [name for (name,) in database.execute(_TABLES).fetchall()]
        rows = [
            database.execute(f"select t::text from budget_recovery.{name} t order by 1").fetchall()
            for name in tables
        ]
    instance = deployment.instance
    runs = [(run.run_id, run.status, run.tags) for run in instance.get_runs()]
    assets = [str(key) for key in instance.all_asset_keys()]
    return dict(zip(tables, rows, strict=True)), sequence_of(bucket), runs, assets


def sequence_of(bucket: Bucket) -> int | None:
    with suppress(NotFoundError):
        return int(bucket.info().state.last_seq)
    return None


@contextmanager
def unchanged(bucket: Bucket, deployment: Deployment) -> Iterator[None]:
    before = everything(bucket, deployment)
    yield
    assert everything(bucket, deployment) == before


def foreseen(pages: Pages, sensor: str, cursor: str = "0") -> str:
    """Return what the preview of a sensor says, which can request nothing and keeps the cursor."""
    result = pages.preview(sensor, cursor)
    assert result["error"] is None, result["error"]
    assert (result["runRequests"], result["cursor"]) in (([], cursor), (None, cursor))
    text = str(result["skipReason"])
    assert text.startswith("Dry run, nothing was changed. ")
    return text.removeprefix("Dry run, nothing was changed. ")


def test_previews_of_ticks_change_nothing(bucket: Bucket, deployment: Deployment) -> None:
    deployment.start_code_server()
    pages = deployment.start_pages()
    hour_start = time.time() // 3600 * 3600

    # Nothing is recorded yet.
    with unchanged(bucket, deployment):
        assert "the first one records the store" in foreseen(pages, LOSS)
        assert "the first one records the store" in foreseen(pages, SUPERVISOR)
        hourly = pages.preview_schedule(HOURLY, hour_start - 1)
        assert (hourly["error"], len(hourly["runRequests"])) == (None, 1)

    with opened_control_plane(load_settings()) as plane:
        services.check(plane)
        with unchanged(bucket, deployment):
            assert "A tick would request a capture" in foreseen(pages, SUPERVISOR)
        capture_now(Hour.containing(plane.clock.now()))
    with unchanged(bucket, deployment):
        assert foreseen(pages, LOSS).startswith("same: ")
        assert foreseen(pages, SUPERVISOR) == "The store is HEALTHY."

    # A restore of the command that no tick has shown.
    bucket.remove("usage.acme.total.lifetime.=")
    run("restore", "--reason", "ticket 7", "--yes")
    with unchanged(bucket, deployment):
        assert foreseen(pages, SUPERVISOR) == (
            "The store is HEALTHY. A tick would show 1 manual restore on restored_usage."
        )

    # A loss that no tick has found.
    bucket.destroy()
    with unchanged(bucket, deployment):
        report = foreseen(pages, LOSS, "2")
        assert report.startswith("lost: ")
        assert "A tick would confirm this, open an incident, pause captures" in report
    bucket.create()

    # An incident whose restore is due.
    (request,) = requested(check(deployment.instance))
    with psycopg.connect(deployment.postgres_url, autocommit=True) as database:
        due(database)
    recorded(deployment.instance, request, DagsterRunStatus.FAILURE)
    launch = (
        f"A tick would launch restore_job for incident {deployment.incident()['incident_id'][:8]}."
    )
    with unchanged(bucket, deployment):
        assert foreseen(pages, SUPERVISOR) == launch
        assert launch in foreseen(pages, LOSS)
        paused = pages.preview_schedule(HOURLY, hour_start - 1)
        assert "Captures are paused" in str(paused["skipReason"])
        assert launch in preview_on_the_command_line(SUPERVISOR, deployment.home)

    # A run that a person terminated.
    launched = recorded(deployment.instance, request, DagsterRunStatus.STARTED)
    deployment.instance.report_run_canceled(launched)
    with unchanged(bucket, deployment):
        assert f"on hold, because run {launched.run_id[:8]} was terminated." in foreseen(
            pages, SUPERVISOR
        )


def test_a_tick_of_the_daemon_shows_the_restore_that_its_preview_announced(
    bucket: Bucket, deployment: Deployment
) -> None:
    with opened_control_plane(load_settings()) as plane:
        services.check(plane)
        capture_now(Hour.containing(plane.clock.now()))
    bucket.remove("usage.acme.total.lifetime.=")
    run("restore", "--reason", "ticket 7", "--yes")
    deployment.start_code_server()
    pages = deployment.start_pages()
    announced = "A tick would show 1 manual restore on restored_usage."
    assert announced in foreseen(pages, SUPERVISOR)
    began = time.time()
    deployment.start_daemon()

    def shown() -> list[Any]:
        return list(deployment.instance.fetch_materializations(RESTORED, limit=9).records)

    def ticks() -> list[str]:
        return deployment.ticks_since(began)

    wait_until(lambda: bool(shown()), seconds=120, every=0.5)
    wait_until(lambda: len(ticks()) >= TICKS, seconds=120, every=0.5)
    assert [text for text in ticks() if "Now shown on restored_usage: 1 man" in text] == ticks()[
        -1:
    ]
    (record,) = shown()
    metadata = record.asset_materialization.metadata
    assert (metadata["reason"].value, metadata["counters_raised"].value) == ("ticket 7", 1)
    assert announced not in foreseen(pages, SUPERVISOR)


def preview_on_the_command_line(sensor: str, home: Path) -> str:
    command = ["-m", "dagster", "sensor", "preview", sensor, "-m", DEFINITIONS]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "DAGSTER_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
