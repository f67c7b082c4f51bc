"""Another store at our address, with fakes: what puts an incident on hold, and what ends it."""

from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import Outcome, RecoveryState, Verdict
from budget_recovery_dagster.errors import IncidentMovedError
from budget_recovery_dagster.services.restore import (
    NothingToDo,
    hold_restore,
    release_restore,
)
from tests.fakes.usage_store import MemoryUsageStore
from tests.unit.manual_harness import ManualHarness, captured_manual_harness
from tests.unit.recovery_harness import outcome_of

DAY = timedelta(days=1)


@pytest.fixture
def harness() -> ManualHarness:
    """Return a store of two tenants; the baseline knows the time of its server."""
    harness = captured_manual_harness()
    harness.store.clock = harness.clock.now()
    harness.check()
    return harness


def another(harness: ManualHarness, *, older_by: timedelta = 5 * DAY) -> MemoryUsageStore:
    """Return a store with a lower counter that is older than the accepted one."""
    return having_3(harness, MemoryUsageStore(harness.store.stream.created_at - older_by))


def rebuilt(harness: ManualHarness) -> MemoryUsageStore:
    """Return a store with a lower counter that is as new as one that was rebuilt after a loss."""
    return having_3(harness, MemoryUsageStore(harness.clock.now()))


def having_3(harness: ManualHarness, store: MemoryUsageStore) -> MemoryUsageStore:
    store.clock = harness.clock.now()
    store.put_usage("a", "spend", "lifetime", None, "3")
    return store


def check(harness: ManualHarness, store: MemoryUsageStore) -> Verdict:
    """Check with this store at the address."""
    harness.store = store
    return harness.check().check.verdict


def lose(harness: ManualHarness) -> MemoryUsageStore:
    """Find that the store was rebuilt; return the new one."""
    store = rebuilt(harness)
    assert check(harness, store) is Verdict.LOST
    assert not harness.incident.is_held
    return store


def test_a_release_after_another_store_joined_is_not_that_of_the_maintenance(
    harness: ManualHarness,
) -> None:
    lose(harness)
    hold_restore(harness.plane, "network maintenance", by="ann")
    judged = harness.incident
    assert check(harness, another(harness)) is Verdict.OTHER_STORE
    on_hold = harness.incident.on_hold or ""
    assert "another store" in on_hold
    assert "by ann: network maintenance" in on_hold
    with pytest.raises(IncidentMovedError, match="a further loss joined"):
        harness.plane.incidents.release("ann", judged=judged)
    assert isinstance(harness.recover(), NothingToDo)
    assert harness.usage("a") == "3"


def test_another_store_holds_although_the_release_was_at_a_time_ahead(
    harness: ManualHarness,
) -> None:
    lose(harness)
    hold_restore(harness.plane, "wait", by="ann")
    at = harness.clock.now()
    harness.clock.advance(40 * DAY)
    release_restore(harness.plane, by="ann")
    harness.clock.set(at + timedelta(seconds=30))
    assert check(harness, another(harness)) is Verdict.OTHER_STORE
    assert isinstance(harness.recover(), NothingToDo)
    assert harness.usage("a") == "3"


def test_a_release_counts_although_the_hold_was_at_a_time_ahead(harness: ManualHarness) -> None:
    lose(harness)
    at = harness.clock.now()
    harness.clock.advance(40 * DAY)
    hold_restore(harness.plane, "wait", by="ann")
    harness.clock.set(at + timedelta(seconds=30))
    assert not release_restore(harness.plane, by="ann").incident.is_held


def test_the_accepted_store_returns_also_after_the_other_one_was_gone(
    harness: ManualHarness,
) -> None:
    ours, other = harness.store, another(harness)
    check(harness, other)
    other.is_gone = True
    assert check(harness, other) is Verdict.LOST
    assert "closes by itself" in harness.incident.hold_ends
    for _ in range(3):
        assert harness.state is RecoveryState.RECOVERING
        assert check(harness, ours) is Verdict.SAME
    assert harness.state is RecoveryState.HEALTHY
    (closed,) = harness.plane.incidents.recent(1)
    assert closed.ended is not None
    assert closed.ended.outcome is Outcome.RETURNED


def test_a_rebuilt_store_that_returns_after_another_one_waits_for_a_release(
    harness: ManualHarness,
) -> None:
    new = lose(harness)
    check(harness, another(harness))
    assert check(harness, new) is Verdict.LOST
    assert harness.incident.awaits_choice
    assert "by itself" not in harness.incident.hold_ends
    losses = len(harness.incident.losses)
    assert check(harness, new) is Verdict.LOST
    assert len(harness.incident.losses) == losses
    release_restore(harness.plane, by="ann")
    new.clock = harness.clock.now()
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert harness.usage("a") == "80"
