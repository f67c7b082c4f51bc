"""The runs of ``restore_job`` in Dagster that are provably ours: their lookup, phase and end.

A Dagster instance is shared. Another team's job may have the same name, even in a repository of the
same name, and another installation of this project has all names in common with this one.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import dagster as dg
from dagster import MAX_RUNTIME_SECONDS_TAG, DagsterEventType, DagsterRunStatus
from dagster._core.events import AssetObservationData, StepMaterializationData
from dagster._core.storage.tags import REPOSITORY_LABEL_TAG

from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.domain.supervision import Fate, Phase, RunSeen

RESTORE_JOB = "restore_job"
RESTORE_STEP = "restore"
DEPLOYMENT_TAG = "budget_recovery/deployment"
"""Tag of a run: the deployment id of the store that it works on."""
INCIDENT_TAG = "budget_recovery/incident"
"""Tag of a run: the incident that it restores."""
LAUNCH_TAG = "budget_recovery/launch"
"""Tag of a run: the number of the launch of its incident."""

# A person who terminates a run wants the restore to stop, even while the termination takes time.
_PHASES: Mapping[DagsterRunStatus, Phase] = {
    DagsterRunStatus.QUEUED: Phase.QUEUED,
    DagsterRunStatus.NOT_STARTED: Phase.QUEUED,
    DagsterRunStatus.STARTING: Phase.QUEUED,
    DagsterRunStatus.STARTED: Phase.STARTED,
    DagsterRunStatus.CANCELING: Phase.CANCELED,
    DagsterRunStatus.CANCELED: Phase.CANCELED,
}
_WITH_A_WORKER = [DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]
_TERMINATIONS = {DagsterEventType.RUN_CANCELING, DagsterEventType.RUN_CANCELED}
_RETRIES = {DagsterEventType.STEP_UP_FOR_RETRY}
# More than can be active at once; older runs are over.
_NEWEST_RUNS = 10
_NEWEST_EVENTS = 50

RestoredEvent = dg.AssetMaterialization | dg.AssetObservation


@dataclass(frozen=True, slots=True)
class Location:
    """A repository in a code location, by their names in the workspace."""

    name: str
    repository: str

    @property
    def label(self) -> str:
        """The value of the tag that Dagster stores with every run of the repository."""
        return f"{self.repository}@{self.name}"


def location_of(context: dg.SensorEvaluationContext) -> Location | None:
    """Return where a sensor is defined; None if it is called without Dagster's services."""
    origin = context.code_location_origin
    if origin is None or context.repository_name is None:
        return None
    return Location(origin.location_name, context.repository_name)


def location_of_run(run: dg.DagsterRun) -> Location | None:
    """Return where the job of a run is defined; None if it was launched without a location."""
    if run.remote_job_origin is None:
        return None
    repository = run.remote_job_origin.repository_origin
    return Location(repository.code_location_origin.location_name, repository.repository_name)


@dataclass(frozen=True, slots=True)
class RestoreRuns:
    """The runs of one installation: of its ``location``, for the store of ``deployment_id``.

    None: the location is unknown, and runs of any location are not ours; or the database belongs to
    no store yet.
    """

    instance: dg.DagsterInstance
    location: Location | None
    deployment_id: str | None

    def of(self, incident: Incident) -> tuple[RunSeen, ...]:
        """Return the newest runs that can restore an incident, newest first."""
        records = self._records(limit=_NEWEST_RUNS)
        return tuple(
            replace(self._seen(each), incident_id=incident.incident_id)
            for each in records
            if _is_for(each, incident)
        )

    def left(self, incident: Incident | None) -> tuple[RunSeen, ...]:
        """Return the started runs that cannot restore the open incident, newest first."""
        records = self._records(statuses=_WITH_A_WORKER)
        return tuple(
            self._seen(each) for each in records if incident is None or not _is_for(each, incident)
        )

    def of_other_jobs(self, jobs: Collection[str]) -> list[dg.RunRecord]:
        """Return our runs of these jobs that may have a worker, newest first."""
        active = self._records(job_name=None, statuses=[DagsterRunStatus.STARTING, *_WITH_A_WORKER])
        return [each for each in active if each.dagster_run.job_name in jobs]

    def tags(self, incident: Incident | None = None) -> dict[str, str]:
        """Return the tags that prove which store a run works on, and what it restores."""
        tags = {} if self.deployment_id is None else {DEPLOYMENT_TAG: self.deployment_id}
        return tags if incident is None else {**tags, INCIDENT_TAG: incident.incident_id}

    def end(self, seen: RunSeen, fate: Fate) -> None:
        """End a run that has no worker any more, unless it has ended."""
        run = self.instance.get_run_by_id(seen.run_id)
        if run is None or run.is_finished:
            return
        message = f"This run has no worker any more: its host or process is gone. {fate.reason}"
        if fate.has_succeeded:
            succeeded = dg.DagsterEvent(
                DagsterEventType.RUN_SUCCESS.value, run.job_name, message=message
            )
            self.instance.report_dagster_event(succeeded, run.run_id)
        elif run.status is DagsterRunStatus.CANCELING:
            self.instance.report_run_canceled(run, message)
        else:
            self.instance.report_run_failed(run, message)

    def _records(
        self,
        *,
        job_name: str | None = RESTORE_JOB,
        statuses: Sequence[DagsterRunStatus] = (),
        limit: int | None = None,
    ) -> list[dg.RunRecord]:
        """Return our runs, newest first."""
        found = {
            record.dagster_run.run_id: record
            for tags in self._tag_filters()
            for record in self.instance.get_run_records(
                dg.RunsFilter(job_name=job_name, tags=tags, statuses=list(statuses)), limit=limit
            )
            if self._is_ours(record.dagster_run)
        }
        newest = sorted(found.values(), key=lambda record: record.storage_id, reverse=True)
        return newest[:limit]

    def _tag_filters(self) -> Iterator[dict[str, str]]:
        # With others' runs in between, ours would not be among the newest.
        if self.deployment_id is not None:
            yield {DEPLOYMENT_TAG: self.deployment_id}
        yield {} if self.location is None else {REPOSITORY_LABEL_TAG: self.location.label}

    def _is_ours(self, run: dg.DagsterRun) -> bool:
        """Whether a run is provably ours: by its location, its tags, or both; neither may differ.

        A run from the launchpad has the location, and one of `dagster job execute` only the tags
        that it gives itself.
        """
        deployment = run.tags.get(DEPLOYMENT_TAG)
        if deployment not in (None, self.deployment_id):
            return False
        location = location_of_run(run)
        if location is None:
            return self.location is None or deployment is not None
        return self.location == location

    def _seen(self, record: dg.RunRecord) -> RunSeen:
        run = record.dagster_run
        phase = _PHASES.get(run.status, Phase.OVER)
        terminated_at = _first_of(self.instance, run, _TERMINATIONS)
        if terminated_at is not None:
            # Independent of its status: a worker that survives the cancellation of its run ends it
            # as a success or a failure.
            phase = Phase.CANCELED
            if _has_outlived(record, terminated_at):
                # Dagster terminates a run that takes too long with the same events as a person.
                phase = Phase.OVER if run.is_finished else Phase.STARTED
        launch = run.tags.get(LAUNCH_TAG, "")
        return RunSeen(
            run_id=run.run_id,
            phase=phase,
            requested_at=record.create_timestamp.astimezone(UTC),
            terminated_at=terminated_at,
            # Tags can be set manually.
            launch=int(launch) if launch.isdecimal() else None,
            incident_id=run.tags.get(INCIDENT_TAG),
            pauses_until=_pauses_until(self.instance, run),
        )


