from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import LeaseState
from budget_recovery_dagster.errors import LeaseHeldError, LeaseLostError
from tests.contract.control_planes import NOON, ControlPlane, in_memory


def test_a_held_lease_is_refused_to_others(plane: ControlPlane) -> None:
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


def test_an_exception_releases_the_lease(plane: ControlPlane) -> None:
    with pytest.raises(ZeroDivisionError), plane.leases.hold("capture", "a"):
        raise ZeroDivisionError
    with plane.leases.hold("capture", "b"):
        pass


def test_the_token_rises_each_time_the_lease_is_taken(plane: ControlPlane) -> None:
    tokens = []
    for _ in range(3):
        with plane.leases.hold("capture", "a") as lease:
            tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


def test_the_token_rises_after_a_lost_lease(plane: ControlPlane) -> None:
    with plane.leases.hold("capture", "a") as lost:
        plane.lose_lease(lost)
        with plane.leases.hold("capture", "b") as taken:
            assert taken.token > lost.token


def test_a_holder_is_refused_after_losing_its_lease(plane: ControlPlane) -> None:
    with plane.leases.hold("capture", "a") as lease:
        lease.require_held()
        plane.lose_lease(lease)
        with pytest.raises(LeaseLostError, match="lease capture is lost"):
            lease.require_held()


def test_a_late_holder_does_not_release_the_next_holders_lease(plane: ControlPlane) -> None:
    late = plane.leases.hold("capture", "late")
    lease = late.__enter__()
    plane.lose_lease(lease)
    with plane.leases.hold("capture", "next") as taken:
        late.__exit__(None, None, None)
        taken.require_held()
        with pytest.raises(LeaseHeldError, match="next"), plane.leases.hold("capture", "third"):
            pytest.fail("two hold it")


@pytest.mark.parametrize("holder", ["NUL \0 byte", "half a pair \ud83d", "x" * 100_000, ""])
def test_any_holder_name_is_accepted(plane: ControlPlane, holder: str) -> None:
    with (
        plane.leases.hold("capture", holder),
        pytest.raises(LeaseHeldError),
        plane.leases.hold("capture", holder),
    ):
        pytest.fail("two hold it")


# The state of a lease


def test_a_lease_that_was_never_taken_has_no_holder(plane: ControlPlane) -> None:
    assert plane.leases.state_of("capture") == LeaseState(0, None)
    # Reading the state does not take the lease.
    with plane.leases.hold("capture", "a") as lease:
        assert lease.token == 1


def test_a_lease_has_a_holder_until_it_is_released(plane: ControlPlane) -> None:
    with plane.leases.hold("capture", "run 1 on db-host") as lease:
        assert plane.leases.state_of("capture") == LeaseState(lease.token, "run 1 on db-host")
        assert plane.leases.state_of("restore") == LeaseState(0, None)
    assert plane.leases.state_of("capture") == LeaseState(lease.token, None)
    with plane.leases.hold("capture", "b") as following:
        assert plane.leases.state_of("capture") == LeaseState(following.token, "b")
        assert following.token > lease.token


def test_a_lost_lease_has_no_holder(plane: ControlPlane) -> None:
    with plane.leases.hold("capture", "a") as lease:
        plane.lose_lease(lease)
        assert plane.leases.state_of("capture") == LeaseState(lease.token, None)


# A maximum duration


def test_a_lease_with_a_maximum_duration_is_held_and_released(plane: ControlPlane) -> None:
    with plane.leases.hold("capture", "a", at_most=timedelta(hours=1)) as lease:
        lease.require_held()
        with pytest.raises(LeaseHeldError), plane.leases.hold("capture", "b"):
            pytest.fail("two hold it")
    with plane.leases.hold("capture", "b"):
        pass


def test_a_lease_in_memory_is_lost_after_its_maximum_duration() -> None:
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
