import gc
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from budget_recovery_dagster.embedded import PostgresServer
from tests.cluster.guarded_bucket import GuardedBucket, Kind
from tests.nats_cluster import Cluster
from tests.postgres_servers import temporary_database

OpenBucket = Callable[[Kind], GuardedBucket]


@pytest.fixture(scope="module")
def cluster(server_dir: Path) -> Iterator[Cluster]:
    """Start three servers; each test starts with all of them."""
    with Cluster.started(server_dir / f"cluster {uuid.uuid4().hex[:12]}") as cluster:
        yield cluster
    # Collect what drivers of gateways left while these tests can still report it.
    gc.collect()


@pytest.fixture(autouse=True)
def all_there(cluster: Cluster) -> Iterator[None]:
    """Restart servers that a failed test left dead."""
    yield
    cluster.start_missing()


@pytest.fixture
def opened(
    cluster: Cluster, postgres_server: PostgresServer, migrated_template: str
) -> Iterator[OpenBucket]:
    """Return a function that opens buckets, each with its own database; nothing is created yet."""
    with _opening(cluster, postgres_server, migrated_template) as open_bucket:
        yield open_bucket


@pytest.fixture(scope="module")
def kept_open(
    cluster: Cluster, postgres_server: PostgresServer, migrated_template: str
) -> Iterator[OpenBucket]:
    """Return a function that opens such buckets for all tests of a module."""
    with _opening(cluster, postgres_server, migrated_template) as open_bucket:
        yield open_bucket


@contextmanager
def _opening(cluster: Cluster, server: PostgresServer, template: str) -> Iterator[OpenBucket]:
    with ExitStack() as stack:

        def open_bucket(kind: Kind) -> GuardedBucket:
            url = stack.enter_context(temporary_database(server, template))
            return stack.enter_context(GuardedBucket.opened(cluster, kind, url))

        yield open_bucket
