"""External assets: the gateway's own store, and what restores raised in it."""

import dagster as dg

from budget_recovery_dagster.presentation.metadata import GATEWAY_OWNERS, OWNERS
from budget_recovery_dagster.settings import Settings

_DESCRIPTION = (
    "The key-value store in NATS JetStream in which the AI gateway adds up the usage of every "
    "budget. The gateway owns it: this project never creates or reconfigures it, keeps one key "
    "of its own in it, and raises counters after a loss. If it is wiped, nothing errors and "
    "usage reads as zero; the snapshots below bring it back.\n\n"
    "**Observations** are the checks of store_loss_sensor: what it found, and the recovery "
    "state."
)


def gateway_usage_store(settings: Settings) -> dg.AssetSpec:
    """Return the external asset of the bucket that the settings name."""
    return dg.AssetSpec(
        "gateway_usage_store",
        group_name="gateway",
        kinds={"nats"},
        owners=GATEWAY_OWNERS,
        tags={"data": "tenant-usage", "for": "enforcement"},
        metadata={
            "bucket": settings.bucket,
            "counters": "usage.<tenant>.<budget>.<window>.<entity>",
            "leaderboards": "leaderboard.<tenant>.<budget>.<window>",
            "marker": "__guard.<deployment id>",
            "read_from": settings.capture_source.value,
            "copied_to": dg.MetadataValue.asset(dg.AssetKey("budget_usage_snapshots")),
            "what_a_restore_brings_back": dg.MetadataValue.asset(dg.AssetKey("recovery_points")),
            "what_was_restored": dg.MetadataValue.asset(dg.AssetKey("restored_usage")),
        },
        description=_DESCRIPTION,
    )


restored_usage = dg.AssetSpec(
    "restored_usage",
    deps=["recovery_points", "gateway_usage_store"],
    group_name="recovery",
    kinds={"nats"},
    owners=OWNERS,
    tags={"data": "tenant-usage", "for": "recovery"},
    description=(
        "The counters that restores raised in the gateway's store, each to the highest usage in "
        "all retained snapshots, or in the chosen one.\n\n"
        "**Materializations** are restores that raised counters, with the usage of each budget "
        "before and after: those of runs, and those of the command `budget-recovery restore`, "
        "which restore_supervisor_sensor adds within a minute. If Dagster was away, it adds those "
        "of the last 24 hours. **Observations** are previews, and restores in Dagster that raised "
        "nothing. The table budget_recovery.restore_audit has every restore."
    ),
)
