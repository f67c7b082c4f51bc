"""The first snapshot: requested over the web pages' own interface, so that there is one to see."""

from dataclasses import dataclass

from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.sandbox.dagster_services import LOCATION
from budget_recovery_dagster.sandbox.dagster_ui import DagsterUi
from budget_recovery_dagster.sandbox.errors import DagsterUiError

ASSET = "budget_usage_snapshots"
JOB = "hourly_snapshot_job"
SCHEDULE = "hourly_snapshot_schedule"

_OVER = frozenset({"SUCCESS", "FAILURE", "CANCELED"})

_ABANDONED = """
query Abandoned {
  runsOrError(filter: {statuses: [STARTING, STARTED, CANCELING]}) {
    ... on Runs { results { id } }
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
        events { ... on ExecutionStepFailureEvent { failureMetadata { description } } }
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
    """Mark runs as canceled that nobody works at, and return how many.

    Only to be called while no run can be at work: a run whose process was killed together with the
    code server would count as running for its longest time, and keep the next snapshot waiting.
    """
    runs = ui.query(_ABANDONED)["runsOrError"].get("results", [])
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
    for run in known["runsOrError"].get("results", []):
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
        "dagster/scheduled_execution_time": hour.start.isoformat(),
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
            f"The first snapshot could not be launched: {launched.get('message') or launched}",
            "look at the code server's log.",
        )
    return SnapshotRun(launched["run"]["id"], launched["run"]["status"])


def look_at(ui: DagsterUi, run_id: str) -> SnapshotRun:
    """Return how a run stands."""
    run = ui.query(_RUN, run=run_id)["runOrError"]
    events = run["eventConnection"]["events"]
    said = (event["failureMetadata"]["description"] for event in events if event)
    return SnapshotRun(
        run_id,
        run["status"],
        has_stored=bool(run["assetMaterializations"]),
        failure=next(said, None),
    )
