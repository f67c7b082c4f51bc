"""The identity of a store."""

from budget_recovery_dagster.domain import StoreIdentity
from budget_recovery_dagster.ports import UsageStore


def identity_of(store: UsageStore) -> StoreIdentity:
    """Observe a store that may have no marker, and return its identity."""
    return store.observe("no deployment").identity