def _is_for(record: dg.RunRecord, incident: Incident) -> bool:
    """Whether one of our runs can restore an incident.

    Runs that were started manually have no tag; those created after the incident belong to it.
    """
    tagged = record.dagster_run.tags.get(INCIDENT_TAG)
    if tagged is not None:
        return tagged == incident.incident_id
    return record.create_timestamp.astimezone(UTC) > incident.opened_at


def _first_of(
    instance: dg.DagsterInstance, run: dg.DagsterRun, kinds: set[DagsterEventType]
) -> datetime | None:
    """Return when one of these events was first stored; None: it was not."""
    times = [entry.timestamp for entry in instance.all_logs(run.run_id, of_type=kinds)]
    return datetime.fromtimestamp(min(times), UTC) if times else None


def _pauses_until(instance: dg.DagsterInstance, run: dg.DagsterRun) -> datetime | None:
    """Return when the next attempt within a started run is due; None: it has failed at none."""
    if run.status not in _WITH_A_WORKER:
        return None
    due = [
        entry.timestamp + (entry.get_dagster_event().step_retry_data.seconds_to_wait or 0)
        for entry in instance.all_logs(run.run_id, of_type=_RETRIES)
    ]
    return datetime.fromtimestamp(max(due), UTC) if due else None


def _has_outlived(record: dg.RunRecord, at: datetime) -> bool:
    """Whether a run had exceeded its maximum runtime by then."""
    longest = record.dagster_run.tags.get(MAX_RUNTIME_SECONDS_TAG, "")
    if record.start_time is None or not longest.isdecimal():
        return False
    started_at = datetime.fromtimestamp(record.start_time, UTC)
    return at - started_at > timedelta(seconds=int(longest))


def show_once(instance: dg.DagsterInstance, run_id: str, event: RestoredEvent) -> None:
    """Store the event of a restore with its run, unless the asset has the incident's result."""
    if is_shown(instance, event):
        return
    kind, data = (
        (DagsterEventType.ASSET_MATERIALIZATION, StepMaterializationData(event, []))
        if isinstance(event, dg.AssetMaterialization)
        else (DagsterEventType.ASSET_OBSERVATION, AssetObservationData(event))
    )
    instance.report_dagster_event(
        dg.DagsterEvent(kind.value, RESTORE_JOB, step_key=RESTORE_STEP, event_specific_data=data),
        run_id,
    )


def is_shown(instance: dg.DagsterInstance, event: RestoredEvent) -> bool:
    """Whether the asset has this result of this incident."""
    fetch = (
        instance.fetch_materializations
        if isinstance(event, dg.AssetMaterialization)
        else instance.fetch_observations
    )
    records = fetch(event.asset_key, limit=_NEWEST_EVENTS).records
    return any(
        each.asset_event is not None and _result(each.asset_event) == _result(event)
        for each in records
    )


def _result(event: RestoredEvent) -> tuple[object, ...]:
    values = (event.metadata.get(name) for name in ("incident", "outcome"))
    return tuple(value.value if value is not None else None for value in values)
