"""Captures as of other days, on real servers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.bootstrap import OpenedDatabase
from budget_recovery_dagster.domain.identity import StoreIdentity
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.ports import TenantReader, UsageStore
from budget_recovery_dagster.services.capture import CaptureService
from budget_recovery_dagster.services.capture_outcome import Captured, TenantOutcome
from budget_recovery_dagster.settings import load_settings


class SteppedClock:
    """The database's clock as a test sets it; every look at it is a little later."""

    def __init__(self, moment: datetime) -> None:
        self.moment = moment

    def __call__(self, _connection: object) -> datetime:
        self.moment += timedelta(milliseconds=1)
        return self.moment


@dataclass(frozen=True)
class TimelessStore:
    """A store whose server does not tell the time, which a test's clock would contradict."""

    store: UsageStore

    def now(self) -> None:
        return None

    def identity(self) -> StoreIdentity:
        return self.store.identity()

    def reader(self, source: CaptureSource) -> TenantReader:
        return self.store.reader(source)


@contextmanager
def opened_at(url: str, clock: SteppedClock) -> Iterator[OpenedDatabase]:
    """Open a database that takes its time from a test."""
    with Database(url, clock=clock) as database:
        yield OpenedDatabase.of(database, load_settings())


def capture(
    database: OpenedDatabase,
    clock: SteppedClock,
    run_id: str = "a run",
    on_outcome: Callable[[TenantOutcome], None] = lambda _: None,
) -> Captured:
    """Capture the hour that the clock shows."""
    captured = _timeless(database.capture_service()).capture(
        Hour.containing(clock.moment), run_id=run_id, holder=run_id, on_outcome=on_outcome
    )
    assert isinstance(captured, Captured)
    return captured


def _timeless(service: CaptureService) -> CaptureService:
    open_store = service.open_store

    @contextmanager
    def opened() -> Iterator[UsageStore]:
        with open_store() as store:
            yield TimelessStore(store)

    def open_timeless() -> AbstractContextManager[UsageStore]:
        return opened()

    return replace(service, open_store=open_timeless)
