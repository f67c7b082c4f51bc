"""A person ends an incident without restoring: the store is accepted as it is."""

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
    """A store of two tenants that was captured, lost and given up."""
    house = captured_hand_house()
    house.fail()
    return house


def test_the_store_is_accepted_as_it_is(house: HandHouse) -> None:
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


def test_captures_and_checks_go_on_with_what_was_accepted(house: HandHouse) -> None:
    house.resolve()
    assert house.baseline.identity.created_at == REBORN
    assert house.baseline.marker is not None
    assert house.check().check.is_good
    house.spend("a", "1")
    house.clock.advance(timedelta(hours=1))
    house.capture()
    # The next loss is one of this store.
    house.store.recreate(REBORN + timedelta(hours=2))
    assert house.check().check.verdict.is_loss


def test_a_recovering_store_is_accepted_as_well() -> None:
    house = captured_hand_house()
    house.wipe()
    house.resolve()
    assert house.state is RecoveryState.HEALTHY


def test_without_an_incident_there_is_nothing_to_resolve() -> None:
    house = captured_hand_house()
    with pytest.raises(IncidentMovedError, match="The store is HEALTHY, and no incident is open"):
        house.resolve()


def test_without_a_reason_nothing_is_resolved(house: HandHouse) -> None:
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
def test_a_store_that_cannot_be_seen_is_never_accepted(
    house: HandHouse, failure: StoreUnreachableError
) -> None:
    house.store.look_failure = failure
    with pytest.raises(type(failure)):
        house.resolve()
    assert house.state is RecoveryState.FAILED


def test_while_somebody_restores_nothing_is_resolved(house: HandHouse) -> None:
    with (
        house.plane.leases.hold(RESTORE_LEASE, "bob@night"),
        pytest.raises(LeaseHeldError, match="bob@night"),
    ):
        house.resolve()
    assert house.state is RecoveryState.FAILED


@pytest.mark.parametrize("kind", [StorePermissionError, StoreWriteError])
def test_a_store_that_takes_no_marker_can_be_accepted(
    house: HandHouse, kind: type[StorePermissionError]
) -> None:
    house.store.marker_failure = kind("No marker here.", "see why.")
    house.resolve()
    assert house.state is RecoveryState.HEALTHY
    assert any("A further loss may go undetected: No marker here." in said for said in house.said)


def test_what_a_dead_worker_only_began_is_not_said_to_be_raised() -> None:
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
