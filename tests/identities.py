"""The identity of a store, without more."""

from budget_recovery_dagster.domain import StoreIdentity
from budget_recovery_dagster.ports import UsageStore


def identity_of(store: UsageStore) -> StoreIdentity:
    """Look at a store that nobody need have marked."""
    return store.observe("no deployment").identity
