"""Reading a tenant's counters from their own keys."""

from budget_recovery_dagster.adapters.nats_codec import KeysRead, decode_key, decode_keys
from budget_recovery_dagster.adapters.nats_ttl import expiry_after
from budget_recovery_dagster.adapters.nats_values import decode_value
from budget_recovery_dagster.domain.counters import (
    CounterReading,
    OmittedCounter,
    UnreadableUsageError,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource, TenantReading


def read_counters(tenant: str, found: KeysRead) -> TenantReading:
    """Decode all that was found under a tenant's prefix; what cannot be read is named."""
    keys, unreadable = decode_keys(found.values, decode_key)
    counters: list[CounterReading] = []
    omitted: list[OmittedCounter] = []
    for key, counter in keys:
        value = found.values[key]
        try:
            if value.fault is not None:
                raise UnreadableUsageError(value.fault)
            usage, shape = decode_value(value.data)
        except UnreadableUsageError as error:
            omitted.append(OmittedCounter(counter.of, counter.entity, key, str(error)))
            continue
        expiry = expiry_after(value.ttl, value.written_ns, counter.of.window)
        counters.append(CounterReading(counter.of, counter.entity, usage, shape, expiry))
    return TenantReading(
        tenant=tenant,
        source=CaptureSource.COUNTERS,
        counters=tuple(counters),
        omitted=tuple(omitted),
        unreadable=unreadable,
        is_partial=found.is_partial,
    )
