"""A bucket that is read through a network that a test can disturb."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from budget_recovery_dagster.adapters.nats import NatsUsageStore, open_usage_store
from budget_recovery_dagster.embedded import NatsServer
from tests.nats_servers import PATIENT, Bucket, DisturbedNetwork


@dataclass(frozen=True)
class Scene:
    """A bucket, and a store that reads it through a network that a test can disturb."""

    bucket: Bucket
    network: DisturbedNetwork
    store: NatsUsageStore


@contextmanager
def set_scene(server: NatsServer) -> Iterator[Scene]:
    """Create an empty bucket; require at the end that no consumer is left."""
    name = f"reading-{uuid4().hex}"
    with (
        Bucket.connected(server.url, name) as bucket,
        DisturbedNetwork(server.url) as network,
        open_usage_store(network.url, name, timeouts=PATIENT) as store,
    ):
        bucket.create()
        yield Scene(bucket, network, store)
        assert bucket.consumers() == 0
        bucket.destroy()


def counters(budget: str, count: int, value: bytes = b"1") -> dict[str, bytes]:
    return {f"usage.t.{budget}.2026-11.{number}": value for number in range(count)}
