"""`resolve` closes an incident without restoring, and accepts the store in its present state."""

from contextlib import nullcontext
from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import RESTORE_LEASE, Outcome, RecoveryState
from budget_recovery_dagster.errors import (
    ChoiceError,
    IncidentMovedError,
    LeaseHeldError,
    StoreMissingError,
    StorePermissionError,
    StoreUnreachableError,
    StoreWriteError,
)
from budget_recovery_dagster.services.restore import resolve_incident
from tests.fakes.usage_store import MemoryUsageStore
from tests.unit.capture_harness import REBORN
from tests.unit.manual_harness import ManualHarness, captured_manual_harness


@pytest.fixture
def harness() -> ManualHarness:
    """Return a store of two tenants: captured, lost and FAILED."""
    harness = captured_manual_harness()
    harness.fail()
    return harness


def test_resolve_accepts_the_store_and_reports_what_is_lower(harness: ManualHarness) -> None:
    resolved = harness.resolve("it was emptied on purpose.")
    assert harness.state is RecoveryState.HEALTHY
    ended = resolved.incident.ended
    assert ended is not None
    assert ended.outcome is Outcome.ACCEPTED
    assert ended.detail.startswith(
        "By ann: it was emptied on purpose. Nothing was raised. Left lower than in the "
        "snapshots: 3 counters. Usage between the newest snapshot (2026-11-25 12:05:00 UTC)"
    )
    assert resolved.remainder.counters == 3
    assert (harness.usage("a"), harness.usage("b")) == (None, None)


def test_captures_and_checks_resume_with_the_accepted_store(harness: ManualHarness) -> None:
    harness.resolve()
    assert harness.baseline.identity.created_at == REBORN
    assert harness.baseline.marker is not None
    assert harness.check().check.is_good
    harness.spend("a", "1")
    harness.clock.advance(timedelta(hours=1))
    harness.capture()
    # The next loss is a loss of the accepted store.
    harness.store.recreate(REBORN + timedelta(hours=2))
    assert harness.check().check.verdict.is_alarm


def test_a_recovering_store_can_be_accepted() -> None:
    harness = captured_manual_harness()
    harness.wipe()
    harness.resolve()
    assert harness.state is RecoveryState.HEALTHY


def test_resolve_is_refused_without_an_open_incident() -> None:
    harness = captured_manual_harness()
    with pytest.raises(IncidentMovedError, match="The store is HEALTHY, and no incident is open"):
        harness.resolve()


def test_resolve_is_refused_without_a_reason(harness: ManualHarness) -> None:
    with pytest.raises(ChoiceError, match="The reason is empty"):
        harness.resolve(" ")
    assert harness.state is RecoveryState.FAILED


@pytest.mark.parametrize(
    "failure",
    [
        StoreUnreachableError("Nobody answers.", "start it."),
        StoreMissingError("There is no bucket.", "make it."),
        StorePermissionError("The marker may not be read.", "grant it."),
    ],
)
def test_a_store_that_cannot_be_observed_is_never_accepted(
    harness: ManualHarness, failure: StoreUnreachableError
) -> None:
    harness.store.observe_failure = failure
    with pytest.raises(type(failure)):
        harness.resolve()
    assert harness.state is RecoveryState.FAILED


def test_resolve_is_refused_while_a_restore_runs(harness: ManualHarness) -> None:
    with (
        harness.plane.leases.hold(RESTORE_LEASE, "bob@night"),
        pytest.raises(LeaseHeldError, match="bob@night"),
    ):
        harness.resolve()
    assert harness.state is RecoveryState.FAILED


def test_an_incident_that_another_process_closes_meanwhile_is_not_resolved_again(
    harness: ManualHarness,
) -> None:
    def opened_late() -> nullcontext[MemoryUsageStore]:
        harness.plane.leases.lose(RESTORE_LEASE)
        harness.resolve("it was emptied on purpose")
        return harness.opened()

    with pytest.raises(IncidentMovedError, match="another process closed it"):
        resolve_incident(
            harness.plane,
            opened_late,
            harness.order("too late"),
            convergence_timeout=harness.convergence_timeout,
        )
    (incident,) = harness.plane.incidents.recent(2)
    assert incident.ended is not None
    assert "it was emptied on purpose" in incident.ended.detail


@pytest.mark.parametrize("kind", [StorePermissionError, StoreWriteError])
def test_a_store_that_refuses_the_marker_can_be_accepted(
    harness: ManualHarness, kind: type[StorePermissionError]
) -> None:
    harness.store.marker_failure = kind("No marker here.", "see why.")
    harness.resolve()
    assert harness.state is RecoveryState.HEALTHY
    assert any(
        "A further loss may go undetected: No marker here." in message
        for message in harness.messages
    )


def test_counters_planned_by_a_killed_worker_are_not_reported_as_raised() -> None:
    harness = captured_manual_harness()
    harness.wipe()

    class KilledError(BaseException):
        pass

    def die(key: str) -> None:
        if key.startswith("usage."):
            raise KilledError

    harness.store.before_write = die
    with pytest.raises(KilledError):
        harness.recover()
    harness.store.before_write = None
    resolved = harness.resolve("emptied on purpose")
    assert (harness.usage("a"), harness.usage("b")) == (None, None)
    ended = resolved.incident.ended
    assert ended is not None
    assert ended.restored.counters == 0
    assert "Nothing was raised." in ended.detail
