"""Restores and live traffic together lose nothing: a check of every revision."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import pairwise
from uuid import uuid4

import pytest

from budget_recovery_dagster.adapters.nats import open_usage_store
from budget_recovery_dagster.domain import BudgetWindow, RaiseResult, Window, Written
from budget_recovery_dagster.embedded import NatsServer
from tests.contract.racing_writers import RacingWriters, history_of
from tests.contract.restore_orders import NOVEMBER, always, key, order
from tests.nats_servers import PATIENT, Bucket
from tests.waiting import wait_until

HOT = 60
KEYS = 3000
WRITERS = 16
INCREMENTS = 500
OCTOBER = BudgetWindow("b", Window.parse("2026-10"))


@pytest.fixture
def bucket(nats_server: NatsServer) -> Iterator[Bucket]:
    """A bucket that keeps every revision."""
    with Bucket.connected(nats_server.url, f"race-{uuid4().hex}") as bucket:
        bucket.create_with(max_msgs_per_subject=-1, allow_msg_ttl=True)
        yield bucket
        bucket.destroy()


def test_no_counter_goes_down_and_no_increment_is_lost_while_two_restores_run(
    nats_server: NatsServer, bucket: Bucket
) -> None:
    names = [str(number) for number in range(KEYS)]
    chance = random.Random(7)  # noqa: S311 - the same at every run, and no secret
    # Below, within and above the range of the writers.
    point = {name: Decimal(chance.choice([1, 3, 20, 1000])) for name in names}
    orders = [order(name, str(usage)) for name, usage in point.items()]
    others = {
        "blocked.t.b.2026-11.1": b'{"usage":"1"}',
        "ratelimit.t.1": b'{"usage":"1"}',
        key("1", OCTOBER): b'{"usage":"1"}',
        key("1", tenant="u"): b'{"usage":"1"}',
    }
    for name, value in others.items():
        bucket.put(name, value)
    untouched = {name: bucket.stored(name) for name in others}

    def restore() -> tuple[RaiseResult, ...]:
        with open_usage_store(nats_server.url, bucket.name, timeouts=PATIENT) as store:
            return store.open_tenant("t").raise_counters(
                [*orders, order("1", "9", OCTOBER)],
                is_open=lambda window: window == NOVEMBER.window,
            )

    keys = [key(name) for name in names]
    writers = RacingWriters(bucket, keys[:HOT], keys[HOT:], WRITERS)
    with writers.at_work(), ThreadPoolExecutor(2) as pool:
        wait_until(lambda: len(writers.added) > INCREMENTS)
        restores = [pool.submit(restore), pool.submit(restore)]
        done = [each.result() for each in restores]
        at_end = len(writers.added)
        wait_until(lambda: len(writers.added) > at_end + INCREMENTS)

    history = history_of(bucket)
    restored = 0
    for name, usage in point.items():
        revisions = history[key(name)]
        assert revisions[-1][1] >= usage
        for (_, before), (revision, after) in pairwise([(0, Decimal(0)), *revisions]):
            assert after > before
            if revision in writers.added:
                assert after == before + 1
            else:
                # Never a sum: exactly the value of the recovery point.
                assert after == usage
                restored += 1
    # The counters contain every acknowledged increment and nothing else.
    assert writers.added.keys() <= {rev for each in history.values() for rev, _ in each}
    assert restored == sum(each.written is Written.RAISED for results in done for each in results)
    assert restored > KEYS // 2
    for results in done:
        assert results[-1].written is Written.CLOSED
        assert {each.written for each in results[:-1]} <= {Written.RAISED, Written.KEPT}
    assert {name: bucket.stored(name) for name in others} == untouched


def test_counters_are_raised_despite_constant_writes(
    nats_server: NatsServer, bucket: Bucket
) -> None:
    names = ["1", "2", "3"]
    writers = RacingWriters(bucket, [key(name) for name in names], [key("other")], WRITERS)
    with (
        writers.at_work(),
        open_usage_store(nats_server.url, bucket.name, timeouts=PATIENT) as store,
    ):
        wait_until(lambda: len(writers.added) > INCREMENTS)
        results = store.open_tenant("t").raise_counters(
            [order(name, "1000000") for name in names], is_open=always
        )
        assert {result.written for result in results} == {Written.RAISED}
        at_end = len(writers.added)
        wait_until(lambda: len(writers.added) > at_end + INCREMENTS)
    history = history_of(bucket)
    for name in names:
        usages = [usage for _, usage in history[key(name)]]
        assert usages == sorted(usages)
        assert usages[-1] > 1_000_000
