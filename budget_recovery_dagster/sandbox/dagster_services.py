"""Dagster's own processes (code server, webserver and daemon) and requests to the webserver.

The first snapshot of a new dev is requested through the GraphQL interface of the webserver.
"""

import http.client
import json
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.embedded import (
    CannotStartError,
    OwnedProcess,
    Program,
    private_socket_dir,
)
from budget_recovery_dagster.errors import BudgetRecoveryError

LOCATION = "budget_recovery"
DEFINITIONS = "budget_recovery_dagster.definitions"
ASSET = "budget_usage_snapshots"
JOB = "hourly_snapshot_job"
SCHEDULE = "hourly_snapshot_schedule"

_READY_SECONDS = 180
_GRACE_SECONDS = 15
_ANSWER_SECONDS = 30
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the address to ask instead
_RESTORE_JOB = "restore_job"
_OVER = frozenset({"SUCCESS", "FAILURE", "CANCELED"})
_ABANDONED = """
query Abandoned {
  runsOrError(filter: {statuses: [STARTING, STARTED, CANCELING]}) {
    ... on Runs { results { id status jobName } }
  }
}
"""
_MARK_CANCELED = """
mutation MarkCanceled($run: String!) {
  terminateRun(runId: $run, terminatePolicy: MARK_AS_CANCELED_IMMEDIATELY) { __typename }
}
"""
_CAPTURES = """
query Captures($asset: AssetKeyInput!, $job: String!, $hour: String!) {
  assetNodes(assetKeys: [$asset]) {
    latestMaterializationByPartition(partitions: [$hour]) { runId }
  }
  runsOrError(
    filter: {pipelineName: $job, tags: [{key: "dagster/partition", value: $hour}]}
  ) {
    ... on Runs { results { id status } }
  }
}
"""
_LAUNCH = """
mutation Launch($parameters: ExecutionParams!) {
  launchRun(executionParams: $parameters) {
    __typename
    ... on LaunchRunSuccess { run { id status } }
    ... on PythonError { message }
  }
}
"""
_RUN = """
query Run($run: ID!) {
  runOrError(runId: $run) {
    ... on Run {
      status
      assetMaterializations { __typename }
      eventConnection(afterCursor: null) {
        events {
          ... on ExecutionStepFailureEvent {
            failureMetadata { description }
            error { message causes { message } }
          }
        }
      }
    }
  }
}
"""


class PortTakenError(CannotStartError):
    """The address of the web pages is in use, or is not an address of this machine."""


class DagsterUiError(BudgetRecoveryError):
    """The Dagster webserver gave no usable answer."""


