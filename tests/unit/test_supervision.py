"""Decisions of the supervision about an open incident, compared with literal values."""

from dataclasses import replace
from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import (
    Decision,
    DeclareDead,
    Held,
    Incident,
    Launch,
    Phase,
    PutOnHold,
    Recovery,
    RecoveryState,
    Rest,
    RunSeen,
    Scene,
    Suspicion,
    supervise,
)
from tests.unit.supervised_incident import INCIDENT, NOW

SECOND = timedelta(seconds=1)
HEALTHY, RECOVERING, FAILED = RecoveryState
HELD = replace(INCIDENT, held=Held(NOW - timedelta(minutes=5), "ann", "the disk is changed"))
EVERY_PHASE = tuple(Phase)


def run(phase: Phase, number: int = 1, *, minutes_ago: int = 10) -> RunSeen:
    return RunSeen(f"run{number}000-rest", phase, NOW - timedelta(minutes=minutes_ago))


def decide(
    *runs: RunSeen,
    state: RecoveryState = RECOVERING,
    incident: Incident | None = INCIDENT,
    worker: str | None = None,
    token: int = 4,
    suspicion: Suspicion | None = None,
) -> Decision:
    """Decide at noon, by default without a worker."""
    return supervise(Scene(Recovery(state, incident), runs, worker, token, suspicion), NOW)


# Launches


def test_a_restore_is_launched_for_an_incident_without_a_worker() -> None:
    assert decide() == Launch(INCIDENT)
    assert decide(run(Phase.OVER), run(Phase.OVER, 2)) == Launch(INCIDENT)


def test_nothing_is_done_without_an_open_incident() -> None:
    assert decide(state=HEALTHY, incident=None) == Rest("The store is HEALTHY.")


def test_a_failed_store_is_left_to_the_operator() -> None:
    assert decide(state=FAILED) == Rest(
        "The store is FAILED: no restore starts until an operator acts."
    )


def test_no_restore_is_launched_for_an_incident_on_hold() -> None:
    assert decide(incident=HELD) == Rest(
        "Incident 0f8fad5b has been on hold since 2026-11-25 11:55:00 UTC, by ann: "
        "the disk is changed."
    )


def test_a_restore_is_launched_only_when_due() -> None:
    early = replace(INCIDENT, next_launch_at=NOW + timedelta(microseconds=1))
    assert decide(incident=early) == Rest(
        "The next launch for incident 0f8fad5b is due at 12:00:00 UTC."
    )
    due = replace(INCIDENT, next_launch_at=NOW)
    assert decide(incident=due) == Launch(due)


@pytest.mark.parametrize("phase", EVERY_PHASE)
def test_no_restore_is_launched_while_a_worker_holds_the_lease(phase: Phase) -> None:
    # A run that Dagster has given up may still write, as a second writer.
    released = replace(INCIDENT, released_at=NOW)
    rest = Rest("run 1 on gw-7 is restoring.")
    old = Suspicion(run(phase).run_id, 4, NOW - timedelta(hours=1))
    worker = "run 1 on gw-7"
    assert decide(run(phase), incident=released, worker=worker, suspicion=old) == rest
    assert decide(worker=worker) == rest
    assert decide(incident=HELD, worker=worker) == rest
    assert decide(state=FAILED, worker=worker) == rest


def test_no_restore_is_launched_while_a_run_is_queued() -> None:
    assert decide(run(Phase.QUEUED)) == Rest("Run run1000- is about to start.")
    # A queued run starts eventually, however long it has been queued.
    assert decide(run(Phase.OVER, 2), run(Phase.QUEUED, minutes_ago=9000)) == Rest(
        "Run run1000- is about to start."
    )


# Runs that Dagster shows as started, but that have no worker


def test_a_started_run_without_a_worker_is_suspected_and_not_replaced() -> None:
    assert decide(run(Phase.STARTED)) == Rest(
        "Run run1000- is started but has no worker yet.",
        Suspicion("run1000-rest", 4, NOW),
    )


@pytest.mark.parametrize("seconds", [0, 59])
def test_a_run_without_a_worker_is_given_a_minute(seconds: int) -> None:
    known = Suspicion("run1000-rest", 4, NOW - seconds * SECOND)
    decision = decide(run(Phase.STARTED), suspicion=known)
    assert isinstance(decision, Rest)
    # The time counts from the first observation; otherwise it would never be up.
    assert decision.suspicion == known


@pytest.mark.parametrize("seconds", [60, 3600])
def test_a_run_without_a_worker_for_a_minute_is_dead(seconds: int) -> None:
    known = Suspicion("run1000-rest", 4, NOW - seconds * SECOND)
    assert decide(run(Phase.STARTED), suspicion=known) == DeclareDead(run(Phase.STARTED))


