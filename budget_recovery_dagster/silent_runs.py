"""Our runs other than restores that have no worker any more, and still hold a pool or a run slot.

A worker that dies together with its code server leaves a run that Dagster shows as started for up
to an hour, and without end if it came from the page of an asset. The next captures wait for it.
"""

from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta

import dagster as dg
from dagster import DagsterRunStatus

from budget_recovery_dagster.domain.admission import CAPTURE_LEASE, RESTORE_LEASE, LeaseState
from budget_recovery_dagster.domain.supervision import DEAD_AFTER
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.restore_runs import RestoreRuns

SILENT_FOR = timedelta(minutes=5)
"""A run that holds no lease, and has stored no event for so long, has no worker.

Longer than a run is between two events, or waits for a clock, without a lease: what may take longer
shows its progress with ``each_minute``.
"""

# A run holds one of them for as long as it works on the store.
_LEASES = (CAPTURE_LEASE, RESTORE_LEASE)
# The implicit job of runs from the pages of assets.
_ASSET_JOB = "__ASSET_JOB"


def silent_runs(
    runs: RestoreRuns, plane: ControlPlane, jobs: Collection[str], assets: Collection[str]
) -> Iterator[dg.DagsterRun]:
    """Find our runs of these jobs, or of only these assets, that have no worker any more.

    A run is alive while it holds a lease. It is dead if a lease of it expired more than a minute
    ago and it has been silent since, or if it has been silent for longer without one.
    """
    # Leases end by the database's clock, events have the times of their hosts.
    now, host_time = plane.clock.now(), plane.clock.host_time()
    leases = [plane.leases.state_of(name) for name in _LEASES]
    for record in runs.of_other_jobs({*jobs, _ASSET_JOB}):
        run = record.dagster_run
        is_ours = run.job_name != _ASSET_JOB or _has_only(run, assets)
        if is_ours and _is_dead(runs.instance, record, leases, now, host_time):
            yield run


def end_run(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """End a run without a worker and free its pools; return a sentence about it."""
    found = instance.get_run_by_id(run.run_id)
    short_id = run.run_id[:8]
    if found is None or found.is_finished:
        return f"Run {short_id} has just ended."
    message = "This run has no worker any more: its host or process is gone."
    if found.status is DagsterRunStatus.CANCELING:
        instance.report_run_canceled(found, message)
    else:
        instance.report_run_failed(found, message)
    storage = instance.event_log_storage
    if storage.supports_global_concurrency_limits:
        # Where pools count steps, not runs, a slot outlives its run.
        storage.free_concurrency_slots_for_run(run.run_id)
    return f"Run {short_id} of {run.job_name} has no worker any more: it is marked as ended."


def _has_only(run: dg.DagsterRun, assets: Collection[str]) -> bool:
    selected = run.asset_selection
    return bool(selected) and all(key.to_user_string() in assets for key in selected or ())


def _is_dead(
    instance: dg.DagsterInstance,
    record: dg.RunRecord,
    leases: Collection[LeaseState],
    now: datetime,
    host_time: datetime,
) -> bool:
    mine = f"run {record.dagster_run.run_id[:8]} on "
    if any(each.holder is not None and each.holder.startswith(mine) for each in leases):
        return False
    left = [each.left for each in leases if each.left and each.left.holder.startswith(mine)]
    silent_for = host_time - _last_event_at(instance, record)
    if not left:
        return silent_for >= SILENT_FOR
    # A lease that could not be released is left by a run that goes on without it.
    is_over = all(now - each.expires_at >= DEAD_AFTER for each in left)
    return is_over and silent_for >= DEAD_AFTER


def _last_event_at(instance: dg.DagsterInstance, record: dg.RunRecord) -> datetime:
    run_id = record.dagster_run.run_id
    newest = instance.get_records_for_run(run_id, limit=1, ascending=False).records
    if not newest:
        return record.create_timestamp.astimezone(UTC)
    return datetime.fromtimestamp(newest[0].timestamp, UTC)
