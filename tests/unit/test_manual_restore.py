"""Manual restores: they apply what was previewed, and close the incident once all is restored."""

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
from tests.unit.capture_harness import REBORN
from tests.unit.manual_harness import (
    OF_A,
    OF_B,
    ManualHarness,
    captured_manual_harness,
    closes_incident,
    failed_manual_harness,
)


@pytest.fixture
def harness() -> ManualHarness:
    """Return a store of two tenants, captured and checked."""
    return captured_manual_harness()


@pytest.fixture
def failed() -> ManualHarness:
    """Return the same store, lost and FAILED."""
    return failed_manual_harness()


def test_a_restore_without_traffic_applies_exactly_the_preview(failed: ManualHarness) -> None:
    preview = failed.preview(OF_A)
    applied = failed.apply(OF_A)
    assert applied.preview is not None
    assert applied.preview.preview_id == preview.preview_id
    assert applied.differences == ()
    assert applied.raised == preview.raised == 2
    assert (failed.usage("a"), failed.usage("a", "alice")) == ("80", "30")
    assert failed.usage("b") is None


def test_a_restore_with_traffic_lowers_nothing_and_reports_every_difference(
    failed: ManualHarness,
) -> None:
    failed.preview(OF_A)
    failed.spend("a", "95")
    failed.spend("a", "2", "alice")
    applied = failed.apply(OF_A)
    assert [(each.entity, each.change, each.found) for each in applied.differences] == [
        (None, Change.LIVE, Decimal(95)),
        ("alice", Change.LIVE, Decimal(2)),
    ]
    assert (failed.usage("a"), failed.usage("a", "alice")) == ("95", "30")


def test_a_window_that_closed_since_the_preview_is_reported(harness: ManualHarness) -> None:
    harness.store.put_usage("a", "spend", "2026-11-25", None, "7")
    harness.capture()
    harness.fail()
    harness.preview(OF_A)
    harness.clock.set(datetime(2026, 11, 26, 0, 0, 30, tzinfo=UTC))
    applied = harness.apply(OF_A)
    assert [each.change for each in applied.differences] == [Change.CLOSED]
    assert applied.raised == 2
    (tenant,) = applied.tenants
    assert [entry.notes for entry in tenant.entries if entry.notes] == [
        ("skipped, the window has closed",)
    ]


def test_a_preview_with_other_options_or_older_than_a_day_is_not_compared(
    failed: ManualHarness,
) -> None:
    failed.preview()
    assert failed.apply(OF_A).preview is None
    failed.preview(OF_B)
    failed.clock.advance(timedelta(days=1, seconds=1))
    assert failed.apply(OF_B).preview is None
    assert "No preview with these options in the last 24 hours" in failed.messages


def test_a_store_recreated_since_the_preview_is_refused(failed: ManualHarness) -> None:
    failed.preview(OF_A)
    failed.store.recreate(REBORN + timedelta(minutes=1))
    before = failed.store.stream
    with pytest.raises(PreviewOutdatedError, match="preview again"):
        failed.apply(OF_A)
    assert failed.store.stream == before
    failed.preview(OF_A)
    assert failed.apply(OF_A).raised == 2


@pytest.mark.parametrize("was_recreated", [False, True])
@pytest.mark.parametrize("by", [timedelta(milliseconds=60), timedelta(milliseconds=-60)])
def test_another_leader_of_a_stream_restored_from_a_backup_is_the_previewed_store(
    failed: ManualHarness, by: timedelta, *, was_recreated: bool
) -> None:
    # Its servers disagree on the creation time, so that each change of leader changes it.
    if was_recreated:
        failed.store.recreate(REBORN + timedelta(minutes=1))
    failed.preview(OF_A)
    stream = failed.store.stream
    assert stream is not None
    failed.store.stream = replace(stream, created_at=stream.created_at + by)
    failed.clock.advance(timedelta(minutes=1))
    failed.check()
    assert len(failed.incident.losses) == (2 if was_recreated else 1)
    assert failed.apply(OF_A).raised == 2


