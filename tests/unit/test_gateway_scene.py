"""The budgets and the traffic of the sandbox show every kind of budget and block."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from budget_recovery_dagster.adapters.nats import CounterKey
from budget_recovery_dagster.domain import Enforcement, Period, SplitBy
from budget_recovery_dagster.sandbox.gateway import (
    BUDGETS,
    REQUESTS_PER_SECOND,
    USERS,
    Ledger,
    Traffic,
)

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
FIRST_MINUTES = 3


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Return a ledger with the history of a new sandbox."""
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.record_history(Traffic(seed=1).history(NOW))
        yield ledger


def exhausted(usages: dict[CounterKey, Decimal], enforcement: Enforcement) -> set[CounterKey]:
    return {
        counter
        for counter, usage in usages.items()
        if (definition := BUDGETS.definition_of(counter)) is not None
        if definition.enforcement is enforcement
        and definition.is_exhausted_at(counter.entity, usage)
    }


def test_the_budgets_use_all_periods_splits_and_enforcements() -> None:
    assert {each.tenant for each in BUDGETS.definitions} == {"acme", "globex", "team a / 東京"}
    assert {each.period for each in BUDGETS.definitions} == set(Period)
    assert {each.split_by for each in BUDGETS.definitions} == set(SplitBy)
    assert {each.enforcement for each in BUDGETS.definitions} == set(Enforcement)
    assert {"cost_centre", "end_user"} <= {each.metadata_key for each in BUDGETS.definitions}


def test_the_history_has_a_budget_of_more_than_500_entities_and_exhausts_some(
    ledger: Ledger,
) -> None:
    usages = ledger.true_spend(BUDGETS, NOW)
    sizes = Counter((counter.tenant, counter.of) for counter in usages)
    assert max(sizes.values()) > 500
    blocked = exhausted(usages, Enforcement.ENFORCE)
    assert {counter.tenant for counter in blocked} == {"acme", "team a / 東京"}
    assert exhausted(usages, Enforcement.AUDIT)


@pytest.mark.parametrize("seed", range(5))
def test_another_budget_is_exhausted_in_the_first_minutes_and_traffic_continues(
    ledger: Ledger, seed: int
) -> None:
    before = exhausted(ledger.true_spend(BUDGETS, NOW), Enforcement.ENFORCE)
    traffic = Traffic(seed)
    for _ in range(int(REQUESTS_PER_SECOND * 60 * FIRST_MINUTES)):
        ledger.record(NOW, traffic.request())
    after = exhausted(ledger.true_spend(BUDGETS, NOW), Enforcement.ENFORCE)
    assert len(after) > len(before) > 0
    # Budgets that count every request are not exhausted.
    splits = {definition.split_by for each in after if (definition := BUDGETS.definition_of(each))}
    assert splits <= {SplitBy.AGENT, SplitBy.METADATA}


def test_traffic_is_the_same_for_the_same_seed() -> None:
    one, same, other = (
        [traffic.request() for _ in range(50)] for traffic in map(Traffic, (7, 7, 8))
    )
    assert one == same != other
    assert {request.tenant for request in one} == set(USERS)
