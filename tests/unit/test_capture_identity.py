"""Captures of a store that may not be the one we knew."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import Observation, RecoveryState, StoreIdentity, Verdict
from budget_recovery_dagster.errors import (
    ClockSkewError,
    PossibleLossError,
    StoreLostError,
    StoreMissingError,
)
from budget_recovery_dagster.services import Captured, MarkerWriting, Paused
from tests.fakes.incidents import MemoryBaselines
from tests.fakes.usage_store import MemoryUsageStore
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
    assert isinstance(captured.stopped_by, StoreLostError)
    assert [f.tenant for f in captured.failed] == ["b", "c"]
    assert all("recreated" in f.reason for f in captured.failed)
    recovery = house.incidents.recovery()
    assert recovery.state is RecoveryState.RECOVERING
    assert recovery.incident is not None
    (loss,) = recovery.incident.losses
    assert (loss.found_by, loss.before.created_at, loss.after) == (
        "bad",
        BORN,
        StoreIdentity(REBORN, 1),
    )
    assert house.checks.newest(1)[0].verdict is Verdict.RECREATED
    # Nothing more is captured from here on.
    assert house.run("paused") == Paused(RecoveryState.RECOVERING)
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


def test_a_bucket_that_goes_before_the_listing_is_a_loss(house: House) -> None:
    house.capture()
    house.clock.advance(timedelta(minutes=1))
    house.store.listing_failure = StoreMissingError("No bucket.", "look.")
    in_order = iter([None, house.store.listing_failure])

    class VanishingStore(MemoryUsageStore):
        def observe(self, deployment_id: str) -> Observation:
            self.identity_failure = next(in_order, house.store.listing_failure)
            return super().observe(deployment_id)

    vanishing = VanishingStore(BORN)
    vanishing.stream = house.store.stream
    vanishing.listing_failure = house.store.listing_failure
    service = replace(house.service, open_store=lambda: nullcontext(vanishing))
    captured = service.capture(house.hour, run_id="r", holder="r", on_outcome=lambda _: None)
    assert isinstance(captured, Captured)
    assert isinstance(captured.stopped_by, StoreLostError)


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
    assert isinstance(captured.stopped_by, StoreLostError)
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
    assert isinstance(house.capture().stopped_by, StoreLostError)
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


def test_two_looks_that_disagree_open_no_incident(house: House) -> None:
    house.capture()
    house.clock.advance(timedelta(minutes=1))
    sequences = iter([2, 400])

    class FlappingStore(MemoryUsageStore):
        def observe(self, deployment_id: str) -> Observation:
            self.stream = StoreIdentity(BORN, next(sequences))
            return super().observe(deployment_id)

    flapping = FlappingStore(BORN)
    service = replace(house.service, open_store=lambda: nullcontext(flapping))
    captured = service.capture(house.hour, run_id="r", holder="r", on_outcome=lambda _: None)
    assert isinstance(captured, Captured)
    assert isinstance(captured.stopped_by, PossibleLossError)
    assert "disagree" in captured.stopped_by.message
    assert captured.stored == ()
    assert house.incidents.recovery().state is RecoveryState.HEALTHY


def test_a_marker_that_is_renewed_during_a_capture_is_no_loss(house: House) -> None:
    house.capture()
    house.clock.advance(timedelta(minutes=1))
    baselines = MemoryBaselines(house.plane)
    record = house.registry.claim("budget-usage")
    assert record.baseline is not None

    def check_in_between() -> None:
        intended = baselines.intend_marker("nonce", judged=house.baseline)
        seen = house.store.observe(record.deployment_id)
        writing = MarkerWriting(house.store, record.deployment_id)
        baselines.accept(writing.renew(intended, seen, house.clock.now()), judged=intended)

    house.while_reading("b", check_in_between)
    assert names(house.capture().stored) == ["a", "b", "c"]
    assert house.incidents.recovery().state is RecoveryState.HEALTHY
    assert house.baseline.marker is not None


def test_a_leader_that_may_be_none_any_more_is_captured_from_no_further(house: House) -> None:
    house.capture()
    house.clock.advance(timedelta(minutes=1))

    class CutOffStore(MemoryUsageStore):
        def observe(self, deployment_id: str) -> Observation:
            return replace(super().observe(deployment_id), is_led=False)

    behind = CutOffStore(BORN)
    behind.stream = StoreIdentity(BORN, 1)
    service = replace(house.service, open_store=lambda: nullcontext(behind))
    captured = service.capture(house.hour, run_id="r", holder="r", on_outcome=lambda _: None)
    assert isinstance(captured, Captured)
    assert isinstance(captured.stopped_by, PossibleLossError)
    assert "may not be the leader" in captured.stopped_by.message
    assert house.incidents.recovery().state is RecoveryState.HEALTHY
