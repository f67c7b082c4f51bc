"""The gateway's own store, at the root of the lineage."""

import dagster as dg

from budget_recovery_dagster.assets.presentation import GATEWAY_OWNERS

gateway_usage_store = dg.AssetSpec(
    "gateway_usage_store",
    group_name="gateway",
    kinds={"nats"},
    owners=GATEWAY_OWNERS,
    tags={"data": "tenant-usage", "for": "enforcement"},
    metadata={
        "bucket": "as BUDGET_RECOVERY_BUCKET says",
        "keys": "usage.<tenant>.<budget>.<window>.<entity>",
        "values": '{"usage": "12.345678"}, with other fields as the gateway likes',
        "copied_to": dg.MetadataValue.asset(dg.AssetKey("budget_usage_snapshots")),
        "what_a_restore_brings_back": dg.MetadataValue.asset(dg.AssetKey("recovery_points")),
    },
    description=(
        "The key-value store in NATS JetStream in which the AI gateway adds up what every budget "
        "has used. The gateway owns it: this project reads its counters, and never creates or "
        "reconfigures it. If it is wiped nothing errors, usage just reads as zero; the snapshots "
        "below are what can bring it back."
    ),
)
