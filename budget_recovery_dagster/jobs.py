"""Dagster jobs."""

import dagster as dg

from budget_recovery_dagster.assets.budget_usage_snapshots import budget_usage_snapshots
from budget_recovery_dagster.assets.recovery_points import recovery_points
from budget_recovery_dagster.assets.tenant_usage_tables import tenant_usage_tables
from budget_recovery_dagster.ops.holds import hold_incident, release_incident
from budget_recovery_dagster.ops.manual_restore import restore_by_hand
from budget_recovery_dagster.ops.resets import record_reset
from budget_recovery_dagster.ops.resolving import resolve_incident
from budget_recovery_dagster.ops.restore import restore

_IN_ONE_PROCESS = dg.in_process_executor
"""One process per run is enough, and starts in half the time."""

_ASSETS = (budget_usage_snapshots, tenant_usage_tables, recovery_points)

hourly_snapshot_job = dg.define_asset_job(
    "hourly_snapshot_job",
    selection=dg.AssetSelection.assets(*_ASSETS) | dg.AssetSelection.checks_for_assets(*_ASSETS),
    description=(
        "Copies every tenant's budget counters from the gateway's usage store to PostgreSQL and "
        "checks what it copied; then writes the tenants' tables of the hour, and sums up what a "
        "restore would bring back. Runs each hour by itself; run the current hour by hand for one "
        "more snapshot."
    ),
    executor_def=_IN_ONE_PROCESS,
    tags={
        # A failed capture is not repeated by itself; the next hour takes the next snapshot.
        "dagster/max_retries": "0",
        # A capture that outlives its hour could store nothing any more.
        "dagster/max_runtime": "3600",
    },
)

recovery_points_job = dg.define_asset_job(
    "recovery_points_job",
    selection=dg.AssetSelection.assets(recovery_points)
    | dg.AssetSelection.checks_for_assets(recovery_points),
    description=(
        "Sums up what a restore would bring back, and judges how old that is. Needs PostgreSQL "
        "only, so it tells the truth while the usage store is down, and while captures fail or "
        "are paused. Runs twice an hour by itself."
    ),
    executor_def=_IN_ONE_PROCESS,
    tags={"dagster/max_retries": "0", "dagster/max_runtime": "1800"},
)


@dg.job(
    name="restore_job",
    description=(
        "Puts the open incident right: waits until the usage store has converged, raises every "
        "counter of a still-open window to the highest that a snapshot knows, and declares the "
        "store healthy. The sensors launch it by themselves, at most three attempts for a loss; "
        "launched by hand it does the same, once. Without an open incident it does nothing."
    ),
    executor_def=_IN_ONE_PROCESS,
    tags={
        # Attempts are counted in the database, and the sensors launch again.
        "dagster/max_retries": "0",
        "dagster/max_runtime": "3600",
        # Ahead of whatever else is queued, such as a backfill.
        "dagster/priority": "10",
    },
)
def restore_job() -> None:
    """Recover the store."""
    restore()


_ONCE = {"dagster/max_retries": "0", "dagster/max_runtime": "300"}


@dg.job(
    name="hold_restore_job",
    description=(
        "Stops the restore of the open incident until release_restore_job: none is launched, and "
        "one that works stops before the next tenant. To terminate a run of restore_job does the "
        "same."
    ),
    executor_def=_IN_ONE_PROCESS,
    tags=_ONCE,
)
def hold_restore_job() -> None:
    """Hold the restore."""
    hold_incident()


@dg.job(
    name="release_restore_job",
    description="Lets a restore go on that is on hold, with all its attempts.",
    executor_def=_IN_ONE_PROCESS,
    tags=_ONCE,
)
def release_restore_job() -> None:
    """Release the restore."""
    release_incident()


@dg.job(
    name="record_reset_job",
    description=(
        "Notes that counters of a budget were lowered or cleared in the gateway on purpose: no "
        "restore brings back what snapshots of that moment or before hold of them. Lower them "
        "first, then run this. It lowers no counter itself."
    ),
    executor_def=_IN_ONE_PROCESS,
    tags=_ONCE,
)
def record_reset_job() -> None:
    """Record a reset."""
    record_reset()


@dg.job(
    name="manual_restore_job",
    description=(
        "Previews or applies a restore that a person chooses: one budget, one tenant or the whole "
        "store, from the latest or from one snapshot. In the Launchpad leave mode at preview "
        "first, and see among the Events of the asset restored_usage what would be done; then set "
        "it to apply and give a reason. A restore after which nothing of the whole store is left "
        "to be raised ends the open incident."
    ),
    executor_def=_IN_ONE_PROCESS,
    tags={
        "dagster/max_retries": "0",
        "dagster/max_runtime": "3600",
        # Ahead of whatever else is queued: a person waits for it.
        "dagster/priority": "20",
    },
)
def manual_restore_job() -> None:
    """Preview or restore what a person has chosen."""
    restore_by_hand()


@dg.job(
    name="resolve_incident_job",
    description=(
        "Ends the open incident without restoring anything more: the store is accepted as it is, "
        "and snapshots are taken again. What the snapshots say more stays in them."
    ),
    executor_def=_IN_ONE_PROCESS,
    tags={
        # It waits for the store, and reads all of it.
        "dagster/max_retries": "0",
        "dagster/max_runtime": "3600",
        "dagster/priority": "20",
    },
)
def resolve_incident_job() -> None:
    """Accept the store as it is."""
    resolve_incident()
