"""The counters that restores raised in the gateway's store."""

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
        "The counters that restores raised in the gateway's store after a loss, each to the "
        "highest usage in all retained snapshots.\n\n"
        "**Materializations** are automatic and manual restores that raised counters, with the "
        "usage of each budget before and after. **Observations** are previews, and restores that "
        "raised nothing. The table budget_recovery.restore_audit has every restore."
    ),
)
