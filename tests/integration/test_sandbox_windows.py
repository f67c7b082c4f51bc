"""Windows of the simulated gateway: closed ones are removed, and the next start at zero."""

import contextlib
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import nats.js.errors
import pytest
from nats.js import JetStreamContext

from budget_recovery_dagster.domain import Period, SplitBy
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.sandbox.gateway import (
    Budgets,
    Charge,
    Ledger,
    Place,
    running_aggregator,
    running_gate,
)
from tests.integration.gateway_harness import (
    ALICE,
    SteppedClock,
    contents,
    costing,
    definition,
    publish_cost,
    spent,
)
from tests.nats_servers import Bucket
from tests.waiting import wait_until

# A Sunday evening, the last of its month: day, week and month end with it.
EVENING = datetime(2026, 5, 31, 23, 59, tzinfo=UTC)
BUDGETS = Budgets(definition(f"of a {period}", "10", period=period) for period in Period)
GROUP = "team=20a=20/=20=E6=9D=B1=E4=BA=AC"


@pytest.fixture
def place(nats_server: NatsServer, bucket: Bucket) -> Place:
    return Place(nats_server.url, bucket.name)


def headers_of_all(bucket: Bucket) -> list[dict[str, str]]:
    async def read(js: JetStreamContext) -> list[dict[str, str]]:
        state = (await js.stream_info(bucket.stream)).state
        found = []
        for number in range(state.first_seq, state.last_seq + 1):
            with contextlib.suppress(nats.js.errors.NotFoundError):
                found.append((await js.get_msg(bucket.stream, number)).headers or {})
        return found

    headers: list[dict[str, str]] = bucket._do(read)
    return headers


def tokens(place: Place, kind: str) -> set[str]:
    return {key.split(".")[3] for key in contents(place).of(kind)}


def test_keys_of_closed_windows_are_removed_and_the_next_start_at_zero(
    place: Place, bucket: Bucket, tmp_path: Path
) -> None:
    clock = SteppedClock(EVENING)
    ledger = tmp_path / "ledger"
    before = {"2026-05-31", "2026-W22", "2026-05", "2026-Q2", "lifetime"}
    with (
        running_gate(place, ledger, BUDGETS, clock=clock) as gate,
        running_aggregator(place, BUDGETS, clock=clock),
    ):
        gate.answer(costing("10"))
        wait_until(lambda: tokens(place, "blocked") == before)
        assert tokens(place, "usage") == tokens(place, "leaderboard") == before
        wait_until(lambda: len(gate.answer(costing("0")).blocked_by) == 5)

        clock.now = EVENING + timedelta(minutes=1)
        wait_until(lambda: tokens(place, "usage") == {"2026-Q2", "lifetime"})
        wait_until(lambda: tokens(place, "blocked") == {"2026-Q2", "lifetime"})
        wait_until(lambda: tokens(place, "leaderboard") == {"2026-Q2", "lifetime"})
        # The markers are removed, too.
        markers = [header for header in headers_of_all(bucket) if "KV-Operation" in header]
        assert len(markers) == 9
        assert all("Nats-TTL" in header for header in markers)

        clock.now = datetime(2026, 7, 1, tzinfo=UTC)
        gate.answer(costing("1"))  # the lifetime is exhausted
        wait_until(lambda: tokens(place, "usage") == {"lifetime"})
        gate.answer(costing("0.5", "another"))
        after = {"2026-07-01", "2026-W27", "2026-07", "2026-Q3", "lifetime"}
        wait_until(lambda: tokens(place, "usage") == after)
        found = contents(place).usages
        assert found == spent(ledger, BUDGETS, clock.now)
        assert {counter.entity: usage for counter, usage in found.items()} == {
            ALICE: 10,
            "another": Decimal("0.5"),
        }


def test_a_late_cost_of_a_closed_window_does_no_harm(place: Place, tmp_path: Path) -> None:
    clock = SteppedClock(EVENING + timedelta(minutes=2))
    with Ledger(tmp_path / "ledger") as ledger:
        late = Charge(ledger.id, ledger.record(EVENING, costing("3")), EVENING, costing("3"))
        assert late.number == 1
    with (
        running_gate(place, tmp_path / "ledger", BUDGETS, clock=clock) as gate,
        running_aggregator(place, BUDGETS, clock=clock),
    ):
        gate.answer(costing("1"))
        current = {"2026-06-01", "2026-W23", "2026-06", "2026-Q2", "lifetime"}
        wait_until(lambda: tokens(place, "usage") == current)
        publish_cost(place, late.to_json())
        gate.answer(costing("1"))
        wait_until(lambda: contents(place).usages == spent(tmp_path / "ledger", BUDGETS, clock.now))
        usages = {each.of.window.token: usage for each, usage in contents(place).usages.items()}
        assert usages == dict.fromkeys(current, 2) | {"2026-Q2": 5, "lifetime": 5}


