"""Captures at other dates, on real servers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from budget_recovery_dagster.adapters.nats import NatsUsageStore, open_usage_store
from budget_recovery_dagster.adapters.postgres import Database
from budget_recovery_dagster.domain import (
    CaptureSource,
    ClusterView,
    Configuration,
    Deletions,
    Hour,
    IntendedMarker,
    Marker,
    Observation,
    StoreLimits,
    TenantWindow,
)
from budget_recovery_dagster.ports import ControlPlane, LiveTenant, TenantReader
from budget_recovery_dagster.services import Captured, TenantOutcome
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import control_plane_on
from tests import services


class SteppedClock:
    """A database clock that a test sets; it advances slightly with each reading."""

    def __init__(self, time: datetime) -> None:
        self.time = time

    def __call__(self, _connection: object) -> datetime:
        self.time += timedelta(milliseconds=1)
        return self.time


@dataclass(frozen=True)
class LeapingClock:
    """The clock of a database that takes its time from a test; waiting moves it forward."""

    database: Database
    clock: SteppedClock

    def now(self) -> datetime:
        return self.database.now()

    def host_time(self) -> datetime:
        return self.clock.time

    def wait(self, span: timedelta) -> None:
        self.clock.time += max(span, timedelta(0))


@dataclass(frozen=True)
class TimelessStore:
    """A store whose server does not report its time, which would contradict the test's clock."""

    store: NatsUsageStore

    def now(self) -> None:
        return None

    def observe(self, deployment_id: str) -> Observation:
        return self.store.observe(deployment_id)

    def reader(self, source: CaptureSource) -> TenantReader:
        return self.store.reader(source)

    def write_marker(self, deployment_id: str, marker: IntendedMarker, *, after: int) -> Marker:
        return self.store.write_marker(deployment_id, marker, after=after)

    def limits(self) -> StoreLimits:
        return self.store.limits()

    def cluster_view(self, seen_at: datetime) -> ClusterView:
        return self.store.cluster_view(seen_at)

    def open_tenant(self, tenant: str) -> LiveTenant:
        return self.store.open_tenant(tenant)

    def configuration(self) -> Configuration:
        return self.store.configuration()

    def count_keys(
        self, wanted: Mapping[TenantWindow, int], *, within: timedelta
    ) -> Mapping[TenantWindow, int]:
        return self.store.count_keys(wanted, within=within)

    def read_deletions(self, after: int, *, at_most: int, within: timedelta) -> Deletions:
        return self.store.read_deletions(after, at_most=at_most, within=within)


@contextmanager
def opened_store() -> Iterator[TimelessStore]:
    """Open the store of the settings."""
    settings = services.present_settings()
    with open_usage_store(settings.require_nats_url(), settings.bucket) as store:
        yield TimelessStore(store)


@contextmanager
def opened_at(url: str, clock: SteppedClock) -> Iterator[ControlPlane]:
    """Open a database that takes its time from a test."""
    with Database(url, clock=clock) as database:
        plane = control_plane_on(database, services.present_settings().bucket)
        yield replace(plane, clock=LeapingClock(database, clock))


def capture(
    database: ControlPlane,
    clock: SteppedClock,
    run_id: str = "a run",
    on_outcome: Callable[[TenantOutcome], None] = lambda _: None,
    settings: Settings | None = None,
) -> Captured:
    """Capture the hour of the clock."""
    captured = services.capture(
        database,
        Hour.containing(clock.time),
        open_store=opened_store,
        settings=settings,
        run_id=run_id,
        holder=run_id,
        on_outcome=on_outcome,
    )
    assert isinstance(captured, Captured)
    return captured
