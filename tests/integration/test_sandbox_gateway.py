"""The simulated gateway: a real process, on a real server that it loses."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest

from budget_recovery_dagster.adapters.nats_store import open_usage_store
from budget_recovery_dagster.domain.windows import Period
from budget_recovery_dagster.sandbox.child_process import OwnedProcess, Program
from budget_recovery_dagster.sandbox.gateway import HISTORY
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from tests.nats_servers import Bucket, DisturbedNetwork
from tests.waiting import wait_until

# The traffic of a minute makes no more than some dollars.
ONLY_WITH_HISTORY = Decimal(20)


@pytest.fixture
def name() -> str:
    return f"gateway-{uuid4().hex}"


@contextmanager
def gateway(url: str, bucket: str, log: Path) -> Iterator[OwnedProcess]:
    """Run the gateway and wait for its traffic."""
    names = {"BUDGET_RECOVERY_NATS_URL": url, "BUDGET_RECOVERY_BUCKET": bucket}
    process = OwnedProcess(
        Program(
            "gateway",
            [sys.executable, "-m", "budget_recovery_dagster.sandbox.gateway", HISTORY],
            log=log,
            environment={**os.environ, **names, "PYTHONUNBUFFERED": "1"},
        )
    )
    try:
        process.wait_until_ready(lambda: process.has_said("Traffic of"), seconds=60)
        yield process
    finally:
        process.stop()


def used_ever(url: str, bucket: str) -> Decimal:
    with open_usage_store(url, bucket) as store:
        return sum(
            (
                counter.usage
                for tenant in store.list_tenants().tenants
                for counter in store.read_counters(tenant).counters
                if counter.of.window.period is Period.LIFETIME
            ),
            Decimal(0),
        )


def test_a_history_is_written_though_the_server_was_lost_meanwhile(
    nats_server: NatsServer, name: str, tmp_path: Path
) -> None:
    with DisturbedNetwork(nats_server.url, f"$KV.{name}.".encode()) as network:

        def cut_once(number: int) -> bool:
            if number == 1:
                network.cut()
            return number != 1

        network.before_request = cut_once
        with gateway(network.url, name, tmp_path / "log") as process:
            assert process.has_said("No traffic: ")
            assert used_ever(nats_server.url, name) > ONLY_WITH_HISTORY


def test_a_bucket_that_is_lost_later_begins_at_zero(
    nats_server: NatsServer, name: str, tmp_path: Path
) -> None:
    with (
        gateway(nats_server.url, name, tmp_path / "log"),
        Bucket.connected(nats_server.url, name) as bucket,
    ):
        assert used_ever(nats_server.url, name) > ONLY_WITH_HISTORY
        bucket.destroy()
        wait_until(lambda: (tmp_path / "log").read_text().count("Traffic of") == 2)
        assert used_ever(nats_server.url, name) < ONLY_WITH_HISTORY
