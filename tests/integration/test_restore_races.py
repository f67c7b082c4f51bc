"""Concurrent and repeated restores have the result of one and never lower a counter."""

import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import pairwise

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.adapters.nats import CounterKey, encode_key
from budget_recovery_dagster.domain import BudgetWindow, Entity, IsOpen, Window
from budget_recovery_dagster.services.restore import (
    NothingToDo,
    Recovered,
    RecoveryResult,
    TenantRestored,
)
from tests.contract.racing_writers import RacingWriters, history_of
from tests.integration.interrupted_store import Interruptions, interrupted
from tests.integration.recovery_harness import Harness, all_stored, opened_harness
from tests.integration.recovery_runs import (
    check,
    incidents,
    outcome,
    requested,
    run_restore,
    state,
    usages,
)
from tests.nats_servers import Bucket
from tests.waiting import wait_until

LIFETIME = "lifetime"
USERS = BudgetWindow("users", Window.parse(LIFETIME))
POINT: dict[Entity, str] = {None: "60", "alice": "30", "bob": "20", "carol": "10"}
# Counted after the loss: a lower usage, a higher one, and a new entity.
LIVE: dict[Entity, str] = {"alice": "2", "bob": "25", "new": "1"}
BOTH: dict[Entity, str] = {None: "60", "alice": "30", "bob": "25", "carol": "10", "new": "1"}


@pytest.fixture
def lost(harness: Harness) -> Harness:
    """Return a store that was lost, with traffic after the loss."""
    harness.bucket.spend("acme", "users", LIFETIME, POINT)
    harness.bucket.rank("acme", "users", LIFETIME, POINT)
    harness.capture()
    harness.lose()
    harness.bucket.spend("acme", "users", LIFETIME, LIVE)
    harness.find_loss()
    return harness


def test_only_one_of_two_concurrent_restores_runs(lost: Harness, database_url: str) -> None:
    done: list[RecoveryResult] = []
    both = threading.Barrier(2)

    def wait_for_the_other(_: IsOpen) -> None:
        # The working restore waits until the other one has ended.
        wait_until(lambda: len(done) == 1)

    def recover(run_id: str) -> None:
        with opened_harness(lost.bucket, database_url, lost.clock.time) as worker:
            both.wait()
            opening = interrupted(Interruptions(before_raising=wait_for_the_other))
            done.append(worker.run(opening, run_id))

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(recover, run_id) for run_id in ("one", "another")]:
            future.result()

    idle, working = done
    assert isinstance(idle, NothingToDo)
    assert isinstance(working, Recovered)
    assert working.incident.attempts == 1
    assert usages(lost.bucket, "acme", "users", LIFETIME) == BOTH


def test_restoring_again_changes_no_revision(lost: Harness) -> None:
    lost.recover()
    before = all_stored(lost.bucket)
    assert isinstance(lost.run(), NothingToDo)
    again = lost.restore("acme")
    assert (again.raised, again.boards, again.failure) == (0, 0, None)
    assert all_stored(lost.bucket) == before


def test_concurrent_restores_without_leases_have_the_result_of_one(
    lost: Harness, database_url: str
) -> None:
    count = 3
    all_have_planned = threading.Barrier(count)

    def restore(_: int) -> TenantRestored:
        with opened_harness(lost.bucket, database_url, lost.clock.time) as worker:
            opening = interrupted(Interruptions(before_raising=lambda _: wait()))
            done = worker.restore("acme", opening)
            assert done.failure is None
            return done

    def wait() -> None:
        all_have_planned.wait(timeout=20)

    before = lost.bucket.info().state.last_seq
    with ThreadPoolExecutor(count) as pool:
        done = list(pool.map(restore, range(count)))

    assert usages(lost.bucket, "acme", "users", LIFETIME) == BOTH
    # Each restore planned to raise three; three counters and one leaderboard were written in total.
    assert [sum(entry.entries for entry in each.entries) for each in done] == [4, 4, 4]
    assert sum(each.raised for each in done) == 3
    assert sum(each.boards for each in done) == 1
    assert lost.bucket.info().state.last_seq == before + 4


WRITERS = 8
INCREMENTS = 200
HOT = "hot"
OTHERS = [str(number) for number in range(100)]


def key(entity: Entity) -> str:
    return encode_key(CounterKey("acme", USERS, entity))


def test_a_restore_with_many_writers_loses_and_lowers_nothing(
    configured: Bucket,
    database: psycopg.Connection,
    harness: Harness,
    instance: dg.DagsterInstance,
) -> None:
    # Below and above the values that the writers reach.
    point: dict[Entity, str] = {
        name: str(1000 if number % 2 else 3) for number, name in enumerate(OTHERS)
    }
    point[HOT] = "1000000"
    configured.spend("acme", "users", LIFETIME, point)
    harness.capture()
    configured.destroy()
    configured.create_with(max_msgs_per_subject=-1, allow_msg_ttl=True)
    writers = RacingWriters(configured, [key(HOT)], [key(name) for name in OTHERS], WRITERS)
    with writers.at_work():
        wait_until(lambda: len(writers.added) > INCREMENTS)
        (request,) = requested(check(instance))
        result = run_restore(instance, request.tags)
        at_end = len(writers.added)
        wait_until(lambda: len(writers.added) > at_end + INCREMENTS)

    assert result.success
    assert outcome(instance, result) == "restored"
    assert state(database) == "healthy"
    history = history_of(configured, "usage.>")
    raised = 0
    for name, usage in point.items():
        revisions = history[key(name)]
        assert revisions[-1][1] >= Decimal(usage)
        for (_, before), (revision, after) in pairwise([(0, Decimal(0)), *revisions]):
            assert after > before
            if revision in writers.added:
                assert after == before + 1
            else:
                # Never a sum: exactly the value of the recovery point.
                assert after == Decimal(usage)
                raised += 1
    assert writers.added.keys() <= {revision for each in history.values() for revision, _ in each}
    (incident,) = incidents(database)
    assert incident["restored_counters"] == raised
    assert raised > len(OTHERS) // 2
    assert incident["attempts"] == 1
    assert outcome(instance, run_restore(instance, request.tags)) == "nothing_to_do"
