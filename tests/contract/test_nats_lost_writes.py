"""Writes to a real bucket that are lost or get no response."""

import threading
from collections.abc import Iterator
from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.nats import NatsUsageStore, open_usage_store
from budget_recovery_dagster.domain import IntendedMarker, RaiseResult, Window, Written
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import (
    StoreUnreachableError,
)
from tests.contract.restore_orders import (
    always,
    key,
    order,
)
from tests.contract.restored_bucket import IMPATIENT, WRITING, bucket_of
from tests.nats_servers import (
    PATIENT,
    Bucket,
    DisturbedNetwork,
    prompt_failure_of,
    usages,
)


@pytest.fixture
def bucket(nats_server: NatsServer) -> Iterator[Bucket]:
    with bucket_of(nats_server) as bucket:
        bucket.create()
        yield bucket


@pytest.fixture
def network(nats_server: NatsServer) -> Iterator[DisturbedNetwork]:
    with DisturbedNetwork(nats_server.url, watched=WRITING) as network:
        yield network


def raise_one(store: NatsUsageStore, usage: str = "5") -> RaiseResult:
    (result,) = store.open_tenant("t").raise_counters([order("e", usage)], is_open=always)
    return result


def test_a_write_with_a_lost_acknowledgement_is_found_stored(
    bucket: Bucket, network: DisturbedNetwork
) -> None:
    lost: list[bytes] = []

    def lose_first_ack(answer: bytes) -> bytes:
        if not lost and b'"seq":' in answer and b"STREAM" not in answer and WRITING in sent:
            lost.append(answer)
            return b""
        return answer

    sent: set[bytes] = set()

    def note(_: int) -> None:
        sent.add(WRITING)

    bucket.put(key("e"), b'{"usage":"1"}')
    network.before_request = note
    network.rewrite = lose_first_ack
    with open_usage_store(network.url, bucket.name, timeouts=IMPATIENT) as store:
        result = raise_one(store)
        assert (result.written, result.before) == (Written.RAISED, Decimal(1))
        assert len(lost) == 1
        assert network.requests == 1
        assert usages(store, "t") == {"e": "5"}


def test_a_lost_write_is_repeated(bucket: Bucket, network: DisturbedNetwork) -> None:
    network.before_request = lambda number: number > 1
    with open_usage_store(network.url, bucket.name, timeouts=IMPATIENT) as store:
        assert raise_one(store).written is Written.RAISED
        assert network.requests == 2
        assert usages(store, "t") == {"e": "5"}


def test_a_lost_write_is_decided_again_after_a_write_of_the_gateway(
    bucket: Bucket, network: DisturbedNetwork
) -> None:
    def lose_first(number: int) -> bool:
        if number == 1:
            bucket.put(key("e"), b'{"usage":"7"}')
        return number > 1

    bucket.put(key("e"), b'{"usage":"1"}')
    network.before_request = lose_first
    with open_usage_store(network.url, bucket.name, timeouts=IMPATIENT) as store:
        result = raise_one(store)
        assert (result.written, result.before) == (Written.KEPT, Decimal(7))


def test_a_store_that_never_responds_to_a_write_is_unreachable(
    bucket: Bucket, network: DisturbedNetwork
) -> None:
    network.before_request = lambda _: False
    with open_usage_store(network.url, bucket.name, timeouts=IMPATIENT) as store:
        failure = prompt_failure_of(lambda: raise_one(store))
        assert isinstance(failure, StoreUnreachableError)
        assert key("e") in failure.message
        failure = prompt_failure_of(lambda: store.write_marker("d", IntendedMarker("n"), after=0))
        assert isinstance(failure, StoreUnreachableError)


def test_a_connection_lost_during_a_write_is_reported(
    bucket: Bucket, network: DisturbedNetwork
) -> None:
    network.before_request = lambda _: network.cut()
    with open_usage_store(network.url, bucket.name, timeouts=PATIENT) as store:
        failure = prompt_failure_of(lambda: raise_one(store))
        assert isinstance(failure, StoreUnreachableError)
        network.before_request = None
        assert raise_one(store).written in (Written.RAISED, Written.KEPT)


def test_a_decision_slower_than_the_timeout_loses_no_response(
    bucket: Bucket, nats_server: NatsServer
) -> None:
    slowly = threading.Event()
    asked: list[Window] = []

    def is_open(window: Window) -> bool:
        asked.append(window)
        slowly.wait(IMPATIENT.answer)
        return True

    orders = [order(str(number), "5") for number in range(5)]
    with open_usage_store(nats_server.url, bucket.name, timeouts=IMPATIENT) as store:
        results = store.open_tenant("t").raise_counters(orders, is_open=is_open)
        assert [result.written for result in results] == [Written.RAISED] * 5
        # No request timed out, so nothing was decided twice.
        assert len(asked) == 5