def test_the_incident_is_closed_once_no_counter_remains_to_be_raised(failed: ManualHarness) -> None:
    applied = failed.apply(OF_A, reason="the first half.")
    assert applied.remainder is not None
    assert (applied.remainder.counters, closes_incident(applied)) == (1, False)
    assert failed.incident.given_up is not None
    applied = failed.apply(OF_B, reason="the other half.")
    assert closes_incident(applied)
    assert failed.state is RecoveryState.HEALTHY
    assert applied.incident is not None
    ended = applied.incident.ended
    assert ended is not None
    assert ended.outcome is Outcome.RESTORED_MANUALLY
    assert ended.detail.startswith(
        "By ann: the other half. In the whole incident, 3 counters raised in 2 windows of 2 "
        "tenants. Restored: a, spend lifetime: 80; b, spend lifetime: 5. Counted after the loss and"
        " not added, because the higher value counts: nothing. Usage between the newest snapshot ("
    )
    assert (ended.restored.tenants, ended.restored.windows, ended.restored.counters) == (2, 2, 3)


def test_captures_and_checks_resume_after_a_restore(failed: ManualHarness) -> None:
    failed.apply()
    assert failed.check().check.is_good
    failed.clock.advance(timedelta(hours=1))
    assert len(failed.capture().outcomes) == 2


def test_a_recovering_store_can_be_restored_manually(harness: ManualHarness) -> None:
    harness.wipe()
    assert closes_incident(harness.apply())
    assert harness.state is RecoveryState.HEALTHY


def test_a_healthy_store_is_restored_and_stays_healthy(harness: ManualHarness) -> None:
    harness.spend("a", "3", "alice")
    baseline = harness.baseline
    applied = harness.apply(OF_A)
    assert (applied.raised, applied.incident, applied.remainder) == (1, None, None)
    assert harness.usage("a", "alice") == "30"
    assert harness.baseline == baseline
    assert harness.check().check.is_good


def test_a_healthy_store_that_is_not_the_accepted_one_is_not_written(
    harness: ManualHarness,
) -> None:
    harness.store.recreate(REBORN)
    before = harness.store.stream
    with pytest.raises(PossibleLossError, match="not the one that was accepted"):
        harness.apply()
    assert harness.store.stream == before


def test_a_loss_of_a_healthy_store_during_a_restore_is_a_failure(harness: ManualHarness) -> None:
    harness.spend("a", "3", "alice")
    harness.before_write(1, lambda: harness.store.recreate(REBORN))
    applied = harness.apply(OF_A)
    assert isinstance(applied.failure, PossibleLossError)
    assert applied.incident is None


def test_a_further_loss_of_a_failed_store_joins_the_incident(failed: ManualHarness) -> None:
    failed.before_write(3, lambda: failed.store.recreate(REBORN + timedelta(minutes=1)))
    applied = failed.apply()
    assert isinstance(applied.failure, StoreLostError)
    assert "wait" not in applied.failure.hint
    assert failed.state is RecoveryState.FAILED
    assert len(failed.incident.losses) == 2


def test_a_restore_is_refused_with_holder_and_time_while_another_runs(
    failed: ManualHarness,
) -> None:
    with failed.plane.leases.hold(RESTORE_LEASE, "bob@night"):
        before = failed.store.stream
        with pytest.raises(LeaseHeldError, match=r"bob@night, since 2026-11-25 12:[0-9]{2}:"):
            failed.apply()
        assert failed.store.stream == before
    assert closes_incident(failed.apply())


@pytest.mark.parametrize("reason", ["", "  "])
def test_a_restore_without_a_reason_is_refused(failed: ManualHarness, reason: str) -> None:
    with pytest.raises(ChoiceError, match="The reason is empty"):
        failed.apply(reason=reason)
    assert failed.usage("a") is None


def test_unknown_choices_are_refused_before_anything_is_written(failed: ManualHarness) -> None:
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


