"""Restores on hold, and a restore whose worker hangs."""

from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import RESTORE_LEASE, Attempt, RecoveryState
from budget_recovery_dagster.errors import AttemptFailedError, LeaseLostError, StoreWriteError
from budget_recovery_dagster.services.restore import NothingToDo, Recovered, RecoveryResult
from tests.unit.recovery_house import RecoveryHouse

FULL = StoreWriteError("The store is full.", "make room.")


@pytest.fixture
def house() -> RecoveryHouse:
    """Return a store of two tenants: captured, checked and wiped."""
    house = RecoveryHouse()
    house.spend("a", "80")
    house.spend("b", "5")
    house.capture()
    house.check()
    house.clock.advance(timedelta(minutes=10))
    house.wipe()
    return house


def hold(house: RecoveryHouse) -> None:
    house.plane.incidents.hold("the disk is changed", "ann", judged=house.incident)


def release(house: RecoveryHouse) -> None:
    house.plane.incidents.release("ann", judged=house.incident)


def attempts(house: RecoveryHouse) -> tuple[Attempt, ...]:
    return house.plane.incidents.attempts_of(house.plane.incidents.recent(1)[0].incident_id)


def is_told(result: RecoveryResult) -> bool:
    return isinstance(result, NothingToDo) and result.reason.endswith(
        "UTC, by ann: the disk is changed"
    )


def test_a_restore_does_nothing_while_the_incident_is_on_hold(house: RecoveryHouse) -> None:
    hold(house)
    before, stream = house.incident, house.store.stream
    assert is_told(house.recover())
    # Not even a marker is written.
    assert (house.incident, house.store.stream) == (before, stream)
    assert attempts(house) == ()


def test_an_incident_on_hold_is_not_given_up_without_snapshots() -> None:
    house = RecoveryHouse()
    house.spend("a", "1")
    house.check()
    house.wipe()
    hold(house)
    assert is_told(house.recover())
    assert house.state is RecoveryState.RECOVERING


def test_a_hold_during_the_wait_for_the_store_prevents_an_attempt(
    house: RecoveryHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = house.store.write_marker

    def hold_and_write(deployment_id: str, nonce: str, *, after: int) -> object:
        hold(house)
        return written(deployment_id, nonce, after=after)

    monkeypatch.setattr(house.store, "write_marker", hold_and_write)
    assert is_told(house.recover())
    assert (attempts(house), house.store.writes) == ((), 0)


def test_used_up_attempts_are_not_judged_while_the_incident_is_on_hold(
    house: RecoveryHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        with house.plane.leases.hold(RESTORE_LEASE, "a worker that dies") as lease:
            house.plane.incidents.claim_attempt(
                judged=house.incident, run_id=f"run {number}", holder="h", lease=lease
            )
    written = house.store.write_marker

    def hold_and_write(deployment_id: str, nonce: str, *, after: int) -> object:
        hold(house)
        return written(deployment_id, nonce, after=after)

    monkeypatch.setattr(house.store, "write_marker", hold_and_write)
    assert is_told(house.recover())
    assert house.state is RecoveryState.RECOVERING


def test_a_hold_stops_an_attempt_before_the_next_tenant(house: RecoveryHouse) -> None:
    house.before_write(1, lambda: hold(house))

    # Not an error: Dagster would retry the run.
    assert is_told(house.recover())

    assert (house.usage("a"), house.usage("b")) == ("80", None)
    (attempt,) = attempts(house)
    assert attempt.outcome is not None
    assert attempt.outcome.startswith("Stopped. Incident ")
    assert attempt.outcome.endswith("UTC, by ann: the disk is changed")
    assert (house.state, house.incident.attempts) == (RecoveryState.RECOVERING, 1)
    assert is_told(house.recover())
    assert len(attempts(house)) == 1


def test_a_hold_stops_the_last_attempt_without_giving_up(house: RecoveryHouse) -> None:
    house.store.marker_failure = FULL
    for _ in range(2):
        with pytest.raises(AttemptFailedError):
            house.recover()
    house.store.marker_failure = None
    house.before_write(1, lambda: hold(house))
    assert is_told(house.recover())
    assert (house.state, house.incident.attempts) == (RecoveryState.RECOVERING, 3)


def test_a_released_restore_has_all_its_attempts_again(house: RecoveryHouse) -> None:
    house.before_write(1, lambda: hold(house))
    house.recover()
    house.store.before_write = None
    release(house)
    assert house.incident.attempts == 0
    house.store.write_failures = dict.fromkeys(range(1, 100), FULL)
    for number in (1, 2):
        with pytest.raises(AttemptFailedError, match=f"Attempt {number} of 3"):
            house.recover()
    house.store.write_failures = {}
    assert isinstance(house.recover(), Recovered)
    assert (house.usage("a"), house.usage("b")) == ("80", "5")
    assert [each.number for each in attempts(house)] == [1, 2, 3, 4]


def test_a_hold_after_the_last_tenant_does_not_prevent_the_end(house: RecoveryHouse) -> None:
    # Two writes for each tenant: a counter and a leaderboard.
    house.before_write(4, lambda: hold(house))
    result = house.recover()
    assert isinstance(result, Recovered)
    assert result.incident.held is not None
    assert house.state is RecoveryState.HEALTHY


# A worker that hangs


def test_a_worker_that_hangs_for_an_hour_loses_the_restore_to_another(
    house: RecoveryHouse,
) -> None:
    others: list[RecoveryResult] = []

    def hang() -> None:
        house.clock.advance(timedelta(hours=1))
        others.append(house.recover())

    house.before_write(1, hang)
    with pytest.raises(LeaseLostError):
        house.recover()
    assert [type(other) for other in others] == [Recovered]
    assert (house.usage("a"), house.usage("b")) == ("80", "5")


def test_a_worker_that_takes_less_than_an_hour_keeps_the_restore(
    house: RecoveryHouse,
) -> None:
    others: list[RecoveryResult] = []

    def be_slow() -> None:
        house.clock.advance(timedelta(minutes=59))
        others.append(house.recover())

    house.before_write(1, be_slow)
    assert isinstance(house.recover(), Recovered)
    assert [type(other) for other in others] == [NothingToDo]
