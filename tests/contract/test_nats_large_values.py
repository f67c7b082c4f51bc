"""Large values: the server would disconnect a reader with too many pending bytes."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from budget_recovery_dagster.adapters.nats import Timeouts, consumers, open_usage_store
from budget_recovery_dagster.embedded import NatsServer
from tests.contract.nats_scene import Scene, counters, set_scene
from tests.nats_servers import COUNTERS

MIB = 2**20


@pytest.fixture(scope="module")
def large_payload_server(server_dir: Path) -> Iterator[NatsServer]:
    """A server that accepts values above the limit of a pull."""
    with NatsServer(server_dir / "large_payload_server", config="max_payload: 32MB") as server:
        yield server


@pytest.fixture
def scene(large_payload_server: NatsServer) -> Iterator[Scene]:
    with set_scene(large_payload_server) as scene:
        yield scene


def value_of(size: int) -> bytes:
    """Return a counter's value with this number of bytes."""
    start, end = b'{"usage":"1","note":"', b'"}'
    return start + b"x" * (size - len(start + end)) + end


def test_a_read_may_exceed_the_servers_limit_of_pending_bytes(scene: Scene) -> None:
    for part in range(10):
        scene.bucket.put_many(counters(f"b{part}", 100, value_of(100_000)))
    reading = scene.store.reader(COUNTERS).read("t")
    assert len(reading.counters) == 1000
    assert not reading.is_partial
    # The server ends a pull at its limit, and all pulls return about the same.
    assert scene.network.requests == 1000 // (consumers.MAX_BYTES // 100_000) + 1


def test_a_value_larger_than_the_limit_of_a_pull_is_read(scene: Scene) -> None:
    sizes = [100, 20 * MIB, 21 * MIB, 100, 20 * MIB, 100]
    for number, size in enumerate(sizes):
        scene.bucket.put(f"usage.t.b.2026-11.{number}", value_of(size))
    reading = scene.store.reader(COUNTERS).read("t")
    assert len(reading.counters) == len(sizes)
    assert not reading.is_partial


def test_a_pull_that_ends_exactly_at_its_limit_continues(scene: Scene) -> None:
    # The server counts a message with its subject and reply subject.
    consumer = f"{consumers.CONSUMER_PREFIX}{'x' * 16}"
    place = f"$JS.ACK.{scene.bucket.stream}.{consumer}.1.1.1.{10**18}.1"
    around = len(scene.bucket.subject("usage.t.b.2026-11.0")) + len(place)
    rest = consumers.MAX_BYTES - around - 1 - around
    for number, value in enumerate([b"1", value_of(rest), b"1"]):
        scene.bucket.put(f"usage.t.b.2026-11.{number}", value)
    timeouts = Timeouts(answer=2.0)
    with open_usage_store(scene.network.url, scene.bucket.name, timeouts=timeouts) as store:
        started = time.monotonic()
        reading = store.reader(COUNTERS).read("t")
    # With one byte more or less, the server would have sent a status at once.
    assert time.monotonic() - started >= timeouts.answer / 2
    assert len(reading.counters) == 3
    assert not reading.is_partial
    assert scene.network.requests == 2
