"""A bucket that is restored into, and how its writings are waited for and recognized."""

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
    """A bucket of this test's own, not made yet; in the end no consumer may be left."""
    with Bucket.connected(server.url, f"restoring-{uuid4().hex}") as bucket:
        yield bucket
        assert bucket.consumers() == 0
        bucket.destroy()
