"""Restores with incomplete information: short timeouts, partial readings, refused writes."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from budget_recovery_dagster.domain import (
    EVERYONE,
    ClusterView,
    Outcome,
    Recovery,
    RecoveryState,
    Replica,
    Reset,
    Verdict,
    may_launch,
)
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    StorePermissionError,
)
from budget_recovery_dagster.services.restore import Recovered, StillWaiting
from tests.boards import board, board_key
from tests.unit.capture_harness import LIFETIME
from tests.unit.recovery_harness import AWAY, FULL, RecoveryHarness, captured_harness, outcome_of


@pytest.fixture
def harness() -> RecoveryHarness:
    """Return a store of two tenants: captured, checked and wiped."""
    harness = captured_harness()
    harness.wipe()
    return harness


def well(seen_at: datetime) -> ClusterView:
    replica = Replica("n2", is_current=True, is_offline=False, lag=0, silent_for=timedelta(0))
    return ClusterView(seen_at, "c", "n1", None, 2, (replica,))


def outcome(harness: RecoveryHarness) -> Outcome:
    return outcome_of(harness.recover())


@pytest.mark.parametrize("seconds", [0, 5, 11])
def test_a_healthy_cluster_gets_the_time_to_converge_despite_a_short_timeout(
    seconds: int, harness: RecoveryHarness
) -> None:
    harness.store.cluster = well
    timeout = timedelta(seconds=seconds)
    harness.convergence_timeout = timeout
    assert outcome(harness) is Outcome.RESTORED


def test_the_wait_for_a_flapping_leader_is_bounded(
    harness: RecoveryHarness,
) -> None:
    terms = iter(range(10**6))

    def flapping(seen_at: datetime) -> ClusterView:
        return replace(well(seen_at), leader=f"n{next(terms)}x")

    harness.store.cluster = flapping
    begun = harness.clock.now()
    result = harness.recover()
    assert isinstance(result, StillWaiting)
    # The timeout of 30 s, and the time for the cluster to settle.
    assert harness.clock.now() - begun <= timedelta(seconds=30 + 12 + 3 + 3)


def test_a_check_of_the_store_that_replaced_a_lost_one_is_not_a_good_check(
    harness: RecoveryHarness,
) -> None:
    last_good = harness.plane.registry.newest_good_check()
    harness.clock.advance(timedelta(minutes=10))
    found = harness.check().check
    assert (found.verdict, found.is_good) == (Verdict.SAME, False)
    assert found.reason.startswith("No further loss: created ")
    assert harness.plane.registry.newest_good_check() == last_good
    assert outcome(harness) is Outcome.RESTORED
    accepted = harness.plane.registry.newest_good_check()
    assert accepted is not None
    assert accepted.checked_at == harness.clock.now()


def test_a_store_that_exists_again_is_reported() -> None:
    harness = RecoveryHarness()
    harness.spend("a", "80")
    harness.capture()
    harness.check()
    harness.store.is_gone = True
    harness.check()
    harness.store.is_gone = False
    # A leader that was cut off may still report the missing store.
    harness.store.is_led = False
    found = harness.check().check
    assert found.verdict is Verdict.UNKNOWN
    assert "may no longer be the leader" in found.reason
    assert harness.incident.target is None
    harness.store.is_led = True
    assert harness.check().check.reason.startswith("The store exists again: created ")
    assert harness.incident.target is not None


def test_a_partial_verification_read_fails_the_attempt(harness: RecoveryHarness) -> None:
    # The first reading is complete. In both tries of the second, a key is purged without a marker.
    purged = iter(["nothing", "usage.a.spend.lifetime.alice", "usage.a.spend.lifetime.="])

    def purge(tenant: str) -> None:
        if tenant == "a":
            harness.store.purge(next(purged, "nothing"))

    harness.store.during_read = purge
    with pytest.raises(AttemptFailedError, match="Fewer counters of tenant 'a' could be read"):
        harness.recover()
    assert harness.state is RecoveryState.RECOVERING
    harness.store.during_read = None
    assert outcome(harness) is Outcome.RESTORED
    assert (harness.usage("a"), harness.usage("b")) == ("80", "5")


def test_a_refused_leaderboard_is_reported_and_does_not_fail_the_restore(
    harness: RecoveryHarness,
) -> None:
    incident = harness.incident
    # Write 3 is the leaderboard of "a", after its two counters.
    harness.store.write_failures = {3: FULL}
    assert outcome(harness) is Outcome.RESTORED
    notes = {
        entry.tenant: entry.notes
        for entry in harness.plane.audits.largest(incident.incident_id, 10).largest
    }
    assert notes["a"] == ("leaderboard not rebuilt: The store is full.",)


def test_only_the_refused_leaderboard_of_a_tenant_has_a_note() -> None:
    harness = RecoveryHarness()
    for budget in ("one", "two", "three"):
        harness.store.put_usage("a", budget, "lifetime", None, "5")
        harness.store.put(board_key("a", budget, "lifetime"), board({None: "5"}))
    harness.capture()
    harness.check()
    harness.wipe()
    incident = harness.incident
    # Write 5 is the second of three leaderboards, after three counters.
    harness.store.write_failures = {5: FULL}
    assert outcome(harness) is Outcome.RESTORED
    audits = harness.plane.audits.largest(incident.incident_id, 10).largest
    assert sorted(entry.notes for entry in audits) == [
        (),
        (),
        ("leaderboard not rebuilt: The store is full.",),
    ]


def test_a_value_that_the_store_refuses_is_reported_and_does_not_fail_the_restore() -> None:
    harness = RecoveryHarness()
    harness.spend("a", "80")
    harness.spend("a", "30.25", "alice")
    harness.spend("b", "5")
    harness.rank("a", {None: "80", "alice": "30.25"})
    harness.rank("b", {None: "5"})
    harness.capture()
    harness.check()
    harness.wipe()
    incident = harness.incident
    harness.store.max_value = len('{"usage":"80","updated_at":"2026-11-25T12:00:00Z"}')
    assert outcome(harness) is Outcome.RESTORED
    assert (harness.usage("a"), harness.usage("a", "alice"), harness.usage("b")) == (
        "80",
        None,
        "5",
    )
    a, b = sorted(
        harness.plane.audits.largest(incident.incident_id, 10).largest, key=lambda each: each.tenant
    )
    assert (a.planned, a.raised, a.kept, a.skipped) == (2, 1, 0, 1)
    assert a.notes[0] == (
        "1 counter skipped: the store refuses the value: 'alice' (its 53 bytes are more than 50)"
    )
    assert [note.partition(": ")[0] for note in (*a.notes[1:], *b.notes)] == [
        "leaderboard not rebuilt",
        "leaderboard not rebuilt",
    ]


def test_the_final_check_fails_the_store_if_a_tenant_cannot_be_read(
    harness: RecoveryHarness,
) -> None:
    for _ in range(3):
        harness.die_in_an_attempt()
    harness.store.failures = {"b": AWAY}
    harness.recover()
    assert harness.state is RecoveryState.FAILED


@pytest.mark.parametrize(("write", "written"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_the_next_run_counts_what_a_killed_run_raised(
    write: int, written: int, harness: RecoveryHarness
) -> None:
    incident = harness.incident

    class KilledError(BaseException):
        pass

    def die() -> None:
        raise KilledError

    # The writes: two counters and a leaderboard of "a", then a counter and a leaderboard of "b".
    harness.before_write(write, die)
    with pytest.raises(KilledError):
        harness.recover()
    harness.store.before_write = None
    found = [harness.usage("a"), harness.usage("a", "alice"), harness.usage("b")]
    assert sum(usage is not None for usage in found) == written
    harness.clock.advance(timedelta(seconds=2))

    result = harness.recover()

    assert isinstance(result, Recovered)
    ended = result.incident.ended
    assert ended is not None
    assert (ended.outcome, ended.restored.counters) == (Outcome.RESTORED, 3)
    audits = harness.plane.audits.largest(incident.incident_id, 10)
    assert {(each.tenant, str(each.before), each.raised) for each in audits.largest} == {
        ("a", "0", 2),
        ("b", "0", 1),
    }
    assert {(each.tenant, str(each.after)) for each in audits.largest} == {("a", "80"), ("b", "5")}


def test_counters_are_counted_correctly_after_the_store_was_unreachable_during_writes(
    harness: RecoveryHarness,
) -> None:
    incident = harness.incident

    def go_away() -> None:
        harness.store.failures = {"a": AWAY}
        harness.store.write_failures = dict.fromkeys(range(2, 100), AWAY)

    harness.before_write(2, go_away)
    with pytest.raises(AttemptFailedError, match="Nobody answers"):
        harness.recover()
    harness.store.before_write = None
    harness.store.failures, harness.store.write_failures = {}, {}
    harness.clock.advance(timedelta(seconds=2))
    result = harness.recover()
    assert isinstance(result, Recovered)
    assert result.incident.ended is not None
    assert result.incident.ended.restored.counters == 3
    audits = harness.plane.audits.largest(incident.incident_id, 10)
    assert {str(each.before) for each in audits.largest} == {"0"}


def test_a_missing_permission_to_write_the_marker_does_not_prevent_a_restore(
    harness: RecoveryHarness,
) -> None:
    harness.store.marker_failure = StorePermissionError("The user may not.", "grant it.")
    assert outcome(harness) is Outcome.RESTORED
    assert any(
        message.startswith("A further loss may go undetected") for message in harness.messages
    )
    assert harness.baseline.marker is None
    found = harness.check().check
    assert found.is_good
    assert "The marker was not renewed" in found.reason


def test_a_launch_time_set_by_a_clock_ahead_is_ignored_once_it_is_correct(
    harness: RecoveryHarness,
) -> None:
    right = harness.clock.now()
    harness.store.cluster_failure = AWAY
    harness.clock.advance(timedelta(hours=3))
    assert isinstance(harness.recover(), StillWaiting)
    harness.clock.set(right)
    harness.store.cluster_failure = None
    # A launch time three hours ahead comes from a wrong clock and is ignored.
    assert may_launch(harness.plane.incidents.recovery(), right) is None
    near = replace(harness.incident, next_launch_at=right + timedelta(minutes=5))
    assert "is due at" in str(may_launch(Recovery(RecoveryState.RECOVERING, near), right))


def test_a_window_whose_records_are_all_damaged_is_restored_in_part() -> None:
    harness = RecoveryHarness()
    harness.spend("a", "80")
    harness.capture()
    harness.check()
    harness.plane.points.corrupt("a", harness.clock.now(), LIFETIME)
    harness.clock.advance(timedelta(minutes=10))
    harness.wipe()
    result = harness.recover()
    assert isinstance(result, Recovered)
    ended = result.incident.ended
    assert ended is not None
    assert ended.outcome is Outcome.RESTORED_IN_PART
    assert "1 window without an intact record: usage unknown." in ended.detail


def test_a_window_that_was_reset_is_not_unknown_although_a_record_is_damaged() -> None:
    harness = captured_harness()
    harness.clock.advance(timedelta(hours=1))
    harness.spend("a", "81")
    harness.capture()
    harness.plane.points.corrupt("a", harness.clock.now(), LIFETIME)
    harness.clock.advance(timedelta(minutes=30))
    now = harness.clock.now()
    harness.plane.resets.record(Reset("a", "spend", None, EVERYONE, now, "ann", "pardoned", now))
    harness.wipe()
    result = harness.recover()
    assert isinstance(result, Recovered)
    ended = result.incident.ended
    assert ended is not None
    assert ended.outcome is Outcome.RESTORED
    assert "unknown" not in ended.detail
    assert (harness.usage("a"), harness.usage("b")) == (None, "5")
