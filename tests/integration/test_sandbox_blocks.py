"""Blocks of the simulated gateway: they follow the counters, whichever program changes them."""

import json
import sqlite3
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext

from budget_recovery_dagster.adapters.nats import encode_key
from budget_recovery_dagster.domain import Enforcement, SplitBy
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.sandbox.gateway import (
    Budgets,
    Ledger,
    Place,
    running_aggregator,
    running_gate,
)
from tests.free_ports import unused_port
from tests.integration.gateway_harness import (
    ALICE,
    BOB,
    Contents,
    contents,
    costing,
    definition,
    spent,
)
from tests.nats_servers import Bucket, DisturbedNetwork
from tests.waiting import wait_until

USERS = definition("per user", "10")
AUDITED = definition("audited", "5", enforcement=Enforcement.AUDIT)
MODELS = definition("models", "1000", split_by=SplitBy.MODEL)
BUDGETS = Budgets([USERS, AUDITED, MODELS])
PREFIX = "team=20a=20/=20=E6=9D=B1=E4=BA=AC.per=20user.lifetime"


@pytest.fixture
def place(nats_server: NatsServer, bucket: Bucket) -> Place:
    return Place(nats_server.url, bucket.name)


def write(bucket: Bucket, entity: str, usage: str, **fields: str) -> None:
    bucket.put(f"usage.{PREFIX}.{entity}", json.dumps({"usage": usage, **fields}).encode())


def blocked(place: Place) -> set[str | None]:
    return {counter.entity for counter in contents(place).blocked}


