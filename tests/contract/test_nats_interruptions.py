"""Interrupted and repeated reads: none leaves a connection, thread or consumer."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from budget_recovery_dagster.adapters.nats import open_usage_store
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import StoreError
from tests.contract.nats_scene import Scene, counters, set_scene
from tests.nats_servers import COUNTERS, PATIENT, PROMPT_SECONDS, failure_of, usages
from tests.waiting import wait_until


@pytest.fixture
def scene(nats_server: NatsServer) -> Iterator[Scene]:
    with set_scene(nats_server) as scene:
        yield scene


@pytest.fixture
def sigint_enabled() -> Iterator[None]:
    """Restore SIGINT, which these tests send and a shell disables for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupting_a_caller_cancels_its_read(scene: Scene, sigint_enabled: None) -> None:
    scene.bucket.put_many(counters("b", 10))
    main = threading.get_ident()

    def interrupt(_: int) -> bool:
        signal.pthread_kill(main, signal.SIGINT)
        return False

    scene.network.before_request = interrupt
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        scene.store.reader(COUNTERS).read("t")
    assert time.monotonic() - started < PROMPT_SECONDS
    scene.network.before_request = None
    assert len(scene.store.reader(COUNTERS).read("t").counters) == 10


def test_an_interruption_closes_the_store_completely(scene: Scene, sigint_enabled: None) -> None:
    scene.bucket.put_many(counters("b", 10))
    main = threading.get_ident()
    threads = threading.active_count()

    def interrupt(_: int) -> bool:
        signal.pthread_kill(main, signal.SIGINT)
        return False

    scene.network.before_request = interrupt
    started = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        open_usage_store(scene.network.url, scene.bucket.name, timeouts=PATIENT) as store,
    ):
        store.reader(COUNTERS).read("t")
    assert time.monotonic() - started < PROMPT_SECONDS
    assert scene.bucket.consumers() == 0
    wait_until(lambda: threading.active_count() == threads)


def test_closing_the_store_cancels_a_running_call(scene: Scene) -> None:
    scene.bucket.put("usage.t.b.2026-11.e", b"1")
    reading = threading.Event()

    def hold(_: int) -> bool:
        reading.set()
        return False

    scene.network.before_request = hold
    failures: list[StoreError] = []
    with open_usage_store(scene.network.url, scene.bucket.name, timeouts=PATIENT) as store:
        caller = threading.Thread(
            target=lambda: failures.append(failure_of(lambda: store.reader(COUNTERS).read("t")))
        )
        caller.start()
        assert reading.wait(10)
    caller.join()
    assert "closed during a call" in failures[0].message


def test_calls_of_several_threads_do_not_interfere(scene: Scene) -> None:
    tenants = [f"t{number}" for number in range(8)]
    for tenant in tenants:
        scene.bucket.put_many(
            {f"usage.{tenant}.b.2026-11.{n}": tenant[1:].encode() for n in range(500)}
        )
    wrong: list[str] = []

    def read(tenant: str) -> None:
        for _ in range(5):
            found = usages(scene.store, tenant)
            if len(found) != 500 or set(found.values()) != {tenant[1:]}:
                wrong.append(tenant)

    threads = [threading.Thread(target=read, args=(tenant,)) for tenant in tenants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_three_hundred_reads_leave_no_consumer_or_subscription(scene: Scene) -> None:
    scene.bucket.put_many(counters("b", 20))

    def disturb(number: int) -> bool:
        if number % 10 == 0:
            scene.network.cut()
        return number % 10 != 0

    scene.network.before_request = disturb
    outcomes = {"read": 0, "failed": 0}

    def read(times: int) -> None:
        for _ in range(times):
            try:
                scene.store.reader(COUNTERS).read("t")
            except StoreError:
                outcomes["failed"] += 1
            else:
                outcomes["read"] += 1

    def in_use() -> tuple[int, int, int]:
        tasks = scene.store._portal.call(lambda: len(asyncio.all_tasks()))
        return tasks, threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    read(5)
    before = in_use()
    read(295)
    wait_until(lambda: all(now <= then for now, then in zip(in_use(), before, strict=True)))
    assert outcomes == {"read": 270, "failed": 30}
    assert scene.bucket.consumers() == 0
