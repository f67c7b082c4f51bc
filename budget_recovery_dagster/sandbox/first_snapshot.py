"""The first snapshot: requested over the web pages' own interface, so that there is one to see."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.sandbox.dagster_services import LOCATION
from budget_recovery_dagster.sandbox.dagster_ui import DagsterUi
from budget_recovery_dagster.sandbox.errors import DagsterUiError

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
    """A run of the snapshot job, as it stood when it was looked at.

    It may succeed and have stored nothing, while captures are paused. ``failure`` is what it says
    of its failure, if it does.
    """

    run_id: str
    status: str
    has_stored: bool = False
    failure: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether its status will not change any more."""
        return self.status in _OVER


def close_abandoned_runs(ui: DagsterUi) -> int:
    """Mark as canceled the runs that nobody is working on, but restores, and return how many.

    That a restore is canceled means that a person wants it to stop; of one that has died its
    supervisor finds out by itself.

    Only to be called while no run can be at work: a run whose process was killed together with the
    code server would count as running for its longest time, and keep the next snapshot waiting.
    """
    runs = [
        run
        for run in _runs(ui.query(_ABANDONED))
        if run["jobName"] != _RESTORE_JOB or run["status"] == "CANCELING"
    ]
    for run in runs:
        ui.query(_MARK_CANCELED, run=run["id"])
    return len(runs)


def request_snapshot(ui: DagsterUi, hour: Hour) -> SnapshotRun | None:
    """Launch the snapshot of the current hour; None if that is captured.

    A run that is under way for it already is returned instead of a second one.

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
        # By these the scheduler knows a tick that has had its run: started anew, it would make up
        # for this hour's missed one, with a second snapshot.
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
            "look at the code server's log.",
        )
    return SnapshotRun(launched["run"]["id"], launched["run"]["status"])


def look_at(ui: DagsterUi, run_id: str) -> SnapshotRun:
    """Return how a run stands.

    Raises:
        DagsterUiError: there is no such run.
    """
    run = ui.query(_RUN, run=run_id)["runOrError"]
    if "status" not in run:
        raise DagsterUiError(
            f"The Dagster webserver knows no run {run_id}.", "see whether somebody deleted it."
        )
    said = (_reason(event) for event in run["eventConnection"]["events"] if event)
    return SnapshotRun(
        run_id,
        run["status"],
        has_stored=bool(run["assetMaterializations"]),
        failure=next(said, None),
    )


def _reason(failure: Mapping[str, Any]) -> str:
    """Say why a step failed: in our own words, or in those of an exception that was not ours."""
    if failure["failureMetadata"] and failure["failureMetadata"]["description"]:
        described: str = failure["failureMetadata"]["description"]
        return described
    error = failure["error"]
    first: str = [error, *error["causes"]][-1]["message"]
    return first.strip()


def _runs(answer: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
    listed = answer["runsOrError"]
    if "results" not in listed:
        raise DagsterUiError("The Dagster webserver could not list the runs.", "look at its log.")
    runs: Sequence[Mapping[str, str]] = listed["results"]
    return runs
