"""The real store with hooks at fixed points."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from budget_recovery_dagster.adapters.nats import NatsUsageStore
from budget_recovery_dagster.domain import (
    BoardOrder,
    BoardResult,
    BudgetWindow,
    CaptureSource,
    ClusterView,
    Configuration,
    Deletions,
    Entity,
    IntendedMarker,
    IsOpen,
    Marker,
    Observation,
    RaiseOrder,
    RaiseResult,
    Room,
    StoreLimits,
    TenantListing,
    TenantReading,
    TenantWindow,
    Window,
)
from budget_recovery_dagster.ports import LiveTenant, TenantReader


def nothing() -> None:
    """Continue without interruption."""


@dataclass(frozen=True)
class Disturbances:
    """Hooks that run each time: after a tenant was read for a capture, before a marker is written,
    before a tenant's counters are raised, and once half of them are in flight."""

    after_reading: Callable[[], None] = nothing
    before_marking: Callable[[], None] = nothing
    before_raising: Callable[[], None] = nothing
    halfway_raised: Callable[[], None] = nothing


@dataclass(frozen=True)
class DisturbedTenant:
    """A live tenant with hooks while counters are raised."""

    live: LiveTenant
    disturbances: Disturbances

    @property
    def reading(self) -> TenantReading:
        return self.live.reading

    def deletion_of(self, of: BudgetWindow, entity: Entity) -> int | None:
        return self.live.deletion_of(of, entity)

    def dropped_at(self, of: BudgetWindow, entity: Entity) -> datetime | None:
        return self.live.dropped_at(of, entity)

    def room_for(
        self, orders: Sequence[RaiseOrder], boards: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> Room:
        return self.live.room_for(orders, boards, is_open=is_open)

    def raise_counters(
        self, orders: Sequence[RaiseOrder], *, is_open: IsOpen
    ) -> tuple[RaiseResult, ...]:
        asked = [0]

        def is_open_or_halfway(window: Window) -> bool:
            asked[0] += 1
            if asked[0] == len(orders) // 2:
                self.disturbances.halfway_raised()
            return is_open(window)

        self.disturbances.before_raising()
        return self.live.raise_counters(orders, is_open=is_open_or_halfway)

    def rebuild_boards(
        self, orders: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> tuple[BoardResult, ...]:
        return self.live.rebuild_boards(orders, is_open=is_open)


@dataclass(frozen=True)
class DisturbedReader:
    """A reader with a hook after each tenant."""

    reader: TenantReader
    disturbances: Disturbances

    def list_tenants(self) -> TenantListing:
        return self.reader.list_tenants()

    def read(self, tenant: str) -> TenantReading:
        reading = self.reader.read(tenant)
        self.disturbances.after_reading()
        return reading


@dataclass(frozen=True)
class DisturbedStore:
    """The real store with hooks."""

    store: NatsUsageStore
    disturbances: Disturbances

    def now(self) -> datetime | None:
        return self.store.now()

    def observe(self, deployment_id: str) -> Observation:
        return self.store.observe(deployment_id)

    def reader(self, source: CaptureSource) -> TenantReader:
        return DisturbedReader(self.store.reader(source), self.disturbances)

    def write_marker(self, deployment_id: str, marker: IntendedMarker, *, after: int) -> Marker:
        self.disturbances.before_marking()
        return self.store.write_marker(deployment_id, marker, after=after)

    def limits(self) -> StoreLimits:
        return self.store.limits()

    def cluster_view(self, seen_at: datetime) -> ClusterView:
        return self.store.cluster_view(seen_at)

    def open_tenant(self, tenant: str) -> LiveTenant:
        return DisturbedTenant(self.store.open_tenant(tenant), self.disturbances)

    def configuration(self) -> Configuration:
        return self.store.configuration()

    def count_keys(
        self, wanted: Mapping[TenantWindow, int], *, within: timedelta
    ) -> Mapping[TenantWindow, int]:
        return self.store.count_keys(wanted, within=within)

    def read_deletions(self, after: int, *, at_most: int, within: timedelta) -> Deletions:
        return self.store.read_deletions(after, at_most=at_most, within=within)


def disturbed(
    open_store: Callable[[], AbstractContextManager[NatsUsageStore]], disturbances: Disturbances
) -> Callable[[], AbstractContextManager[DisturbedStore]]:
    """Return an opener of the store with hooks."""

    @contextmanager
    def opened() -> Iterator[DisturbedStore]:
        with open_store() as store:
            yield DisturbedStore(store, disturbances)

    return opened
