"""The simulated gateway's bucket, destroyed again and again while requests come in."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest

from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.in_process import (
    RunningGate,
    running_aggregator,
    running_gate,
)
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place
from budget_recovery_dagster.sandbox.gateway.wiping import count_contents, wipe
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from tests.integration.gateway_house import ALICE, BOB, contents, costing, definition, spent
from tests.nats_servers import Bucket
from tests.waiting import wait_until

USERS = Budgets([definition("users", "10")])


@pytest.fixture
def place(nats_server: NatsServer) -> Place:
    return Place(nats_server.url, f"wiped-{uuid4().hex[:12]}")


@contextmanager
def traffic(gate: RunningGate) -> Iterator[None]:
    """Have one user spend without end, a cost that never adds up to the limit."""
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

                assert wipe(place).seconds is not None

                # What was exhausted spends again: the very harm that recovery is for.
                wait_until(lambda: gate.answer(costing("0")).is_allowed)
                wait_until(lambda: usage_of(place, BOB) > 0)
                assert usage_of(place, ALICE) == 0
        # Nothing that comes later is lost: the counter rises by what is spent from here on.
        last = gate.answer(costing("0", BOB)).number
        wait_until(lambda: newest_counted(place) == last)
        rest = usage_of(place, BOB)
        assert rest < sum(cost for key, cost in spent(ledger, USERS).items() if key.entity == BOB)
        assert gate.answer(costing("3", BOB)).is_allowed
        wait_until(lambda: usage_of(place, BOB) == rest + 3)


def newest_counted(place: Place) -> int:
    """The number of the last charge that is in a counter."""
    found = contents(place)
    applied = (json.loads(found.values[key])["applied"] for key in found.of("usage"))
    return max((int(mark.rpartition(":")[2]) for mark in applied), default=0)


def test_what_is_there_is_counted_and_what_was_removed_is_not(place: Place) -> None:
    with Bucket.connected(place.url, place.bucket) as bucket:
        bucket.create()
        bucket.put("usage.a.b.lifetime.c", b"1")
        bucket.put("blocked.a.b.lifetime.c", b"{}")
        bucket.put("blocked.a.b.lifetime.d", b"{}")
        bucket.remove("blocked.a.b.lifetime.d")
        bucket.put("usage.nobody", b"1")
    found = count_contents(place)
    assert (found.tenants, found.counters, found.blocked) == (1, 2, 1)
