"""Reads during concurrent writes, purges and interruptions."""

import random
import threading
import time
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from budget_recovery_dagster.adapters.nats import Timeouts, consumers, open_usage_store
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import StoreReadError
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import store_opener
from tests.boards import board, board_key
from tests.contract.nats_scene import Scene, counters, set_scene
from tests.identities import identity_of
from tests.nats_servers import (
    BOARDS,
    COUNTERS,
    failure_of,
    publish_raw,
    publish_with_raw_headers,
    usages,
)
from tests.waiting import wait_until

MANY = 2 * consumers.BATCH + 2000


@pytest.fixture
def scene(nats_server: NatsServer) -> Iterator[Scene]:
    with set_scene(nats_server) as scene:
        yield scene


@pytest.mark.parametrize("count", [consumers.BATCH - 1, consumers.BATCH, MANY])
def test_a_read_spans_batches(scene: Scene, count: int) -> None:
    scene.bucket.put_many(counters("b", count))
    reading = scene.store.reader(COUNTERS).read("t")
    assert len({counter.entity for counter in reading.counters}) == count
    assert not reading.is_partial
    assert scene.network.requests == count // consumers.BATCH + 1


def test_no_key_is_missed_during_concurrent_writes(scene: Scene) -> None:
    before = counters("b", MANY)
    scene.bucket.put_many(before)
    overwritten = list(before)[::-2]

    def write(number: int) -> None:
        # Each overwritten key moves to the end of the stream, behind keys that are created now.
        # Some have been delivered before.
        if number <= 3:
            written = dict.fromkeys(overwritten, b"%d" % (number + 1))
            scene.bucket.put_many(written | counters("new", 3000))

    scene.network.before_request = write
    reading = scene.store.reader(COUNTERS).read("t")
    found = {counter.entity: counter for counter in reading.counters if counter.of.budget == "b"}
    assert len(found) == MANY
    assert sum(counter.usage == 4 for counter in found.values()) == len(overwritten)
    assert not reading.is_partial


def test_no_leaderboard_is_missed_during_concurrent_writes(scene: Scene) -> None:
    def rank(budgets: range, usage: int) -> dict[str, bytes]:
        return {
            board_key("t", f"b{number}", "2026-11"): board({"a": str(usage), "b": "1"})
            for number in budgets
        }

    scene.bucket.put_many(rank(range(MANY), 2))

    def write(number: int) -> None:
        # As above: these keys move behind new ones.
        if number <= 3:
            overwritten = rank(range(MANY - 1, 0, -2), 2 + number)
            scene.bucket.put_many(overwritten | rank(range(MANY, MANY + 3000), 9))

    scene.network.before_request = write
    reading = scene.store.reader(BOARDS).read("t")
    found = {
        counter.of.budget: counter.usage for counter in reading.counters if counter.entity == "a"
    }
    assert {f"b{number}" for number in range(MANY)} <= set(found)
    assert sum(usage == 5 for usage in found.values()) == MANY // 2
    assert not reading.is_partial


def test_leaderboard_purges_during_two_reads_make_the_reading_partial(scene: Scene) -> None:
    for group in ("kept", "first", "second"):
        scene.bucket.put_many(
            {
                f"leaderboard.t.{group}.{year:04d}-{month:02d}": board({"a": "1"})
                for year in range(1, 301)
                for month in range(1, 13)
            }
        )

    def purge_twice(number: int) -> None:
        # A pull returns 5,000 of the 10,800; the second one now returns 3,600 and the end. The two
        # pulls of the next read return the same.
        if number == 2:
            scene.bucket.purge("leaderboard.t.first.")
        elif number == 4:
            scene.bucket.purge("leaderboard.t.second.")

    scene.network.before_request = purge_twice
    reading = scene.store.reader(BOARDS).read("t")
    assert reading.is_partial
    # The remaining group, and the part of the last one that arrived before its purge.
    assert len(reading.counters) == consumers.BATCH


