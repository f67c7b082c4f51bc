"""Another store at our address, with fakes: what puts an incident on hold, and what ends it."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import Evidence, Outcome, RecoveryState, Verdict
from budget_recovery_dagster.errors import (
    ChoiceError,
    IncidentHeldError,
    IncidentMovedError,
    PreviewOutdatedError,
    StorePermissionError,
)
from budget_recovery_dagster.services.restore import (
    Acceptance,
    Applied,
    NothingToDo,
    Resolved,
    StillWaiting,
    hold_restore,
    recover_store,
    release_restore,
)
from tests.fakes.usage_store import MemoryUsageStore
from tests.unit.manual_harness import ManualHarness, captured_manual_harness
from tests.unit.recovery_harness import outcome_of

DAY = timedelta(days=1)
DENIED = StorePermissionError("The marker may not be written.", "grant it.")


@pytest.fixture
def harness() -> ManualHarness:
    """Return a store of two tenants; the baseline knows the time of its server."""
    harness = captured_manual_harness()
    harness.store.clock = harness.clock.now()
    harness.check()
    return harness


def another(harness: ManualHarness, *, older_by: timedelta = 5 * DAY) -> MemoryUsageStore:
    """Return a store with a lower counter that is older than the accepted one."""
    return having_3(MemoryUsageStore(harness.store.stream.created_at - older_by))


def rebuilt(harness: ManualHarness) -> MemoryUsageStore:
    """Return a store with a lower counter that is as new as one that was rebuilt after a loss."""
    return having_3(MemoryUsageStore(harness.clock.now()))


def having_3(store: MemoryUsageStore) -> MemoryUsageStore:
    store.put_usage("a", "spend", "lifetime", None, "3")
    return store


def use(harness: ManualHarness, store: MemoryUsageStore) -> None:
    """Set the store at the address; its clock is right."""
    store.clock = harness.clock.now()
    harness.store = store


def check(harness: ManualHarness, store: MemoryUsageStore) -> Verdict:
    """Check with this store at the address."""
    use(harness, store)
    return harness.check().check.verdict


def lose(harness: ManualHarness) -> MemoryUsageStore:
    """Find that the store was rebuilt; return the new one."""
    store = rebuilt(harness)
    assert check(harness, store) is Verdict.LOST
    assert not harness.incident.is_held
    return store


def test_a_release_after_another_store_joined_is_not_that_of_the_maintenance(
    harness: ManualHarness,
) -> None:
    lose(harness)
    hold_restore(harness.plane, "network maintenance", by="ann")
    judged = harness.incident
    assert check(harness, another(harness)) is Verdict.OTHER_STORE
    on_hold = harness.incident.on_hold or ""
    assert "another store" in on_hold
    assert "by ann: network maintenance" in on_hold
    with pytest.raises(IncidentMovedError, match="a further loss joined"):
        harness.plane.incidents.release("ann", judged=judged)
    assert isinstance(harness.recover(), NothingToDo)
    assert harness.usage("a") == "3"


def test_another_store_holds_although_the_release_was_at_a_time_ahead(
    harness: ManualHarness,
) -> None:
    lose(harness)
    hold_restore(harness.plane, "wait", by="ann")
    at = harness.clock.now()
    harness.clock.advance(40 * DAY)
    release_restore(harness.plane, by="ann")
    harness.clock.set(at + timedelta(seconds=30))
    assert check(harness, another(harness)) is Verdict.OTHER_STORE
    assert isinstance(harness.recover(), NothingToDo)
    assert harness.usage("a") == "3"


def test_a_release_counts_although_the_hold_was_at_a_time_ahead(harness: ManualHarness) -> None:
    lose(harness)
    at = harness.clock.now()
    harness.clock.advance(40 * DAY)
    hold_restore(harness.plane, "wait", by="ann")
    harness.clock.set(at + timedelta(seconds=30))
    assert not release_restore(harness.plane, by="ann").incident.is_held


def test_the_accepted_store_returns_also_after_the_other_one_was_gone(
    harness: ManualHarness,
) -> None:
    ours, other = harness.store, another(harness)
    check(harness, other)
    other.is_gone = True
    assert check(harness, other) is Verdict.LOST
    assert "closes by itself" in harness.incident.hold_ends
    for _ in range(3):
        assert harness.state is RecoveryState.RECOVERING
        assert check(harness, ours) is Verdict.SAME
    assert harness.state is RecoveryState.HEALTHY
    (closed,) = harness.plane.incidents.recent(1)
    assert closed.ended is not None
    assert closed.ended.outcome is Outcome.RETURNED


def test_a_rebuilt_store_that_returns_after_another_one_waits_for_a_release(
    harness: ManualHarness,
) -> None:
    new = lose(harness)
    check(harness, another(harness))
    assert check(harness, new) is Verdict.LOST
    assert harness.incident.awaits_choice
    assert "by itself" not in harness.incident.hold_ends
    losses = len(harness.incident.losses)
    assert check(harness, new) is Verdict.LOST
    assert len(harness.incident.losses) == losses
    release_restore(harness.plane, by="ann")
    use(harness, new)
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert harness.usage("a") == "80"


# What a person decides holds for the store that the incident is about


def resolve_with_resets(harness: ManualHarness) -> Resolved:
    return harness.resolve(acceptance=Acceptance.RECORD_RESETS)


@pytest.mark.parametrize("act", [ManualHarness.apply, resolve_with_resets])
def test_a_manual_end_at_a_wrong_address_is_refused(
    harness: ManualHarness, act: Callable[[ManualHarness], object]
) -> None:
    lose(harness)
    use(harness, another(harness))
    accepted = harness.baseline
    with pytest.raises(IncidentHeldError, match="another store") as refused:
        act(harness)
    assert "BUDGET_RECOVERY_NATS_URL" in refused.value.hint
    assert harness.usage("a") == "3"
    assert (harness.state, harness.baseline) == (RecoveryState.RECOVERING, accepted)
    assert not harness.plane.state.resets


def test_a_preview_says_in_an_incident_why_a_restore_would_be_refused(
    harness: ManualHarness,
) -> None:
    new = lose(harness)
    assert harness.preview().refusal is None
    use(harness, another(harness))
    assert "existed" in (harness.preview().refusal or "")
    # Once the incident is about it, a person may decide to restore it.
    check(harness, harness.store)
    assert harness.preview().refusal is None
    use(harness, new)
    assert "recreated" in (harness.preview().refusal or "")


@pytest.mark.parametrize("act", [ManualHarness.apply, resolve_with_resets])
@pytest.mark.parametrize("make", [rebuilt, lambda harness: another(harness, older_by=9 * DAY)])
def test_a_decision_about_another_store_holds_for_no_third_one(
    harness: ManualHarness,
    act: Callable[[ManualHarness], object],
    make: Callable[[ManualHarness], MemoryUsageStore],
) -> None:
    check(harness, another(harness))
    third = make(harness)
    use(harness, third)
    with pytest.raises(IncidentHeldError):
        act(harness)
    assert harness.usage("a") == "3"
    assert harness.incident.losses[-1].after is not None
    assert harness.incident.losses[-1].after.created_at == third.stream.created_at
    # It has become the one that the incident is about.
    act(harness)
    assert harness.state is RecoveryState.HEALTHY


def test_a_resolve_is_refused_if_its_preview_saw_another_store(harness: ManualHarness) -> None:
    new = lose(harness)
    preview_id = harness.preview().preview_id
    use(harness, another(harness))
    with pytest.raises(PreviewOutdatedError, match="preview again"):
        harness.resolve(preview_id=preview_id)
    assert not harness.incident.is_held
    with pytest.raises(ChoiceError, match="not stored any more"):
        harness.resolve(preview_id="unknown")
    use(harness, new)
    harness.resolve(preview_id=preview_id)
    assert harness.state is RecoveryState.HEALTHY


def test_a_restore_adopts_no_store_that_others_did_not_confirm(harness: ManualHarness) -> None:
    """Two further observations agree with each other, but on another store."""
    other, new = another(harness), rebuilt(harness)
    new.is_gone = True
    assert check(harness, new) is Verdict.LOST
    new.is_gone = False
    turns = iter([new, other, other])
    result = recover_store(
        harness.plane,
        lambda: nullcontext(next(turns)),
        run_id="a run",
        holder="a restore",
        convergence_timeout=timedelta(0),
        on_progress=harness.messages.append,
    )
    assert isinstance(result, StillWaiting)
    assert harness.incident.target is None
    assert (harness.usage("a"), len(harness.incident.losses)) == ("3", 1)


def release_and_recover(harness: ManualHarness) -> None:
    release_restore(harness.plane, by="ann")
    harness.recover()


@pytest.mark.parametrize("end", [ManualHarness.apply, ManualHarness.resolve, release_and_recover])
@pytest.mark.parametrize("is_denied", [True, False])
def test_an_incident_about_a_former_store_without_our_marker_can_be_ended(
    end: Callable[[ManualHarness], object],
    is_denied: bool,  # noqa: FBT001 - a parameter of pytest's
) -> None:
    harness = ManualHarness()
    former = harness.store
    if is_denied:
        former.marker_failure = DENIED
    harness.spend("a", "80")
    harness.capture()
    former.clock = harness.clock.now()
    harness.check()
    harness.clock.advance(timedelta(minutes=10))
    new = lose(harness)
    new.marker_failure = former.marker_failure
    harness.recover()
    harness.check()
    former.purge("__guard")
    assert check(harness, former) is Verdict.OTHER_STORE
    assert harness.incident.losses[-1].evidence is Evidence.FORMER_STORE
    end(harness)
    assert harness.state is RecoveryState.HEALTHY
    assert harness.check().check.verdict is Verdict.SAME


def test_a_check_during_a_manual_restore_of_another_store_does_not_fail_it(
    harness: ManualHarness,
) -> None:
    check(harness, another(harness))
    harness.before_write(1, harness.check)
    applied: Applied = harness.apply()
    assert applied.failure is None
    assert harness.state is RecoveryState.HEALTHY


def test_a_check_during_a_resolve_of_another_store_does_not_fail_it(
    harness: ManualHarness,
) -> None:
    check(harness, another(harness))
    found: list[Verdict] = []

    def check_once(_: str) -> None:
        if not found:
            found.append(harness.check().check.verdict)

    harness.store.during_read = check_once
    harness.resolve()
    assert found == [Verdict.LOST]
    assert harness.state is RecoveryState.HEALTHY


def test_a_failed_incident_waits_for_a_person_although_the_accepted_store_is_back(
    harness: ManualHarness,
) -> None:
    ours = harness.store
    lose(harness)
    for _ in range(3):
        harness.die_in_an_attempt()
    harness.recover()
    assert harness.state is RecoveryState.FAILED
    check(harness, another(harness))
    # A failed restore cannot be released.
    assert "budget-recovery release" not in harness.incident.hold_ends
    assert "budget-recovery resolve" in harness.incident.hold_ends
    assert [check(harness, ours) for _ in range(6)] == [Verdict.SAME] * 6
    assert harness.check().recovery.state is RecoveryState.FAILED
    use(harness, ours)
    harness.resolve()
    assert harness.check().recovery.state is RecoveryState.HEALTHY
    assert harness.check().check.verdict is Verdict.SAME
