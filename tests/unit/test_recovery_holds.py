"""Restores on hold, and a restore whose worker hangs."""

from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import (
    Attempt,
    Evidence,
    IntendedMarker,
    Outcome,
    RecoveryState,
)
from budget_recovery_dagster.errors import AttemptFailedError, ChoiceError, LeaseLostError
from budget_recovery_dagster.services.restore import (
    NothingToDo,
    Recovered,
    RecoveryResult,
    hold_restore,
)
from tests.unit.capture_harness import BORN
from tests.unit.recovery_harness import UNCONFIRMED, RecoveryHarness, outcome_of


@pytest.fixture
def harness() -> RecoveryHarness:
    """Return a store of two tenants: captured, checked and wiped."""
    harness = RecoveryHarness()
    for tenant, usage in {"a": "80", "b": "5"}.items():
        harness.spend(tenant, usage)
        harness.rank(tenant, {None: usage})
    harness.capture()
    harness.check()
    harness.clock.advance(timedelta(minutes=10))
    harness.wipe()
    return harness


def hold(harness: RecoveryHarness) -> None:
    harness.plane.incidents.hold("the disk is changed", "ann", judged=harness.incident)


def release(harness: RecoveryHarness) -> None:
    harness.plane.incidents.release("ann", judged=harness.incident)


def attempts(harness: RecoveryHarness) -> tuple[Attempt, ...]:
    return harness.plane.incidents.attempts_of(harness.plane.incidents.recent(1)[0].incident_id)


def reports_hold(result: RecoveryResult) -> bool:
    return isinstance(result, NothingToDo) and (
        "UTC, by ann: the disk is changed. Try: fix the cause of the hold, then run"
        " `budget-recovery release`." in result.reason
    )


@pytest.mark.parametrize("reason", ["", " \n"])
def test_a_hold_without_a_reason_is_refused(harness: RecoveryHarness, reason: str) -> None:
    with pytest.raises(ChoiceError, match="The reason is empty"):
        hold_restore(harness.plane, reason, by="ann")
    assert not harness.incident.is_held


def test_a_second_hold_reports_the_first(harness: RecoveryHarness) -> None:
    assert not hold_restore(harness.plane, "the disk is changed", by="ann").was_on_hold
    again = hold_restore(harness.plane, "me too", by="bob")
    assert again.was_on_hold
    assert again.incident.held is not None
    assert again.incident.held.by == "ann"


def test_a_restore_does_nothing_while_the_incident_is_on_hold(harness: RecoveryHarness) -> None:
    hold(harness)
    before, stream = harness.incident, harness.store.stream
    assert reports_hold(harness.recover())
    # Not even a marker is written.
    assert (harness.incident, harness.store.stream) == (before, stream)
    assert attempts(harness) == ()


def test_an_incident_on_hold_is_not_given_up_without_snapshots() -> None:
    harness = RecoveryHarness()
    harness.spend("a", "1")
    harness.check()
    harness.wipe()
    hold(harness)
    assert reports_hold(harness.recover())
    assert harness.state is RecoveryState.RECOVERING


