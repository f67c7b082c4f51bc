"""Where less is known than it seems: short time-outs, partial readings, checks of a lost store."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from budget_recovery_dagster.domain import (
    ClusterView,
    Outcome,
    Recovery,
    RecoveryState,
    Replica,
    Verdict,
    may_launch,
)
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    StorePermissionError,
    StoreUnreachableError,
    StoreWriteError,
)
from budget_recovery_dagster.services.restore import Recovered, StillWaiting
from tests.unit.capture_house import LIFETIME
from tests.unit.recovery_house import RecoveryHouse, captured_house

FULL = StoreWriteError("The store is full.", "make room.")
AWAY = StoreUnreachableError("Nobody answers.", "start it.")


@pytest.fixture
def house() -> RecoveryHouse:
    """A store of two tenants that was captured, checked, and wiped."""
    house = captured_house()
    house.wipe()
    return house


def well(seen_at: datetime) -> ClusterView:
    replica = Replica("n2", is_current=True, is_offline=False, lag=0, silent_for=timedelta(0))
    return ClusterView(seen_at, "c", "n1", None, 2, (replica,))


def outcome(house: RecoveryHouse) -> Outcome:
    result = house.recover()
    assert isinstance(result, Recovered)
    assert result.incident.ended is not None
    return result.incident.ended.outcome


@pytest.mark.parametrize("seconds", [0, 5, 11])
def test_a_cluster_that_is_well_is_given_the_time_to_prove_it(
    seconds: int, house: RecoveryHouse
) -> None:
    house.store.cluster = well
    timeout = timedelta(seconds=seconds)
    house.convergence_timeout = timeout
    assert outcome(house) is Outcome.RESTORED


def test_a_leader_that_changes_all_the_time_is_not_waited_for_without_end(
    house: RecoveryHouse,
) -> None:
    terms = iter(range(10**6))

    def flapping(seen_at: datetime) -> ClusterView:
        return replace(well(seen_at), leader=f"n{next(terms)}x")

    house.store.cluster = flapping
    begun = house.clock.now()
    result = house.recover()
    assert isinstance(result, StillWaiting)
    # The time-out of 30 s, and what it takes to settle.
    assert house.clock.now() - begun <= timedelta(seconds=30 + 12 + 3 + 3)


def test_a_check_of_what_stands_in_the_place_of_a_lost_store_is_no_good_check(
    house: RecoveryHouse,
) -> None:
    last_good = house.plane.registry.newest_good_check()
    house.clock.advance(timedelta(minutes=10))
    found = house.check().check
    assert (found.verdict, found.is_good) == (Verdict.UNCHANGED, False)
    assert found.reason.startswith("No further loss: created ")
    assert house.plane.registry.newest_good_check() == last_good
    assert outcome(house) is Outcome.RESTORED
    accepted = house.plane.registry.newest_good_check()
    assert accepted is not None
    assert accepted.checked_at == house.clock.now()


def test_a_store_that_is_back_is_told_as_such() -> None:
    house = RecoveryHouse()
    house.spend("a", "80")
    house.capture()
    house.check()
    house.store.is_gone = True
    house.check()
    house.store.is_gone = False
    # A leader that was cut off may still show the store that is gone.
    house.store.is_led = False
    found = house.check().check
    assert found.verdict is Verdict.UNKNOWN
    assert "may no longer be the leader" in found.reason
    assert house.incident.target is None
    house.store.is_led = True
    assert house.check().check.reason.startswith("The store exists again: created ")
    assert house.incident.target is not None


def test_a_partial_reading_back_is_no_success(house: RecoveryHouse) -> None:
    # The first reading is whole; in both tries of the second one a key goes without a trace.
    purged = iter(["nothing", "usage.a.spend.lifetime.alice", "usage.a.spend.lifetime.="])

    def purge(tenant: str) -> None:
        if tenant == "a":
            house.store.purge(next(purged, "nothing"))

    house.store.in_mid_reading = purge
    with pytest.raises(AttemptFailedError, match="Fewer counters of tenant 'a' could be read back"):
        house.recover()
    assert house.state is RecoveryState.RECOVERING
    house.store.in_mid_reading = None
    assert outcome(house) is Outcome.RESTORED
    assert (house.usage("a"), house.usage("b")) == ("80", "5")


def test_a_leaderboard_that_is_refused_is_named_and_fails_nothing(house: RecoveryHouse) -> None:
    incident = house.incident
    # Two counters of "a", then its leaderboard.
    house.store.write_failures = {3: FULL}
    assert outcome(house) is Outcome.RESTORED
    notes = {
        entry.tenant: entry.notes
        for entry in house.plane.audits.largest(incident.incident_id, 10).largest
    }
    assert notes["a"] == ("leaderboard not rebuilt: The store is full.",)


def test_one_refused_leaderboard_of_a_tenant_is_the_only_one_that_is_noted() -> None:
    house = RecoveryHouse()
    for budget in ("one", "two", "three"):
        house.store.put_usage("a", budget, "lifetime", None, "5")
    house.capture()
    house.check()
    house.wipe()
    incident = house.incident
    # Three counters, then three leaderboards.
    house.store.write_failures = {5: FULL}
    assert outcome(house) is Outcome.RESTORED
    told = house.plane.audits.largest(incident.incident_id, 10).largest
    assert sorted(entry.notes for entry in told) == [
        (),
        (),
        ("leaderboard not rebuilt: The store is full.",),
    ]


def test_a_value_that_the_store_never_takes_is_named_and_fails_nothing() -> None:
    house = RecoveryHouse()
    house.spend("a", "80")
    house.spend("a", "30.25", "alice")
    house.spend("b", "5")
    house.capture()
    house.check()
    house.wipe()
    incident = house.incident
    house.store.max_value = len('{"usage":"80","updated_at":"2026-11-25T12:00:00Z"}')
    assert outcome(house) is Outcome.RESTORED
    assert (house.usage("a"), house.usage("a", "alice"), house.usage("b")) == ("80", None, "5")
    a, b = sorted(
        house.plane.audits.largest(incident.incident_id, 10).largest, key=lambda each: each.tenant
    )
    assert (a.planned, a.raised, a.kept, a.skipped) == (2, 1, 0, 1)
    assert a.notes[0] == (
        "1 counter left: the store refuses the value: 'alice' (its 53 bytes are more than 50)"
    )
    assert [note.partition(": ")[0] for note in (*a.notes[1:], *b.notes)] == [
        "leaderboard not rebuilt",
        "leaderboard not rebuilt",
    ]


def test_a_last_look_that_cannot_see_one_tenant_decides_all_the_same(house: RecoveryHouse) -> None:
    for _ in range(3):
        house.die_in_an_attempt()
    house.store.failures = {"b": AWAY}
    house.recover()
    assert house.state is RecoveryState.FAILED


@pytest.mark.parametrize(("write", "written"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_what_a_run_raised_before_it_died_is_counted_by_the_next(
    write: int, written: int, house: RecoveryHouse
) -> None:
    incident = house.incident

    class KilledError(BaseException):
        pass

    def die() -> None:
        raise KilledError

    # Two counters and a leaderboard of "a", then one of each of "b".
    house.before_write(write, die)
    with pytest.raises(KilledError):
        house.recover()
    house.store.before_write = None
    found = [house.usage("a"), house.usage("a", "alice"), house.usage("b")]
    assert sum(usage is not None for usage in found) == written
    house.clock.advance(timedelta(seconds=2))

    result = house.recover()

    assert isinstance(result, Recovered)
    ended = result.incident.ended
    assert ended is not None
    assert (ended.outcome, ended.restored.counters) == (Outcome.RESTORED, 3)
    told = house.plane.audits.largest(incident.incident_id, 10)
    assert {(each.tenant, str(each.before), each.raised) for each in told.largest} == {
        ("a", "0", 2),
        ("b", "0", 1),
    }
    assert (str(told.before), str(told.after)) == ("0", "115")


def test_a_store_that_goes_away_amid_the_writing_is_counted_right_later(
    house: RecoveryHouse,
) -> None:
    incident = house.incident

    def go_away() -> None:
        house.store.failures = {"a": AWAY}
        house.store.write_failures = dict.fromkeys(range(2, 100), AWAY)

    house.before_write(2, go_away)
    with pytest.raises(AttemptFailedError, match="Nobody answers"):
        house.recover()
    house.store.before_write = None
    house.store.failures, house.store.write_failures = {}, {}
    house.clock.advance(timedelta(seconds=2))
    result = house.recover()
    assert isinstance(result, Recovered)
    assert result.incident.ended is not None
    assert result.incident.ended.restored.counters == 3
    told = house.plane.audits.largest(incident.incident_id, 10)
    assert str(told.before) == "0"


def test_a_marker_that_may_not_be_written_keeps_nobody_from_restoring(
    house: RecoveryHouse,
) -> None:
    house.store.marker_failure = StorePermissionError("The user may not.", "grant it.")
    assert outcome(house) is Outcome.RESTORED
    assert any(said.startswith("A further loss may go undetected") for said in house.said)
    assert house.baseline.marker is None
    found = house.check().check
    assert found.is_good
    assert "The marker was not renewed" in found.reason


def test_a_clock_that_was_ahead_puts_nothing_off_once_it_is_right(house: RecoveryHouse) -> None:
    right = house.clock.now()
    house.store.cluster_failure = AWAY
    house.clock.advance(timedelta(hours=3))
    assert isinstance(house.recover(), StillWaiting)
    house.clock.set(right)
    house.store.cluster_failure = None
    # What was put off to three hours from now cannot be meant.
    assert may_launch(house.plane.incidents.recovery(), right) is None
    near = replace(house.incident, next_launch_at=right + timedelta(minutes=5))
    assert "is due at" in str(may_launch(Recovery(RecoveryState.RECOVERING, near), right))


def test_windows_of_which_every_record_is_damaged_are_not_called_whole() -> None:
    house = RecoveryHouse()
    house.spend("a", "80")
    house.capture()
    house.check()
    house.plane.points.corrupt("a", house.clock.now(), LIFETIME)
    house.clock.advance(timedelta(minutes=10))
    house.wipe()
    result = house.recover()
    assert isinstance(result, Recovered)
    ended = result.incident.ended
    assert ended is not None
    assert ended.outcome is Outcome.RESTORED_IN_PART
    assert "1 window without an intact record: usage unknown." in ended.detail