def test_a_tenant_that_cannot_be_restored_keeps_the_incident_open(failed: ManualHarness) -> None:
    failed.store.failures["a"] = StoreReadError("Reading a took too long.", "read again.")
    applied = failed.apply()
    assert applied.failure is not None
    assert applied.failure.message == "Tenant 'a' is not restored: Reading a took too long."
    assert failed.usage("b") == "5"
    assert failed.state is RecoveryState.FAILED
    failed.store.failures.clear()
    assert closes_incident(failed.apply())


def test_a_full_store_is_reported(failed: ManualHarness) -> None:
    failed.store.marker_failure = StoreWriteError("The store is full.", "make room.")
    with pytest.raises(StoreWriteError, match="The store is full"):
        failed.apply()
    assert failed.state is RecoveryState.FAILED


def lagging(seen_at: datetime) -> ClusterView:
    replica = Replica("n2", is_current=False, is_offline=False, lag=9, silent_for=timedelta(0))
    return ClusterView(seen_at, "c", "n1", None, 2, (replica,))


def test_an_unconverged_store_is_refused_unless_the_operator_accepts_it(
    failed: ManualHarness,
) -> None:
    failed.store.cluster = lagging
    with pytest.raises(StoreNotReadyError, match="has not converged"):
        failed.apply()
    assert failed.usage("a") is None
    order = failed.order("n2 is dead for good", unconverged=True)
    assert closes_incident(failed.carry_out(RestoreRequest(), order))
    assert any(
        "Continuing although the store has not converged" in message for message in failed.messages
    )


def test_an_unconverged_store_without_a_leader_cannot_be_accepted(failed: ManualHarness) -> None:
    failed.store.cluster = lagging
    failed.store.is_led = False
    before = failed.store.stream
    order = failed.order("n2 is dead for good", unconverged=True)
    with pytest.raises(StoreNotReadyError, match="may not be its leader any more"):
        failed.carry_out(RestoreRequest(), order)
    assert failed.store.stream == before


def test_an_accepted_unconverged_store_still_needs_a_correct_clock(failed: ManualHarness) -> None:
    failed.store.clock = failed.clock.now() + timedelta(seconds=6)
    order = failed.order("in a hurry", unconverged=True)
    with pytest.raises(StoreNotReadyError, match="The clocks differ by 6 s"):
        failed.carry_out(RestoreRequest(), order)
    assert failed.usage("a") is None


def test_a_restore_is_audited_with_operator_and_reason(failed: ManualHarness) -> None:
    incident = failed.incident.incident_id
    failed.apply(OF_B, reason="b is missing")
    (kept,) = [each for each in failed.plane.state.audits.values() if each.entry.tenant == "b"]
    assert (kept.trail.who, kept.trail.why, kept.trail.incident_id) == (
        "ann",
        "b is missing",
        incident,
    )
    assert (kept.entry.raised, kept.entry.before, kept.entry.after) == (1, Decimal(0), Decimal(5))
    # Other tenants are not part of this restore.
    assert {each.entry.tenant for each in failed.plane.state.audits.values()} <= {"a", "b"}
    assert all(
        each.trail.who != "ann" or each.entry.tenant == "b"
        for each in failed.plane.state.audits.values()
    )


def test_a_restore_of_one_budget_writes_no_other(harness: ManualHarness) -> None:
    harness.store.put_usage("a", "cards", "lifetime", None, "7")
    harness.capture()
    harness.fail()
    harness.apply(RestoreRequest(tenant="a", budget="cards"))
    assert harness.usage("b") is None
    reading = harness.store.open_tenant("a").reading
    assert [(each.of.budget, each.usage) for each in reading.counters] == [("cards", Decimal(7))]


def test_a_restore_from_a_snapshot_brings_back_only_its_usages(harness: ManualHarness) -> None:
    harness.spend("a", "81")
    harness.spend("a", "35", "alice")
    harness.clock.advance(timedelta(minutes=1))
    harness.capture()
    harness.fail()
    harness.apply(replace(OF_A, snapshot="2026-11-25T12:05"))
    assert (harness.usage("a"), harness.usage("a", "alice")) == ("80", "30")
    harness.apply(OF_A)
    assert (harness.usage("a"), harness.usage("a", "alice")) == ("81", "35")