@dataclass(frozen=True, slots=True)
class DagsterUi:
    """The Dagster webserver at an address of this machine."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The URL for a browser on this machine."""
        host = self._reachable_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def _reachable_host(self) -> str:
        return _EVERY_ADDRESS.get(self.host, self.host)

    def require_free(self) -> None:
        """Check that a server could use the address now.

        Raises:
            PortTakenError: it could not.
        """
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                # As the webserver does: connections that have just ended do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise PortTakenError(
                f"The web pages cannot be served at {self.host} port {self.port}:"
                f" {error.strerror or error}.",
                "choose another --port or --host.",
            ) from error

    def is_up(self) -> bool:
        """Whether the webserver answers."""
        try:
            status, _ = self._ask("GET", "/server_info")
        except (OSError, http.client.HTTPException):
            return False
        return status == http.client.OK

    def query(self, document: str, **variables: Any) -> Mapping[str, Any]:
        """Return the data that answer a GraphQL document.

        Raises:
            DagsterUiError: there is no answer, or an error.
        """
        body = json.dumps({"query": document, "variables": variables})
        try:
            _, answer = self._ask("POST", "/graphql", body)
            content = json.loads(answer)
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise DagsterUiError(
                f"The Dagster webserver at {self.url} gave no answer: {error}.", "see its log."
            ) from error
        if content.get("errors"):
            raise DagsterUiError(
                f"The Dagster webserver refused a query: {content['errors'][0]['message']}",
                "see its log.",
            )
        data: Mapping[str, Any] = content["data"]
        return data

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(
            self._reachable_host, self.port, timeout=_ANSWER_SECONDS
        )
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class SnapshotRun:
    """The last known state of a run of the snapshot job.

    A run succeeds without storing a snapshot while captures are paused. ``failure`` is its own
    reason of a failure, if it has one.
    """

    run_id: str
    status: str
    has_stored: bool = False
    failure: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether its status is final."""
        return self.status in _OVER


def close_abandoned_runs(ui: DagsterUi) -> None:
    """Mark abandoned runs as canceled, except restores.

    Call it only while no run can be active: a run that was killed together with the code server
    would count as running until its maximum runtime, and block the next snapshot. A canceled
    restore means that an operator stopped it; the supervisor itself detects a restore that died.
    """
    for run in _runs(ui.query(_ABANDONED)):
        if run["jobName"] != _RESTORE_JOB or run["status"] == "CANCELING":
            ui.query(_MARK_CANCELED, run=run["id"])


def request_snapshot(ui: DagsterUi, hour: Hour) -> SnapshotRun | None:
    """Launch the snapshot of the current hour; return None if that hour is captured.

    If a run for it is active, that run is returned instead of a second one.

    Raises:
        DagsterUiError: it could not be launched.
    """
    known = ui.query(_CAPTURES, asset={"path": [ASSET]}, job=JOB, hour=hour.key)
    if any(any(node["latestMaterializationByPartition"]) for node in known["assetNodes"]):
        return None
    for run in _runs(known):
        found = SnapshotRun(run["id"], run["status"])
        if not found.is_over:
            return found
    return _launch(ui, hour)


def _launch(ui: DagsterUi, hour: Hour) -> SnapshotRun:
    tags = {
        "dagster/partition": hour.key,
        # The scheduler finds the run of a tick by these tags. Without them, a restarted scheduler
        # would make up for this hour's tick with a second snapshot.
        "dagster/schedule_name": SCHEDULE,
        ".dagster/scheduled_execution_time": hour.start.isoformat(),
        "dagster/run_key": hour.key,
    }
    parameters = {
        "selector": {
            "repositoryLocationName": LOCATION,
            "repositoryName": "__repository__",
            "jobName": JOB,
        },
        "executionMetadata": {"tags": [{"key": key, "value": tags[key]} for key in tags]},
    }
    launched = ui.query(_LAUNCH, parameters=parameters)["launchRun"]
    if "run" not in launched:
        raise DagsterUiError(
            "The first snapshot could not be launched: "
            f"{launched.get('message') or launched['__typename']}.",
            "see the log of the code server.",
        )
    return SnapshotRun(launched["run"]["id"], launched["run"]["status"])


def snapshot_run(ui: DagsterUi, run_id: str) -> SnapshotRun:
    """Return the present state of a run.

    Raises:
        DagsterUiError: there is no such run.
    """
    run = ui.query(_RUN, run=run_id)["runOrError"]
    if "status" not in run:
        raise DagsterUiError(
            f"The Dagster webserver knows no run {run_id}.", "check whether it was deleted."
        )
    reasons = (_reason(event) for event in run["eventConnection"]["events"] if event)
    return SnapshotRun(
        run_id,
        run["status"],
        has_stored=bool(run["assetMaterializations"]),
        failure=next(reasons, None),
    )


def _reason(failure: Mapping[str, Any]) -> str:
    """Return why a step failed: its own description, or the message of the exception."""
    if failure["failureMetadata"] and failure["failureMetadata"]["description"]:
        described: str = failure["failureMetadata"]["description"]
        return described
    error = failure["error"]
    first: str = [error, *error["causes"]][-1]["message"]
    return first.strip()


def _runs(answer: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
    listed = answer["runsOrError"]
    if "results" not in listed:
        raise DagsterUiError("The Dagster webserver could not list the runs.", "see its log.")
    runs: Sequence[Mapping[str, str]] = listed["results"]
    return runs


class DagsterServices:
    """The services with ``home`` as DAGSTER_HOME and their logs next to it.

    The code server is a separate child, not one of the daemon and the webserver, so that its end is
    noticed. The services and the runs get only ``environment``.
    """

    def __init__(self, home: Path, ui: DagsterUi, environment: Mapping[str, str]) -> None:
        self._home = home
        self._ui = ui
        self._environment = {**environment, "DAGSTER_HOME": str(home), "PYTHONUNBUFFERED": "1"}
        self._workspace = home / "workspace.yaml"
        self._socket_dir: Path | None = None
        self._processes: list[OwnedProcess] = []

    @property
    def processes(self) -> tuple[OwnedProcess, ...]:
        """The processes that were started."""
        return tuple(self._processes)

    def start_pages(self) -> None:
        """Start code server and webserver, and return when the pages are served.

        Raises:
            ChildEndedError: one of them did not become ready.
            UnusableDataError: there is no directory for the socket of the code server.
        """
        self._home.mkdir(mode=0o700, exist_ok=True)
        settings = files("budget_recovery_dagster.sandbox").joinpath("dagster.yaml").read_text()
        (self._home / "dagster.yaml").write_text(settings)
        self._socket_dir = private_socket_dir(self._home)
        code_socket = self._socket_dir / "code-server"
        code_socket.unlink(missing_ok=True)
        code_server = self._start(
            "Dagster code server",
            "code-server.log",
            *("dagster", "api", "grpc", "--socket", code_socket, "--module-name", DEFINITIONS),
            *("--location-name", LOCATION, "--empty-working-directory"),
            has_workers=True,  # the runs
        )
        server = {"grpc_server": {"socket": str(code_socket), "location_name": LOCATION}}
        # JSON is also YAML.
        self._workspace.write_text(json.dumps({"load_from": [server]}))
        code_server.wait_until_ready(
            lambda: _accepts_connections(code_socket), seconds=_READY_SECONDS
        )
        webserver = self._start(
            "Dagster webserver",
            "webserver.log",
            *("dagster_webserver", "--workspace", self._workspace),
            *("--host", self._ui.host, "--port", self._ui.port),
        )
        webserver.wait_until_ready(self._ui.is_up, seconds=_READY_SECONDS)

    def start_daemon(self) -> None:
        """Start the daemon for schedules, sensors and queued runs; it needs some seconds."""
        self._start(
            "Dagster daemon",
            "daemon.log",
            *("dagster._daemon", "run", "--workspace", self._workspace),
        )

    def stop(self) -> None:
        """Stop all services and their runs. A second call does nothing."""
        for process in self._processes:
            process.ask_to_end()
        for process in self._processes:
            process.stop()
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _start(
        self,
        name: str,
        log: str,
        module: str,
        *arguments: str | Path | int,
        has_workers: bool = False,
    ) -> OwnedProcess:
        process = OwnedProcess(
            Program(
                name,
                # As modules: the scripts of the environment may not be in PATH.
                [sys.executable, "-m", module, *map(str, arguments)],
                log=self._home.with_name(log),
                environment=self._environment,
                # SIGINT would be lost in an import, before their handlers exist; SIGTERM is not.
                stop_signal=signal.SIGTERM,
                # All their state is in the database; without it they can hang when they end.
                death_signal=signal.SIGKILL,
                grace_seconds=_GRACE_SECONDS,
                has_workers=has_workers,
            )
        )
        self._processes.append(process)
        return process


def _accepts_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
