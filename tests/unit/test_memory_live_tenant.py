"""Failures and races that the fake usage store can simulate during writes."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.nats import MAX_REJECTIONS
from budget_recovery_dagster.domain import (
    NO_EXPIRY,
    BudgetWindow,
    CaptureSource,
    ClusterView,
    IntendedMarker,
    RaiseOrder,
    RaiseResult,
    ValueShape,
    Window,
    Written,
)
from budget_recovery_dagster.errors import (
    StoreError,
    StoreMissingError,
    StoreNoQuorumError,
    StorePermissionError,
    StoreWriteError,
)
from tests.fakes.usage_store import MemoryUsageStore, alone
from tests.identities import identity_of

NOVEMBER = BudgetWindow("b", Window.parse("2026-11"))
MONDAY = datetime(2026, 11, 30, tzinfo=UTC)
REFUSAL = StoreWriteError("The disk is full.", "make room.")


@pytest.fixture
def store() -> MemoryUsageStore:
    store = MemoryUsageStore(MONDAY)
    for entity in ("a", "b", "c"):
        store.put_usage("t", "b", "2026-11", entity, "1")
    return store


def order(entity: str, usage: str) -> RaiseOrder:
    return RaiseOrder(NOVEMBER, entity, Decimal(usage), ValueShape.TEXT, NO_EXPIRY)


def raise_all(store: MemoryUsageStore) -> tuple[RaiseResult, ...]:
    orders = [order(entity, "5") for entity in ("a", "b", "c")]
    return store.open_tenant("t").raise_counters(orders, is_open=lambda _: True)


def usages(store: MemoryUsageStore) -> list[Decimal]:
    return [counter.usage for counter in store.open_tenant("t").reading.counters]


def test_a_write_is_refused_by_its_number_and_earlier_writes_are_kept(
    store: MemoryUsageStore,
) -> None:
    store.write_failures[2] = REFUSAL
    with pytest.raises(StoreWriteError) as caught:
        raise_all(store)
    assert caught.value is REFUSAL
    assert usages(store) == [5, 1, 5]
    assert store.writes == 3
    assert [each.written for each in raise_all(store)] == [
        Written.KEPT,
        Written.RAISED,
        Written.KEPT,
    ]


def test_the_limit_of_refusals_counts_only_consecutive_ones(store: MemoryUsageStore) -> None:
    store.write_failures = dict.fromkeys(range(1, 1000), REFUSAL)
    written = [100, 200, 300]
    for number in written:
        del store.write_failures[number]
    orders = [order(str(number), "5") for number in range(1, 1000)]
    with pytest.raises(StoreWriteError):
        store.open_tenant("u").raise_counters(orders, is_open=lambda _: True)
    assert store.writes == 300 + MAX_REJECTIONS
    found = store.open_tenant("u").reading.counters
    assert [counter.entity for counter in found] == [str(number) for number in written]


def test_a_failure_other_than_a_refusal_ends_the_writes(store: MemoryUsageStore) -> None:
    store.write_failures[2] = StoreNoQuorumError("no quorum.", "wait.")
    with pytest.raises(StoreNoQuorumError):
        raise_all(store)
    assert usages(store) == [5, 1, 1]


def test_a_value_that_is_too_large_is_not_written(store: MemoryUsageStore) -> None:
    store.max_value = 10
    results = raise_all(store)
    assert {(each.written, each.before) for each in results} == {(Written.REFUSED, Decimal(1))}
    assert usages(store) == [1, 1, 1]
    assert store.writes == 0


def test_another_writer_can_write_between_decision_and_write(
    store: MemoryUsageStore,
) -> None:
    competing = iter([lambda: store.put_usage("t", "b", "2026-11", "a", "7")])

    def step_in(key: str) -> None:
        assert key.startswith("usage.t.b.2026-11.")
        next(competing, lambda: None)()

    store.before_write = step_in
    written = [(each.written, each.before) for each in raise_all(store)]
    assert written[0] == (Written.KEPT, Decimal(7))
    assert usages(store) == [7, 5, 5]


def test_writes_use_the_time_that_was_set(store: MemoryUsageStore) -> None:
    store.clock = MONDAY
    store.put(
        "usage.t.b.lifetime.e", b'{"usage":"1","updated_at":"?"}', ttl="1h", written_at=MONDAY
    )
    store.clock = MONDAY + timedelta(minutes=10)
    lifetime = BudgetWindow("b", Window.parse("lifetime"))
    live = store.open_tenant("t")
    of = RaiseOrder(lifetime, "e", Decimal(2), ValueShape.TEXT, NO_EXPIRY)
    live.raise_counters([of], is_open=lambda _: True)
    value = store.live_key("usage.t.b.lifetime.e").value
    assert value is not None
    assert value.data == b'{"usage":"2","updated_at":"2026-11-30T00:10:00Z"}'
    assert value.ttl == "3000"


def test_marker_observation_and_cluster_fail_separately(store: MemoryUsageStore) -> None:
    store.marker_failure = StorePermissionError("denied.", "grant it.")
    with pytest.raises(StorePermissionError):
        store.write_marker("d", IntendedMarker("n"), after=0)
    assert store.observe("d").marker is None
    store.observe_failure, store.marker_failure = store.marker_failure, None
    with pytest.raises(StorePermissionError):
        store.observe("d")
    store.observe_failure = None
    assert store.write_marker("d", IntendedMarker("n"), after=0).revision == 4
    store.cluster_failure = StoreNoQuorumError("no quorum.", "wait.")
    with pytest.raises(StoreNoQuorumError):
        store.cluster_view(MONDAY)
    assert identity_of(store).last_sequence == 4


def test_the_cluster_and_the_age_limit_can_be_set(store: MemoryUsageStore) -> None:
    assert store.cluster_view(MONDAY) == alone(MONDAY)
    store.cluster = lambda seen_at: ClusterView(seen_at, "C", None, None, 3, ())
    assert store.cluster_view(MONDAY).leader is None
    store.keeps_for = timedelta(days=30)
    assert store.observe("d").keeps_for == timedelta(days=30)


def test_every_call_reports_a_missing_bucket(store: MemoryUsageStore) -> None:
    live = store.open_tenant("t")
    store.is_gone = True
    calls: list[Callable[[], object]] = [
        store.now,
        lambda: store.observe("d"),
        lambda: store.write_marker("d", IntendedMarker("n"), after=0),
        lambda: store.cluster_view(MONDAY),
        lambda: store.open_tenant("t"),
        store.reader(CaptureSource.COUNTERS).list_tenants,
        lambda: store.reader(CaptureSource.COUNTERS).read("t"),
        lambda: live.raise_counters([order("a", "5")], is_open=lambda _: True),
    ]
    for call in calls:
        with pytest.raises(StoreMissingError):
            call()
    store.is_gone = False
    assert usages(store) == [1, 1, 1]


def test_a_failing_tenant_does_not_affect_others(store: MemoryUsageStore) -> None:
    failure: StoreError = StoreNoQuorumError("no quorum.", "wait.")
    store.failures["t"] = failure
    with pytest.raises(StoreNoQuorumError):
        store.open_tenant("t")
    assert store.open_tenant("u").reading.counters == ()