def test_no_key_is_missed_during_concurrent_writes_at_full_speed(
    scene: Scene, nats_server: NatsServer
) -> None:
    before = counters("b", MANY)
    scene.bucket.put_many(before)
    order = random.Random(1)  # noqa: S311 - no secret
    # In random order, so that the server's pending count reaches zero too early.
    writings = [
        (scene.bucket.subject(key).encode(), b"%d" % value)
        for value in range(2, 22)
        for key in order.sample(list(before), MANY)
    ]
    writer = threading.Thread(target=publish_raw, args=(nats_server.url, writings))
    writer.start()
    readings = 0
    while writer.is_alive():
        reading = scene.store.reader(COUNTERS).read("t")
        assert len(reading.counters) == MANY
        assert not reading.is_partial
        readings += 1
    writer.join()
    assert readings > 0


def test_a_purge_during_a_read_is_detected_and_the_read_is_repeated(scene: Scene) -> None:
    for budget in ("kept", "purged"):
        scene.bucket.put_many(counters(budget, consumers.BATCH + 1))

    def purge_once(number: int) -> None:
        if number == 2:
            scene.bucket.purge("usage.t.purged.")

    scene.network.before_request = purge_once
    reading = scene.store.reader(COUNTERS).read("t")
    assert {counter.of.budget for counter in reading.counters} == {"kept"}
    assert len(reading.counters) == consumers.BATCH + 1
    # The second read returned as many keys as announced.
    assert not reading.is_partial
    assert scene.network.requests == 4


def test_purges_during_two_reads_make_the_reading_partial(scene: Scene) -> None:
    for budget in ("kept", "first", "second"):
        scene.bucket.put_many(counters(budget, consumers.BATCH))

    def purge_twice(number: int) -> None:
        if number == 2:
            scene.bucket.purge("usage.t.first.")
        elif number == 5:
            scene.bucket.purge("usage.t.second.")

    scene.network.before_request = purge_twice
    reading = scene.store.reader(COUNTERS).read("t")
    assert reading.is_partial
    assert len(reading.counters) == consumers.BATCH
    assert {counter.of.budget for counter in reading.counters} == {"kept"}


def test_deletions_during_a_read_do_not_make_the_reading_partial(scene: Scene) -> None:
    before = counters("b", consumers.BATCH + 10)
    scene.bucket.put_many(before)
    last = list(before)[-1]
    scene.network.before_request = lambda number: scene.bucket.remove(last) if number == 2 else None
    reading = scene.store.reader(COUNTERS).read("t")
    assert len(reading.counters) == consumers.BATCH + 9
    assert not reading.is_partial
    assert scene.network.requests == 2


def test_expired_keys_are_absent(scene: Scene) -> None:
    scene.bucket.put("usage.t.b.2026-11.stays", b"1")
    scene.bucket.put("usage.t.b.2026-11.goes", b"1", {"Nats-TTL": "1s"})
    scene.bucket.put("usage.t.b.2026-11.purged", b"", {"KV-Operation": "PURGE"})
    before = identity_of(scene.store).last_sequence
    # The server's delete marker has its own sequence.
    wait_until(lambda: identity_of(scene.store).last_sequence > before)
    assert scene.bucket.messages() == 3
    reading = scene.store.reader(COUNTERS).read("t")
    assert [counter.entity for counter in reading.counters] == ["stays"]
    assert reading.omitted == ()
    assert not reading.is_partial


def test_a_key_that_is_not_utf8_does_not_affect_other_keys(
    scene: Scene, nats_server: NatsServer
) -> None:
    scene.bucket.put("usage.t.b.2026-11.good", b"1")
    subject = b"$KV." + scene.bucket.name.encode() + b".usage.t.b.2026-11.\xff\xfe"
    publish_raw(nats_server.url, [(subject, b"1")])
    reading = scene.store.reader(COUNTERS).read("t")
    assert [counter.entity for counter in reading.counters] == ["good"]
    (unreadable,) = reading.unreadable
    assert unreadable.key == r"usage.t.b.2026-11.\xff\xfe"
    assert not reading.is_partial


