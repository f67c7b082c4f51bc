"""Blocks of the simulated gateway: from the counters, whoever changes them, to the answers."""

import json
import time
from pathlib import Path

import pytest

from budget_recovery_dagster.adapters.nats_codec import encode_key
from budget_recovery_dagster.domain.budgets import Enforcement, SplitBy
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.in_process import running_aggregator, running_gate
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from tests.free_ports import unused_port
from tests.integration.gateway_house import (
    ALICE,
    BOB,
    Contents,
    contents,
    costing,
    definition,
    spent,
)
from tests.nats_servers import Bucket
from tests.waiting import wait_until

USERS = definition("per user", "10")
AUDITED = definition("audited", "5", enforcement=Enforcement.AUDIT)
MODELS = definition("models", "1000", split_by=SplitBy.MODEL)
BUDGETS = Budgets([USERS, AUDITED, MODELS])
PREFIX = "team=20a=20/=20=E6=9D=B1=E4=BA=AC.per=20user.lifetime"


@pytest.fixture
def place(nats_server: NatsServer, bucket: Bucket) -> Place:
    return Place(nats_server.url, bucket.name)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def write(bucket: Bucket, entity: str, usage: str, **fields: str) -> None:
    bucket.put(f"usage.{PREFIX}.{entity}", json.dumps({"usage": usage, **fields}).encode())


def blocked(place: Place) -> set[str | None]:
    return {counter.entity for counter in contents(place).blocked}


def test_an_exhausted_budget_is_blocked_within_a_second_and_for_its_entity_only(
    place: Place, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        assert gate.answer(costing("9.999999")).number == 1
        wait_until(lambda: len(contents(place).of("usage")) == 3)
        assert gate.answer(costing("0.000001")).is_allowed
        exhausted = time.monotonic()
        # Not by requests, which would be traffic; the gate writes there what it is told of.
        with Ledger(ledger) as book:
            wait_until(lambda: len(book.blocked()) == 2)
        assert time.monotonic() - exhausted < 1
        assert not gate.answer(costing("0")).is_allowed
        answer = gate.answer(costing("1"))
        assert (answer.blocked_by, answer.noted, answer.number) == ((USERS,), (AUDITED,), None)
        assert gate.answer(costing("1", BOB)).is_allowed
        # What was refused cost nothing.
        assert sum(spent(ledger, Budgets([MODELS])).values()) == 11


def test_an_audit_budget_is_noted_and_never_blocks(place: Place, ledger: Path) -> None:
    budgets = Budgets([AUDITED])
    with running_gate(place, ledger, budgets) as gate, running_aggregator(place, budgets):
        assert gate.answer(costing("6")).noted == ()
        wait_until(lambda: gate.answer(costing("1")).noted == (AUDITED,))
        assert gate.answer(costing("100")).is_allowed
        assert json.loads(next(iter(_values(contents(place), "blocked")))) == {
            "enforcement": "audit"
        }


def _values(found: Contents, kind: str) -> list[bytes]:
    return [found.values[key] for key in found.of(kind)]


def test_blocks_follow_counters_that_others_change_without_any_traffic(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        write(bucket, "a", "10")
        write(bucket, "b", "10.5")
        write(bucket, "c", "9.99")
        wait_until(lambda: blocked(place) == {"a", "b"})
        wait_until(lambda: not gate.answer(costing("0", "b")).is_allowed)
        assert contents(place).boards[PREFIX] == [
            {"entity": "b", "usage": "10.5"},
            {"entity": "a", "usage": "10"},
            {"entity": "c", "usage": "9.99"},
        ]
        write(bucket, "a", "9")
        bucket.remove(f"usage.{PREFIX}.b")
        write(bucket, "c", "10")
        wait_until(lambda: blocked(place) == {"c"})
        wait_until(lambda: gate.answer(costing("0", "b")).is_allowed)


def test_counters_that_are_removed_without_a_trace_lose_their_blocks(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        write(bucket, "a", "10")
        wait_until(lambda: not gate.answer(costing("0", "a")).is_allowed)
        bucket.purge("usage.")
        wait_until(lambda: gate.answer(costing("0", "a")).is_allowed)
        wait_until(lambda: contents(place).boards == contents(place).boards_of_the_counters)


def test_a_counter_that_cannot_be_read_stays_as_it_is_and_so_does_its_block(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        write(bucket, BOB, "10")
        wait_until(lambda: not gate.answer(costing("0", BOB)).is_allowed)
        bucket.put(f"usage.{PREFIX}.{BOB}", b"broken")
        bucket.put(f"usage.{PREFIX}.free", b"broken")
        # Its other counters go on.
        assert gate.answer(costing("3", "free")).is_allowed
        wait_until(lambda: gate.answer(costing("2.5", "free")).noted == (AUDITED,))
        assert not gate.answer(costing("0", BOB)).is_allowed
        values = contents(place).values
        assert values[f"usage.{PREFIX}.{BOB}"] == values[f"usage.{PREFIX}.free"] == b"broken"


def test_a_gate_that_was_started_again_blocks_before_it_hears_of_anything(
    place: Place, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        assert gate.answer(costing("10")).is_allowed
        wait_until(lambda: not gate.answer(costing("0")).is_allowed)
    nowhere = Place(f"nats://127.0.0.1:{unused_port()}", place.bucket)
    with running_gate(nowhere, ledger, BUDGETS) as gate:
        assert gate.answer(costing("1")).blocked_by == (USERS,)
        assert gate.answer(costing("1", BOB)).is_allowed
    # Without anybody who counts or derives, what stands in the bucket holds.
    with running_gate(place, ledger, BUDGETS) as gate:
        assert gate.answer(costing("1")).blocked_by == (USERS,)


def test_a_block_stands_while_the_server_is_started_again(server_dir: Path, ledger: Path) -> None:
    server = NatsServer(server_dir / f"restarted-{ledger.parent.name}", port=unused_port())
    with server:
        place = Place(server.url, "restarted")
        with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
            assert gate.answer(costing("10")).is_allowed
            wait_until(lambda: not gate.answer(costing("0")).is_allowed)
            server.stop()
            assert gate.answer(costing("1", BOB)).is_allowed
            server.start()
            answers: list[bool] = []

            def is_counted() -> bool:
                answers.append(gate.answer(costing("1")).is_allowed)
                return contents(place).usages == spent(ledger, BUDGETS)

            wait_until(is_counted)
            assert not any(answers)
            assert gate.answer(costing("1")).blocked_by == (USERS,)


def test_a_lost_bucket_begins_at_zero_and_its_blocks_drop(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        assert gate.answer(costing("10")).is_allowed
        wait_until(lambda: not gate.answer(costing("0")).is_allowed)
        bucket.destroy()
        destroyed = time.monotonic()
        wait_until(lambda: gate.answer(costing("0.25")).is_allowed)
        assert time.monotonic() - destroyed < 3
        counter = next(each for each in spent(ledger, BUDGETS) if each.of.budget == "per user")
        assert counter.entity == ALICE
        wait_until(lambda: contents(place).usages.get(counter) == 0.25)
        assert encode_key(counter) in contents(place).values
        assert spent(ledger, BUDGETS)[counter] == 10.25
