"""The sources of a tenant's usages: the keys of each, and how what stands under them is read."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from budget_recovery_dagster.adapters.nats_boards import read_boards
from budget_recovery_dagster.adapters.nats_codec import (
    BOARDS,
    COUNTERS,
    KeysRead,
    decode_name,
    printable,
    tenant_prefix,
)
from budget_recovery_dagster.adapters.nats_counters import read_counters
from budget_recovery_dagster.domain.counters import UnreadableKey, UnusableNameError
from budget_recovery_dagster.domain.snapshots import CaptureSource, TenantReading
from budget_recovery_dagster.errors import StoreReadError
from budget_recovery_dagster.ports import TenantListing


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of keys: how they begin, and what those of a tenant mean."""

    first: str
    decode: Callable[[str, KeysRead], TenantReading]


SOURCES: Mapping[CaptureSource, Source] = {
    CaptureSource.COUNTERS: Source(COUNTERS, read_counters),
    CaptureSource.LEADERBOARDS: Source(BOARDS, read_boards),
}


@dataclass(frozen=True, slots=True)
class SourceReader:
    """Reads tenants from one source of a store.

    The store gives what it has under a prefix that ends in a dot: ``list_keys`` the keys, and
    ``read_values`` their values too.
    """

    source: Source
    list_keys: Callable[[str], Iterable[str]]
    read_values: Callable[[str], KeysRead]

    def list_tenants(self) -> TenantListing:
        """List the tenants by their keys; one whose keys are all deleted may still be listed."""
        return list_tenants(self.source.first, self.list_keys(f"{self.source.first}."))

    def read(self, tenant: str) -> TenantReading:
        """Read a tenant's counters from every key of the source that existed before the call."""
        return self.source.decode(
            tenant, self.read_values(prefix_to_read(self.source.first, tenant))
        )


def list_tenants(first: str, keys: Iterable[str]) -> TenantListing:
    """Tell the tenants that these keys, which begin with the token ``first``, belong to."""
    tenants: dict[str, str] = {}
    unreadable: list[UnreadableKey] = []
    for key in keys:
        token, goes_on, _ = key.removeprefix(f"{first}.").partition(".")
        try:
            if not goes_on:
                raise UnusableNameError("ends after the tenant")
            if token not in tenants:
                tenants[token] = decode_name(token)
                tenant_prefix(first, tenants[token])
        except UnusableNameError as error:
            tenants.pop(token, None)
            unreadable.append(UnreadableKey(printable(key), str(error)))
    return TenantListing(
        frozenset(tenants.values()), tuple(sorted(unreadable, key=lambda key: key.key))
    )


def prefix_to_read(first: str, tenant: str) -> str:
    """Return the prefix under which all that belongs to a tenant is read.

    Raises:
        StoreReadError: no counter can belong to a tenant of this name.
    """
    try:
        return tenant_prefix(first, tenant)
    except UnusableNameError as error:
        raise StoreReadError(
            f"No counter can belong to the tenant {tenant[:100]!a}: {error}.",
            "use the name of a tenant as the gateway knows it.",
        ) from error
