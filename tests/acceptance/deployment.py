"""Dagster's services as in a deployment: separate processes that can be restarted."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
from dagster._core.definitions.run_request import InstigatorType
from psycopg.rows import dict_row

from budget_recovery_dagster.embedded import OwnedProcess, Program
from budget_recovery_dagster.sandbox import DEFINITIONS, LOCATION, DagsterUi
from tests.free_ports import unused_port
from tests.postgres_servers import expire_leases, skip_pause
from tests.processes import is_running
from tests.shut_gates import Gate, shut_gate
from tests.waiting import wait_until

START_SECONDS = 120

_TERMINATE = """
mutation Terminate($run: String!, $policy: TerminateRunPolicy!) {
  terminateRun(runId: $run, terminatePolicy: $policy) { __typename }
}
"""
_LAUNCH = """
mutation Launch($parameters: ExecutionParams!) {
  launchRun(executionParams: $parameters) {
    __typename
    ... on LaunchRunSuccess { run { id } }
  }
}
"""
_EVALUATED = """
... on DryRunInstigationTick {
  evaluationResult { skipReason cursor runRequests { runKey } error { message } }
}
"""
_PREVIEW_SENSOR = f"""
mutation Preview($sensor: SensorSelector!, $cursor: String) {{
  sensorDryRun(selectorData: $sensor, cursor: $cursor) {{ {_EVALUATED} }}
}}
"""
_PREVIEW_SCHEDULE = f"""
mutation Preview($schedule: ScheduleSelector!, $after: Float!) {{
  scheduleDryRun(selectorData: $schedule, timestamp: $after) {{ {_EVALUATED} }}
}}
"""
_REPOSITORY = {"repositoryLocationName": LOCATION, "repositoryName": "__repository__"}


@dataclass
class Deployment:
    """The services and their shared state, supervised by the test."""

    home: Path
    postgres_url: str
    instance: dg.DagsterInstance
    _started: list[OwnedProcess] = field(default_factory=list)
    _sockets: dict[str, Path] = field(default_factory=dict)

    def start_code_server(
        self,
        location: str = LOCATION,
        *target: str | Path,
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Start a code server at the socket of the previous one, now ended; return its pid.

        Start those of further locations before the daemon and the pages. ``target`` names their
        code, by default ours.
        """
        socket = self._sockets.setdefault(location, self.home / f"{location}.socket")
        socket.unlink(missing_ok=True)
        process = self._start(
            f"code server {location}",
            *("dagster", "api", "grpc", "--socket", socket),
            *(target or ("--module-name", DEFINITIONS)),
            *("--location-name", location, "--empty-working-directory"),
            environment=environment,
        )
        process.wait_until_ready(lambda: socket.exists() or None, seconds=START_SECONDS)
        return process.pid

    def start_daemon(self) -> int:
        """Start a daemon and return its pid."""
        return self._start("daemon", "dagster._daemon", "run", "--workspace", self._workspace).pid

    def start_pages(self) -> "Pages":
        """Start a webserver and return its pages."""
        ui = DagsterUi("127.0.0.1", unused_port())
        arguments = ("--workspace", self._workspace, "--host", ui.host, "--port", str(ui.port))
        process = self._start("webserver", "dagster_webserver", *arguments)
        process.wait_until_ready(ui.is_up, seconds=START_SECONDS)
        return Pages(ui)

    def end(self, number: signal.Signals, *pids: int) -> None:
        """Send a signal to processes and wait until all have ended."""
        for pid in pids:
            os.kill(pid, number)
        wait_until(lambda: not any(is_running(pid) for pid in pids), seconds=START_SECONDS)

    def worker_pid(self, lease: str = "restore") -> int:
        """Return the pid of the holder of a lease."""
        query = f"select holder from budget_recovery.lease where name = '{lease}'"
        ((holder,),) = self._rows(query)
        found = re.fullmatch(r"run \w+ on .* \(pid (\d+)\)", str(holder))
        assert found is not None
        return int(found[1])

    def runs(self) -> list[dg.DagsterRun]:
        """Return the runs of restore_job, newest first."""
        return list(self.instance.get_runs(dg.RunsFilter(job_name="restore_job")))

    def statuses(self) -> list[str]:
        """Return their statuses."""
        return [run.status.value for run in self.runs()]

    def ticks_since(self, since: float, location: str = LOCATION) -> list[str]:
        """Return the skip reasons of a supervisor's ticks since a time, newest first."""
        (sensor,) = [
            state
            for state in self.instance.all_instigator_state(instigator_type=InstigatorType.SENSOR)
            if state.instigator_name == "restore_supervisor_sensor"
            and state.repository_selector.location_name == location
        ]
        ticks = self.instance.get_ticks(
            sensor.instigator_origin_id, sensor.selector_id, after=since
        )
        return [tick.skip_reason or "" for tick in ticks]

    def incident(self) -> dict[str, Any]:
        """Return the incident."""
        with psycopg.connect(self.postgres_url, row_factory=dict_row) as database:
            (row,) = database.execute("select * from budget_recovery.incident").fetchall()
        return row

    def attempts(self) -> list[tuple[int, str]]:
        """Return number and run of all attempts, oldest first."""
        return self._rows(
            "select number, run_id from budget_recovery.restore_attempt order by started_at"
        )

    def let_leases_run_out(self) -> None:
        """Expire the lease of a dead worker, and its pause, without waiting for minutes."""
        skip_pause(self.postgres_url)
        with psycopg.connect(self.postgres_url) as database:
            expire_leases(database)

    def stop(self) -> None:
        """Stop all services, and workers that have outlived their code server."""
        for process in self._started:
            process.stop()

    def _rows(self, query: str) -> list[Any]:
        with psycopg.connect(self.postgres_url) as database:
            return database.execute(query.encode()).fetchall()

    @property
    def _workspace(self) -> Path:
        """The workspace file with the sockets of the code servers."""
        servers = [
            {"grpc_server": {"socket": str(socket), "location_name": location}}
            for location, socket in self._sockets.items()
        ]
        workspace = self.home / "workspace.yaml"
        # JSON is valid YAML.
        workspace.write_text(json.dumps({"load_from": servers}))
        return workspace

    def _start(
        self,
        name: str,
        module: str,
        *arguments: str | Path,
        environment: Mapping[str, str] | None = None,
    ) -> OwnedProcess:
        process = OwnedProcess(
            Program(
                name,
                [sys.executable, "-m", module, *arguments],
                log=self.home / f"{name}.log",
                environment={
                    **os.environ,
                    "DAGSTER_HOME": str(self.home),
                    **(environment or {}),
                },
                death_signal=signal.SIGKILL,
            )
        )
        self._started.append(process)
        return process


