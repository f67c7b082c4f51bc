"""`resolve` closes an incident without restoring, and accepts the store in its present state."""

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
from tests.unit.capture_house import REBORN
from tests.unit.hand_house import HandHouse, captured_hand_house


@pytest.fixture
def house() -> HandHouse:
    """Return a store of two tenants: captured, lost and FAILED."""
    house = captured_hand_house()
    house.fail()
    return house


def test_resolve_accepts_the_store_and_reports_what_is_lower(house: HandHouse) -> None:
    resolved = house.resolve("it was emptied on purpose.")
    assert house.state is RecoveryState.HEALTHY
    ended = resolved.incident.ended
    assert ended is not None
    assert ended.outcome is Outcome.ACCEPTED
    assert ended.detail.startswith(
        "By ann: it was emptied on purpose. Nothing was raised. Left lower than in the "
        "snapshots: 3 counters. Usage counted from 2026-11-25 12:05:00 UTC"
    )
    assert resolved.remainder.counters == 3
    assert (house.usage("a"), house.usage("b")) == (None, None)


def test_captures_and_checks_resume_with_the_accepted_store(house: HandHouse) -> None:
    house.resolve()
    assert house.baseline.identity.created_at == REBORN
    assert house.baseline.marker is not None
    assert house.check().check.is_good
    house.spend("a", "1")
    house.clock.advance(timedelta(hours=1))
    house.capture()
    # The next loss is a loss of the accepted store.
    house.store.recreate(REBORN + timedelta(hours=2))
    assert house.check().check.verdict.is_loss


def test_a_recovering_store_can_be_accepted() -> None:
    house = captured_hand_house()
    house.wipe()
    house.resolve()
    assert house.state is RecoveryState.HEALTHY


def test_resolve_is_refused_without_an_open_incident() -> None:
    house = captured_hand_house()
    with pytest.raises(IncidentMovedError, match="The store is HEALTHY, and no incident is open"):
        house.resolve()


def test_resolve_is_refused_without_a_reason(house: HandHouse) -> None:
    with pytest.raises(ChoiceError, match="The reason is empty"):
        house.resolve(" ")
    assert house.state is RecoveryState.FAILED


@pytest.mark.parametrize(
    "failure",
    [
        StoreUnreachableError("Nobody answers.", "start it."),
        StoreMissingError("There is no bucket.", "make it."),
        StorePermissionError("The marker may not be read.", "grant it."),
    ],
)
def test_a_store_that_cannot_be_observed_is_never_accepted(
    house: HandHouse, failure: StoreUnreachableError
) -> None:
    house.store.look_failure = failure
    with pytest.raises(type(failure)):
        house.resolve()
    assert house.state is RecoveryState.FAILED


def test_resolve_is_refused_while_a_restore_runs(house: HandHouse) -> None:
    with (
        house.plane.leases.hold(RESTORE_LEASE, "bob@night"),
        pytest.raises(LeaseHeldError, match="bob@night"),
    ):
        house.resolve()
    assert house.state is RecoveryState.FAILED


@pytest.mark.parametrize("kind", [StorePermissionError, StoreWriteError])
def test_a_store_that_refuses_the_marker_can_be_accepted(
    house: HandHouse, kind: type[StorePermissionError]
) -> None:
    house.store.marker_failure = kind("No marker here.", "see why.")
    house.resolve()
    assert house.state is RecoveryState.HEALTHY
    assert any("A further loss may go undetected: No marker here." in said for said in house.said)


def test_counters_planned_by_a_killed_worker_are_not_reported_as_raised() -> None:
    house = captured_hand_house()
    house.wipe()

    class KilledError(BaseException):
        pass

    def die(key: str) -> None:
        if key.startswith("usage."):
            raise KilledError

    house.store.before_write = die
    with pytest.raises(KilledError):
        house.recover()
    house.store.before_write = None
    resolved = house.resolve("emptied on purpose")
    assert (house.usage("a"), house.usage("b")) == (None, None)
    ended = resolved.incident.ended
    assert ended is not None
    assert ended.restored.counters == 0
    assert "Nothing was raised." in ended.detail