def test_a_run_that_waits_for_its_next_attempt_is_not_dead() -> None:
    waits = replace(INCIDENT, attempts=1, next_attempt_at=NOW + SECOND)
    known = Suspicion("run1000-rest", 4, NOW - 60 * SECOND)
    assert decide(run(Phase.STARTED), incident=waits, suspicion=known) == Rest(
        "Run run1000- has no worker. Attempt 2 of 3 for incident 0f8fad5b is due at 12:00:01 UTC."
    )
    # Its minute without a worker begins when the attempt is due.
    due = replace(waits, next_attempt_at=NOW)
    decision = decide(run(Phase.STARTED), incident=due)
    assert isinstance(decision, Rest)
    assert decision.suspicion == Suspicion("run1000-rest", 4, NOW)
    assert decide(run(Phase.STARTED), incident=due, suspicion=known) == DeclareDead(
        run(Phase.STARTED)
    )


def test_no_restore_is_launched_before_its_next_attempt() -> None:
    waits = replace(INCIDENT, attempts=2, next_launch_at=NOW, next_attempt_at=NOW + SECOND)
    assert decide(run(Phase.OVER), incident=waits) == Rest(
        "Attempt 3 of 3 for incident 0f8fad5b is due at 12:00:01 UTC."
    )
    due = replace(waits, next_attempt_at=NOW)
    assert decide(run(Phase.OVER), incident=due) == Launch(due)


def test_a_new_lease_token_restarts_the_suspicion() -> None:
    known = Suspicion("run1000-rest", 3, NOW - 60 * SECOND)
    decision = decide(run(Phase.STARTED), token=4, suspicion=known)
    assert isinstance(decision, Rest)
    assert decision.suspicion == Suspicion("run1000-rest", 4, NOW)


def test_the_suspicion_of_another_run_does_not_count() -> None:
    known = Suspicion("run2000-rest", 4, NOW - 60 * SECOND)
    decision = decide(run(Phase.STARTED), run(Phase.OVER, 2), suspicion=known)
    assert isinstance(decision, Rest)
    assert decision.suspicion == Suspicion("run1000-rest", 4, NOW)


def test_a_suspicion_ends_when_a_worker_appears_or_the_run_is_over() -> None:
    known = Suspicion("run1000-rest", 4, NOW - 60 * SECOND)
    assert decide(run(Phase.STARTED), worker="w", suspicion=known) == Rest("w is restoring.")
    assert decide(run(Phase.OVER), suspicion=known) == Launch(INCIDENT)


@pytest.mark.parametrize("newest", [Phase.QUEUED, Phase.OVER])
def test_a_dead_run_is_declared_dead_behind_newer_runs(newest: Phase) -> None:
    known = Suspicion("run1000-rest", 4, NOW - 60 * SECOND)
    started = run(Phase.STARTED)
    assert decide(run(newest, 2), started, suspicion=known) == DeclareDead(started)


@pytest.mark.parametrize("incident", [HELD, INCIDENT])
@pytest.mark.parametrize("state", [RECOVERING, FAILED])
def test_a_dead_run_is_declared_dead_in_every_state(
    state: RecoveryState, incident: Incident
) -> None:
    known = Suspicion("run1000-rest", 4, NOW - 60 * SECOND)
    decision = decide(run(Phase.STARTED), state=state, incident=incident, suspicion=known)
    assert decision == DeclareDead(run(Phase.STARTED))


# Runs that an operator has terminated


def test_a_terminated_run_puts_the_incident_on_hold() -> None:
    canceled = run(Phase.CANCELED)
    assert decide(canceled) == PutOnHold(INCIDENT, canceled)
    # Also if its worker has not noticed yet, or if the next launch is not due.
    assert decide(canceled, worker="run 1 on gw-7") == PutOnHold(INCIDENT, canceled)
    early = replace(INCIDENT, next_launch_at=NOW + SECOND)
    assert decide(canceled, incident=early) == PutOnHold(early, canceled)


def test_an_incident_on_hold_is_not_put_on_hold_again() -> None:
    assert isinstance(decide(run(Phase.CANCELED), incident=HELD), Rest)


@pytest.mark.parametrize("minutes_ago", [10, 11])
def test_a_run_requested_before_a_release_does_not_hold_again(minutes_ago: int) -> None:
    released = replace(INCIDENT, released_at=NOW - timedelta(minutes=10))
    assert decide(run(Phase.CANCELED, minutes_ago=minutes_ago), incident=released) == Launch(
        released
    )


def test_a_run_requested_after_a_release_holds_again() -> None:
    released = replace(INCIDENT, released_at=NOW - timedelta(minutes=10))
    canceled = run(Phase.CANCELED, minutes_ago=9)
    assert decide(canceled, incident=released) == PutOnHold(released, canceled)


@pytest.mark.parametrize(
    ("newest", "decision"),
    [
        (Phase.OVER, Launch(INCIDENT)),
        (Phase.QUEUED, Rest("Run run2000- is about to start.")),
        (
            Phase.STARTED,
            Rest(
                "Run run2000- is started but has no worker yet.",
                Suspicion("run2000-rest", 4, NOW),
            ),
        ),
    ],
)
def test_a_terminated_run_followed_by_a_newer_one_does_not_hold(
    newest: Phase, decision: Decision
) -> None:
    assert decide(run(newest, 2, minutes_ago=5), run(Phase.CANCELED)) == decision


def test_a_terminated_run_of_a_failed_store_does_not_hold() -> None:
    # There is nothing to stop, and a hold would be refused at every tick.
    assert isinstance(decide(run(Phase.CANCELED), state=FAILED), Rest)
