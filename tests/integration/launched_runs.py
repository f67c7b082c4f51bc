"""Runs as Dagster records them: of restore_job after the loss of a store, and of other jobs."""

from collections.abc import Mapping

import dagster as dg
import psycopg
from dagster import DagsterRunStatus
from dagster._core.remote_origin import (
    GrpcServerCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.restore_runs import Location, RestoreRuns
from tests import services
from tests.integration.live_capture import capture_now
from tests.integration.recovery_runs import check, requested
from tests.nats_servers import Bucket


def lost(bucket: Bucket, instance: dg.DagsterInstance, hour: Hour) -> dg.RunRequest:
    """Capture a store of two tenants, lose it, and return the request for its restore."""
    bucket.spend("acme", "total", "lifetime", {None: "80"})
    bucket.spend("globex", "total", "lifetime", {None: "5"})
    capture_now(hour)
    check(instance)
    bucket.destroy()
    bucket.create()
    (request,) = requested(check(instance))
    return request


def recorded(
    instance: dg.DagsterInstance, request: dg.RunRequest, status: DagsterRunStatus
) -> dg.DagsterRun:
    """Record a run as launched for a request, without a worker."""
    return instance.create_run_for_job(
        services.definitions().resolve_job_def("restore_job"),
        status=status,
        tags=dict(request.tags),
    )


def our_runs(instance: dg.DagsterInstance, plane: ControlPlane) -> RestoreRuns:
    """Return the restore runs of this process, which has no code location."""
    return RestoreRuns(instance, None, plane.registry.claim().deployment_id)


def due(database: psycopg.Connection) -> None:
    """Make the next launch due."""
    database.execute("update budget_recovery.incident set next_launch_at = now()")


def status_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> DagsterRunStatus:
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    return found.status


def started_from(
    instance: dg.DagsterInstance,
    location: Location,
    job: str,
    *assets: str,
    status: DagsterRunStatus = DagsterRunStatus.STARTED,
    tags: Mapping[str, str] | None = None,
) -> dg.DagsterRun:
    """Record a run of a job, or of only these assets, as started from a code location."""
    code = GrpcServerCodeLocationOrigin(host="localhost", port=4000, location_name=location.name)
    origin = RemoteJobOrigin(RemoteRepositoryOrigin(code, location.repository), job)
    run = instance.create_run_for_job(
        services.definitions().resolve_job_def(job),
        status=status,
        tags=dict(tags or {}),
        asset_selection=frozenset(map(dg.AssetKey, assets)) or None,
        remote_job_origin=origin,
    )
    event = dg.DagsterEvent(dg.DagsterEventType.RUN_START.value, run.job_name)
    instance.report_dagster_event(event, run.run_id)
    return run
