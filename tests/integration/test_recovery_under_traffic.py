"""A store is lost while the gateway uses it, and every block comes back."""

from pathlib import Path

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import Hour, SplitBy
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.sandbox.gateway import Budgets, Place, running_aggregator, running_gate
from tests.integration.gateway_harness import (
    ALICE,
    BOB,
    contents,
    costing,
    definition,
    is_counted,
)
from tests.integration.recovery_runs import check, outcome, requested, run_restore, state
from tests.integration.snapshot_job import run_job
from tests.nats_servers import Bucket
from tests.waiting import wait_until

USERS = definition("per user", "10")
MODELS = definition("models", "25", split_by=SplitBy.MODEL)
BUDGETS = Budgets([USERS, MODELS])


@pytest.fixture
def place(nats_server: NatsServer, configured: Bucket) -> Place:
    return Place(nats_server.url, configured.name)


def blocked(place: Place) -> set[tuple[str, str | None]]:
    return {(each.of.budget, each.entity) for each in contents(place).blocked}


def test_every_block_is_restored_without_further_costs(
    place: Place,
    configured: Bucket,
    ledger: Path,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    with running_gate(place, ledger, BUDGETS) as gate, running_aggregator(place, BUDGETS):
        gate.answer(costing("10.5"))
        gate.answer(costing("4", BOB))
        wait_until(lambda: not gate.answer(costing("0")).is_allowed)
        wait_until(lambda: is_counted(place, ledger, BUDGETS))
        assert blocked(place) == {("per user", ALICE)}
        assert run_job(instance, current_hour).success
        check(instance)
        # Counted after the snapshot, so it is lost.
        gate.answer(costing("3", BOB))
        wait_until(lambda: is_counted(place, ledger, BUDGETS))

        configured.destroy()
        # The gateway recreates its bucket and allows requests of exhausted budgets.
        wait_until(lambda: gate.answer(costing("0")).is_allowed)
        gate.answer(costing("1"))
        gate.answer(costing("5", BOB))
        wait_until(lambda: sum(contents(place).usages.values()) == 12)
        assert blocked(place) == set()
        (request,) = requested(check(instance))
        result = run_restore(instance, request.tags)

        assert outcome(instance, result) == "restored"
        assert state(database) == "healthy"
        # From here on, requests only ask whether they are blocked.
        wait_until(lambda: not gate.answer(costing("0")).is_allowed)
        wait_until(lambda: contents(place).boards == contents(place).boards_of_the_counters)
        found = contents(place)
        assert blocked(place) == {("per user", ALICE)}
        # The higher of snapshot and live: alice 10.5 and 1, bob 4 and 5, the model 14.5 and 6.
        assert sorted(map(str, found.usages.values())) == ["10.5", "14.5", "5"]
