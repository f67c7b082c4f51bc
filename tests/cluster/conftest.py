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
    """Three servers, all of which each test finds there."""
    with Cluster.started(server_dir / f"cluster {uuid.uuid4().hex[:12]}") as cluster:
        yield cluster
    # What the drivers of gateways have left is to be found while these tests are asked about it.
    gc.collect()


@pytest.fixture(autouse=True)
def all_there(cluster: Cluster) -> Iterator[None]:
    """Let a test that fails leave no server dead."""
    yield
    cluster.start_missing()


@pytest.fixture
def opened(
    cluster: Cluster, postgres_server: PostgresServer, migrated_template: str
) -> Iterator[OpenBucket]:
    """Open buckets, each with a database of its own; nothing is created yet."""
    with _opening(cluster, postgres_server, migrated_template) as open_bucket:
        yield open_bucket


@pytest.fixture(scope="module")
def kept_open(
    cluster: Cluster, postgres_server: PostgresServer, migrated_template: str
) -> Iterator[OpenBucket]:
    """Open such buckets for all tests of a module."""
    with _opening(cluster, postgres_server, migrated_template) as open_bucket:
        yield open_bucket


@contextmanager
def _opening(cluster: Cluster, server: PostgresServer, template: str) -> Iterator[OpenBucket]:
    with ExitStack() as stack:

        def open_bucket(kind: Kind) -> GuardedBucket:
            url = stack.enter_context(temporary_database(server, template))
            return stack.enter_context(GuardedBucket.opened(cluster, kind, url))

        yield open_bucket
