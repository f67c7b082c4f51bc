"""A store with hooks at fixed points of a restore."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime

from budget_recovery_dagster.domain import (
    BoardOrder,
    BoardResult,
    BudgetWindow,
    CaptureSource,
    Entity,
    IsOpen,
    RaiseOrder,
    RaiseResult,
    Room,
    TenantListing,
    TenantReading,
)
from budget_recovery_dagster.ports import LiveTenant, TenantReader
from tests.integration.timeless_store import TimelessStore, opened_store


def nothing(*_: object) -> None:
    """Continue without interruption."""


@dataclass(frozen=True)
class Interruptions:
    """Hooks that run each time at their point, such as before counters of a tenant are raised."""

    after_reading: Callable[[], None] = nothing
    before_raising: Callable[[IsOpen], None] = nothing
    after_raising: Callable[[], None] = nothing
    after_rebuilding: Callable[[], None] = nothing


@dataclass(frozen=True)
class InterruptedTenant:
    """A live tenant with hooks."""

    live: LiveTenant
    interruptions: Interruptions

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
        self.interruptions.before_raising(is_open)
        results = self.live.raise_counters(orders, is_open=is_open)
        self.interruptions.after_raising()
        return results

    def rebuild_boards(
        self, orders: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> tuple[BoardResult, ...]:
        results = self.live.rebuild_boards(orders, is_open=is_open)
        self.interruptions.after_rebuilding()
        return results


@dataclass(frozen=True)
class InterruptedReader:
    """A reader with a hook after each tenant."""

    inner: TenantReader
    interruptions: Interruptions

    def list_tenants(self) -> TenantListing:
        return self.inner.list_tenants()

    def read(self, tenant: str) -> TenantReading:
        reading = self.inner.read(tenant)
        self.interruptions.after_reading()
        return reading


@dataclass(frozen=True)
class InterruptedStore(TimelessStore):
    """The real store, with hooks."""

    interruptions: Interruptions

    def reader(self, source: CaptureSource) -> TenantReader:
        return InterruptedReader(super().reader(source), self.interruptions)

    def open_tenant(self, tenant: str) -> LiveTenant:
        return InterruptedTenant(super().open_tenant(tenant), self.interruptions)


OpenInterrupted = Callable[[], AbstractContextManager[InterruptedStore]]


@contextmanager
def opened_interrupted(interruptions: Interruptions) -> Iterator[InterruptedStore]:
    """Open the store of the settings with hooks."""
    with opened_store() as store:
        yield InterruptedStore(store.store, interruptions)


def interrupted(interruptions: Interruptions) -> OpenInterrupted:
    """Return an opener of the store of the settings with hooks."""
    return lambda: opened_interrupted(interruptions)