@pytest.mark.parametrize("headers", [b"NATS/1.0", b"N", b"NATS/1.0 \xff\xfe\xfd"])
def test_unreadable_headers_do_not_affect_other_keys(
    scene: Scene, nats_server: NatsServer, headers: bytes
) -> None:
    for tenant in ("t", "u"):
        scene.bucket.put(f"usage.{tenant}.b.2026-11.good", b"1")
    subject = scene.bucket.subject("usage.t.b.2026-11.bad")
    publish_with_raw_headers(nats_server.url, subject, headers, b"2")
    reading = scene.store.reader(COUNTERS).read("t")
    assert [counter.entity for counter in reading.counters] == ["good"]
    (omitted,) = reading.omitted
    assert omitted.key == "usage.t.b.2026-11.bad"
    assert omitted.reason == "the headers are unreadable"
    assert not reading.is_partial
    assert usages(scene.store, "u") == {"good": "1"}
    # Once the gateway has written the key again, it is readable again.
    scene.bucket.put("usage.t.b.2026-11.bad", b"3")
    assert usages(scene.store, "t") == {"good": "1", "bad": "3"}


def test_an_interrupted_read_is_restarted(scene: Scene) -> None:
    scene.bucket.put_many(counters("b", consumers.BATCH + 1))

    def lose_consumer(number: int) -> None:
        if number in {2, 3}:
            scene.bucket.delete_consumers()

    scene.network.before_request = lose_consumer
    reading = scene.store.reader(COUNTERS).read("t")
    assert len(reading.counters) == consumers.BATCH + 1
    assert not reading.is_partial
    # One batch and a lost pull, a lost pull, then two batches.
    assert scene.network.requests == 5


def test_a_read_that_is_interrupted_every_time_fails(scene: Scene) -> None:
    scene.bucket.put_many(counters("b", 10))
    scene.network.before_request = lambda _: scene.bucket.delete_consumers()
    failure = failure_of(lambda: scene.store.reader(COUNTERS).read("t"))
    assert isinstance(failure, StoreReadError)
    assert " interrupted: 503" in failure.message


def test_a_consumer_without_responders_at_first_is_read(scene: Scene) -> None:
    scene.bucket.put_many(counters("b", 10))

    def lose_consumer(number: int) -> None:
        if number <= 8:
            scene.bucket.delete_consumers()

    scene.network.before_request = lose_consumer
    assert len(scene.store.reader(COUNTERS).read("t").counters) == 10
    assert scene.network.requests == 9


def test_a_read_times_out(scene: Scene) -> None:
    scene.bucket.put_many(counters("b", consumers.BATCH + 1))
    scene.network.before_request = lambda _: False
    timeouts = Timeouts(reading=0.2)
    with open_usage_store(scene.network.url, scene.bucket.name, timeouts=timeouts) as store:
        failures = [
            failure_of(lambda: store.reader(COUNTERS).read("t")),
            failure_of(store.reader(COUNTERS).list_tenants),
        ]
    for failure in failures:
        assert isinstance(failure, StoreReadError)
        assert "timed out after 0.2 s" in failure.message
        assert "BUDGET_RECOVERY_READ_TIMEOUT_SECONDS" in failure.hint


@pytest.mark.parametrize(("seconds", "in_a_tick", "waits"), [(1, False, 1), (60, True, 2)])
def test_the_settings_limit_how_long_a_response_may_take(
    scene: Scene, *, seconds: int, in_a_tick: bool, waits: float
) -> None:
    scene.bucket.put_many(counters("b", 1))
    scene.network.before_request = lambda _: False
    settings = Settings(
        nats_url=SecretStr(scene.network.url),
        bucket=scene.bucket.name,
        answer_timeout_seconds=seconds,
    )
    with store_opener(settings, in_a_tick=in_a_tick)() as store:
        started = time.monotonic()
        failure = failure_of(store.reader(COUNTERS).list_tenants)
        assert waits <= time.monotonic() - started < 30
    assert "BUDGET_RECOVERY_ANSWER_TIMEOUT_SECONDS" in failure.hint
