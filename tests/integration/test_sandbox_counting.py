"""Costs of the simulated gateway: each counts exactly once, through every failure."""

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

from budget_recovery_dagster.adapters.nats import encode_key
from budget_recovery_dagster.domain import Period, SplitBy
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.sandbox.gateway import (
    Budgets,
    Charge,
    Ledger,
    Place,
    cost_stream,
    running_aggregator,
    running_gate,
)
from tests.free_ports import unused_port
from tests.integration.gateway_harness import (
    ALICE,
    BOB,
    HOSTILE_BOARDS,
    HOSTILE_VALUES,
    MODEL,
    NO_COSTS,
    TENANT,
    charge_with,
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
ALICE_TOKEN = "user=3Aalice=40example=2Ecom"
OF_USERS = f"usage.team=20a=20/=20=E6=9D=B1=E4=BA=AC.users.lifetime.{ALICE_TOKEN}"
OF_MODELS = "usage.team=20a=20/=20=E6=9D=B1=E4=BA=AC.models.lifetime.openai-main/gpt-4o"


@pytest.fixture
def place(nats_server: NatsServer, bucket: Bucket) -> Place:
    return Place(nats_server.url, bucket.name)


def usages(place: Place) -> dict[str, Decimal]:
    return {encode_key(counter): usage for counter, usage in contents(place).usages.items()}


def test_duplicate_costs_are_counted_once(place: Place, ledger: Path) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        for cost in ("1", "0.000000000000000001", "2"):
            gate.answer(costing(cost))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
        # Without an id the stream accepts them again, as it does after its duplicate window.
        publish_cost(place, *(charge.to_json() for charge in charges_of(ledger)))
        gate.answer(costing("4"))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
        assert usages(place)[OF_USERS] == Decimal("7.000000000000000001")


def test_a_partly_counted_cost_is_completed(place: Place, bucket: Bucket, ledger: Path) -> None:
    with Ledger(ledger) as book:
        applied = {"applied": f"{book.id}:1", "updated_at": "2026-11-29T14:00:00.000Z"}
    with running_gate(place, ledger, BUDGETS) as gate:
        gate.answer(costing("3"))
        # The state after an aggregator was killed between two counters.
        bucket.put(OF_USERS, json.dumps({"usage": "3", **applied}).encode())
        with running_aggregator(place, BUDGETS):
            wait_until(lambda: is_counted(place, ledger, BUDGETS))
    assert usages(place)[OF_USERS] == usages(place)[OF_MODELS] == 3


def test_costs_add_to_values_of_other_programs_and_keep_their_fields(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        gate.answer(costing("1"))
        wait_until(lambda: len(usages(place)) == 3)
        # As a restore does: it raises one with all its fields, and creates one without ours.
        raised = {**json.loads(contents(place).values[OF_USERS]), "usage": "10"}
        # No float represents these.
        note = b'"note":{"rate":[1.10,-0.0,1E+400,0.1234567890123456789],"of":null,"is":"1.10"}'
        bucket.put(OF_USERS, json.dumps(raised).encode().replace(b"}", b"," + note + b"}"))
        bucket.put(OF_MODELS, b"20.5")
        gate.answer(costing("0.25"))
        wait_until(lambda: usages(place)[OF_MODELS] == Decimal("20.75"))
        wait_until(lambda: usages(place)[OF_USERS] == Decimal("10.25"))
        assert note in contents(place).values[OF_USERS]
        value = json.loads(contents(place).values[OF_USERS])
        assert value["applied"].partition(":")[2] == "2"
        assert value["updated_at"] > raised["updated_at"]


@pytest.mark.parametrize("messages", NO_COSTS.values(), ids=NO_COSTS)
def test_a_message_that_is_not_a_cost_is_skipped(
    place: Place, ledger: Path, messages: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        wait_until(lambda: "Aggregator is connected" in caplog.text)
        publish_cost(place, *messages)
        gate.answer(costing("1"))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
    named = [each.message for each in caplog.records if "is skipped" in each.message]
    assert len(named) == len(messages)
    assert max(map(len, named)) < 300


@pytest.mark.parametrize(("value", "usage"), HOSTILE_VALUES.values(), ids=HOSTILE_VALUES)
def test_no_foreign_value_stops_the_counting_or_the_derivation(
    place: Place, bucket: Bucket, ledger: Path, value: bytes, usage: str | None
) -> None:
    board = OF_USERS.replace("usage.", "leaderboard.").removesuffix(f".{ALICE_TOKEN}")
    bucket.put(OF_USERS, value)
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        gate.answer(costing("1"))
        gate.answer(costing("1", BOB))
        wait_until(lambda: len(contents(place).of("leaderboard")) == 3)
        wait_until(lambda: BOB in contents(place).values[board].decode())
        found = contents(place).values[OF_USERS]
    readable = found if usage is None else json.loads(found, parse_int=str)["usage"]
    assert readable == (value if usage is None else usage)


@pytest.mark.parametrize("board", HOSTILE_BOARDS.values(), ids=HOSTILE_BOARDS)
def test_no_foreign_leaderboard_stops_the_derivation(
    place: Place, bucket: Bucket, ledger: Path, board: bytes
) -> None:
    key = OF_USERS.replace("usage.", "leaderboard.").removesuffix(f".{ALICE_TOKEN}")
    bucket.put(key, board)
    # An entity whose entry may have to be kept.
    bucket.put(OF_USERS.replace(ALICE_TOKEN, "e"), b"broken")
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        gate.answer(costing("1"))
        expected = [{"entity": ALICE, "usage": "1"}]
        wait_until(lambda: contents(place).values[key] != board)
        wait_until(lambda: contents(place).boards[key.partition(".")[2]] == expected)


def test_a_cost_that_one_counter_cannot_hold_counts_in_the_others(
    place: Place, bucket: Bucket, ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        gate.answer(costing("1"))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
        # A key that is too long, a sum with too many digits, and a value of maximum size.
        publish_cost(place, charge_with(user="x" * 990, cost="1"))
        publish_cost(place, charge_with(number=2, model="m", cost="99999999999999999999"))
        wait_until(lambda: usages(place)[OF_MODELS] == 2)
        full = json.dumps({"usage": "2", "note": "x" * 1_000_000}).encode()
        bucket.put(OF_MODELS, full)
        gate.answer(costing("7", "somebody"))
        wait_until(lambda: OF_USERS.replace(ALICE_TOKEN, "somebody") in usages(place))
        assert contents(place).values[OF_MODELS] == full
    of_users = {key: usage for key, usage in usages(place).items() if ".users." in key}
    assert of_users == {OF_USERS: 1, OF_USERS.replace(ALICE_TOKEN, "somebody"): 7}
    for named in (
        "Charge another:1 does not count into budget 'users' of",
        f"Costs of {OF_USERS} are not counted: 100000000000000000000",
        f"Costs of {OF_MODELS} are not counted: a value of 1000",
    ):
        assert named in caplog.text


def test_duplicate_costs_of_several_ledgers_are_counted_once(place: Place, tmp_path: Path) -> None:
    ledgers = [tmp_path / "one", tmp_path / "other"]
    with (
        running_gate(place, ledgers[0], BUDGETS) as one,
        running_gate(place, ledgers[1], BUDGETS) as other,
        running_aggregator(place, BUDGETS),
    ):
        for number in range(5):
            one.answer(costing(f"1.0{number}"))
            other.answer(costing(f"2.0{number}"))
        wait_until(lambda: usages(place).get(OF_USERS) == Decimal("15.2"))
        charges = [charge for each in ledgers for charge in charges_of(each)]
        publish_cost(place, *(charge.to_json() for charge in charges))
        one.answer(costing("100"))
        wait_until(lambda: usages(place)[OF_USERS] == Decimal("115.2"))
    assert usages(place)[OF_MODELS] == Decimal("115.2")


def charges_of(ledger: Path) -> list[Charge]:
    with Ledger(ledger) as book:
        return list(book.charges())


def test_several_aggregators_count_the_same(place: Place, ledger: Path) -> None:
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
            # Longer than every timeout of the gateway, so that all its parts start again.
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


def test_costs_wait_for_a_missing_server(server_dir: Path, ledger: Path) -> None:
    port = unused_port()
    place = Place(f"nats://127.0.0.1:{port}", "later")
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        assert gate.answer(costing("1")).is_allowed
        with NatsServer(server_dir / f"later-{port}", port=port):
            wait_until(lambda: is_counted(place, ledger, BUDGETS))


def test_a_lost_stream_of_costs_is_created_before_costs_are_reported(
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


def test_true_spend_counts_for_its_entity(place: Place, ledger: Path) -> None:
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
