"""A recovery from the open incident to its end."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from budget_recovery_dagster.domain import (
    RESTORE_LEASE,
    ClusterView,
    FailureReason,
    IntendedMarker,
    Marker,
    MergedAudits,
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
    StoreError,
    StoreLostError,
    StorePermissionError,
)
from budget_recovery_dagster.services.restore import (
    GaveUp,
    NothingToDo,
    Recovered,
    RecoveryResult,
    StillWaiting,
    recover_store,
)
from tests.fakes.incidents import MemoryStoreRegistry
from tests.unit.capture_harness import REBORN
from tests.unit.recovery_harness import (
    AWAY,
    FULL,
    LATER,
    UNCONFIRMED,
    RecoveryHarness,
    captured_harness,
    outcome_of,
)


@pytest.fixture
def harness() -> RecoveryHarness:
    """Return a store of two tenants, captured and checked."""
    return captured_harness()


def test_a_wiped_store_is_restored_from_snapshots_and_accepted(harness: RecoveryHarness) -> None:
    harness.wipe()
    harness.spend("a", "31", "alice")
    harness.spend("a", "2")

    result = harness.recover()

    assert outcome_of(result) is Outcome.RESTORED
    assert (harness.usage("a"), harness.usage("a", "alice"), harness.usage("b")) == (
        "80",
        "31",
        "5",
    )
    assert harness.state is RecoveryState.HEALTHY
    assert isinstance(result, Recovered)
    ended = result.incident.ended
    assert ended is not None
    assert (ended.restored.tenants, ended.restored.windows, ended.restored.counters) == (2, 2, 2)
    assert harness.baseline.identity.created_at == REBORN
    assert harness.baseline.marker is not None
    # The next check is good, and the next snapshot is stored.
    assert harness.check().check.verdict.is_good
    assert len(harness.capture("next").stored) == 2


def test_usages_of_every_budget_before_and_after_are_audited(harness: RecoveryHarness) -> None:
    harness.wipe()
    harness.spend("a", "2")
    incident = harness.incident
    harness.recover()
    audits = {
        entry.tenant: (entry.entries, entry.raised, str(entry.before), str(entry.after))
        for entry in harness.plane.audits.largest(incident.incident_id, 10).largest
    }
    # Tenant "a" had 2 before; its snapshot contains 80, of which 30 are alice's.
    assert audits == {"a": (2, 2, "2", "80"), "b": (1, 1, "0", "5")}
    trails = [audit.trail for audit in harness.plane.state.audits.values()]
    assert {(trail.who, trail.run_id) for trail in trails} == {("a restore", "a run")}


def test_a_restore_that_finds_all_usage_ends_with_nothing_lost(harness: RecoveryHarness) -> None:
    # Some servers change the creation time on their own.
    harness.store.stream = StoreIdentity(REBORN, harness.store.stream.last_sequence)
    harness.check()
    result = harness.recover()
    assert outcome_of(result) is Outcome.NOTHING_LOST
    assert (harness.usage("a"), harness.usage("b")) == ("80", "5")


def test_a_recovery_without_snapshots_fails_at_once_even_if_the_store_is_unreachable() -> None:
    harness = RecoveryHarness()
    harness.spend("a", "1")
    harness.check()
    harness.wipe()
    harness.store.identity_failure = AWAY
    result = harness.recover()
    assert isinstance(result, GaveUp)
    assert result.reason is FailureReason.NO_SNAPSHOTS
    assert harness.state is RecoveryState.FAILED


@pytest.mark.parametrize("failing", ["cluster_failure", "observe_failure", "identity_failure"])
def test_a_restore_waits_for_an_unreachable_store_without_using_an_attempt(
    failing: str, harness: RecoveryHarness
) -> None:
    harness.wipe()
    setattr(harness.store, failing, AWAY)
    begun = harness.clock.now()

    result = harness.recover()

    assert isinstance(result, StillWaiting)
    assert result.reason == AWAY.message
    assert (result.incident.attempts, harness.state) == (0, RecoveryState.RECOVERING)
    waiting = result.incident.waiting
    assert waiting is not None
    assert (waiting.reason, waiting.waits) == (AWAY.message, 1)
    assert result.incident.next_launch_at is not None
    assert result.incident.next_launch_at - harness.clock.now() == timedelta(seconds=30)
    assert harness.clock.now() - begun <= timedelta(seconds=40)
    setattr(harness.store, failing, None)
    assert outcome_of(harness.recover()) is Outcome.RESTORED


def test_nothing_is_written_before_the_cluster_has_converged(harness: RecoveryHarness) -> None:
    harness.wipe()
    sequence = harness.store.stream.last_sequence
    lag = 8000

    def catching_up(seen_at: datetime) -> ClusterView:
        replica = Replica("n2", lag == 0, is_offline=False, lag=lag, silent_for=timedelta(0))
        return ClusterView(seen_at, "c", "n1", None, 2, (replica,))

    harness.store.cluster = catching_up
    result = harness.recover()
    assert isinstance(result, StillWaiting)
    assert "replica n2 is not current, 8000 operations behind" in result.reason
    assert harness.store.stream.last_sequence == sequence

    lag = 0
    begun = harness.clock.now()
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    # A cluster notices a failure within ten seconds, so good answers must last for twelve.
    assert harness.clock.now() - begun >= timedelta(seconds=12)


@pytest.mark.parametrize("lag", [0, 8000])
@pytest.mark.parametrize("minutes", [-1, 1])
def test_a_clock_that_is_set_during_the_wait_neither_prolongs_nor_shortens_it(
    harness: RecoveryHarness, lag: int, minutes: int
) -> None:
    harness.wipe()
    polls = 0

    def polled(seen_at: datetime) -> ClusterView:
        nonlocal polls
        polls += 1
        # In all by less than an hour, for which a restore may hold its lease.
        harness.clock.advance(timedelta(minutes=minutes))
        replica = Replica("n2", lag == 0, is_offline=False, lag=lag, silent_for=timedelta(0))
        return ClusterView(seen_at, "c", "n1", None, 2, (replica,))

    harness.store.cluster = polled
    result = harness.recover()
    # One poll every three seconds: until the timeout after 30 s, or during 12 s of good answers.
    if lag:
        assert isinstance(result, StillWaiting)
        assert polls == 11
    else:
        assert outcome_of(result) is Outcome.RESTORED
        assert polls == 5


def test_a_restore_waits_while_clocks_disagree_by_more_than_five_seconds(
    harness: RecoveryHarness,
) -> None:
    harness.wipe()
    harness.store.clock = harness.clock.now() - timedelta(seconds=6)
    result = harness.recover()
    assert isinstance(result, StillWaiting)
    assert "The clocks differ by 6 s" in result.reason
    harness.store.clock = harness.clock.now() - timedelta(seconds=4)
    assert outcome_of(harness.recover()) is Outcome.RESTORED


def test_a_restore_waits_while_both_servers_share_a_wrong_clock(harness: RecoveryHarness) -> None:
    harness.wipe()
    harness.clock.advance(timedelta(days=40))
    harness.store.clock = harness.clock.now()
    harness.clock.host_is_ahead = -timedelta(days=40)
    result = harness.recover()
    assert isinstance(result, StillWaiting)
    assert "The clocks differ by 40.0 days" in result.reason
    assert "this host's" in result.reason
    assert harness.incident.attempts == 0
    harness.clock.host_is_ahead = -timedelta(seconds=60)
    assert outcome_of(harness.recover()) is Outcome.RESTORED


def test_the_time_of_the_answer_is_no_reason_to_wait(
    harness: RecoveryHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.wipe()

    def slow() -> datetime:
        harness.clock.advance(timedelta(seconds=30))
        at = harness.clock.now()
        harness.clock.advance(timedelta(seconds=30))
        return at

    monkeypatch.setattr(harness.store, "now", slow)
    assert outcome_of(harness.recover()) is Outcome.RESTORED


def test_three_failed_attempts_give_up_and_keep_what_was_raised(harness: RecoveryHarness) -> None:
    harness.wipe()
    # The first counter of "a" is written; no write of its second is confirmed.
    harness.store.write_failures = dict.fromkeys(range(2, 100), UNCONFIRMED)
    for number in (1, 2):
        with pytest.raises(AttemptFailedError, match=f"Attempt {number} of 3 .*No response"):
            harness.recover()
        assert harness.incident.attempts == number
    result = harness.recover()
    assert isinstance(result, GaveUp)
    assert result.reason is FailureReason.NOT_WRITTEN
    assert "No response to a write." in result.detail
    assert result.incident.given_up is not None
    assert result.incident.given_up.code == "store_unreachable"
    assert harness.state is RecoveryState.FAILED
    assert harness.usage("a") == "80"
    assert isinstance(harness.recover(), NothingToDo)


def test_a_refused_tenant_is_named_and_does_not_affect_others(harness: RecoveryHarness) -> None:
    harness.wipe()
    harness.store.write_failures = {1: UNCONFIRMED}
    with pytest.raises(AttemptFailedError, match="Tenant 'a' is not restored: No response"):
        harness.recover()
    assert harness.usage("b") == "5"
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert harness.usage("a", "alice") == "30"


DENIED = StorePermissionError("The user may not write usage.", "grant it.")


@pytest.mark.parametrize("refusal", [FULL, DENIED])
def test_writes_that_are_definitely_refused_use_no_attempt_and_are_repeated(
    refusal: StoreError, harness: RecoveryHarness
) -> None:
    harness.wipe()
    # The first counter of "a" is written, everything else is refused.
    harness.store.write_failures = dict.fromkeys(range(2, 100), refusal)
    for waits in range(1, 6):
        result = harness.recover()
        assert isinstance(result, StillWaiting)
        assert (result.reason, result.incident.attempts) == (refusal.message, 0)
        waiting = result.incident.waiting
        assert waiting is not None
        assert (waiting.reason, waiting.waits) == (refusal.message, waits)
        harness.clock.advance(timedelta(minutes=waits))
    assert harness.state is RecoveryState.RECOVERING
    harness.store.write_failures = {}

    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert (harness.usage("a"), harness.usage("a", "alice"), harness.usage("b")) == (
        "80",
        "30",
        "5",
    )


def test_a_refusal_beside_an_unconfirmed_write_uses_an_attempt(harness: RecoveryHarness) -> None:
    harness.wipe()
    harness.store.write_failures = {1: UNCONFIRMED, **dict.fromkeys(range(2, 100), FULL)}
    with pytest.raises(AttemptFailedError, match="No response to a write"):
        harness.recover()
    assert harness.incident.attempts == 1


def test_a_refused_marker_uses_no_attempt(harness: RecoveryHarness) -> None:
    harness.wipe()
    harness.store.marker_failure = FULL
    result = harness.recover()
    assert isinstance(result, StillWaiting)
    assert (result.reason, result.incident.attempts) == ("The store is full.", 0)


def test_an_attempt_before_its_time_does_nothing(harness: RecoveryHarness) -> None:
    harness.wipe()
    harness.store.write_failures = dict.fromkeys(range(1, 100), UNCONFIRMED)
    for attempts, pause in ((1, 60), (2, 300)):
        with pytest.raises(AttemptFailedError):
            harness.recover()
        due = harness.incident.next_attempt_at
        assert due == harness.clock.now() + timedelta(seconds=pause)
        harness.clock.advance(timedelta(seconds=pause - 1))
        early = recover_store(
            harness.plane,
            lambda: nullcontext(harness.store),
            run_id="launched manually",
            holder="a restore",
            convergence_timeout=timedelta(0),
            on_progress=harness.messages.append,
        )
        assert isinstance(early, NothingToDo)
        assert f"Attempt {attempts + 1} of 3" in early.reason
        assert harness.incident.attempts == attempts


def test_a_further_loss_during_a_restore_fails_it_and_resets_the_attempts(
    harness: RecoveryHarness,
) -> None:
    harness.wipe()
    # Write 5 is the last of three counters and two leaderboards.
    harness.before_write(5, lambda: harness.store.recreate(LATER))
    with pytest.raises(StoreLostError, match="lost once more"):
        harness.recover()
    incident = harness.incident
    assert [loss.verdict for loss in incident.losses] == [Verdict.LOST, Verdict.LOST]
    assert (incident.attempts, harness.state) == (0, RecoveryState.RECOVERING)
    harness.store.before_write = None

    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert (harness.usage("a"), harness.usage("a", "alice"), harness.usage("b")) == (
        "80",
        "30",
        "5",
    )


def test_a_further_loss_between_two_runs_joins_the_incident(harness: RecoveryHarness) -> None:
    harness.wipe()
    harness.store.write_failures = dict.fromkeys(range(1, 100), UNCONFIRMED)
    with pytest.raises(AttemptFailedError):
        harness.recover()
    harness.store.write_failures = {}
    harness.store.recreate(LATER)

    result = harness.recover()

    assert isinstance(result, Recovered)
    assert len(result.incident.losses) == 2
    assert result.incident.attempts == 1
    assert harness.usage("b") == "5"


def test_a_crash_between_writing_and_recording_the_marker_is_not_a_further_loss(
    harness: RecoveryHarness,
) -> None:
    harness.wipe()

    class CrashError(Exception):
        pass

    written = harness.store.write_marker

    def write_and_die(deployment_id: str, marker: IntendedMarker, *, after: int) -> Marker:
        written(deployment_id, marker, after=after)
        raise CrashError

    harness.store.write_marker = write_and_die  # type: ignore[method-assign]
    with pytest.raises(CrashError):
        harness.recover()
    harness.store.write_marker = written  # type: ignore[method-assign]
    assert harness.check().check.verdict.is_good

    result = harness.recover()

    assert isinstance(result, Recovered)
    assert len(result.incident.losses) == 1


def test_a_store_that_disappears_again_is_a_further_loss(harness: RecoveryHarness) -> None:
    harness.store.is_gone = True
    harness.check()
    assert harness.incident.target is None
    # A store that is still missing is no further loss, nor is its return.
    harness.check()
    harness.store.recreate(REBORN)
    harness.store.is_gone = False
    harness.check()
    back = harness.incident
    assert (len(back.losses), back.target is None) == (1, False)
    harness.store.is_gone = True
    harness.check()
    assert len(harness.incident.losses) == 2


def test_a_second_restore_does_nothing_while_one_is_running(harness: RecoveryHarness) -> None:
    harness.wipe()
    others: list[RecoveryResult] = []
    harness.before_write(1, lambda: others.append(harness.recover()))
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    (other,) = others
    assert isinstance(other, NothingToDo)
    assert "is running" in other.reason


def test_a_restore_writes_nothing_after_its_lease_is_lost(harness: RecoveryHarness) -> None:
    harness.wipe()
    # As if the worker had been paused and another had taken over.
    harness.before_write(2, lambda: harness.plane.leases.lose(RESTORE_LEASE))
    with pytest.raises(LeaseLostError):
        harness.recover()
    # The second write was already sent. The third, of "b", was not.
    assert harness.store.writes == 2
    assert harness.usage("b") is None
    assert harness.state is RecoveryState.RECOVERING
    assert outcome_of(harness.recover()) is Outcome.RESTORED


def test_a_worker_without_its_lease_leaves_its_audit_as_it_was_begun(
    harness: RecoveryHarness,
) -> None:
    harness.wipe()
    incident_id = harness.incident.incident_id
    begun: list[MergedAudits] = []

    # As if the worker had been paused, and its writes had timed out meanwhile.
    def lose_the_lease_and_the_store() -> None:
        begun.append(harness.plane.audits.largest(incident_id, 10))
        harness.plane.leases.lose(RESTORE_LEASE)
        raise AWAY

    harness.before_write(1, lose_the_lease_and_the_store)
    with pytest.raises(LeaseLostError):
        harness.recover()
    assert [entry.planned for entry in begun[0].largest] == [2]
    assert [harness.plane.audits.largest(incident_id, 10)] == begun


def test_a_check_during_a_restore_writes_nothing_and_does_not_disturb_it(
    harness: RecoveryHarness,
) -> None:
    harness.wipe()
    seen: list[tuple[Verdict, Observation]] = []

    def check_meanwhile() -> None:
        deployment = harness.plane.registry.claim().deployment_id
        before = harness.store.stream
        seen.append((harness.check().check.verdict, harness.store.observe(deployment)))
        assert harness.store.stream == before

    harness.before_write(2, check_meanwhile)
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    ((verdict, _),) = seen
    assert verdict.is_good


def test_a_restore_of_closed_windows_only_raises_nothing() -> None:
    harness = RecoveryHarness()
    harness.store.put_usage("a", "spend", "2026-11-25", None, "7")
    harness.capture()
    harness.check()
    harness.clock.advance(timedelta(days=1))
    harness.wipe()
    assert outcome_of(harness.recover()) is Outcome.NOTHING_CURRENT
    assert harness.usage("a") is None


def test_the_time_after_the_last_snapshot_is_reported_as_not_covered(
    harness: RecoveryHarness,
) -> None:
    for _ in range(3):
        harness.clock.advance(timedelta(minutes=10))
        harness.check()
    harness.clock.advance(timedelta(minutes=5))
    harness.wipe()
    # Captured at 12:05; the last check before the loss was at 12:45.
    # Confirmed two seconds after its first observation.
    assert harness.incident.uncovered == timedelta(minutes=45, seconds=2)
    result = harness.recover()
    assert isinstance(result, Recovered)
    assert result.incident.ended is not None
    assert result.incident.ended.detail.endswith(
        "Usage between the newest snapshot (2026-11-25 12:05:00 UTC) and the loss is not restored: "
        "at most 45 min, until the loss was found (2026-11-25 12:50:02 UTC)."
    )


def test_a_key_removed_after_its_write_is_reported_and_the_others_are_restored(
    harness: RecoveryHarness,
) -> None:
    harness.wipe()
    incident = harness.incident
    # Before write 2, the aggregate of "a" is written, but not yet verified.
    harness.before_write(2, lambda: harness.store.remove("usage.a.spend.lifetime.="))
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert (harness.usage("a"), harness.usage("a", "alice"), harness.usage("b")) == (
        None,
        "30",
        "5",
    )
    (notes,) = [
        entry.notes
        for entry in harness.plane.audits.largest(incident.incident_id, 10).largest
        if entry.tenant == "a"
    ]
    assert notes == (
        "1 counter missing from the store after the write (deleted since): the aggregate",
    )


def test_attempts_are_counted_for_each_loss(harness: RecoveryHarness) -> None:
    harness.wipe()
    harness.store.write_failures = dict.fromkeys(range(1, 100), UNCONFIRMED)
    for _ in range(2):
        with pytest.raises(AttemptFailedError):
            harness.recover()
    harness.store.recreate(LATER)
    harness.check()
    assert harness.incident.attempts == 0
    harness.store.write_failures = {}
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    attempts = harness.plane.incidents.attempts_of(harness.plane.incidents.recent(1)[0].incident_id)
    assert [(each.loss, each.number) for each in attempts] == [(1, 1), (1, 2), (2, 1)]


def test_a_service_on_another_bucket_is_refused(harness: RecoveryHarness) -> None:
    another = MemoryStoreRegistry(harness.plane.state, "another")
    harness.plane = replace(harness.plane, registry=another)
    with pytest.raises(Exception, match="BUDGET_RECOVERY_BUCKET"):
        harness.recover()
