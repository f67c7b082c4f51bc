"""One Dagster for another team's restore_job and for two installations, each with its own store."""

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from dagster import DagsterRunStatus
from psycopg.rows import dict_row

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.embedded import NatsServer, PostgresServer
from budget_recovery_dagster.sandbox import LOCATION
from budget_recovery_dagster.settings import load_settings
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.acceptance.deployment import Deployment, deployed, patient_gate
from tests.integration.live_capture import capture_now
from tests.integration.recovery_runs import usages
from tests.nats_servers import Bucket
from tests.postgres_servers import temporary_database
from tests.waiting import wait_until

pytestmark = [pytest.mark.disaster, pytest.mark.slow]

SECOND, TEAM = "second", "other_team"
# A tick of each sensor, a run, and another installation at the same time.
_RECOVER_SECONDS = 240
# Ticks of more than two minutes: a run without our lease was marked as failed after one.
_ENOUGH_TICKS = 5

# It ends when somebody writes into its pipe.
_OTHER_TEAM = """
from pathlib import Path
import dagster as dg

@dg.op
def restore_backup() -> None:
    Path({pipe!r}).read_text()

@dg.job
def restore_job() -> None:
    restore_backup()

defs = dg.Definitions(jobs=[restore_job], executor=dg.in_process_executor)
"""


@dataclass(frozen=True)
class Installation:
    """A store of its own, captured and lost, and the settings that name it."""

    bucket: Bucket
    postgres_url: str
    settings: dict[str, str]
    deployment_id: str

    def incident(self) -> dict[str, object]:
        with psycopg.connect(self.postgres_url, row_factory=dict_row) as database:
            found = database.execute("select * from budget_recovery.incident").fetchall()
        return found[0] if found else {"closed_at": None}

    def is_over(self) -> bool:
        return self.incident()["closed_at"] is not None


def installed(
    nats: NatsServer, exits: ExitStack, url: str, amount: str, monkeypatch: pytest.MonkeyPatch
) -> Installation:
    """Capture and lose a store with a counter of this amount; leave the settings set to it."""
    bucket = exits.enter_context(Bucket.connected(nats.url, f"b-{uuid.uuid4().hex[:12]}"))
    settings = {
        "BUDGET_RECOVERY_NATS_URL": nats.url,
        "BUDGET_RECOVERY_BUCKET": bucket.name,
        "BUDGET_RECOVERY_POSTGRES_URL": url,
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    bucket.create()
    bucket.spend("acme", "total", "lifetime", {None: amount})
    with opened_control_plane(load_settings()) as plane:
        capture_now(Hour.containing(plane.clock.now()))
        services.check(plane)
        deployment_id = plane.registry.claim().deployment_id
    bucket.destroy()
    bucket.create()
    return Installation(bucket, url, settings, deployment_id)


@pytest.fixture
def exits() -> Iterator[ExitStack]:
    with ExitStack() as exits:
        yield exits


@pytest.fixture
def second(
    nats_server: NatsServer,
    postgres_server: PostgresServer,
    migrated_template: str,
    exits: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> Installation:
    url = exits.enter_context(temporary_database(postgres_server, migrated_template))
    return installed(nats_server, exits, url, "5", monkeypatch)


@pytest.fixture
def first(
    second: Installation,
    nats_server: NatsServer,
    database_url: str,
    exits: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> Installation:
    """Return the installation whose settings stay set."""
    return installed(nats_server, exits, database_url, "80", monkeypatch)


@pytest.fixture
def deployment(
    first: Installation,
    empty_database_url: str,
    exits: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> Deployment:
    _, _, address = empty_database_url.partition("://")
    monkeypatch.setenv("BUDGET_RECOVERY_DAGSTER_POSTGRES_URL", f"postgresql+psycopg2://{address}")
    # The path must be short enough for a socket.
    home = exits.enter_context(tempfile.TemporaryDirectory(prefix="deployed-"))
    return exits.enter_context(deployed(Path(home), first.postgres_url))


def test_two_installations_and_another_team_share_a_dagster(
    first: Installation, second: Installation, deployment: Deployment
) -> None:
    pipe, code = deployment.home / "pipe", deployment.home / "other_team.py"
    os.mkfifo(pipe)
    code.write_text(_OTHER_TEAM.format(pipe=str(pipe)))
    deployment.start_code_server()
    deployment.start_code_server(SECOND, environment=second.settings)
    deployment.start_code_server(TEAM, "--python-file", code)
    pages = deployment.start_pages()
    instance = deployment.instance

    def status(run_id: str) -> DagsterRunStatus:
        run = instance.get_run_by_id(run_id)
        assert run is not None
        return run.status

    # Queued until the daemon starts, like another one that is terminated in between.
    theirs, terminated = pages.launch(TEAM), pages.launch(TEAM)
    with patient_gate(first.postgres_url, "acme") as gate:
        deployment.start_daemon()
        wait_until(lambda: gate.has_waiting, seconds=_RECOVER_SECONDS)
        wait_until(lambda: status(terminated) is DagsterRunStatus.STARTED, seconds=60)
        pages.terminate(terminated, force=True)
        since = time.time()
        wait_until(
            lambda: any("is restoring." in tick for tick in deployment.ticks_since(since)),
            seconds=120,
        )
        assert first.incident()["held_at"] is None
        gate.open()
        for each in (first, second):
            wait_until(each.is_over, seconds=_RECOVER_SECONDS)

    for each, amount in ((first, "80"), (second, "5")):
        assert (each.incident()["launches"], each.incident()["outcome"]) == (1, "restored")
        assert usages(each.bucket, "acme", "total", "lifetime") == {None: amount}
    ours = {
        run.tags["budget_recovery/deployment"]: run.remote_job_origin.repository_origin.get_label()
        for run in instance.get_runs(dg.RunsFilter(job_name="restore_job"))
        if run.run_id not in (theirs, terminated) and run.remote_job_origin
    }
    assert ours == {
        first.deployment_id: f"__repository__@{LOCATION}",
        second.deployment_id: f"__repository__@{SECOND}",
    }

    # Their run is still working, for much longer than a run of ours may be silent.
    since = time.time()

    def has_ticked(location: str) -> bool:
        return len(deployment.ticks_since(since, location)) >= _ENOUGH_TICKS

    for location in (LOCATION, SECOND):
        wait_until(partial(has_ticked, location), seconds=_RECOVER_SECONDS)
        assert set(deployment.ticks_since(since, location)) <= {"The store is HEALTHY.", ""}
    assert status(theirs) is DagsterRunStatus.STARTED
    pipe.write_text("go on")
    wait_until(lambda: status(theirs) is DagsterRunStatus.SUCCESS, seconds=60)
