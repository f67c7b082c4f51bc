"""What a person restores by hand: as previewed, and the end of an incident where all is back."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import (
    RESTORE_LEASE,
    Change,
    ClusterView,
    Outcome,
    RecoveryState,
    Replica,
)
from budget_recovery_dagster.errors import (
    ChoiceError,
    LeaseHeldError,
    PossibleLossError,
    PreviewOutdatedError,
    StoreLostError,
    StoreNotReadyError,
    StoreReadError,
    StoreWriteError,
)
from budget_recovery_dagster.services.restore import RestoreRequest
from tests.unit.capture_house import REBORN
from tests.unit.hand_house import (
    OF_A,
    OF_B,
    HandHouse,
    captured_hand_house,
    failed_hand_house,
)


@pytest.fixture
def house() -> HandHouse:
    """A store of two tenants that was captured and checked."""
    return captured_hand_house()


@pytest.fixture
def failed() -> HandHouse:
    """The same, lost and given up."""
    return failed_hand_house()


def test_without_traffic_what_is_applied_is_what_was_previewed(failed: HandHouse) -> None:
    preview = failed.preview(OF_A)
    applied = failed.apply(OF_A)
    assert applied.preview is not None
    assert applied.preview.preview_id == preview.preview_id
    assert applied.differences == ()
    assert applied.raised == preview.raised == 2
    assert (failed.usage("a"), failed.usage("a", "alice")) == ("80", "30")
    assert failed.usage("b") is None


def test_with_traffic_nothing_is_lowered_and_every_difference_is_told(failed: HandHouse) -> None:
    failed.preview(OF_A)
    failed.spend("a", "95")
    failed.spend("a", "2", "alice")
    applied = failed.apply(OF_A)
    assert [(each.entity, each.change, each.found) for each in applied.differences] == [
        (None, Change.LIVE, Decimal(95)),
        ("alice", Change.LIVE, Decimal(2)),
    ]
    assert (failed.usage("a"), failed.usage("a", "alice")) == ("95", "30")


def test_a_window_that_closed_since_the_preview_is_told(house: HandHouse) -> None:
    house.store.put_usage("a", "spend", "2026-11-25", None, "7")
    house.capture()
    house.fail()
    house.preview(OF_A)
    house.clock.set(datetime(2026, 11, 26, 0, 0, 30, tzinfo=UTC))
    applied = house.apply(OF_A)
    assert [each.change for each in applied.differences] == [Change.CLOSED]
    assert applied.raised == 2
    (tenant,) = applied.tenants
    assert [entry.notes for entry in tenant.entries if entry.notes] == [
        ("skipped, the window has closed",)
    ]


def test_a_preview_of_another_choice_or_of_the_day_before_is_not_compared(
    failed: HandHouse,
) -> None:
    failed.preview()
    assert failed.apply(OF_A).preview is None
    failed.preview(OF_B)
    failed.clock.advance(timedelta(days=1, seconds=1))
    assert failed.apply(OF_B).preview is None
    assert "No preview with these options in the last 24 hours" in failed.said


def test_a_store_that_is_made_anew_since_the_preview_is_refused(failed: HandHouse) -> None:
    failed.preview(OF_A)
    failed.store.recreate(REBORN + timedelta(minutes=1))
    before = failed.store.stream
    with pytest.raises(PreviewOutdatedError, match="preview again"):
        failed.apply(OF_A)
    assert failed.store.stream == before
    failed.preview(OF_A)
    assert failed.apply(OF_A).raised == 2


def test_an_incident_ends_once_nothing_is_left_to_be_raised(failed: HandHouse) -> None:
    applied = failed.apply(OF_A, reason="the first half.")
    assert applied.remainder is not None
    assert (applied.remainder.counters, applied.has_ended_incident) == (1, False)
    assert failed.incident.given_up is not None
    applied = failed.apply(OF_B, reason="the other half.")
    assert applied.has_ended_incident
    assert failed.state is RecoveryState.HEALTHY
    assert applied.incident is not None
    ended = applied.incident.ended
    assert ended is not None
    assert ended.outcome is Outcome.RESTORED_MANUALLY
    assert ended.detail.startswith(
        "By ann: the other half. In the whole incident, 3 counters raised in 2 windows of 2 "
        "tenants. Usage counted from"
    )
    assert (ended.restored.tenants, ended.restored.windows, ended.restored.counters) == (2, 2, 3)


def test_afterwards_captures_and_checks_go_on_as_ever(failed: HandHouse) -> None:
    failed.apply()
    assert failed.check().check.is_good
    failed.clock.advance(timedelta(hours=1))
    assert len(failed.capture().outcomes) == 2


def test_a_recovering_store_is_restored_by_hand_as_well(house: HandHouse) -> None:
    house.wipe()
    assert house.apply().has_ended_incident
    assert house.state is RecoveryState.HEALTHY


def test_a_healthy_store_is_restored_and_stays_healthy(house: HandHouse) -> None:
    house.spend("a", "3", "alice")
    baseline = house.baseline
    applied = house.apply(OF_A)
    assert (applied.raised, applied.incident, applied.remainder) == (1, None, None)
    assert house.usage("a", "alice") == "30"
    assert house.baseline == baseline
    assert house.check().check.is_good


def test_a_healthy_store_that_is_not_the_accepted_one_is_left_alone(house: HandHouse) -> None:
    house.store.recreate(REBORN)
    before = house.store.stream
    with pytest.raises(PossibleLossError, match="not the one that was accepted"):
        house.apply()
    assert house.store.stream == before


def test_a_healthy_store_that_is_lost_meanwhile_is_no_success(house: HandHouse) -> None:
    house.spend("a", "3", "alice")
    house.before_write(1, lambda: house.store.recreate(REBORN))
    applied = house.apply(OF_A)
    assert isinstance(applied.failure, PossibleLossError)
    assert applied.incident is None


def test_a_failed_store_that_is_lost_once_more_joins_the_incident(failed: HandHouse) -> None:
    failed.before_write(3, lambda: failed.store.recreate(REBORN + timedelta(minutes=1)))
    applied = failed.apply()
    assert isinstance(applied.failure, StoreLostError)
    assert "wait" not in applied.failure.hint
    assert failed.state is RecoveryState.FAILED
    assert len(failed.incident.losses) == 2


def test_while_somebody_else_restores_one_is_told_who_and_since_when(failed: HandHouse) -> None:
    with failed.plane.leases.hold(RESTORE_LEASE, "bob@night"):
        before = failed.store.stream
        with pytest.raises(LeaseHeldError, match=r"bob@night, since 2026-11-25 12:1[0-9]:"):
            failed.apply()
        assert failed.store.stream == before
    assert failed.apply().has_ended_incident


@pytest.mark.parametrize("reason", ["", "  "])
def test_without_a_reason_nothing_is_done(failed: HandHouse, reason: str) -> None:
    with pytest.raises(ChoiceError, match="The reason is empty"):
        failed.apply(reason=reason)
    assert failed.usage("a") is None


def test_what_does_not_exist_is_refused_before_anything_is_written(failed: HandHouse) -> None:
    before = failed.store.stream
    for request in (
        RestoreRequest(tenant="nobody"),
        RestoreRequest(tenant="a", budget="nothing"),
        RestoreRequest(snapshot="2020-01-01"),
        RestoreRequest(budget="spend"),
    ):
        with pytest.raises(ChoiceError):
            failed.apply(request)
    assert failed.store.stream == before


def test_a_tenant_that_cannot_be_written_keeps_the_incident_open(failed: HandHouse) -> None:
    failed.store.failures["a"] = StoreReadError("Reading a took too long.", "read again.")
    applied = failed.apply()
    assert applied.failure is not None
    assert applied.failure.message == "Tenant 'a' is not restored: Reading a took too long."
    assert failed.usage("b") == "5"
    assert failed.state is RecoveryState.FAILED
    failed.store.failures.clear()
    assert failed.apply().has_ended_incident


def test_a_store_that_takes_no_writes_is_said_to_be_so(failed: HandHouse) -> None:
    failed.store.marker_failure = StoreWriteError("The store is full.", "make room.")
    with pytest.raises(StoreWriteError, match="The store is full"):
        failed.apply()
    assert failed.state is RecoveryState.FAILED


def lagging(seen_at: datetime) -> ClusterView:
    replica = Replica("n2", is_current=False, is_offline=False, lag=9, silent_for=timedelta(0))
    return ClusterView(seen_at, "c", "n1", None, 2, (replica,))


def test_an_unconverged_store_is_waited_for_unless_a_person_accepts_it(failed: HandHouse) -> None:
    failed.store.cluster = lagging
    with pytest.raises(StoreNotReadyError, match="has not converged"):
        failed.apply()
    assert failed.usage("a") is None
    order = failed.order("n2 is dead for good", unconverged=True)
    assert failed.carry_out(RestoreRequest(), order).has_ended_incident
    assert any("Continuing although the store has not converged" in said for said in failed.said)


def test_what_may_be_another_store_by_now_is_not_accepted_either(failed: HandHouse) -> None:
    failed.store.cluster = lagging
    failed.store.is_led = False
    before = failed.store.stream
    order = failed.order("n2 is dead for good", unconverged=True)
    with pytest.raises(StoreNotReadyError, match="may not be its leader any more"):
        failed.carry_out(RestoreRequest(), order)
    assert failed.store.stream == before


def test_the_clock_of_an_accepted_store_must_still_be_right(failed: HandHouse) -> None:
    failed.store.clock = failed.clock.now() + timedelta(seconds=6)
    order = failed.order("in a hurry", unconverged=True)
    with pytest.raises(StoreNotReadyError, match="The clocks disagree"):
        failed.carry_out(RestoreRequest(), order)
    assert failed.usage("a") is None


def test_what_is_done_is_audited_with_who_and_why(failed: HandHouse) -> None:
    incident = failed.incident.incident_id
    failed.apply(OF_B, reason="b is missing")
    (kept,) = [each for each in failed.plane.state.audits.values() if each.entry.tenant == "b"]
    assert (kept.trail.who, kept.trail.why, kept.trail.incident_id) == (
        "ann",
        "b is missing",
        incident,
    )
    assert (kept.entry.raised, kept.entry.before, kept.entry.after) == (1, Decimal(0), Decimal(5))
    # What of others is left is no work of this restore.
    assert {each.entry.tenant for each in failed.plane.state.audits.values()} <= {"a", "b"}
    assert all(
        each.trail.who != "ann" or each.entry.tenant == "b"
        for each in failed.plane.state.audits.values()
    )


def test_a_budget_of_one_tenant_alone_is_touched(house: HandHouse) -> None:
    house.store.put_usage("a", "cards", "lifetime", None, "7")
    house.capture()
    house.fail()
    house.apply(RestoreRequest(tenant="a", budget="cards"))
    assert house.usage("b") is None
    reading = house.store.open_tenant("a").reading
    assert [(each.of.budget, each.usage) for each in reading.counters] == [("cards", Decimal(7))]


def test_a_named_snapshot_brings_back_no_more_than_it_holds(house: HandHouse) -> None:
    house.spend("a", "81")
    house.spend("a", "35", "alice")
    house.clock.advance(timedelta(minutes=1))
    house.capture()
    house.fail()
    house.apply(replace(OF_A, snapshot="2026-11-25T12:05"))
    assert (house.usage("a"), house.usage("a", "alice")) == ("80", "30")
    house.apply(OF_A)
    assert (house.usage("a"), house.usage("a", "alice")) == ("81", "35")