def test_windows_that_closed_while_nothing_ran_are_removed_at_the_start(
    place: Place, bucket: Bucket
) -> None:
    for key in ("usage.{}.a", "blocked.{}.b", "leaderboard.{}"):
        bucket.put(key.format(f"{GROUP}.b.2026-05-30"), b'{"usage":"1"}')
    bucket.put("ratelimit.x.y.2026-05-30.z", b"7")
    bucket.put(f"usage.{GROUP}.b.2026-05-31.a", b'{"usage":"1"}')
    with running_aggregator(place, BUDGETS, clock=SteppedClock(EVENING)):
        wait_until(
            lambda: (
                set(contents(place).values)
                == {
                    "ratelimit.x.y.2026-05-30.z",
                    f"usage.{GROUP}.b.2026-05-31.a",
                    f"leaderboard.{GROUP}.b.2026-05-31",
                }
            )
        )


def test_a_budget_of_more_than_500_entities_shows_the_largest(place: Place, tmp_path: Path) -> None:
    customers = definition("customers", "501", split_by=SplitBy.METADATA, metadata_key="end_user")
    budgets = Budgets([customers])
    with (
        running_gate(place, tmp_path / "ledger", budgets) as gate,
        running_aggregator(place, budgets),
    ):
        # The first has spent 1, the second 2, ... the last 501.
        for number in range(1, 502):
            gate.answer(costing(str(number), end_user=f"end user {number:03}"))
        gate.answer(costing("0"))  # for no customer
        wait_until(lambda: len(contents(place).usages) == 501)
        wait_until(lambda: contents(place).boards == contents(place).boards_of_the_counters)
        [entries] = contents(place).boards.values()
        assert len(entries) == 500
        assert entries[0] == {"entity": "end user 501", "usage": "501"}
        assert entries[-1] == {"entity": "end user 002", "usage": "2"}
        wait_until(lambda: {each.entity for each in contents(place).blocked} == {"end user 501"})
        assert contents(place).usages == spent(tmp_path / "ledger", budgets)


@pytest.mark.alone
@pytest.mark.parametrize("change", ["it closes", "many exhaust it"])
def test_a_large_budget_does_not_delay_the_block_of_another(
    place: Place, bucket: Bucket, tmp_path: Path, change: str
) -> None:
    day = definition("day", "10", period=Period.DAY)
    budgets = Budgets([definition("ever", "10"), day])
    clock = SteppedClock(EVENING)
    group = f"{GROUP}.day.2026-05-31"
    counters = [f"usage.{group}.{number}" for number in range(6000 if "closes" in change else 3000)]
    with (
        running_gate(place, tmp_path / "ledger", budgets, clock=clock) as gate,
        running_aggregator(place, budgets, clock=clock),
        Ledger(tmp_path / "ledger") as book,
    ):
        bucket.put_many(dict.fromkeys(counters, b"5"))
        wait_until(lambda: len(contents(place).boards.get(group, ())) == 500)
        if "closes" in change:
            clock.now = EVENING + timedelta(minutes=1)
        else:
            bucket.put_many(dict.fromkeys(counters, b"20"))
        gate.answer(costing("10"))
        exhausted = time.monotonic()
        ever = f"{GROUP}.ever.lifetime.user=3Aalice=40example=2Ecom"
        wait_until(lambda: ever in book.blocked(), every=0.05)
        assert time.monotonic() - exhausted < 1
        if "closes" in change:
            wait_until(lambda: tokens(place, "usage") == {"lifetime", "2026-06-01"})
        else:
            wait_until(lambda: len(contents(place).blocked) == len(counters) + 2)


def test_a_bucket_with_exactly_one_batch_of_keys_is_read_to_its_end(
    place: Place, bucket: Bucket
) -> None:
    bucket.put_many({f"k.{number}": b"" for number in range(999)})
    assert len(contents(place).values) == 1000  # with the key that put_many adds
