"""Incidents: opening, further losses, and ends."""

from dataclasses import replace
from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import (
    EVERYONE,
    Baseline,
    CaptureFailure,
    Check,
    Ended,
    FailureReason,
    GivenUp,
    Hour,
    Incident,
    Outcome,
    Recovery,
    RecoveryState,
    Reset,
    Restored,
    StoreIdentity,
    Verdict,
)
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    CapturesPausedError,
    IncidentMovedError,
)
from tests.contract.control_planes import BORN, NOON, ControlPlane, Counters, reading
from tests.contract.incident_scene import (
    ACCEPTED,
    CLOSING,
    GONE,
    LOSS,
    MARKED_TARGET,
    TARGET,
    claim_attempt,
    close,
    give_up,
    open_one,
    wait,
)

HEALTHY, RECOVERING, FAILED = RecoveryState
TEAM: Counters = {("team", "lifetime"): {"alice": "1"}}
MINUTE = timedelta(minutes=1)


def state(plane: ControlPlane) -> RecoveryState:
    return plane.incidents.recovery().state


# Opening


def test_a_healthy_store_has_no_incident(plane: ControlPlane) -> None:
    assert plane.incidents.recovery() == Recovery(HEALTHY, None)
    assert plane.incidents.recent(10) == ()


def test_an_open_incident_pauses_captures_and_is_listed(plane: ControlPlane) -> None:
    incident = open_one(plane)
    assert incident == Incident(
        incident_id=incident.incident_id,
        opened_at=NOON,
        losses=(LOSS,),
        target=TARGET,
        newest_point_at=None,
        last_good_at=None,
    )
    assert plane.incidents.recovery() == Recovery(RECOVERING, incident)
    assert plane.incidents.recent(10) == (incident,)
    assert plane.baseline == ACCEPTED
    with pytest.raises(CapturesPausedError):
        plane.commit(plane.take(reading("acme", TEAM)))


@pytest.mark.parametrize("target", [None, TARGET, MARKED_TARGET])
def test_restore_target_and_losses_are_stored_exactly(plane: ControlPlane, target: None) -> None:
    accepted = plane.registry.accept(ACCEPTED, judged=None)
    loss = replace(GONE, before=StoreIdentity(BORN, 9007199254740993))
    incident = plane.incidents.open(loss, target=target, judged=accepted)
    assert incident.target == target
    assert incident.losses == (loss,)
    assert plane.incidents.recovery().incident == incident


def test_every_incident_has_its_own_id(plane: ControlPlane) -> None:
    ids = {close(plane, open_one(plane)).incident_id for _ in range(3)}
    assert len(ids) == 3
    assert all(len(each) == 36 for each in ids)


def test_an_incident_records_the_time_that_no_snapshot_covers(plane: ControlPlane) -> None:
    """The last good check is 40 minutes newer than the last snapshot."""
    plane.capture("acme", TEAM, at=NOON)
    for minutes, verdict in (
        (20, Verdict.SAME),
        (40, Verdict.SAME),
        (50, Verdict.UNKNOWN),
    ):
        plane.registry.record_check(
            Check(NOON + minutes * MINUTE, "tick", verdict, "why", identity=None)
        )
    plane.clock.set(NOON + 50 * MINUTE)
    found = replace(LOSS, found_at=NOON + 50 * MINUTE)
    incident = plane.incidents.open(found, target=TARGET, judged=plane.baseline)
    assert incident.newest_point_at == NOON
    assert incident.last_good_at == NOON + 40 * MINUTE
    assert incident.uncovered == 50 * MINUTE
    plane.registry.record_check(Check(NOON + 55 * MINUTE, "t", Verdict.SAME, "why", identity=None))
    assert plane.incidents.recovery().incident == incident


def test_a_tenant_whose_captures_fail_is_covered_until_its_newest_snapshot(
    plane: ControlPlane,
) -> None:
    for tenant in ("acme", "b", "c"):
        plane.capture(tenant, TEAM, at=NOON)
    plane.capture("b", TEAM, at=NOON + 10 * MINUTE)
    failures = [
        CaptureFailure(tenant, Hour(NOON), "not permitted", "grant it.")
        for tenant in ("b", "c", "new")
    ]
    plane.capture("acme", TEAM, at=NOON + 30 * MINUTE)
    plane.snapshots.record_failures(failures, run_id="run")
    plane.capture("c", TEAM, at=NOON + 40 * MINUTE)
    plane.clock.set(NOON + 50 * MINUTE)
    found = replace(LOSS, found_at=NOON + 50 * MINUTE)
    incident = plane.incidents.open(found, target=TARGET, judged=plane.baseline)
    assert incident.newest_point_at == NOON + 10 * MINUTE
    assert incident.last_good_at == NOON + 40 * MINUTE
    assert incident.uncovered == 40 * MINUTE


