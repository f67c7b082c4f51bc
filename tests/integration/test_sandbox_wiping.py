"""The bucket of the simulated gateway, wiped repeatedly while requests come in."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest

from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.sandbox.gateway import (
    Budgets,
    Place,
    RunningGate,
    count_contents,
    running_aggregator,
    running_gate,
    wipe,
)
from tests.integration.gateway_harness import ALICE, BOB, contents, costing, definition, spent
from tests.nats_servers import Bucket
from tests.waiting import wait_until

USERS = Budgets([definition("users", "10")])


@pytest.fixture
def place(nats_server: NatsServer) -> Place:
    return Place(nats_server.url, f"wiped-{uuid4().hex[:12]}")


@contextmanager
def traffic(gate: RunningGate) -> Iterator[None]:
    """Let one user spend forever, in amounts that never reach the limit."""
    stop = threading.Event()

    def spend() -> None:
        while not stop.wait(0.002):
            gate.answer(costing("0.000001", BOB))

    thread = threading.Thread(target=spend)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def usage_of(place: Place, user: str) -> Decimal:
    usages = contents(place).usages
    return sum((used for key, used in usages.items() if key.entity == user), Decimal(0))


def test_under_traffic_blocks_drop_and_usage_counts_from_zero(place: Place, ledger: Path) -> None:
    with running_gate(place, ledger, USERS) as gate, running_aggregator(place, USERS):
        with traffic(gate):
            for _ in range(3):
                assert gate.answer(costing("10")).is_allowed
                wait_until(lambda: not gate.answer(costing("0")).is_allowed)
                found = count_contents(place)
                assert (found.tenants, found.counters, found.blocked) == (1, 2, 1)

                assert wipe(place) is not None

                # The exhausted budget spends again: the harm that recovery repairs.
                wait_until(lambda: gate.answer(costing("0")).is_allowed)
                wait_until(lambda: usage_of(place, BOB) > 0)
                assert usage_of(place, ALICE) == 0
        # Later spend is not lost: the counter rises by it.
        last = gate.answer(costing("0", BOB)).number
        wait_until(lambda: newest_counted(place) == last)
        rest = usage_of(place, BOB)
        assert rest < sum(cost for key, cost in spent(ledger, USERS).items() if key.entity == BOB)
        assert gate.answer(costing("3", BOB)).is_allowed
        wait_until(lambda: usage_of(place, BOB) == rest + 3)


def newest_counted(place: Place) -> int:
    """The number of the last counted charge."""
    found = contents(place)
    applied = (json.loads(found.values[key])["applied"] for key in found.of("usage"))
    return max((int(mark.rpartition(":")[2]) for mark in applied), default=0)


def test_existing_keys_are_counted_and_removed_ones_are_not(place: Place) -> None:
    with Bucket.connected(place.url, place.bucket) as bucket:
        bucket.create()
        bucket.put("usage.a.b.lifetime.c", b"1")
        bucket.put("blocked.a.b.lifetime.c", b"{}")
        bucket.put("blocked.a.b.lifetime.d", b"{}")
        bucket.remove("blocked.a.b.lifetime.d")
        bucket.put("usage.nobody", b"1")
    found = count_contents(place)
    assert (found.tenants, found.counters, found.blocked) == (1, 2, 1)
