"""Captures of a store that may not be the one we knew."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.memory.usage_store import MemoryUsageStore
from budget_recovery_dagster.domain.identity import StoreIdentity
from budget_recovery_dagster.errors import (
    ClockSkewError,
    PossibleLossError,
    StoreMissingError,
)
from budget_recovery_dagster.services.capture_outcome import Captured
from tests.unit.capture_house import BORN, NOW, REBORN, House, names


def test_a_store_recreated_during_the_reading_is_not_stored(house: House) -> None:
    house.capture("good")
    house.clock.advance(timedelta(minutes=1))

    def wipe() -> None:
        house.store.recreate(REBORN)
        house.spend("b", "0.01")

    house.while_reading("b", wipe)
    captured = house.capture("bad")

    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, PossibleLossError)
    assert [f.tenant for f in captured.failed] == ["b", "c"]
    assert all("Possible loss" in f.reason for f in captured.failed)
    assert captured.pruned is None
    assert house.known("b") == Decimal(10)


@pytest.mark.parametrize("what", ["recreated", "regressed", "gone"])
def test_a_wipe_during_the_very_first_capture_is_noticed(what: str, house: House) -> None:
    def wipe() -> None:
        house.store.purge()
        if what == "recreated":
            house.store.recreate(REBORN)
        elif what == "regressed":
            house.store.stream = replace(house.store.stream, last_sequence=1)
        else:
            house.store.identity_failure = StoreMissingError("No bucket.", "look.")

    house.while_reading("a", wipe)
    captured = house.capture()
    assert captured.stored == ()
    assert isinstance(captured.stopped_by, PossibleLossError)
    assert what in captured.stopped_by.message
    assert house.registry.claim("budget-usage").baseline is None


def test_a_bucket_that_goes_before_the_listing_is_a_possible_loss(house: House) -> None:
    house.capture()
    house.clock.advance(timedelta(minutes=1))
    house.store.listing_failure = StoreMissingError("No bucket.", "look.")
    in_order = iter([None, house.store.listing_failure])

    class VanishingStore(MemoryUsageStore):
        def identity(self) -> StoreIdentity:
            self.identity_failure = next(in_order)
            return super().identity()

    vanishing = VanishingStore(BORN)
    vanishing.stream = house.store.stream
    vanishing.listing_failure = house.store.listing_failure
    service = replace(house.service, open_store=lambda: nullcontext(vanishing))
    captured = service.capture(house.hour, run_id="r", holder="r", on_outcome=lambda _: None)
    assert isinstance(captured, Captured)
    assert isinstance(captured.stopped_by, PossibleLossError)


@pytest.mark.parametrize("what", ["recreated", "regressed", "gone"])
def test_a_store_of_another_identity_stores_nothing_and_prunes_nothing(
    what: str, house: House
) -> None:
    house.capture("old")
    house.clock.advance(timedelta(days=8))
    if what == "recreated":
        house.store.recreate(REBORN)
    elif what == "regressed":
        house.store.stream = house.store.stream.__class__(BORN, 2)
    else:
        house.store.identity_failure = StoreMissingError("No bucket.", "look.")

    captured = house.capture("new")

    assert captured.stored == ()
    assert isinstance(captured.stopped_by, PossibleLossError)
    assert what in captured.stopped_by.message
    assert captured.pruned is None
    assert len(house.snapshots.captured_by("old")) == 3
    assert [f.name for f in house.snapshots.failures_of("new")] == ["a", "b", "c"]


def test_a_baseline_lost_from_the_database_is_no_first_install(house: House) -> None:
    house.capture()
    house.plane.store = None
    house.clock.advance(timedelta(minutes=1))
    house.store.recreate(REBORN)
    house.spend("a", "1")
    assert isinstance(house.capture().stopped_by, PossibleLossError)
    assert house.known("a") == Decimal(10)


def test_a_missing_bucket_before_any_snapshot_is_a_mistake_not_a_loss() -> None:
    house = House()
    house.store.identity_failure = StoreMissingError("No bucket.", "check BUCKET.")
    with pytest.raises(StoreMissingError):
        house.run()


def test_a_baseline_that_another_moved_is_judged_again(house: House) -> None:
    house.capture()
    house.clock.advance(timedelta(minutes=1))

    def another_accepts_the_present() -> None:
        assert house.plane.store is not None
        assert house.plane.store.baseline is not None
        old = house.plane.store.baseline
        moved = old.__class__(house.store.stream, old.version + 1)
        house.plane.store = house.plane.store.__class__(
            house.plane.store.bucket,
            house.plane.store.deployment_id,
            house.plane.store.state,
            moved,
        )

    house.while_reading("b", another_accepts_the_present)
    assert names(house.capture().stored) == ["a", "b", "c"]


def test_clocks_that_disagree_store_nothing_and_prune_nothing(house: House) -> None:
    house.capture("good")
    house.store.clock = NOW
    house.clock.advance(timedelta(days=25))
    captured = house.capture("ahead")
    assert isinstance(captured.stopped_by, ClockSkewError)
    assert "2026-12-20 12:05:00" in captured.stopped_by.message
    assert "2026-11-25 12:05:00" in captured.stopped_by.message
    assert (captured.stored, captured.pruned) == ((), None)
    house.clock.set(NOW + timedelta(seconds=59))
    assert names(house.capture("right again").stored) == ["a", "b", "c"]