@dataclass(frozen=True)
class Pages:
    """The web pages, as operators use them."""

    ui: DagsterUi

    def preview(self, name: str, cursor: str | None = None) -> Mapping[str, Any]:
        """Preview the tick of a sensor, and return its result."""
        sensor = {**_REPOSITORY, "sensorName": name}
        tick = self.ui.query(_PREVIEW_SENSOR, sensor=sensor, cursor=cursor)["sensorDryRun"]
        evaluated: Mapping[str, Any] = tick["evaluationResult"]
        return evaluated

    def preview_schedule(self, name: str, after: float) -> Mapping[str, Any]:
        """Preview the next tick of a schedule after a time, and return its result."""
        schedule = {**_REPOSITORY, "scheduleName": name}
        tick = self.ui.query(_PREVIEW_SCHEDULE, schedule=schedule, after=after)["scheduleDryRun"]
        evaluated: Mapping[str, Any] = tick["evaluationResult"]
        return evaluated

    def launch(
        self, location: str = LOCATION, job: str = "restore_job", tags: Mapping[str, str] = {}
    ) -> str:
        """Launch a location's job in its launchpad and return the run."""
        selector = {**_REPOSITORY, "repositoryLocationName": location, "jobName": job}
        metadata = {"tags": [{"key": key, "value": tags[key]} for key in tags]}
        parameters = {"selector": selector, "executionMetadata": metadata}
        answer = self.ui.query(_LAUNCH, parameters=parameters)["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess"
        return str(answer["run"]["id"])

    def terminate(self, run_id: str, *, force: bool = False) -> None:
        """Terminate a run, or mark it as canceled without waiting for its worker."""
        policy = "MARK_AS_CANCELED_IMMEDIATELY" if force else "SAFE_TERMINATE"
        answer = self.ui.query(_TERMINATE, run=run_id, policy=policy)["terminateRun"]
        assert answer["__typename"] == "TerminateRunSuccess"


def project_dagster_yaml() -> str:
    """Return the settings of a Dagster instance that this project recommends."""
    return files("budget_recovery_dagster.sandbox").joinpath("dagster.yaml").read_text()


@contextmanager
def patient_gate(url: str, tenant: str, table: str = "restore_audit") -> Iterator[Gate]:
    """Shut a gate at which a restore, or what writes into the table, waits for two minutes."""
    with shut_gate(url, tenant, table) as gate:
        with psycopg.connect(url) as database:
            database.execute("alter function budget_recovery.wait_at_gate() set lock_timeout = 0")
        yield gate


@contextmanager
def deployed(
    home: Path, postgres_url: str, dagster_yaml: str | None = None
) -> Iterator[Deployment]:
    """Prepare a deployment with the settings of the environment, without starting it."""
    settings = dagster_yaml or project_dagster_yaml()
    (home / "dagster.yaml").write_text(settings)
    with ExitStack() as exits:
        instance = exits.enter_context(dg.DagsterInstance.from_config(str(home)))
        deployment = Deployment(home, postgres_url, instance)
        exits.callback(deployment.stop)
        yield deployment