@pytest.mark.alone
def test_an_exhausted_budget_is_blocked_within_a_second_and_for_its_entity_only(
    place: Place, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        assert gate.answer(costing("9.999999")).number == 1
        wait_until(lambda: len(contents(place).of("usage")) == 3)
        assert gate.answer(costing("0.000001")).is_allowed
        exhausted = time.monotonic()
        # Not by requests, which would be traffic: the gate records its blocks in the ledger.
        with Ledger(ledger) as book:
            wait_until(lambda: len(book.blocked()) == 2)
        assert time.monotonic() - exhausted < 1
        assert not gate.answer(costing("0")).is_allowed
        answer = gate.answer(costing("1"))
        assert (answer.blocked_by, answer.noted, answer.number) == ((USERS,), (AUDITED,), None)
        assert gate.answer(costing("1", BOB)).is_allowed
        # The refused request cost nothing.
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


def test_blocks_follow_changes_of_other_programs_without_traffic(
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


def test_counters_that_are_purged_without_markers_lose_their_blocks(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        write(bucket, "a", "10")
        wait_until(lambda: not gate.answer(costing("0", "a")).is_allowed)
        bucket.purge("usage.")
        wait_until(lambda: gate.answer(costing("0", "a")).is_allowed)
        wait_until(lambda: contents(place).boards == contents(place).boards_of_the_counters)


def test_an_unreadable_counter_and_its_block_stay_unchanged(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        write(bucket, BOB, "10")
        wait_until(lambda: not gate.answer(costing("0", BOB)).is_allowed)
        bucket.put(f"usage.{PREFIX}.{BOB}", b"broken")
        bucket.put(f"usage.{PREFIX}.free", b"broken")
        # Its other counters still work.
        assert gate.answer(costing("3", "free")).is_allowed
        wait_until(lambda: gate.answer(costing("2.5", "free")).noted == (AUDITED,))
        assert not gate.answer(costing("0", BOB)).is_allowed
        values = contents(place).values
        assert values[f"usage.{PREFIX}.{BOB}"] == values[f"usage.{PREFIX}.free"] == b"broken"


@pytest.mark.alone
def test_a_locked_ledger_stops_requests_and_work_continues_afterwards(
    place: Place, bucket: Bucket, ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        assert gate.answer(costing("1")).is_allowed
        foreign = sqlite3.connect(ledger, isolation_level=None)
        foreign.execute("begin immediate")
        asked = time.monotonic()
        assert not gate.answer(costing("1")).is_allowed
        assert time.monotonic() - asked < 1
        write(bucket, "a", "10")  # its block cannot be recorded
        wait_until(
            lambda: f"No access to the bucket: the ledger {ledger} cannot be used" in caplog.text
        )
        foreign.close()
        wait_until(lambda: gate.answer(costing("0", "a")).blocked_by == (USERS,))
        assert gate.answer(costing("2")).is_allowed
        models = Budgets([MODELS])
        wait_until(lambda: spent(ledger, models).items() <= contents(place).usages.items())
        assert sum(spent(ledger, models).values()) == 3


def test_an_unreadable_counter_keeps_its_place_on_the_leaderboard(
    place: Place, bucket: Bucket
) -> None:
    a, b = {"entity": "a", "usage": "3"}, {"entity": "b", "usage": "2"}
    with running_aggregator(place, BUDGETS):
        write(bucket, "a", "3")
        write(bucket, "b", "2")
        wait_until(lambda: contents(place).boards.get(PREFIX) == [a, b])
        write(bucket, "a", "7.0000000000000000001")
        write(bucket, "b", "2.5")
        wait_until(lambda: {**b, "usage": "2.5"} in contents(place).boards[PREFIX])
        assert a in contents(place).boards[PREFIX]
    # A new aggregator knows only the present entry.
    with running_aggregator(place, BUDGETS):
        write(bucket, "b", "4")
        wait_until(lambda: contents(place).boards[PREFIX] == [{**b, "usage": "4"}, a])
        write(bucket, "a", "7")
        wait_until(lambda: {**a, "usage": "7"} in contents(place).boards[PREFIX])


def test_a_restarted_gate_blocks_before_it_reads_the_bucket(place: Place, ledger: Path) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        assert gate.answer(costing("10")).is_allowed
        wait_until(lambda: not gate.answer(costing("0")).is_allowed)
    nowhere = Place(f"nats://127.0.0.1:{unused_port()}", place.bucket)
    with running_gate(nowhere, ledger, BUDGETS) as gate:
        assert gate.answer(costing("1")).blocked_by == (USERS,)
        assert gate.answer(costing("1", BOB)).is_allowed
    # Without an aggregator, the blocks in the bucket hold.
    with running_gate(place, ledger, BUDGETS) as gate:
        assert gate.answer(costing("1")).blocked_by == (USERS,)


def test_a_block_survives_a_restart_of_the_server(server_dir: Path, ledger: Path) -> None:
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


def test_a_lost_bucket_starts_at_zero_and_its_blocks_drop(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        assert gate.answer(costing("10")).is_allowed
        wait_until(lambda: not gate.answer(costing("0")).is_allowed)
        bucket.destroy()
        wait_until(lambda: gate.answer(costing("0.25")).is_allowed)
        counter = next(each for each in spent(ledger, BUDGETS) if each.of.budget == "per user")
        assert counter.entity == ALICE
        wait_until(lambda: contents(place).usages.get(counter) == 0.25)
        assert encode_key(counter) in contents(place).values
        assert spent(ledger, BUDGETS)[counter] == 10.25


def test_a_server_that_stalls_during_a_view_lifts_no_block(
    place: Place, bucket: Bucket, ledger: Path
) -> None:
    bucket.put_many({f"blocked.{PREFIX}.{number}": b"{}" for number in range(100)})
    with Ledger(ledger) as book:
        book.block([f"{PREFIX}.99"])
    with DisturbedNetwork(place.url) as network:
        network.before_request = lambda number: hold_up(bucket) if number == 1 else None
        answers: list[bool] = []

        def is_seen() -> bool:
            answers.append(gate.answer(costing("1", "99")).is_allowed)
            with Ledger(ledger) as book:
                return len(book.blocked()) == 100

        with running_gate(Place(network.url, place.bucket), ledger, BUDGETS) as gate:
            wait_until(is_seen)
    assert answers
    assert not any(answers)


def hold_up(bucket: Bucket) -> None:
    """Let the server deliver nothing for longer than a pull waits.

    This happens if the server is stopped after it has accepted a pull: the pull expires with all
    its messages undelivered.
    """

    async def pause(js: JetStreamContext) -> Any:
        [consumer] = await js.consumers_info(bucket.stream)
        until = (datetime.now(UTC) + timedelta(seconds=1.5)).isoformat()
        return await bucket._client.request(
            f"$JS.API.CONSUMER.PAUSE.{bucket.stream}.{consumer.name}",
            json.dumps({"pause_until": until}).encode(),
        )

    assert json.loads(bucket._do(pause).data)["paused"]


def test_a_block_that_is_rewritten_during_a_view_remains(
    place: Place, bucket: Bucket, ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for entity in "abc":
        bucket.put(f"blocked.{PREFIX}.{entity}", b"{}")
    with Ledger(ledger) as book:
        book.block(f"{PREFIX}.{entity}" for entity in "abc")

    def step_in(number: int) -> None:
        # The former number of keys comes before b, which is now the last one.
        if number == 1:
            bucket.put(f"blocked.{PREFIX}.d", b"{}")
            bucket.put(f"blocked.{PREFIX}.b", b"{}")

    with DisturbedNetwork(place.url) as network:
        network.before_request = step_in
        with running_gate(Place(network.url, place.bucket), ledger, BUDGETS) as gate:
            wait_until(lambda: not gate.answer(costing("1", "d")).is_allowed)
            wait_until(lambda: network.requests > 1)
    assert "No longer" not in caplog.text
    with Ledger(ledger) as book:
        assert book.blocked() == {f"{PREFIX}.{entity}" for entity in "abcd"}
