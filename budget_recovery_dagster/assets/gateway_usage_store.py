"""The gateway's own store, at the root of the lineage."""

import dagster as dg

gateway_usage_store = dg.AssetSpec(
    "gateway_usage_store",
    group_name="gateway",
    kinds={"nats"},
    description=(
        "The key-value store in NATS JetStream in which the AI gateway adds up what every budget "
        "has used. The gateway owns it: this project reads its counters, and never creates or "
        "reconfigures it. If it is wiped nothing errors, usage just reads as zero; the snapshots "
        "below are what can bring it back."
    ),
)