def test_a_snapshot_newer_than_the_last_good_check_counts_as_good(
    plane: ControlPlane,
) -> None:
    plane.registry.record_check(Check(NOON - MINUTE, "tick", Verdict.SAME, "why", identity=None))
    plane.capture("acme", TEAM, at=NOON)
    found = replace(LOSS, found_at=NOON + MINUTE)
    incident = plane.incidents.open(found, target=TARGET, judged=plane.baseline)
    assert incident.last_good_at == incident.newest_point_at == NOON
    # Not zero: usage of the minute before the loss was found is in no snapshot.
    assert incident.uncovered == MINUTE


def test_a_second_incident_is_refused_while_one_is_open(plane: ControlPlane) -> None:
    incident = open_one(plane)
    with pytest.raises(IncidentMovedError, match=f"{incident.short_id} is already open"):
        plane.incidents.open(LOSS, target=TARGET, judged=ACCEPTED)
    assert plane.incidents.recent(10) == (incident,)


@pytest.mark.parametrize(
    "judged", [None, replace(ACCEPTED, version=2), replace(ACCEPTED, marker=None, marked_at=None)]
)
def test_a_loss_judged_against_another_baseline_opens_no_incident(
    plane: ControlPlane, judged: None
) -> None:
    plane.registry.accept(ACCEPTED, judged=None)
    with pytest.raises(BaselineMovedError):
        plane.incidents.open(LOSS, target=TARGET, judged=judged)
    assert plane.incidents.recovery() == Recovery(HEALTHY, None)


@pytest.mark.parametrize("broken", [RECOVERING, FAILED])
def test_no_incident_is_opened_if_the_state_was_changed_manually(
    plane: ControlPlane, broken: RecoveryState
) -> None:
    plane.set_state(broken)
    with pytest.raises(IncidentMovedError, match=f"{broken.name}, but no incident"):
        plane.incidents.open(LOSS, target=TARGET, judged=None)
    assert plane.incidents.recovery() == Recovery(broken, None)


def test_a_verdict_that_is_no_alarm_is_refused(plane: ControlPlane) -> None:
    with pytest.raises(ValueError, match="unknown is no alarm"):
        plane.incidents.open(replace(LOSS, verdict=Verdict.UNKNOWN), target=None, judged=None)
    incident = open_one(plane)
    with pytest.raises(ValueError, match="same is no alarm"):
        plane.incidents.join(replace(LOSS, verdict=Verdict.SAME), target=None, judged=incident)
    assert plane.incidents.recovery() == Recovery(RECOVERING, incident)


# Further losses, and the restore target


def test_a_further_loss_joins_the_incident_and_resets_its_attempts(plane: ControlPlane) -> None:
    incident = open_one(plane)
    for _ in range(3):
        incident = claim_attempt(plane, incident)
    incident = wait(plane, incident)
    joined = plane.incidents.join(GONE, target=None, judged=incident)
    assert joined == replace(
        incident, losses=(LOSS, GONE), target=None, attempts=0, waiting=None, next_launch_at=None
    )
    assert plane.incidents.recovery() == Recovery(RECOVERING, joined)
    claim_attempt(plane, joined, run_id="run 9")
    attempts = [
        (each.loss, each.number) for each in plane.incidents.attempts_of(joined.incident_id)
    ]
    assert attempts == [(1, 1), (1, 2), (1, 3), (2, 1)]


def test_a_further_loss_leaves_a_failed_incident_failed(plane: ControlPlane) -> None:
    failed = give_up(plane, open_one(plane))
    joined = plane.incidents.join(GONE, target=None, judged=failed)
    assert plane.incidents.recovery() == Recovery(FAILED, joined)
    assert joined.given_up == failed.given_up
    assert joined.losses == (LOSS, GONE)


def test_a_new_restore_target_is_stored_and_the_baseline_is_kept(plane: ControlPlane) -> None:
    incident = open_one(plane)
    moved = plane.incidents.adopt_target(MARKED_TARGET, judged=incident)
    assert moved == replace(incident, target=MARKED_TARGET)
    assert plane.incidents.recovery() == Recovery(RECOVERING, moved)
    assert plane.baseline == ACCEPTED


def test_whether_the_restore_target_began_empty_is_known_until_it_is_another_store(
    plane: ControlPlane,
) -> None:
    accepted = plane.registry.accept(ACCEPTED, judged=plane.baseline)
    opened = plane.incidents.open(LOSS, target=TARGET, judged=accepted, began_empty=True)
    assert opened.began_empty
    assert plane.incidents.recovery() == Recovery(RECOVERING, opened)
    # With our marker in it, nobody can observe that any more.
    marked = plane.incidents.adopt_target(MARKED_TARGET, judged=opened)
    assert (marked.target, marked.began_empty) == (MARKED_TARGET, True)
    assert plane.incidents.recovery() == Recovery(RECOVERING, marked)
    gone = plane.incidents.join(GONE, target=None, judged=marked)
    assert not gone.began_empty
    another = Baseline(StoreIdentity(BORN + timedelta(days=30), 3), version=1)
    found = plane.incidents.adopt_target(another, judged=gone, began_empty=True)
    assert found.began_empty
    older = replace(another, identity=StoreIdentity(BORN + timedelta(days=9), 3))
    assert not plane.incidents.adopt_target(older, judged=found).began_empty
    assert plane.incidents.recovery().incident == plane.incidents.recent(1)[0]


