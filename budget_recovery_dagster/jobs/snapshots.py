"""Jobs that capture snapshots and refresh recovery points."""

import dagster as dg

IN_ONE_PROCESS = dg.in_process_executor
"""One process per run is enough, and starts in half the time."""

_ASSETS = ("budget_usage_snapshots", "tenant_usage_tables", "recovery_points")

hourly_snapshot_job = dg.define_asset_job(
    "hourly_snapshot_job",
    selection=dg.AssetSelection.assets(*_ASSETS)
    | dg.AssetSelection.checks_for_assets(*map(dg.AssetKey, _ASSETS)),
    description=(
        "Copies every tenant's budget counters from the gateway's usage store to PostgreSQL and "
        "checks the copy. Then writes the tenants' tables of the hour and refreshes the recovery "
        "points. Runs every hour; run the current hour manually for one more snapshot."
    ),
    executor_def=IN_ONE_PROCESS,
    tags={
        # A failed capture is not retried; the next hour takes the next snapshot.
        "dagster/max_retries": "0",
        # A capture that runs past its hour cannot store anything.
        "dagster/max_runtime": "3600",
    },
)

recovery_points_job = dg.define_asset_job(
    "recovery_points_job",
    selection=dg.AssetSelection.assets("recovery_points")
    | dg.AssetSelection.checks_for_assets(dg.AssetKey("recovery_points")),
    description=(
        "Refreshes the recovery points and checks their age. Needs only PostgreSQL, so the result "
        "is correct while the usage store is down, captures fail or captures are paused. Runs "
        "twice an hour on a schedule."
    ),
    executor_def=IN_ONE_PROCESS,
    tags={"dagster/max_retries": "0", "dagster/max_runtime": "1800"},
)
