"""Dagster jobs."""

import dagster as dg

from budget_recovery_dagster.assets.budget_usage_snapshots import budget_usage_snapshots

hourly_snapshot_job = dg.define_asset_job(
    "hourly_snapshot_job",
    selection=dg.AssetSelection.assets(budget_usage_snapshots)
    | dg.AssetSelection.checks_for_assets(budget_usage_snapshots),
    description=(
        "Copies every tenant's budget counters from the gateway's usage store to PostgreSQL, and "
        "checks what it copied. Runs each hour by itself; run the current hour by hand for one "
        "more snapshot."
    ),
    # One process per run is enough, and starts in half the time.
    executor_def=dg.in_process_executor,
    tags={
        # A failed capture is not repeated by itself; the next hour takes the next snapshot.
        "dagster/max_retries": "0",
        # A capture that outlives its hour could store nothing any more.
        "dagster/max_runtime": "3600",
    },
)