# Ends


def test_closing_an_incident_makes_the_store_healthy_with_the_new_baseline(
    plane: ControlPlane,
) -> None:
    incident = wait(plane, claim_attempt(plane, open_one(plane)))
    plane.clock.advance(MINUTE)
    closed = close(plane, incident)
    ended = Ended(NOON + MINUTE, Outcome.RESTORED, CLOSING.detail, CLOSING.restored)
    assert closed == replace(incident, ended=ended)
    assert plane.incidents.recovery() == Recovery(HEALTHY, None)
    assert plane.incidents.recent(1) == (closed,)
    assert plane.baseline == replace(CLOSING.baseline, version=2)
    snapshot = plane.take(reading("acme", TEAM))
    assert plane.commit(snapshot) == replace(
        CLOSING.baseline, identity=snapshot.identity, version=3
    )


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_is_stored(plane: ControlPlane, outcome: Outcome) -> None:
    incident = open_one(plane)
    closing = replace(CLOSING, outcome=outcome, restored=Restored())
    with plane.restore_lease() as lease:
        closed = plane.incidents.close(closing, judged=incident, lease=lease)
    assert closed.ended == Ended(NOON, outcome, CLOSING.detail, Restored())
    assert plane.incidents.recent(1) == (closed,)
    assert state(plane) is HEALTHY


def test_resets_are_recorded_together_with_the_end_of_an_incident(plane: ControlPlane) -> None:
    plane.capture("acme", TEAM)
    incident = open_one(plane)
    reset = Reset("acme", "team", "lifetime", EVERYONE, NOON, "ann", "on purpose", NOON)
    several = replace(reset, entity=frozenset({"bob", None}))
    with plane.restore_lease() as lease:
        stale = replace(incident, target=MARKED_TARGET)
        with pytest.raises(IncidentMovedError):
            plane.incidents.close(CLOSING, judged=stale, lease=lease, resets=[reset])
        assert plane.recorded_resets() == []
        plane.incidents.close(CLOSING, judged=incident, lease=lease, resets=[reset, several])
    assert state(plane) is HEALTHY
    assert plane.points.current_usages("acme", NOON) == {}
    assert reset in [replace(each, last_excluded=0) for each in plane.recorded_resets()]


def test_closing_an_incident_sets_the_first_baseline(
    plane: ControlPlane,
) -> None:
    close(plane, plane.incidents.open(LOSS, target=TARGET, judged=None))
    assert plane.baseline == replace(CLOSING.baseline, version=1)


@pytest.mark.parametrize("reason", FailureReason)
def test_giving_up_an_incident_fails_the_store_and_ends_waiting(
    plane: ControlPlane, reason: FailureReason
) -> None:
    incident = wait(plane, open_one(plane))
    with plane.restore_lease() as lease:
        failed = plane.incidents.give_up(reason, "it refuses", judged=incident, lease=lease)
    assert failed == replace(
        incident,
        given_up=GivenUp(NOON, reason, "it refuses"),
        waiting=None,
        next_launch_at=None,
    )
    assert plane.incidents.recovery() == Recovery(FAILED, failed)
    assert plane.baseline == ACCEPTED


def test_incidents_are_listed_newest_first(plane: ControlPlane) -> None:
    closed = []
    for hours in range(3):
        plane.clock.set(NOON + timedelta(hours=hours))
        closed.append(close(plane, open_one(plane)))
    last = open_one(plane)
    assert plane.incidents.recent(10) == (last, *reversed(closed))
    assert plane.incidents.recent(2) == (last, closed[2])


def test_any_text_can_be_stored(plane: ControlPlane) -> None:
    ugly, escaped = "NUL \0, half a pair \ud83d", "NUL \\x00, half a pair \\ud83d"
    loss = replace(LOSS, found_by=ugly, reason=ugly)
    incident = plane.incidents.open(loss, target=TARGET, judged=None)
    assert (incident.losses[0].found_by, incident.losses[0].reason) == (escaped, escaped)
    incident = wait(plane, incident, reason=ugly)
    assert incident.waiting is not None
    assert incident.waiting.reason == escaped
    with plane.restore_lease() as lease:
        incident = plane.incidents.claim_attempt(
            judged=incident, run_id=ugly, holder=ugly, lease=lease
        )
        plane.incidents.end_attempt(ugly, judged=incident, lease=lease)
        closing = replace(CLOSING, detail=ugly * 1000)
        closed = plane.incidents.close(closing, judged=incident, lease=lease)
    (attempt,) = plane.incidents.attempts_of(incident.incident_id)
    assert (attempt.run_id, attempt.holder, attempt.outcome) == (escaped, escaped, escaped)
    assert plane.incidents.recent(1) == (closed,)
    assert closed.ended is not None
    assert len(closed.ended.detail) == 2000
