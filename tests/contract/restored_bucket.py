"""A bucket to restore into, and how to wait for its writes and recognize them."""

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from budget_recovery_dagster.adapters.nats import Timeouts
from budget_recovery_dagster.embedded import NatsServer
from tests.nats_servers import Bucket

IMPATIENT = Timeouts(connect=5.0, answer=0.5, reading=30.0)
WRITING = b"Nats-Expected-Last-Subject-Sequence"


@contextmanager
def bucket_of(server: NatsServer) -> Iterator[Bucket]:
    """Name a bucket that does not exist yet; require at the end that no consumer is left."""
    with Bucket.connected(server.url, f"restoring-{uuid4().hex}") as bucket:
        yield bucket
        assert bucket.consumers() == 0
        bucket.destroy()
