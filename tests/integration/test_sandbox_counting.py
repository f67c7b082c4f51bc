"""Costs of the simulated gateway: each is counted exactly once, whatever happens on its way."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamInfo

from budget_recovery_dagster.adapters.nats_codec import encode_key
from budget_recovery_dagster.domain.budgets import SplitBy
from budget_recovery_dagster.domain.windows import Period
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.in_process import running_aggregator, running_gate
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place
from budget_recovery_dagster.sandbox.gateway.store import cost_stream
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from tests.free_ports import unused_port
from tests.integration.gateway_house import (
    ALICE,
    MODEL,
    TENANT,
    contents,
    costing,
    definition,
    is_counted,
    publish_cost,
)
from tests.nats_servers import Bucket
from tests.waiting import wait_until

USERS = definition("users", "1000000")
MODELS = definition("models", "1000000", split_by=SplitBy.MODEL)
COMPANY = definition("company", "1000000", split_by=SplitBy.NOTHING, period=Period.QUARTER)
BUDGETS = Budgets([USERS, MODELS, COMPANY])
OF_USERS = "usage.team=20a=20/=20=E6=9D=B1=E4=BA=AC.users.lifetime.user=3Aalice=40example=2Ecom"
OF_MODELS = "usage.team=20a=20/=20=E6=9D=B1=E4=BA=AC.models.lifetime.openai-main/gpt-4o"


@pytest.fixture
def place(nats_server: NatsServer, bucket: Bucket) -> Place:
    return Place(nats_server.url, bucket.name)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def usages(place: Place) -> dict[str, Decimal]:
    return {encode_key(counter): usage for counter, usage in contents(place).usages.items()}


def test_costs_that_come_twice_are_counted_once(place: Place, ledger: Path) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        for cost in ("1", "0.000000000000000001", "2"):
            gate.answer(costing(cost))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
        with Ledger(ledger) as book:
            charges = list(book.charges())
        # Without an id the stream takes them once more, as it does after its duplicate window.
        for charge in charges:
            publish_cost(place, charge.to_json())
        gate.answer(costing("4"))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
        assert usages(place)[OF_USERS] == Decimal("7.000000000000000001")


def test_a_cost_that_was_counted_in_part_is_counted_in_the_rest(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    with Ledger(ledger) as book:
        applied = {"applied": f"{book.id}:1", "updated_at": "2026-11-29T14:00:00.000Z"}
    with running_gate(place, ledger, BUDGETS) as gate:
        gate.answer(costing("3"))
        # As an aggregator leaves it that was killed between two counters.
        bucket.put(OF_USERS, json.dumps({"usage": "3", **applied}).encode())
        with running_aggregator(place, BUDGETS):
            wait_until(lambda: is_counted(place, ledger, BUDGETS))
    assert usages(place)[OF_USERS] == usages(place)[OF_MODELS] == 3


def test_what_others_write_is_added_to_and_their_fields_are_kept(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        gate.answer(costing("1"))
        wait_until(lambda: len(usages(place)) == 3)
        # As a restore does: one is raised with all its fields, one made without ours.
        raised = {**json.loads(contents(place).values[OF_USERS]), "usage": "10", "note": [1]}
        bucket.put(OF_USERS, json.dumps(raised).encode())
        bucket.put(OF_MODELS, b"20.5")
        gate.answer(costing("0.25"))
        wait_until(lambda: usages(place)[OF_MODELS] == Decimal("20.75"))
        wait_until(lambda: usages(place)[OF_USERS] == Decimal("10.25"))
        value = json.loads(contents(place).values[OF_USERS])
        assert (value["note"], value["applied"].partition(":")[2]) == ([1], "2")
        assert value["updated_at"] > raised["updated_at"]


def test_a_message_that_is_no_cost_stops_nothing(place: Place, ledger: Path) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        gate.answer(costing("1"))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
        publish_cost(place, b"nonsense")
        gate.answer(costing("1"))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))


def test_aggregators_at_the_same_time_change_nothing(place: Place, ledger: Path) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, ExitStack() as exits:
        for _ in range(3):
            exits.enter_context(running_aggregator(place, BUDGETS))
        for number in range(300):
            gate.answer(costing(f"0.{number:03}", user=f"user {number % 7}"))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))


@pytest.fixture
def own_server(server_dir: Path) -> Iterator[NatsServer]:
    with NatsServer(server_dir / f"own-{time.time_ns()}", port=unused_port()) as server:
        yield server


def test_answers_never_wait_and_all_costs_arrive_afterwards(
    own_server: NatsServer, ledger: Path
) -> None:
    place = Place(own_server.url, "frozen")
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        gate.answer(costing("1"))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
        os.kill(own_server.process.pid, signal.SIGSTOP)
        try:
            slowest = 0.0
            frozen = time.monotonic()
            number = 0
            # Longer than the patience of whoever asks the server, so that all of them begin anew.
            while time.monotonic() < frozen + 3:
                asked = time.monotonic()
                assert gate.answer(costing(f"0.{number:04}")).is_allowed
                slowest = max(slowest, time.monotonic() - asked)
                number += 1
                time.sleep(0.01)
        finally:
            os.kill(own_server.process.pid, signal.SIGCONT)
        assert slowest < 0.5
        wait_until(lambda: is_counted(place, ledger, BUDGETS))


def test_costs_wait_for_a_server_that_is_not_there(server_dir: Path, ledger: Path) -> None:
    port = unused_port()
    place = Place(f"nats://127.0.0.1:{port}", "later")
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        assert gate.answer(costing("1")).is_allowed
        with NatsServer(server_dir / f"later-{port}", port=port):
            wait_until(lambda: is_counted(place, ledger, BUDGETS))


def test_a_lost_stream_of_costs_is_made_anew_before_anything_is_reported(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    stream = cost_stream(place.bucket)
    with running_gate(place, ledger, BUDGETS) as gate:
        gate.answer(costing("1"))
        with running_aggregator(place, BUDGETS):
            wait_until(lambda: is_counted(place, ledger, BUDGETS))
        bucket._do(lambda js: js.delete_stream(stream))
        wait_until(lambda: stream in {each.config.name for each in bucket._do(streams)})
        gate.answer(costing("1"))
        with running_aggregator(place, BUDGETS):
            wait_until(lambda: is_counted(place, ledger, BUDGETS))


async def streams(js: JetStreamContext) -> list[StreamInfo]:
    return await js.streams_info()


def test_true_spend_is_counted_for_whom_it_was(place: Place, ledger: Path) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        gate.answer(costing("1"))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
    now = datetime.now(UTC)
    with Ledger(ledger) as book:
        spend = {
            (key.tenant, key.of.budget, key.entity): usage
            for key, usage in book.true_spend(BUDGETS, now).items()
        }
    assert spend == {
        (TENANT, "users", ALICE): 1,
        (TENANT, "models", MODEL): 1,
        (TENANT, "company", None): 1,
    }
