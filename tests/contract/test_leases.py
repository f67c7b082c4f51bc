from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import LeaseState
from budget_recovery_dagster.errors import LeaseHeldError, LeaseLostError
from tests.contract.control_planes import NOON, ControlPlane, in_memory


def test_a_held_lease_is_given_to_nobody_else(plane: ControlPlane) -> None:
    plane.clock.set(NOON)
    with plane.leases.hold("capture", "run 1 on db-host"):
        plane.clock.advance(timedelta(seconds=2))
        with (
            pytest.raises(LeaseHeldError) as refused,
            plane.leases.hold("capture", "run 2"),
        ):
            pytest.fail("two hold it")
    assert "run 1 on db-host, since 2026-11-25 12:00:00 UTC" in refused.value.message
    assert "its lease expires at 2026-11-25 12:00:3" in refused.value.hint


def test_leases_of_other_names_are_free(plane: ControlPlane) -> None:
    with plane.leases.hold("capture", "a"), plane.leases.hold("restore", "a") as other:
        assert other.name == "restore"
        other.require_held()


def test_a_released_lease_is_free_at_once(plane: ControlPlane) -> None:
    for holder in ("a", "b", "a"):
        with plane.leases.hold("capture", holder) as lease:
            lease.require_held()


def test_a_lease_is_released_also_by_a_failure(plane: ControlPlane) -> None:
    with pytest.raises(ZeroDivisionError), plane.leases.hold("capture", "a"):
        raise ZeroDivisionError
    with plane.leases.hold("capture", "b"):
        pass


def test_the_token_rises_with_every_taking(plane: ControlPlane) -> None:
    tokens = []
    for _ in range(3):
        with plane.leases.hold("capture", "a") as lease:
            tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


def test_the_token_rises_also_after_a_loss(plane: ControlPlane) -> None:
    with plane.leases.hold("capture", "a") as lost:
        plane.lose_lease(lost)
        with plane.leases.hold("capture", "b") as taken:
            assert taken.token > lost.token


def test_a_holder_learns_that_its_lease_is_lost(plane: ControlPlane) -> None:
    with plane.leases.hold("capture", "a") as lease:
        lease.require_held()
        plane.lose_lease(lease)
        with pytest.raises(LeaseLostError, match="lease capture is lost"):
            lease.require_held()


def test_a_late_holder_does_not_release_the_lease_of_the_next(plane: ControlPlane) -> None:
    late = plane.leases.hold("capture", "late")
    lease = late.__enter__()
    plane.lose_lease(lease)
    with plane.leases.hold("capture", "next") as taken:
        late.__exit__(None, None, None)
        taken.require_held()
        with pytest.raises(LeaseHeldError, match="next"), plane.leases.hold("capture", "third"):
            pytest.fail("two hold it")


@pytest.mark.parametrize("holder", ["NUL \0 byte", "half a pair \ud83d", "x" * 100_000, ""])
def test_any_holder_can_be_named(plane: ControlPlane, holder: str) -> None:
    with (
        plane.leases.hold("capture", holder),
        pytest.raises(LeaseHeldError),
        plane.leases.hold("capture", holder),
    ):
        pytest.fail("two hold it")


# How a lease stands


def test_a_lease_that_was_never_taken_is_held_by_nobody(plane: ControlPlane) -> None:
    assert plane.leases.state_of("capture") == LeaseState(0, None)
    # Nor is it by having been looked at.
    with plane.leases.hold("capture", "a") as lease:
        assert lease.token == 1


def test_a_lease_says_who_holds_it_and_later_that_nobody_does(plane: ControlPlane) -> None:
    with plane.leases.hold("capture", "run 1 on db-host") as lease:
        assert plane.leases.state_of("capture") == LeaseState(lease.token, "run 1 on db-host")
        assert plane.leases.state_of("restore") == LeaseState(0, None)
    assert plane.leases.state_of("capture") == LeaseState(lease.token, None)
    with plane.leases.hold("capture", "b") as following:
        assert plane.leases.state_of("capture") == LeaseState(following.token, "b")
        assert following.token > lease.token


def test_a_lease_that_is_lost_is_held_by_nobody(plane: ControlPlane) -> None:
    with plane.leases.hold("capture", "a") as lease:
        plane.lose_lease(lease)
        assert plane.leases.state_of("capture") == LeaseState(lease.token, None)


# A time after which it is not renewed any more


def test_a_lease_for_a_time_is_held_until_then(plane: ControlPlane) -> None:
    with plane.leases.hold("capture", "a", at_most=timedelta(hours=1)) as lease:
        lease.require_held()
        with pytest.raises(LeaseHeldError), plane.leases.hold("capture", "b"):
            pytest.fail("two hold it")
    with plane.leases.hold("capture", "b"):
        pass


def test_in_memory_a_lease_is_lost_once_its_time_has_passed() -> None:
    plane = in_memory()
    hour = timedelta(hours=1)
    with plane.leases.hold("restore", "hung", at_most=hour) as lease:
        plane.clock.set(NOON + hour - timedelta(microseconds=1))
        lease.require_held()
        assert plane.leases.state_of("restore") == LeaseState(1, "hung")
        plane.clock.set(NOON + hour)
        assert plane.leases.state_of("restore") == LeaseState(1, None)
        with pytest.raises(LeaseLostError):
            lease.require_held()
        with plane.leases.hold("restore", "next") as taken:
            taken.require_held()
            with pytest.raises(LeaseLostError):
                lease.require_held()
    assert plane.leases.state_of("restore") == LeaseState(2, None)
