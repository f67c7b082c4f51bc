"""What the fake usage store can simulate, in addition to its contract."""

from datetime import UTC, datetime

import pytest

from budget_recovery_dagster.domain import CaptureSource, StoreIdentity
from budget_recovery_dagster.errors import StoreReadError, StoreUnreachableError
from tests.boards import board, board_key
from tests.fakes.usage_store import MemoryUsageStore
from tests.identities import identity_of

COUNTERS = CaptureSource.COUNTERS
MONDAY = datetime(2026, 11, 30, tzinfo=UTC)


@pytest.fixture
def store() -> MemoryUsageStore:
    store = MemoryUsageStore(MONDAY)
    for entity in ("a", "b", "c", "d"):
        store.put_usage("t", "budget", "2026-11", entity, "1.5")
    return store


def entities(store: MemoryUsageStore) -> list[str | None]:
    return [counter.entity for counter in store.reader(COUNTERS).read("t").counters]


def test_a_failing_tenant_does_not_affect_others(store: MemoryUsageStore) -> None:
    store.put_usage("other", "budget", "lifetime", None, "2")
    failure = store.failures["t"] = StoreReadError("broken off.", "read again.")
    with pytest.raises(StoreReadError) as caught:
        store.reader(COUNTERS).read("t")
    assert caught.value is failure
    assert store.reader(COUNTERS).list_tenants().tenants == {"t", "other"}
    assert len(store.reader(COUNTERS).read("other").counters) == 1
    del store.failures["t"]
    assert len(store.reader(COUNTERS).read("t").counters) == 4


def test_the_listing_and_the_identity_fail_separately(store: MemoryUsageStore) -> None:
    store.listing_failure = StoreUnreachableError("down.", "start it.")
    with pytest.raises(StoreUnreachableError):
        store.reader(COUNTERS).list_tenants()
    assert identity_of(store) == StoreIdentity(MONDAY, 4)
    store.listing_failure, store.identity_failure = None, store.listing_failure
    with pytest.raises(StoreUnreachableError):
        identity_of(store)
    with pytest.raises(StoreUnreachableError):
        store.now()
    assert store.reader(COUNTERS).list_tenants().tenants == {"t"}


def test_it_reports_the_time_that_was_set_or_none(store: MemoryUsageStore) -> None:
    assert store.now() is None
    store.clock = MONDAY
    assert store.now() == MONDAY


def test_the_store_can_be_replaced_by_an_empty_one(store: MemoryUsageStore) -> None:
    later = MONDAY.replace(hour=1)
    store.recreate(later)
    assert identity_of(store) == StoreIdentity(later, 0)
    assert store.reader(COUNTERS).list_tenants().tenants == frozenset()


def test_a_read_includes_a_concurrent_write(store: MemoryUsageStore) -> None:
    store.during_read = lambda tenant: store.put_usage(tenant, "budget", "2026-11", "e", "2")
    assert entities(store) == ["a", "b", "c", "d", "e"]


def test_a_read_includes_a_leaderboard_written_meanwhile(store: MemoryUsageStore) -> None:
    for budget in ("x", "y"):
        store.put(board_key("t", budget, "2026-11"), board({"a": "1"}))
    store.during_read = lambda tenant: store.put(
        board_key(tenant, "z", "2026-11"), board({"a": "2"})
    )
    reading = store.reader(CaptureSource.LEADERBOARDS).read("t")
    assert [counter.of.budget for counter in reading.counters] == ["x", "y", "z"]
    assert not reading.is_partial


def test_a_purge_during_a_read_restarts_the_read(store: MemoryUsageStore) -> None:
    store.during_read = lambda _: store.purge("usage.t.budget.2026-11.d")
    assert entities(store) == ["a", "b", "c"]
    assert not store.reader(COUNTERS).read("t").is_partial


def test_purges_during_two_reads_make_the_reading_partial(store: MemoryUsageStore) -> None:
    purged = iter("dc")
    store.during_read = lambda _: store.purge(f"usage.t.budget.2026-11.{next(purged)}")
    reading = store.reader(COUNTERS).read("t")
    assert reading.is_partial
    assert [counter.entity for counter in reading.counters] == ["a", "b"]
