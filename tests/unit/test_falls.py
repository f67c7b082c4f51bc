"""A check of an intact store: what it counts, requests and reports."""

from contextlib import nullcontext
from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import (
    BudgetWindow,
    KeyCount,
    RecoveryState,
    TenantWindow,
    Verdict,
    Window,
)
from budget_recovery_dagster.errors import StorePermissionError, StoreReadError
from budget_recovery_dagster.services import CaptureRequest, Checked, check_store
from tests.unit.capture_harness import NOW, REBORN, Harness
from tests.unit.recovery_harness import captured_harness

DAY = timedelta(days=1)
MINUTES = timedelta(minutes=1)
SPEND = TenantWindow("a", BudgetWindow("spend", Window.parse("lifetime")))


@pytest.fixture
def harness() -> Harness:
    """Return a captured and checked store with three counters of tenant a and one of b."""
    harness = Harness()
    for entity in ("x", "y", "z"):
        harness.spend("a", "10", entity)
    harness.spend("b", "10")
    harness.capture("first")
    checked(harness)
    return harness


def checked(harness: Harness, after: timedelta = 10 * MINUTES) -> Checked:
    harness.clock.advance(after)
    return check_store(harness.plane, lambda: nullcontext(harness.store), checked_by="a test")


def gone(result: Checked) -> dict[TenantWindow, int]:
    return {each.at: each.missing for each in result.compared.gone}


def request_of(result: Checked) -> CaptureRequest:
    assert result.compared.request is not None
    return result.compared.request


def test_an_unchanged_or_growing_store_requests_nothing(harness: Harness) -> None:
    assert checked(harness).compared.request is None
    harness.spend("a", "11", "x")
    harness.spend("a", "1", "new")
    result = checked(harness)
    assert (result.compared.notes, result.compared.request, result.hint) == ((), None, "")


@pytest.mark.parametrize("keys", [0, 5, 7, 9])
@pytest.mark.parametrize("deleted", [0, 2])
def test_a_count_finds_at_least_what_is_gone(keys: int, deleted: int) -> None:
    known = KeyCount(SPEND, keys=7, sequence=3, counted_at=NOW)
    later = NOW + MINUTES
    counted = known.counted(keys, deleted, later)
    assert (counted.keys, counted.counted_at) == (keys, later)
    assert counted.missing == max(7 - keys, 0) + deleted
    assert (counted.missing_since is None) == (counted.missing == 0)
    # Not counted is not gone.
    again = counted.counted(None, 0, later + MINUTES)
    assert (again.keys, again.missing) == (keys, counted.missing)
    assert again.missing_since == counted.missing_since


def test_the_request_of_a_difference_is_the_same_until_it_changes(harness: Harness) -> None:
    harness.store.purge("usage.a.spend.lifetime.x")
    first = checked(harness)
    assert gone(first) == {SPEND: 1}
    assert request_of(first).hour == harness.hour
    assert request_of(checked(harness)) == request_of(first)
    harness.store.remove("usage.a.spend.lifetime.y")
    second = checked(harness)
    assert gone(second) == {SPEND: 2}
    assert request_of(second).key != request_of(first).key


def test_no_capture_is_requested_for_an_hour_that_is_about_to_end(harness: Harness) -> None:
    harness.store.purge("usage.a.")
    harness.clock.set(harness.hour.end - timedelta(seconds=70))
    late = checked(harness, timedelta(seconds=30))
    assert gone(late) == {SPEND: 3}
    assert late.compared.request is None
    # The next check requests it, unless the hourly capture was quicker.
    assert request_of(checked(harness)).hour == harness.hour


def test_a_store_that_cannot_be_counted_is_intact_all_the_same(harness: Harness) -> None:
    harness.store.count_failure = StorePermissionError("No permission to count.", "grant it.")
    harness.store.purge("usage.a.")
    result = checked(harness)
    assert result.check.verdict.is_good
    assert "were not searched for: No permission to count." in result.check.reason
    assert result.hint == "grant it."
    assert gone(result) == {}
    # Nothing was forgotten meanwhile.
    harness.store.count_failure = None
    assert gone(checked(harness)) == {SPEND: 3}


