"""What restores have written back into the gateway's store."""

import dagster as dg

from budget_recovery_dagster.presentation.metadata import OWNERS

restored_usage = dg.AssetSpec(
    "restored_usage",
    deps=["recovery_points", "gateway_usage_store"],
    group_name="recovery",
    kinds={"nats"},
    owners=OWNERS,
    tags={"data": "tenant-usage", "for": "recovery"},
    description=(
        "The counters that a restore has raised in the gateway's store after a loss, each to the "
        "highest that any retained snapshot knows. **Materialized** by every recovery that raised "
        "something, and by every restore by hand that did, with what each budget's counters were "
        "before and after; observed by one that found nothing to raise, and by every preview, "
        "which its Events show. The table budget_recovery.restore_audit has all of it."
    ),
)
