"""A program that deletes our marker, as a gateway's cleanup may do, keeps nothing from working."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import (
    Evidence,
    IntendedMarker,
    Marker,
    Outcome,
    RecoveryState,
    Verdict,
)
from budget_recovery_dagster.services.restore import StillWaiting
from tests.fakes.usage_store import MemoryUsageStore
from tests.unit.capture_harness import REBORN
from tests.unit.manual_harness import ManualHarness
from tests.unit.recovery_harness import LATER, captured, outcome_of

REPORTED = "Another program has deleted the marker right after it was written."


class CleanedStore(MemoryUsageStore):
    """A store with hooks on both sides of the write of a marker, called with its key."""

    before: Callable[[str], object] | None = None
    after: Callable[[str], object] | None = None

    def write_marker(self, deployment_id: str, marker: IntendedMarker, *, after: int) -> Marker:
        key = f"__guard.{deployment_id}"
        if self.before is not None:
            self.before(key)
        written = super().write_marker(deployment_id, marker, after=after)
        if self.after is not None:
            self.after(key)
        return written


def clean_after(store: CleanedStore) -> None:
    """Delete each marker as soon as it is written."""
    store.after = store.remove


def clean_before(store: CleanedStore) -> None:
    """Delete the marker time and again, also between its observation and its write."""
    store.before = store.remove


CLEANERS = pytest.mark.parametrize("clean", [clean_after, clean_before])


@pytest.fixture
def store() -> CleanedStore:
    return CleanedStore()


@pytest.fixture
def harness(store: CleanedStore) -> ManualHarness:
    return captured(ManualHarness(store=store))


@CLEANERS
def test_checks_go_on_without_a_marker_and_report_it(
    harness: ManualHarness, store: CleanedStore, clean: Callable[[CleanedStore], None]
) -> None:
    clean(store)
    for _ in range(2):
        checked = harness.check()
        assert checked.check.verdict is Verdict.SAME
        assert checked.check.evidence is Evidence.MARKER_NOT_WRITTEN
        assert f"The marker was not renewed: {REPORTED}" in checked.check.reason
        assert "begin with __guard" in checked.hint
        assert harness.baseline.marker is None
        assert harness.baseline.identity.last_sequence == store.stream.last_sequence

    store.before = store.after = None
    checked = harness.check()
    assert (checked.check.evidence, checked.hint) == (None, "")
    assert harness.baseline.marker is not None


@CLEANERS
def test_a_loss_is_found_and_restored_in_the_first_attempt(
    harness: ManualHarness, store: CleanedStore, clean: Callable[[CleanedStore], None]
) -> None:
    clean(store)
    harness.check()
    harness.wipe()
    assert harness.incident.losses[0].evidence is Evidence.RECREATED
    result = harness.recover()
    assert outcome_of(result) is Outcome.RESTORED
    assert harness.plane.incidents.recent(1)[0].attempts == 1
    assert (harness.usage("a"), harness.usage("a", "alice"), harness.usage("b")) == (
        "80",
        "30",
        "5",
    )
    assert any(
        message.startswith(f"A further loss may go undetected: {REPORTED}")
        for message in harness.messages
    )
    assert harness.check().check.evidence is Evidence.MARKER_NOT_WRITTEN


@CLEANERS
def test_a_further_loss_during_the_restore_is_still_found(
    harness: ManualHarness, store: CleanedStore, clean: Callable[[CleanedStore], None]
) -> None:
    clean(store)
    harness.wipe()
    harness.before_write(2, lambda: store.recreate(LATER))
    with pytest.raises(Exception, match="lost once more"):
        harness.recover()
    store.before_write = None
    assert [loss.evidence for loss in harness.incident.losses] == [Evidence.RECREATED] * 2
    assert outcome_of(harness.recover()) is Outcome.RESTORED


@CLEANERS
def test_manual_restore_and_resolve_are_not_kept_from_ending_an_incident(
    harness: ManualHarness, store: CleanedStore, clean: Callable[[CleanedStore], None]
) -> None:
    clean(store)
    harness.wipe()
    harness.apply()
    assert harness.usage("a") == "80"
    assert harness.state is RecoveryState.HEALTHY

    store.recreate(LATER)
    harness.check()
    assert harness.resolve().incident.ended is not None
    assert harness.state is RecoveryState.HEALTHY


@pytest.mark.parametrize("write", [1, 2, 3])
def test_a_marker_deleted_between_the_writes_of_a_restore_does_no_harm(
    harness: ManualHarness, store: CleanedStore, write: int
) -> None:
    harness.wipe()
    deployment = harness.plane.registry.claim().deployment_id
    harness.before_write(write, lambda: store.remove(f"__guard.{deployment}"))
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert harness.plane.incidents.recent(1)[0].attempts == 1
    assert harness.baseline.marker is None
    checked = harness.check()
    assert (checked.check.verdict, checked.hint) == (Verdict.SAME, "")
    assert harness.baseline.marker is not None


# What is no deletion


def test_a_marker_that_vanishes_without_a_trace_is_not_accepted(
    harness: ManualHarness, store: CleanedStore
) -> None:
    store.after = store.purge
    checked = harness.check()
    assert checked.check.verdict is Verdict.UNKNOWN
    assert "is not in the store that was observed" in checked.check.reason
    assert harness.baseline.marker is not None

    harness.wipe()
    result = harness.recover()
    assert isinstance(result, StillWaiting)
    assert harness.incident.attempts == 0


def test_a_store_that_goes_back_behind_a_deletion_is_a_loss(
    harness: ManualHarness, store: CleanedStore
) -> None:
    deployment = harness.plane.registry.claim().deployment_id
    store.remove(f"__guard.{deployment}")
    older = store.copy()
    clean_after(store)
    harness.check()
    store.stream, store.after = older.stream, None
    assert harness.check().check.evidence is Evidence.SEQUENCE_BACK


def test_a_marker_of_another_installation_is_still_a_conflict(
    harness: ManualHarness, store: CleanedStore
) -> None:
    def write_another(_: str) -> None:
        deployment = harness.plane.registry.claim().deployment_id
        after = store.observe(deployment).marker
        store.before = None
        store.write_marker(
            deployment, IntendedMarker("theirs", 99), after=after.revision if after else 0
        )

    store.before = write_another
    checked = harness.check()
    assert checked.check.verdict is Verdict.UNKNOWN
    assert "has changed since sequence" in checked.check.reason


def test_a_marker_that_expired_at_once_is_not_taken_for_a_deleted_one(
    harness: ManualHarness, store: CleanedStore
) -> None:
    store.after = lambda key: store.expire(key, leaves_mark=True)
    assert harness.check().check.verdict is Verdict.UNKNOWN


def test_the_store_is_replaced_between_the_write_of_the_marker_and_the_observation(
    harness: ManualHarness, store: CleanedStore
) -> None:
    def replace_it(key: str) -> None:
        store.after = None
        store.stream = replace(store.stream, created_at=REBORN + timedelta(minutes=5))
        store.remove(key)

    store.after = replace_it
    assert harness.check().check.verdict is Verdict.UNKNOWN
    assert harness.check().check.evidence is Evidence.RECREATED
