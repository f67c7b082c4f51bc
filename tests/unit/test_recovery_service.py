"""A recovery from the open incident to its end."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from budget_recovery_dagster.domain import (
    RESTORE_LEASE,
    ClusterView,
    FailureReason,
    Marker,
    Observation,
    Outcome,
    RecoveryState,
    Replica,
    StoreIdentity,
    Verdict,
)
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    LeaseLostError,
    StoreLostError,
    StoreUnreachableError,
    StoreWriteError,
)
from budget_recovery_dagster.services.restore import (
    GaveUp,
    NothingToDo,
    Recovered,
    RecoveryResult,
    StillWaiting,
)
from tests.fakes.incidents import MemoryStoreRegistry
from tests.unit.capture_house import REBORN
from tests.unit.recovery_house import LATER, RecoveryHouse, captured_house

FULL = StoreWriteError("The store is full.", "make room.")
AWAY = StoreUnreachableError("Nobody answers.", "start it.")


@pytest.fixture
def house() -> RecoveryHouse:
    """Return a store of two tenants, captured and checked."""
    return captured_house()


def outcome(result: RecoveryResult) -> Outcome:
    assert isinstance(result, Recovered)
    assert result.incident.ended is not None
    return result.incident.ended.outcome


def test_a_wiped_store_is_restored_from_snapshots_and_accepted(house: RecoveryHouse) -> None:
    house.wipe()
    house.spend("a", "31", "alice")
    house.spend("a", "2")

    result = house.recover()

    assert outcome(result) is Outcome.RESTORED
    assert (house.usage("a"), house.usage("a", "alice"), house.usage("b")) == ("80", "31", "5")
    assert house.state is RecoveryState.HEALTHY
    assert isinstance(result, Recovered)
    ended = result.incident.ended
    assert ended is not None
    assert (ended.restored.tenants, ended.restored.windows, ended.restored.counters) == (2, 2, 2)
    assert house.baseline.identity.created_at == REBORN
    assert house.baseline.marker is not None
    # The next check is good, and the next snapshot is stored.
    assert house.check().check.verdict.is_good
    assert len(house.capture("next").stored) == 2


def test_usages_of_every_budget_before_and_after_are_audited(house: RecoveryHouse) -> None:
    house.wipe()
    house.spend("a", "2")
    incident = house.incident
    house.recover()
    told = {
        entry.tenant: (entry.entries, entry.raised, str(entry.before), str(entry.after))
        for entry in house.plane.audits.largest(incident.incident_id, 10).largest
    }
    # Tenant "a" had 2 before; its snapshot contains 80 and 30.
    assert told == {"a": (2, 2, "2", "110"), "b": (1, 1, "0", "5")}
    trails = [audit.trail for audit in house.plane.state.audits.values()]
    assert {(trail.who, trail.run_id) for trail in trails} == {("a restore", "a run")}


def test_a_restore_that_finds_all_usage_ends_with_nothing_lost(house: RecoveryHouse) -> None:
    # Some servers change the creation time on their own.
    house.store.stream = StoreIdentity(REBORN, house.store.stream.last_sequence)
    house.check()
    result = house.recover()
    assert outcome(result) is Outcome.NOTHING_LOST
    assert (house.usage("a"), house.usage("b")) == ("80", "5")


def test_a_recovery_without_snapshots_fails_at_once_even_if_the_store_is_unreachable() -> None:
    house = RecoveryHouse()
    house.spend("a", "1")
    house.check()
    house.wipe()
    house.store.identity_failure = AWAY
    result = house.recover()
    assert isinstance(result, GaveUp)
    assert result.reason is FailureReason.NO_SNAPSHOTS
    assert house.state is RecoveryState.FAILED


@pytest.mark.parametrize("failing", ["cluster_failure", "look_failure", "identity_failure"])
def test_a_restore_waits_for_an_unreachable_store_without_using_an_attempt(
    failing: str, house: RecoveryHouse
) -> None:
    house.wipe()
    setattr(house.store, failing, AWAY)
    begun = house.clock.now()

    result = house.recover()

    assert isinstance(result, StillWaiting)
    assert result.reason == AWAY.message
    assert (result.incident.attempts, house.state) == (0, RecoveryState.RECOVERING)
    waiting = result.incident.waiting
    assert waiting is not None
    assert (waiting.reason, waiting.waits) == (AWAY.message, 1)
    assert result.incident.next_launch_at is not None
    assert result.incident.next_launch_at - house.clock.now() == timedelta(seconds=30)
    assert house.clock.now() - begun <= timedelta(seconds=40)
    setattr(house.store, failing, None)
    assert outcome(house.recover()) is Outcome.RESTORED


def test_nothing_is_written_before_the_cluster_has_converged(house: RecoveryHouse) -> None:
    house.wipe()
    sequence = house.store.stream.last_sequence
    lag = 8000

    def catching_up(seen_at: datetime) -> ClusterView:
        replica = Replica("n2", lag == 0, is_offline=False, lag=lag, silent_for=timedelta(0))
        return ClusterView(seen_at, "c", "n1", None, 2, (replica,))

    house.store.cluster = catching_up
    result = house.recover()
    assert isinstance(result, StillWaiting)
    assert "replica n2 is not current, 8000 operations behind" in result.reason
    assert house.store.stream.last_sequence == sequence

    lag = 0
    begun = house.clock.now()
    assert outcome(house.recover()) is Outcome.RESTORED
    # A cluster notices a failure within ten seconds, so good answers must last for twelve.
    assert house.clock.now() - begun >= timedelta(seconds=12)


def test_a_restore_waits_while_clocks_disagree_by_more_than_five_seconds(
    house: RecoveryHouse,
) -> None:
    house.wipe()
    house.store.clock = house.clock.now() - timedelta(seconds=6)
    result = house.recover()
    assert isinstance(result, StillWaiting)
    assert "clocks disagree" in result.reason
    house.store.clock = house.clock.now() - timedelta(seconds=4)
    assert outcome(house.recover()) is Outcome.RESTORED


def test_three_failed_attempts_give_up_and_keep_what_was_raised(house: RecoveryHouse) -> None:
    house.wipe()
    # The first counter of "a" is written; its second is refused each time.
    house.store.write_failures = dict.fromkeys(range(2, 100), FULL)
    for number in (1, 2):
        with pytest.raises(AttemptFailedError, match=f"Attempt {number} of 3 .*The store is full"):
            house.recover()
        assert house.incident.attempts == number
    result = house.recover()
    assert isinstance(result, GaveUp)
    assert result.reason is FailureReason.NOT_WRITTEN
    assert "The store is full." in result.detail
    assert house.state is RecoveryState.FAILED
    assert house.usage("a") == "80"
    assert isinstance(house.recover(), NothingToDo)


def test_a_refused_tenant_is_named_and_does_not_affect_others(house: RecoveryHouse) -> None:
    house.wipe()
    house.store.write_failures = {1: FULL}
    with pytest.raises(AttemptFailedError, match="Tenant 'a' is not restored: The store is full"):
        house.recover()
    assert house.usage("b") == "5"
    assert outcome(house.recover()) is Outcome.RESTORED
    assert house.usage("a", "alice") == "30"


def test_a_refused_marker_uses_an_attempt(house: RecoveryHouse) -> None:
    house.wipe()
    house.store.marker_failure = FULL
    with pytest.raises(AttemptFailedError, match="The store is full"):
        house.recover()
    assert house.incident.attempts == 1


def test_a_further_loss_during_a_restore_fails_it_and_resets_the_attempts(
    house: RecoveryHouse,
) -> None:
    house.wipe()
    # Write 5 is the last of three counters and two leaderboards.
    house.before_write(5, lambda: house.store.recreate(LATER))
    with pytest.raises(StoreLostError, match="lost once more"):
        house.recover()
    incident = house.incident
    assert [loss.verdict for loss in incident.losses] == [Verdict.RECREATED, Verdict.RECREATED]
    assert (incident.attempts, house.state) == (0, RecoveryState.RECOVERING)
    house.store.before_write = None

    assert outcome(house.recover()) is Outcome.RESTORED
    assert (house.usage("a"), house.usage("a", "alice"), house.usage("b")) == ("80", "30", "5")


def test_a_further_loss_between_two_runs_joins_the_incident(house: RecoveryHouse) -> None:
    house.wipe()
    house.store.marker_failure = FULL
    with pytest.raises(AttemptFailedError):
        house.recover()
    house.store.marker_failure = None
    house.store.recreate(LATER)

    result = house.recover()

    assert isinstance(result, Recovered)
    assert len(result.incident.losses) == 2
    assert result.incident.attempts == 1
    assert house.usage("b") == "5"


def test_a_crash_between_writing_and_recording_the_marker_is_not_a_further_loss(
    house: RecoveryHouse,
) -> None:
    house.wipe()

    class CrashError(Exception):
        pass

    written = house.store.write_marker

    def write_and_die(deployment_id: str, nonce: str, *, after: int) -> Marker:
        written(deployment_id, nonce, after=after)
        raise CrashError

    house.store.write_marker = write_and_die  # type: ignore[method-assign]
    with pytest.raises(CrashError):
        house.recover()
    house.store.write_marker = written  # type: ignore[method-assign]
    assert house.check().check.verdict.is_good

    result = house.recover()

    assert isinstance(result, Recovered)
    assert len(result.incident.losses) == 1


def test_a_store_that_disappears_again_is_a_further_loss(house: RecoveryHouse) -> None:
    house.store.is_gone = True
    house.check()
    assert house.incident.target is None
    # A store that is still missing is no further loss, nor is its return.
    house.check()
    house.store.recreate(REBORN)
    house.store.is_gone = False
    house.check()
    back = house.incident
    assert (len(back.losses), back.target is None) == (1, False)
    house.store.is_gone = True
    house.check()
    assert len(house.incident.losses) == 2


def test_a_second_restore_does_nothing_while_one_is_running(house: RecoveryHouse) -> None:
    house.wipe()
    others: list[RecoveryResult] = []
    house.before_write(1, lambda: others.append(house.recover()))
    assert outcome(house.recover()) is Outcome.RESTORED
    (other,) = others
    assert isinstance(other, NothingToDo)
    assert "is running" in other.reason


def test_a_restore_writes_nothing_after_its_lease_is_lost(house: RecoveryHouse) -> None:
    house.wipe()
    # As if the worker had been paused and another had taken over.
    house.before_write(2, lambda: house.plane.leases.lose(RESTORE_LEASE))
    with pytest.raises(LeaseLostError):
        house.recover()
    # The second write was already sent. The third, of "b", was not.
    assert house.store.writes == 2
    assert house.usage("b") is None
    assert house.state is RecoveryState.RECOVERING
    assert outcome(house.recover()) is Outcome.RESTORED


def test_a_check_during_a_restore_writes_nothing_and_does_not_disturb_it(
    house: RecoveryHouse,
) -> None:
    house.wipe()
    seen: list[tuple[Verdict, Observation]] = []

    def check_meanwhile() -> None:
        deployment = house.plane.registry.claim().deployment_id
        before = house.store.stream
        seen.append((house.check().check.verdict, house.store.observe(deployment)))
        assert house.store.stream == before

    house.before_write(2, check_meanwhile)
    assert outcome(house.recover()) is Outcome.RESTORED
    ((verdict, _),) = seen
    assert verdict.is_good


def test_a_restore_of_closed_windows_only_raises_nothing() -> None:
    house = RecoveryHouse()
    house.store.put_usage("a", "spend", "2026-11-25", None, "7")
    house.capture()
    house.check()
    house.clock.advance(timedelta(days=1))
    house.wipe()
    assert outcome(house.recover()) is Outcome.NOTHING_CURRENT
    assert house.usage("a") is None


def test_the_time_after_the_last_snapshot_is_reported_as_not_covered(
    house: RecoveryHouse,
) -> None:
    for _ in range(3):
        house.clock.advance(timedelta(minutes=10))
        house.check()
    house.clock.advance(timedelta(minutes=5))
    house.wipe()
    # Captured at 12:05; the last check before the loss was at 12:45.
    assert house.incident.uncovered == timedelta(minutes=40)
    result = house.recover()
    assert isinstance(result, Recovered)
    assert result.incident.ended is not None
    assert result.incident.ended.detail.endswith(
        "Usage counted from 2026-11-25 12:05:00 UTC until the loss, at least until "
        "2026-11-25 12:45:00 UTC (40 min), is in no snapshot and did not come back."
    )


def test_a_key_removed_after_its_write_is_reported_and_the_others_are_restored(
    house: RecoveryHouse,
) -> None:
    house.wipe()
    incident = house.incident
    # Before write 2, the aggregate of "a" is written, but not yet verified.
    house.before_write(2, lambda: house.store.remove("usage.a.spend.lifetime.="))
    assert outcome(house.recover()) is Outcome.RESTORED
    assert (house.usage("a"), house.usage("a", "alice"), house.usage("b")) == (None, "30", "5")
    (notes,) = [
        entry.notes
        for entry in house.plane.audits.largest(incident.incident_id, 10).largest
        if entry.tenant == "a"
    ]
    assert notes == ("1 counter missing from the store after the write: the aggregate",)


def test_a_marker_deleted_during_a_restore_fails_the_attempt(
    house: RecoveryHouse,
) -> None:
    house.wipe()
    deployment = house.plane.registry.claim().deployment_id
    house.before_write(1, lambda: house.store.remove(f"__guard.{deployment}"))
    with pytest.raises(AttemptFailedError, match="marker is no longer in the store"):
        house.recover()
    house.store.before_write = None
    # Restores of the same run are distinguished by their time.
    house.clock.advance(timedelta(seconds=1))
    assert outcome(house.recover()) is Outcome.RESTORED


def test_attempts_are_counted_for_each_loss(house: RecoveryHouse) -> None:
    house.wipe()
    house.store.write_failures = dict.fromkeys(range(1, 100), FULL)
    for _ in range(2):
        with pytest.raises(AttemptFailedError):
            house.recover()
    house.store.recreate(LATER)
    house.check()
    assert house.incident.attempts == 0
    house.store.write_failures = {}
    assert outcome(house.recover()) is Outcome.RESTORED
    attempts = house.plane.incidents.attempts_of(house.plane.incidents.recent(1)[0].incident_id)
    assert [(each.loss, each.number) for each in attempts] == [(1, 1), (1, 2), (2, 1)]


def test_a_service_on_another_bucket_is_refused(house: RecoveryHouse) -> None:
    another = MemoryStoreRegistry(house.plane.state, "another")
    house.plane = replace(house.plane, registry=another)
    with pytest.raises(Exception, match="BUDGET_RECOVERY_BUCKET"):
        house.recover()
