"""Captures of a store whose identity may have changed."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import (
    Evidence,
    IntendedMarker,
    Observation,
    RecoveryState,
    StoreIdentity,
    Verdict,
)
from budget_recovery_dagster.errors import (
    ClockSkewError,
    PossibleLossError,
    StoreLostError,
    StoreMissingError,
)
from budget_recovery_dagster.services import Paused
from budget_recovery_dagster.services.store_watch import Finding, watch_store
from tests.fakes.usage_store import MemoryUsageStore
from tests.unit.capture_harness import BORN, NOW, REBORN, Harness, names


def test_a_store_recreated_during_a_read_is_not_stored(harness: Harness) -> None:
    harness.capture("good")
    harness.clock.advance(timedelta(minutes=1))

    def wipe() -> None:
        harness.store.recreate(REBORN)
        harness.spend("b", "0.01")

    harness.while_reading("b", wipe)
    captured = harness.capture("bad")

    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, StoreLostError)
    assert [f.tenant for f in captured.failed] == ["b", "c"]
    assert all("recreated" in f.reason for f in captured.failed)
    recovery = harness.plane.incidents.recovery()
    assert recovery.state is RecoveryState.RECOVERING
    assert recovery.incident is not None
    (loss,) = recovery.incident.losses
    assert (loss.found_by, loss.before.created_at, loss.after) == (
        "bad",
        BORN,
        StoreIdentity(REBORN, 1),
    )
    assert harness.plane.registry.newest_checks(1)[0].verdict is Verdict.LOST
    # Nothing more is captured from here on.
    assert harness.run("paused") == Paused(RecoveryState.RECOVERING)
    assert captured.pruned is None
    assert harness.known("b") == Decimal(10)


def compared(harness: Harness, store: MemoryUsageStore) -> Finding:
    return watch_store(harness.plane, store, lambda: nullcontext(store), "a check").compare()


def test_a_first_capture_knows_an_older_store_and_the_neighbours_of_the_accepted_one(
    harness: Harness,
) -> None:
    """Before any check: otherwise another store would be restored into as a rebuilt one."""
    harness.store.clock = harness.clock.now()
    harness.capture("first")
    older = MemoryUsageStore(BORN - timedelta(days=1))
    younger = MemoryUsageStore(harness.clock.now() + timedelta(seconds=1))
    younger.put("__guard.11111111-2222-4333-8444-555555555555", b"{}")
    for other, evidence in ((older, Evidence.PREDATES), (younger, Evidence.FOREIGN_MARKER)):
        found = compared(harness, other)
        assert (found.verdict, found.judgement.evidence) == (Verdict.OTHER_STORE, evidence)


@pytest.mark.parametrize("what", ["recreated", "went back", "gone"])
def test_a_wipe_during_the_first_capture_is_detected(what: str, harness: Harness) -> None:
    def wipe() -> None:
        harness.store.purge()
        if what == "recreated":
            harness.store.recreate(REBORN)
        elif what == "went back":
            harness.store.stream = replace(harness.store.stream, last_sequence=1)
        else:
            harness.store.identity_failure = StoreMissingError("No bucket.", "look.")

    harness.while_reading("a", wipe)
    captured = harness.capture()
    assert captured.stored == ()
    assert isinstance(captured.stopped_by, PossibleLossError)
    now = "gone" if what == "gone" else harness.store.stream
    assert captured.stopped_by.message == (
        "The usage store may have lost data during this capture. It was: created 2026-11-01"
        f" 00:00:00.000000 UTC, sequence 3; now: {now}."
    )
    assert harness.plane.registry.claim().baseline is None


def test_a_bucket_that_disappears_before_the_listing_is_a_loss(harness: Harness) -> None:
    harness.capture()
    harness.clock.advance(timedelta(minutes=1))
    harness.store.listing_failure = StoreMissingError("No bucket.", "look.")
    in_order = iter([None, harness.store.listing_failure])

    class VanishingStore(MemoryUsageStore):
        def observe(self, deployment_id: str) -> Observation:
            self.identity_failure = next(in_order, harness.store.listing_failure)
            return super().observe(deployment_id)

    vanishing = VanishingStore(BORN)
    vanishing.stream = harness.store.stream
    vanishing.listing_failure = harness.store.listing_failure
    captured = harness.capture(store=vanishing)
    assert isinstance(captured.stopped_by, StoreLostError)


@pytest.mark.parametrize("what", ["recreated", "went back", "gone"])
def test_a_store_with_another_identity_is_neither_captured_nor_pruned(
    what: str, harness: Harness
) -> None:
    harness.capture("old")
    harness.clock.advance(timedelta(days=8))
    if what == "recreated":
        harness.store.recreate(REBORN)
    elif what == "went back":
        harness.store.stream = harness.store.stream.__class__(BORN, 2)
    else:
        harness.store.identity_failure = StoreMissingError("No bucket.", "look.")

    captured = harness.capture("new")

    assert captured.stored == ()
    assert isinstance(captured.stopped_by, StoreLostError)
    assert what in captured.stopped_by.message
    assert captured.pruned is None
    assert len(harness.plane.reports.captured_by("old")) == 3
    assert [f.name for f in harness.plane.reports.failures_of("new")] == ["a", "b", "c"]


def test_a_baseline_missing_from_the_database_is_not_a_first_install(harness: Harness) -> None:
    harness.capture()
    harness.plane.state.store = None
    harness.clock.advance(timedelta(minutes=1))
    harness.store.recreate(REBORN)
    harness.spend("a", "1")
    assert isinstance(harness.capture().stopped_by, StoreLostError)
    assert harness.known("a") == Decimal(10)


def test_a_missing_bucket_before_the_first_snapshot_is_an_error_and_not_a_loss() -> None:
    harness = Harness()
    harness.store.identity_failure = StoreMissingError("No bucket.", "check BUCKET.")
    with pytest.raises(StoreMissingError):
        harness.run()


def test_the_store_is_judged_again_if_another_process_moved_the_baseline(harness: Harness) -> None:
    harness.capture()
    harness.clock.advance(timedelta(minutes=1))

    def another_accepts_the_present() -> None:
        assert harness.plane.state.store is not None
        assert harness.plane.state.store.baseline is not None
        old = harness.plane.state.store.baseline
        moved = old.__class__(harness.store.stream, old.version + 1)
        harness.plane.state.store = harness.plane.state.store.__class__(
            harness.plane.state.store.bucket,
            harness.plane.state.store.deployment_id,
            harness.plane.state.store.state,
            moved,
        )

    harness.while_reading("b", another_accepts_the_present)
    assert names(harness.capture().stored) == ["a", "b", "c"]


def test_nothing_is_stored_or_pruned_if_the_clocks_disagree(harness: Harness) -> None:
    harness.capture("good")
    harness.store.clock = NOW
    harness.clock.advance(timedelta(days=25))
    captured = harness.capture("ahead")
    assert isinstance(captured.stopped_by, ClockSkewError)
    assert "2026-12-20 12:05:00" in captured.stopped_by.message
    assert "2026-11-25 12:05:00" in captured.stopped_by.message
    assert (captured.stored, captured.pruned) == ((), None)
    harness.clock.set(NOW + timedelta(seconds=59))
    assert names(harness.capture("right again").stored) == ["a", "b", "c"]


def test_two_observations_that_disagree_open_no_incident(harness: Harness) -> None:
    harness.capture()
    harness.clock.advance(timedelta(minutes=1))
    sequences = iter([2, 400, 401])

    class FlappingStore(MemoryUsageStore):
        def observe(self, deployment_id: str) -> Observation:
            self.stream = StoreIdentity(BORN, next(sequences))
            return super().observe(deployment_id)

    flapping = FlappingStore(BORN)
    captured = harness.capture(store=flapping)
    assert isinstance(captured.stopped_by, PossibleLossError)
    assert "disagree" in captured.stopped_by.message
    assert captured.stored == ()
    assert harness.plane.incidents.recovery().state is RecoveryState.HEALTHY


def test_a_marker_renewed_during_a_capture_is_not_a_loss(harness: Harness) -> None:
    harness.capture()
    harness.clock.advance(timedelta(minutes=1))
    registry = harness.plane.registry
    record = registry.claim()
    assert record.baseline is not None

    def check_in_between() -> None:
        intended = registry.accept(
            replace(harness.baseline, intended=IntendedMarker("nonce")), judged=harness.baseline
        )
        seen = harness.store.observe(record.deployment_id)
        watch = watch_store(
            harness.plane, harness.store, lambda: nullcontext(harness.store), "a check"
        )
        renewed, _ = watch.renew_marker(intended, seen, harness.clock.now())
        registry.accept(renewed, judged=intended)

    harness.while_reading("b", check_in_between)
    assert names(harness.capture().stored) == ["a", "b", "c"]
    assert harness.plane.incidents.recovery().state is RecoveryState.HEALTHY
    assert harness.baseline.marker is not None


def test_a_capture_stops_at_a_server_that_may_no_longer_be_the_leader(harness: Harness) -> None:
    harness.capture()
    harness.clock.advance(timedelta(minutes=1))

    class CutOffStore(MemoryUsageStore):
        def observe(self, deployment_id: str) -> Observation:
            return replace(super().observe(deployment_id), is_led=False)

    behind = CutOffStore(BORN)
    behind.stream = StoreIdentity(BORN, 1)
    captured = harness.capture(store=behind)
    assert isinstance(captured.stopped_by, PossibleLossError)
    assert "may no longer be the leader" in captured.stopped_by.message
    assert harness.plane.incidents.recovery().state is RecoveryState.HEALTHY
