"""The first snapshot of a new dev, requested through the GraphQL interface of the webserver."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.sandbox.dagster_services import LOCATION, DagsterUi, DagsterUiError

ASSET = "budget_usage_snapshots"
JOB = "hourly_snapshot_job"
SCHEDULE = "hourly_snapshot_schedule"

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
