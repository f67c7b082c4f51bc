"""The simulated gateway as it runs: real processes, killed, on a real server that they lose."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from budget_recovery_dagster.domain.budgets import Enforcement
from budget_recovery_dagster.domain.windows import Period
from budget_recovery_dagster.sandbox.child_process import OwnedProcess, Program
from budget_recovery_dagster.sandbox.gateway import aggregate, serve
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place
from budget_recovery_dagster.sandbox.gateway.scene import BUDGETS
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from tests.integration.gateway_house import contents, is_counted, spent
from tests.nats_servers import Bucket, DisturbedNetwork
from tests.waiting import wait_until

# The traffic of a minute makes no more than some dollars.
ONLY_WITH_HISTORY = Decimal(20)
FAST = ("--requests-per-second", "100")
# One request, and then a long silence in which the counters can be compared.
SLOW = ("--requests-per-second", "0.01")


@pytest.fixture
def name() -> str:
    return f"gateway-{uuid4().hex}"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


@contextmanager
def running(place: Place, ready: str, log: Path, *command: str | Path) -> Iterator[OwnedProcess]:
    """Run a part of the gateway and wait until it works."""
    names = {"BUDGET_RECOVERY_NATS_URL": place.url, "BUDGET_RECOVERY_BUCKET": place.bucket}
    process = OwnedProcess(
        Program(
            str(command[0]),
            [sys.executable, "-m", *command],
            log=log,
            environment={**os.environ, **names, "PYTHONUNBUFFERED": "1"},
        )
    )
    try:
        process.wait_until_ready(lambda: process.has_said(ready), seconds=60)
        yield process
    finally:
        process.stop()


def gateway(place: Place, ledger: Path, *arguments: str) -> AbstractContextManager[OwnedProcess]:
    log = ledger.with_suffix(".gateway.log")
    return running(place, serve.READY, log, serve.__name__, ledger, *arguments)


def aggregator(place: Place, ledger: Path) -> AbstractContextManager[OwnedProcess]:
    log = ledger.with_suffix(".aggregator.log")
    return running(place, aggregate.READY, log, aggregate.__name__)


def used_ever(place: Place) -> Decimal:
    usages = contents(place).usages
    return sum(
        (usage for key, usage in usages.items() if key.of.window.period is Period.LIFETIME),
        Decimal(0),
    )


def charges(ledger: Path) -> int:
    with Ledger(ledger) as book:
        return sum(1 for _ in book.charges())


def test_a_history_is_written_though_the_server_was_lost_meanwhile(
    nats_server: NatsServer, name: str, ledger: Path
) -> None:
    place = Place(nats_server.url, name)
    with DisturbedNetwork(nats_server.url, f"$KV.{name}.".encode()) as network:

        def cut_once(number: int) -> bool:
            if number == 1:
                network.cut()
            return number != 1

        network.before_request = cut_once
        with gateway(Place(network.url, name), ledger, serve.HISTORY) as process:
            assert process.has_said("The history is not written: ")
    assert used_ever(place) > ONLY_WITH_HISTORY
    # Nobody has counted anything yet: all is as the last request of the history left it.
    [applied] = {json.loads(value)["applied"] for value in contents(place).values.values()}
    with Ledger(ledger) as book:
        last = int(applied.removeprefix(f"{book.id}:"))
        history = book.true_spend(BUDGETS, datetime.now(UTC), up_to=last)
    assert contents(place).usages == history


def test_a_history_that_was_interrupted_is_completed_and_never_written_again(
    nats_server: NatsServer, name: str, ledger: Path
) -> None:
    place = Place(nats_server.url, name)
    with DisturbedNetwork(nats_server.url, f"$KV.{name}.".encode()) as network:
        network.before_request = lambda number: number < 3
        process = OwnedProcess(
            Program(
                "gateway",
                [sys.executable, "-m", serve.__name__, ledger, serve.HISTORY],
                log=ledger.with_suffix(".first.log"),
                environment={
                    **os.environ,
                    "BUDGET_RECOVERY_NATS_URL": network.url,
                    "BUDGET_RECOVERY_BUCKET": name,
                },
                grace_seconds=0,
            )
        )
        wait_until(lambda: network.requests >= 3)
        process.stop()
    with Ledger(ledger) as book:
        assert 0 < len(contents(place).usages) < len(book.true_spend(BUDGETS, datetime.now(UTC)))
    with gateway(place, ledger, serve.HISTORY), aggregator(place, ledger):
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
    with Bucket.connected(nats_server.url, name) as bucket:
        bucket.destroy()
    with gateway(place, ledger, serve.HISTORY), aggregator(place, ledger):
        wait_until(lambda: used_ever(place) > 0)
        assert used_ever(place) < ONLY_WITH_HISTORY


def test_a_bucket_that_is_lost_later_begins_at_zero(
    nats_server: NatsServer, name: str, ledger: Path
) -> None:
    place = Place(nats_server.url, name)
    with (
        gateway(place, ledger, serve.HISTORY),
        aggregator(place, ledger),
        Bucket.connected(nats_server.url, name) as bucket,
    ):
        assert used_ever(place) > ONLY_WITH_HISTORY
        wait_until(lambda: blocked_by_history(place))
        bucket.destroy()
        wait_until(lambda: 0 < used_ever(place) < ONLY_WITH_HISTORY)
        assert not blocked_by_history(place)
        for part in ("gateway", "aggregator"):
            assert "Without the bucket: " in ledger.with_suffix(f".{part}.log").read_text()


def blocked_by_history(place: Place) -> bool:
    """Whether both are blocked that a new sandbox begins with."""
    enforced = {
        key.tenant
        for key in contents(place).blocked
        if (definition := BUDGETS.behind(key)) is not None
        if definition.enforcement is Enforcement.ENFORCE
    }
    return enforced >= {"acme", "team a / 東京"}


def test_true_spend_is_counted_though_the_aggregator_is_killed_again_and_again(
    nats_server: NatsServer, name: str, ledger: Path
) -> None:
    place = Place(nats_server.url, name)
    with gateway(place, ledger, serve.HISTORY, *FAST):
        for _ in range(4):
            with aggregator(place, ledger) as process:
                before = contents(place).usages
                # In the middle of its work: it has counted something, and more is to come.
                wait_until(partial(has_changed, place, before))
                os.kill(process.pid, 9)
        at_the_end = charges(ledger)
        wait_until(lambda: charges(ledger) > at_the_end + 100)
    with gateway(place, ledger, *SLOW), aggregator(place, ledger):
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
        assert sum(spent(ledger, BUDGETS).values()) > ONLY_WITH_HISTORY


def has_changed(place: Place, before: object) -> bool:
    return contents(place).usages != before


def test_all_of_it_can_be_killed_and_started_again_and_blocks_stand(
    nats_server: NatsServer, name: str, ledger: Path
) -> None:
    place = Place(nats_server.url, name)
    with gateway(place, ledger, serve.HISTORY, *FAST) as serving, aggregator(place, ledger):
        wait_until(lambda: blocked_by_history(place))
        blocked = contents(place).of("blocked")
        os.kill(serving.pid, 9)
    with gateway(place, ledger, *FAST), aggregator(place, ledger):
        before = charges(ledger)
        wait_until(lambda: charges(ledger) > before + 100)
        assert blocked <= contents(place).of("blocked")
    with Ledger(ledger) as book:
        remembered = {f"blocked.{suffix}" for suffix in book.blocked()}
    assert blocked <= remembered
    # What was reported twice, for its acknowledgement was lost in a death, is counted once.
    with gateway(place, ledger, *SLOW), aggregator(place, ledger):
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