def test_a_hold_during_the_wait_for_the_store_prevents_an_attempt(
    harness: RecoveryHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = harness.store.write_marker

    def hold_and_write(deployment_id: str, marker: IntendedMarker, *, after: int) -> object:
        hold(harness)
        return written(deployment_id, marker, after=after)

    monkeypatch.setattr(harness.store, "write_marker", hold_and_write)
    assert reports_hold(harness.recover())
    assert (attempts(harness), harness.store.writes) == ((), 0)


def test_used_up_attempts_are_not_judged_while_the_incident_is_on_hold(
    harness: RecoveryHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        harness.die_in_an_attempt()
    written = harness.store.write_marker

    def hold_and_write(deployment_id: str, marker: IntendedMarker, *, after: int) -> object:
        hold(harness)
        return written(deployment_id, marker, after=after)

    monkeypatch.setattr(harness.store, "write_marker", hold_and_write)
    assert reports_hold(harness.recover())
    assert harness.state is RecoveryState.RECOVERING


def test_a_hold_stops_an_attempt_before_the_next_tenant(harness: RecoveryHarness) -> None:
    harness.before_write(1, lambda: hold(harness))

    # Not an error: Dagster would retry the run.
    assert reports_hold(harness.recover())

    assert (harness.usage("a"), harness.usage("b")) == ("80", None)
    (attempt,) = attempts(harness)
    assert attempt.outcome is not None
    assert attempt.outcome.startswith("Stopped. Incident ")
    assert attempt.outcome.endswith("UTC, by ann: the disk is changed.")
    assert (harness.state, harness.incident.attempts) == (RecoveryState.RECOVERING, 1)
    assert reports_hold(harness.recover())
    assert len(attempts(harness)) == 1


def test_a_hold_stops_the_last_attempt_without_giving_up(harness: RecoveryHarness) -> None:
    harness.store.write_failures = dict.fromkeys(range(1, 100), UNCONFIRMED)
    for _ in range(2):
        with pytest.raises(AttemptFailedError):
            harness.recover()
    harness.store.write_failures = {}
    harness.before_write(1, lambda: hold(harness))
    assert reports_hold(harness.recover())
    assert (harness.state, harness.incident.attempts) == (RecoveryState.RECOVERING, 3)


def test_a_released_restore_has_all_its_attempts_again(harness: RecoveryHarness) -> None:
    harness.before_write(1, lambda: hold(harness))
    harness.recover()
    harness.store.before_write = None
    release(harness)
    assert harness.incident.attempts == 0
    harness.store.write_failures = dict.fromkeys(range(1, 100), UNCONFIRMED)
    for number in (1, 2):
        with pytest.raises(AttemptFailedError, match=f"Attempt {number} of 3"):
            harness.recover()
    harness.store.write_failures = {}
    assert isinstance(harness.recover(), Recovered)
    assert (harness.usage("a"), harness.usage("b")) == ("80", "5")
    assert [each.number for each in attempts(harness)] == [1, 2, 3, 4]


def test_a_hold_after_the_last_tenant_does_not_prevent_the_end(harness: RecoveryHarness) -> None:
    # Two writes for each tenant: a counter and a leaderboard.
    harness.before_write(4, lambda: hold(harness))
    result = harness.recover()
    assert isinstance(result, Recovered)
    assert result.incident.held is not None
    assert harness.state is RecoveryState.HEALTHY


# A worker that hangs


def test_a_worker_that_hangs_for_an_hour_loses_the_restore_to_another(
    harness: RecoveryHarness,
) -> None:
    others: list[RecoveryResult] = []

    def hang() -> None:
        harness.clock.advance(timedelta(hours=1))
        others.append(harness.recover())

    harness.before_write(1, hang)
    with pytest.raises(LeaseLostError):
        harness.recover()
    assert [type(other) for other in others] == [Recovered]
    assert (harness.usage("a"), harness.usage("b")) == ("80", "5")


def test_a_worker_that_takes_less_than_an_hour_keeps_the_restore(
    harness: RecoveryHarness,
) -> None:
    others: list[RecoveryResult] = []

    def be_slow() -> None:
        harness.clock.advance(timedelta(minutes=59))
        others.append(harness.recover())

    harness.before_write(1, be_slow)
    assert isinstance(harness.recover(), Recovered)
    assert [type(other) for other in others] == [NothingToDo]


def test_a_former_store_without_a_marker_is_restored_once_released(
    harness: RecoveryHarness,
) -> None:
    harness.recover()
    # The address leads to the store again that the present one replaced.
    harness.store.recreate(BORN)
    harness.spend("a", "3")
    harness.check()
    assert harness.incident.losses[-1].evidence is Evidence.FORMER_STORE
    release(harness)
    # A check may come before the restore; it must not put the incident on hold again.
    harness.check()
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert harness.usage("a") == "80"
