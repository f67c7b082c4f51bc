"""Decisions of the supervision about an open incident, compared with literal values."""

from dataclasses import replace
from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import (
    Attempt,
    Decision,
    DeclareDead,
    Ended,
    FailureReason,
    GivenUp,
    Held,
    Incident,
    Launch,
    Outcome,
    Phase,
    PutOnHold,
    Recovery,
    RecoveryState,
    Rest,
    Restored,
    RunSeen,
    Scene,
    Suspicion,
    fate_of,
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


# Runs of no open incident


NO_INCIDENT = Recovery(HEALTHY, None)
LEFT = RunSeen("run9000-rest", Phase.STARTED, NOW - timedelta(hours=1))


def look_after(
    *left: RunSeen,
    recovery: Recovery = NO_INCIDENT,
    worker: str | None = None,
    suspicion: Suspicion | None = None,
) -> Decision:
    return supervise(Scene(recovery, (), worker, 4, suspicion, left), NOW)


def test_a_started_run_without_an_incident_is_dead_after_two_minutes_without_a_worker() -> None:
    silent = Rest("Run run9000- is started but has no worker yet.", Suspicion(LEFT.run_id, 4, NOW))
    assert look_after(LEFT) == silent
    almost = Suspicion(LEFT.run_id, 4, NOW - timedelta(seconds=119))
    assert look_after(LEFT, suspicion=almost) == Rest(silent.reason, almost)
    due = Suspicion(LEFT.run_id, 4, NOW - timedelta(minutes=2))
    assert look_after(LEFT, suspicion=due) == DeclareDead(LEFT)
    # A worker held the lease in between.
    assert look_after(LEFT, suspicion=replace(due, token=3)) == silent


def test_no_run_is_ended_while_a_worker_holds_the_lease() -> None:
    assert look_after(LEFT, worker="run 1 on gw-7") == Rest("run 1 on gw-7 is restoring.")


def test_a_run_that_pauses_before_its_next_attempt_is_not_suspected() -> None:
    pausing = replace(LEFT, pauses_until=NOW + SECOND)
    assert look_after(pausing) == Rest("The store is HEALTHY.")
    assert "no worker yet" in str(look_after(pausing, LEFT))
    over = replace(LEFT, pauses_until=NOW)
    assert "no worker yet" in str(look_after(over))


def test_the_open_incident_comes_before_other_runs() -> None:
    open_incident = Recovery(RECOVERING, INCIDENT)
    assert look_after(LEFT, recovery=open_incident) == Launch(INCIDENT)
    held = Recovery(RECOVERING, HELD)
    assert "no worker yet" in str(look_after(LEFT, recovery=held))


# How a dead run ends


RUN_ID = LEFT.run_id


def attempt(run_id: str, outcome: str | None, number: int = 1) -> Attempt:
    return Attempt(INCIDENT.incident_id, 1, number, run_id, "a host", NOW, None, outcome)


def ended(outcome: Outcome) -> Incident:
    return replace(INCIDENT, ended=Ended(NOW, outcome, "", Restored()))


IN_PART = ended(Outcome.RESTORED_IN_PART)
GIVEN_UP = replace(INCIDENT, given_up=GivenUp(NOW, FailureReason.NOT_WRITTEN, "why"))
FATES = [
    # The attempt that closed the incident, recorded or not.
    (IN_PART, [attempt(RUN_ID, "restored in part")], True, True),
    (IN_PART, [attempt(RUN_ID, None)], True, True),
    (IN_PART, [attempt("other", None), attempt(RUN_ID, None, 2)], True, True),
    # Another run closed it.
    (IN_PART, [attempt(RUN_ID, None), attempt("other", "restored in part", 2)], False, False),
    (IN_PART, [attempt(RUN_ID, None), attempt("other", None, 2)], False, False),
    (IN_PART, [attempt("other", "restored in part")], False, False),
    (IN_PART, [attempt(RUN_ID, "no quorum")], False, False),
    # A verification, and a loss without anything to raise.
    (IN_PART, [attempt("other", None)], True, True),
    (ended(Outcome.NOTHING_LOST), [], True, True),
    # A person closed it, or the accepted store returned.
    (ended(Outcome.ACCEPTED), [attempt(RUN_ID, None)], False, False),
    (ended(Outcome.RETURNED), [], False, False),
    # It is still open, or was given up.
    (INCIDENT, [attempt(RUN_ID, None)], False, False),
    (GIVEN_UP, [attempt(RUN_ID, "no quorum")], False, True),
    (GIVEN_UP, [attempt(RUN_ID, "no quorum"), attempt("other", "no quorum", 2)], False, False),
    (None, [], False, False),
]


@pytest.mark.parametrize(("incident", "attempts", "has_succeeded", "is_shown"), FATES)
def test_a_dead_run_ends_as_its_attempts_and_its_incident_did(
    incident: Incident | None, attempts: list[Attempt], *, has_succeeded: bool, is_shown: bool
) -> None:
    fate = fate_of(LEFT, incident, attempts)
    assert fate.has_succeeded is has_succeeded
    assert fate.shown == (incident if is_shown else None)


def test_the_fate_of_a_run_names_its_reason() -> None:
    assert fate_of(LEFT, IN_PART, []).reason == "Incident 0f8fad5b ended: restored in part."
    assert fate_of(LEFT, GIVEN_UP, [attempt(RUN_ID, "x")]).reason == (
        "Incident 0f8fad5b was given up."
    )
    failed = fate_of(LEFT, INCIDENT, [attempt(RUN_ID, "no quorum")])
    assert failed.reason == "Its last attempt ended: no quorum"
