"""The simulated gateway as real processes that are killed, on a real server that they lose."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from budget_recovery_dagster.domain import Enforcement, Period
from budget_recovery_dagster.embedded import NatsServer, OwnedProcess, Program
from budget_recovery_dagster.sandbox import gateway as gateway_package
from budget_recovery_dagster.sandbox.gateway import (
    AGGREGATOR_READY,
    BUDGETS,
    GATE_READY,
    Budgets,
    Ledger,
    Place,
    Traffic,
    begin,
    cost_stream,
    count_history,
    utc_clock,
)
from tests.free_ports import unused_port
from tests.integration.gateway_harness import (
    ALICE,
    BOB,
    contents,
    costing,
    definition,
    is_counted,
    spent,
)
from tests.nats_servers import Bucket, DisturbedNetwork
from tests.waiting import wait_until

# A minute of traffic costs only some dollars.
ONLY_WITH_HISTORY = Decimal(20)
WITH_HISTORY = "--with-history"
FAST = ("--requests-per-second", "100")
# One request, and then a long pause in which the counters can be compared.
SLOW = ("--requests-per-second", "0.01")
SENT_AGAIN = 50


@pytest.fixture
def name() -> str:
    return f"gateway-{uuid4().hex}"


@contextmanager
def running(place: Place, ready: str, log: Path, *command: str | Path) -> Iterator[OwnedProcess]:
    """Run a part of the gateway and wait until it works."""
    names = {"BUDGET_RECOVERY_NATS_URL": place.url, "BUDGET_RECOVERY_BUCKET": place.bucket}
    process = OwnedProcess(
        Program(
            str(command[0]),
            [sys.executable, "-m", gateway_package.__name__, *command],
            log=log,
            environment={**os.environ, **names, "PYTHONUNBUFFERED": "1"},
        )
    )
    try:
        process.wait_until_ready(lambda: process.has_logged(ready), seconds=60)
        yield process
    finally:
        process.stop()


def gateway(place: Place, ledger: Path, *arguments: str) -> AbstractContextManager[OwnedProcess]:
    log = ledger.with_suffix(".gateway.log")
    return running(place, GATE_READY, log, "serve", ledger, *arguments)


def aggregator(place: Place, ledger: Path) -> AbstractContextManager[OwnedProcess]:
    log = ledger.with_suffix(".aggregator.log")
    return running(place, AGGREGATOR_READY, log, "aggregate")


def writing_into(name: str) -> bytes:
    return f"PUB $KV.{name}.".encode()


def used_ever(place: Place) -> Decimal:
    usages = contents(place).usages
    return sum(
        (usage for key, usage in usages.items() if key.of.window.period is Period.LIFETIME),
        Decimal(0),
    )


def charges(ledger: Path) -> int:
    with Ledger(ledger) as book:
        return sum(1 for _ in book.charges())


def test_a_history_is_written_although_the_connection_broke(
    nats_server: NatsServer, name: str, ledger: Path
) -> None:
    place = Place(nats_server.url, name)
    with DisturbedNetwork(nats_server.url, writing_into(name)) as network:

        def cut_once(number: int) -> bool:
            if number == 1:
                network.cut()
            return number != 1

        network.before_request = cut_once
        with gateway(Place(network.url, name), ledger, WITH_HISTORY) as process:
            assert process.has_logged("The history is not written: ")
    assert used_ever(place) > ONLY_WITH_HISTORY
    # No aggregator runs yet: the counters are those of the history.
    [applied] = {json.loads(value)["applied"] for value in contents(place).values.values()}
    with Ledger(ledger) as book:
        last = int(applied.removeprefix(f"{book.id}:"))
        history = book.true_spend(BUDGETS, datetime.now(UTC), up_to=last)
    assert contents(place).usages == history


def test_an_interrupted_history_is_completed_and_never_written_again(
    nats_server: NatsServer, name: str, ledger: Path
) -> None:
    place = Place(nats_server.url, name)
    with DisturbedNetwork(nats_server.url, writing_into(name)) as network:
        network.before_request = lambda number: number < 3
        process = OwnedProcess(
            Program(
                "gateway",
                [sys.executable, "-m", gateway_package.__name__, "serve", ledger, WITH_HISTORY],
                log=ledger.with_suffix(".first.log"),
                environment={
                    **os.environ,
                    "BUDGET_RECOVERY_NATS_URL": network.url,
                    "BUDGET_RECOVERY_BUCKET": name,
                },
                grace_seconds=0,
            )
        )
        wait_until(lambda: network.requests >= 3 and len(contents(place).usages) > 0)
        process.stop()
    with Ledger(ledger) as book:
        assert len(contents(place).usages) < len(book.true_spend(BUDGETS, datetime.now(UTC)))
    with gateway(place, ledger, WITH_HISTORY, *SLOW), aggregator(place, ledger):
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
    with Bucket.connected(nats_server.url, name) as bucket:
        bucket.destroy()
    with gateway(place, ledger, WITH_HISTORY), aggregator(place, ledger):
        wait_until(lambda: used_ever(place) > 0)
        assert used_ever(place) < ONLY_WITH_HISTORY


def test_a_bucket_that_is_lost_later_starts_at_zero(
    nats_server: NatsServer, name: str, ledger: Path
) -> None:
    place = Place(nats_server.url, name)
    with (
        gateway(place, ledger, WITH_HISTORY),
        aggregator(place, ledger),
        Bucket.connected(nats_server.url, name) as bucket,
    ):
        assert used_ever(place) > ONLY_WITH_HISTORY
        wait_until(lambda: blocked_by_history(place))
        bucket.destroy()
        wait_until(lambda: 0 < used_ever(place) < ONLY_WITH_HISTORY)
        assert not blocked_by_history(place)
        for part in ("gateway", "aggregator"):
            assert "No access to the bucket: " in ledger.with_suffix(f".{part}.log").read_text()


def blocked_by_history(place: Place) -> bool:
    """Whether both blocks of a new sandbox exist."""
    enforced = {
        key.tenant
        for key in contents(place).blocked
        if (definition := BUDGETS.definition_of(key)) is not None
        if definition.enforcement is Enforcement.ENFORCE
    }
    return enforced >= {"acme", "team a / 東京"}


def test_each_cost_counts_once_although_every_process_is_killed_repeatedly(
    server_dir: Path, name: str, ledger: Path
) -> None:
    server = NatsServer(server_dir / name, port=unused_port())
    with server:
        place = Place(server.url, name)
        blocked: set[str] = set()
        for _ in range(2):
            with (
                gateway(place, ledger, WITH_HISTORY, *FAST) as serving,
                aggregator(place, ledger) as counting,
            ):
                wait_until(lambda: blocked_by_history(place))
                start = charges(ledger)
                # Kill it while it works: more costs are on their way.
                wait_until(partial(has_counted, place, start + SENT_AGAIN))
                os.kill(counting.pid, signal.SIGKILL)
                os.kill(serving.pid, signal.SIGKILL)
                assert blocked <= (blocked := contents(place).of("blocked"))
                os.kill(server.process.pid, signal.SIGKILL)
            server.stop()
            # As if the gate had died before it recorded what it had reported. The restarted server
            # no longer knows the ids of counted costs, and accepts them again.
            with Ledger(ledger) as book:
                book.mark_reported(start)
                assert blocked <= {f"blocked.{suffix}" for suffix in book.blocked()}
            server.start()
        with gateway(place, ledger, *SLOW), aggregator(place, ledger):
            wait_until(lambda: is_counted(place, ledger, BUDGETS))
            assert blocked <= contents(place).of("blocked")
            assert sum(spent(ledger, BUDGETS).values()) > ONLY_WITH_HISTORY
            with Bucket.connected(place.url, name) as bucket:
                taken = bucket._do(lambda js: js.stream_info(cost_stream(name))).state.last_seq
            assert taken >= charges(ledger) - history_size() + SENT_AGAIN


def history_size() -> int:
    return sum(1 for _ in Traffic(seed=1).history(datetime.now(UTC)))


def has_counted(place: Place, number: int) -> bool:
    found = contents(place)
    applied = [json.loads(found.values[key])["applied"] for key in found.of("usage")]
    return max(int(mark.rpartition(":")[2]) for mark in applied) >= number


def test_histories_of_several_ledgers_add_up(
    nats_server: NatsServer, name: str, tmp_path: Path
) -> None:
    place = Place(nats_server.url, name)
    budgets = Budgets([definition("users", "1000000")])
    for file, cost in (("one", "1"), ("other", "2")):
        with Ledger(tmp_path / file) as book:
            book.record_history([(datetime.now(UTC), costing(cost))])
            asyncio.run(count_history(place, book, budgets, utc_clock))
            asyncio.run(count_history(place, book, budgets, utc_clock))
    assert set(contents(place).usages.values()) == {Decimal(3)}


@pytest.mark.parametrize("wiped", [False, True], ids=["meanwhile", "before"])
def test_a_new_ledger_on_a_used_bucket_gets_no_history_and_logs_it(
    nats_server: NatsServer,
    name: str,
    ledger: Path,
    wiped: bool,  # noqa: FBT001 - a parameter of the test
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Place(nats_server.url, name)
    old = "usage.team=20a=20/=20=E6=9D=B1=E4=BA=AC.users.lifetime.old"
    with Bucket.connected(nats_server.url, name) as bucket, Ledger(ledger) as book:
        bucket.create()
        bucket.put(old, b"5")
        if wiped:
            bucket.remove(old)  # its marker is not a counter
        began(place, book)
        usages = {key.entity: usage for key, usage in contents(place).usages.items()}
        assert usages == ({ALICE: 1} if wiped else {"old": 5})
        assert [charge.number for charge in book.charges()] == ([1] if wiped else [])
        assert (f"Bucket {name} had counters before this ledger" in caplog.text) is not wiped
        # It gets no history later, even if the bucket is lost.
        bucket.destroy()
        began(place, book)
        assert contents(place).usages == {}
        book.record(datetime.now(UTC), costing("1", BOB))
        began(place, book)
        assert contents(place).usages == {}


def began(place: Place, book: Ledger) -> None:
    budgets = Budgets([definition("users", "1000000")])
    asyncio.run(begin(place, book, budgets, utc_clock, lambda now: [(now, costing("1"))]))