def test_a_window_that_was_not_counted_is_unknown_and_the_others_are_compared(
    harness: Harness,
) -> None:
    other = TenantWindow("b", SPEND.of)
    harness.store.uncounted = frozenset({SPEND})
    harness.store.purge("usage.")
    result = checked(harness)
    assert gone(result) == {other: 1}
    assert (
        "were not searched for: The keys of 1 of 2 windows were not counted, such as tenant 'a', "
        "spend lifetime."
    ) in result.check.reason
    assert "counts them again" in result.hint
    # Its last count is kept until the next one.
    harness.store.uncounted = frozenset()
    result = checked(harness)
    assert gone(result) == {SPEND: 3, other: 1}
    assert "not counted" not in result.check.reason


def test_deletions_that_could_not_be_read_are_read_by_the_next_check(harness: Harness) -> None:
    harness.store.remove("usage.a.spend.lifetime.x")
    read = harness.store.deletion_failure = StoreReadError("Too slow.", "check the load.")
    result = checked(harness)
    assert read.message in result.check.reason
    assert gone(result) == {}
    harness.store.deletion_failure = None
    assert gone(checked(harness)) == {SPEND: 1}


def test_a_deletion_that_a_capture_has_seen_is_not_found_again(harness: Harness) -> None:
    harness.store.remove("usage.a.spend.lifetime.x")
    harness.clock.advance(MINUTES)
    harness.capture("second")
    assert gone(checked(harness)) == {}
    (fall,) = harness.plane.falls.open()
    assert (fall.at, fall.counters) == (SPEND, 1)


def test_a_deletion_of_a_captured_tenant_is_not_found_again_if_another_tenant_failed(
    harness: Harness,
) -> None:
    harness.store.remove("usage.a.spend.lifetime.x")
    harness.store.remove("usage.b.spend.lifetime.=")
    harness.store.failures["b"] = StoreReadError("Reading b took too long.", "read again.")
    harness.clock.advance(MINUTES)
    assert [each.tenant for each in harness.capture("second").failed] == ["b"]
    assert {at.tenant: missing for at, missing in gone(checked(harness)).items()} == {"b": 1}


def test_counts_start_again_in_a_store_that_replaced_a_lost_one(harness: Harness) -> None:
    harness.store.recreate(REBORN)
    harness.spend("a", "1", "x")
    lost = checked(harness)
    assert lost.check.verdict is Verdict.LOST
    assert lost.compared.notes == ()
    again = checked(harness)
    # The incident is open: nothing is counted.
    assert (again.compared.gone, again.compared.request) == ((), None)


def test_a_purge_is_counted_after_an_incident_that_ended_with_the_clock_ahead() -> None:
    harness = captured_harness()
    harness.wipe()
    harness.clock.advance(40 * DAY)
    harness.recover()
    assert harness.state is RecoveryState.HEALTHY
    harness.clock.advance(-40 * DAY)
    # The counts start again, in the store that was restored.
    assert harness.check().compared.gone == ()
    harness.store.purge("usage.a.spend.lifetime.alice")
    harness.clock.advance(10 * MINUTES)
    assert gone(harness.check()) == {SPEND: 1}


def test_old_delete_marks_hide_no_purge(harness: Harness) -> None:
    for number in range(20):
        harness.spend("a", "1", f"old{number}")
        harness.store.remove(f"usage.a.spend.lifetime.old{number}")
    harness.clock.advance(MINUTES)
    harness.capture("second")
    harness.store.purge("usage.a.spend.lifetime.x")
    assert gone(checked(harness)) == {SPEND: 1}


def test_a_deletion_during_the_read_is_counted_by_the_next_check(harness: Harness) -> None:
    # The first half of tenant a has been read by then, x included.
    harness.store.during_read = lambda tenant: (
        harness.store.remove("usage.a.spend.lifetime.x") if tenant == "a" else None
    )
    harness.clock.advance(MINUTES)
    captured = harness.capture("second")
    harness.store.during_read = None
    assert [each.drops for each in captured.stored] == [0, 0]
    assert gone(checked(harness)) == {SPEND: 1}


def test_the_largest_falls_are_named(harness: Harness) -> None:
    harness.store.purge("usage.b.")
    harness.store.purge("usage.a.")
    result = checked(harness)
    assert [(each.at.tenant, each.missing) for each in result.compared.gone] == [("a", 3), ("b", 1)]
    assert result.compared.notes == (
        (
            "Counters missing from the store since the newest snapshots: 4. The largest: 3 of"
            " tenant 'a', spend lifetime."
        ),
        "A capture is requested.",
    )
