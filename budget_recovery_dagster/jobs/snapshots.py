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
        "checks what it copied; then writes the tenants' tables of the hour, and sums up what a "
        "restore would bring back. Runs each hour by itself; run the current hour by hand for one "
        "more snapshot."
    ),
    executor_def=IN_ONE_PROCESS,
    tags={
        # A failed capture is not repeated by itself; the next hour takes the next snapshot.
        "dagster/max_retries": "0",
        # A capture that outlives its hour could store nothing any more.
        "dagster/max_runtime": "3600",
    },
)

recovery_points_job = dg.define_asset_job(
    "recovery_points_job",
    selection=dg.AssetSelection.assets("recovery_points")
    | dg.AssetSelection.checks_for_assets(dg.AssetKey("recovery_points")),
    description=(
        "Sums up what a restore would bring back, and judges how old that is. Needs PostgreSQL "
        "only, so it tells the truth while the usage store is down, and while captures fail or "
        "are paused. Runs twice an hour by itself."
    ),
    executor_def=IN_ONE_PROCESS,
    tags={"dagster/max_retries": "0", "dagster/max_runtime": "1800"},
)
