"""What a manual restore reports as unknown, not compared, stopped early or lost meanwhile."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from budget_recovery_dagster.adapters.nats import encode_name
from budget_recovery_dagster.domain import Change, ClusterView, RecoveryState
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    ChoiceError,
    PreviewOutdatedError,
    StoreLostError,
    StoreReadError,
    StoreUnreachableError,
)
from budget_recovery_dagster.presentation import comparison
from budget_recovery_dagster.presentation.text import acceptance_lines, window_notes
from budget_recovery_dagster.services import preview_restore
from budget_recovery_dagster.services.restore import Acceptance, Remainder
from tests.unit.capture_harness import LIFETIME, NOW, REBORN
from tests.unit.manual_harness import (
    OF_A,
    OF_B,
    ManualHarness,
    captured_manual_harness,
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


def test_unknown_usage_is_reported_when_the_incident_is_closed(failed: ManualHarness) -> None:
    failed.store.put("usage.b.spend.lifetime.=", b"rubbish")
    for tenant, at in list(failed.plane.state.snapshots):
        if tenant == "a":
            failed.plane.points.corrupt(tenant, at, LIFETIME)
    applied = failed.apply()
    assert applied.remainder == Remainder(0, unreadable=1, corrupt=1, unseen=())
    assert applied.incident is not None
    assert applied.incident.ended is not None
    assert (
        "1 window without an intact record: usage unknown. 1 live counter skipped (unreadable)."
    ) in applied.incident.ended.detail


@pytest.mark.parametrize("chosen", [None, *Acceptance])
def test_what_no_choice_covers_is_shown_before_the_question(
    failed: ManualHarness, chosen: Acceptance | None
) -> None:
    failed.store.put("usage.b.spend.lifetime.=", b"rubbish")
    for tenant, at in list(failed.plane.state.snapshots):
        if tenant == "a":
            failed.plane.points.corrupt(tenant, at, LIFETIME)
    lines = list(acceptance_lines(failed.preview(), chosen))
    assert lines[1:3] == [
        "1 live counter unreadable: no reset is recorded for them.",
        (
            "1 window has no intact record (checksum mismatch): what the store lacks there is"
            " unknown, and no reset is recorded for it."
        ),
    ]
    failed.store.failures["b"] = StoreReadError("Reading usage.b.> timed out.", "try again.")
    lines = list(acceptance_lines(failed.preview(), chosen))
    assert (
        "1 tenant not read completely: 'b'. What the store lacks there is unknown, and no reset"
        " is recorded for it."
    ) in lines


def test_a_single_choice_is_described_in_full(failed: ManualHarness) -> None:
    *_, line = acceptance_lines(failed.preview(), Acceptance.KEEP_SNAPSHOTS)
    assert (
        line == "--keep-snapshots: the next loss raises 3 counters to the usage in the snapshots."
    )
    *_, line = acceptance_lines(failed.preview(), Acceptance.RECORD_RESETS)
    assert line.startswith("--record-resets: the usage of 3 counters was removed on purpose.")


def test_the_notes_name_the_largest_counters_first(harness: ManualHarness) -> None:
    users = [f"user {number}" for number in range(8)]
    for user in users:
        harness.spend("a", "1", user)
    harness.spend("a", "40", "zoe")
    harness.clock.advance(timedelta(hours=1))
    harness.capture()
    for user in (*users, "zoe"):
        harness.store.put(f"usage.a.spend.lifetime.{encode_name(user)}", b"rubbish")
    applied = harness.apply(OF_A)
    (note,) = [note for entry in applied.tenants[0].entries for note in entry.notes]
    assert note.startswith("9 counters skipped: the live value is unreadable: 'zoe' (")
    assert note.endswith(", ...")
    (noted,) = [
        note
        for window in harness.preview(OF_A).windows
        for note in window_notes(window)
        if "unreadable" in note
    ]
    assert noted.startswith("9 live counters skipped (unreadable): 'zoe' (")


def test_an_unreadable_tenant_is_reported_as_not_compared(
    failed: ManualHarness,
) -> None:
    failed.preview()
    failed.store.failures["a"] = StoreReadError("Reading a took too long.", "read again.")
    applied = failed.apply()
    assert (applied.uncompared, applied.differences) == (("a",), ())
    assert comparison(applied).startswith("1 tenant not compared. ")


def test_a_tenant_that_no_snapshot_contains_any_more_is_reported(failed: ManualHarness) -> None:
    failed.preview()
    for key in [key for key in failed.plane.state.snapshots if key[0] == "b"]:
        del failed.plane.state.snapshots[key]
    applied = failed.apply()
    assert [(each.tenant, each.change) for each in applied.differences] == [("b", Change.GONE)]
    assert applied.absent == ("b",)


def test_a_snapshot_pruned_while_waiting_for_the_store_is_refused(
    harness: ManualHarness,
) -> None:
    harness.clock.advance(timedelta(hours=1))
    harness.capture()
    harness.fail()
    converged = harness.store.cluster

    def prune(seen_at: datetime) -> ClusterView:
        harness.plane.state.snapshots.pop(("a", NOW), None)
        return converged(seen_at)

    harness.store.cluster = prune
    before = harness.store.stream
    with pytest.raises(ChoiceError, match="No retained snapshot matches"):
        harness.apply(replace(OF_A, snapshot="2026-11-25T12:05"))
    assert harness.store.stream == before


def test_a_restore_is_compared_with_the_preview_that_the_operator_names(
    failed: ManualHarness,
) -> None:
    mine = failed.preview(OF_A)
    failed.store.recreate(REBORN + timedelta(minutes=1))
    preview_restore(failed.plane, failed.opened, OF_A, by="bob", on_progress=failed.messages.append)
    order = failed.order("as I have seen it")
    with pytest.raises(PreviewOutdatedError):
        failed.carry_out(OF_A, order, mine.preview_id)
    for request, preview_id in ((OF_B, mine.preview_id), (OF_A, "a\0"), (OF_A, "")):
        with pytest.raises(ChoiceError, match="has these options: tenant"):
            failed.carry_out(request, order, preview_id)


def test_a_missing_marker_reveals_a_purge_since_the_preview(failed: ManualHarness) -> None:
    failed.preview(OF_A)
    failed.clock.advance(timedelta(minutes=1))
    failed.store.purge()
    failed.check()
    assert len(failed.incident.losses) == 2
    with pytest.raises(PreviewOutdatedError, match="but it does not exist"):
        failed.apply(OF_A)
    failed.clock.advance(timedelta(minutes=1))
    failed.preview(OF_A)
    assert failed.apply(OF_A).raised == 2


def test_counters_raised_before_the_store_became_unreachable_are_reported(
    failed: ManualHarness,
) -> None:
    def go_away(tenant: str) -> None:
        if tenant == "b":
            away = StoreUnreachableError("Nobody answers.", "start it.")
            failed.store.observe_failure = failed.store.failures["b"] = away

    failed.store.during_read = go_away
    applied = failed.apply()
    assert isinstance(applied.failure, StoreUnreachableError)
    assert applied.raised == 2
    assert failed.usage("a") == "80"


def test_a_loss_detected_by_a_check_during_a_restore_is_reported(failed: ManualHarness) -> None:
    def lose() -> None:
        failed.store.recreate(REBORN + timedelta(minutes=1))
        failed.check()

    failed.before_write(3, lose)
    applied = failed.apply()
    assert isinstance(applied.failure, StoreLostError)
    assert applied.failure.message.startswith("The store was lost once more during the restore.")


def test_an_incident_opened_during_a_restore_is_reported(harness: ManualHarness) -> None:
    harness.spend("a", "3", "alice")

    def lose() -> None:
        harness.store.recreate(REBORN)
        harness.check()

    harness.before_write(1, lose)
    applied = harness.apply(OF_A)
    assert isinstance(applied.failure, StoreLostError)
    assert applied.failure.message.endswith("has been opened.")


def test_a_leader_cut_off_at_the_end_does_not_close_the_incident(failed: ManualHarness) -> None:
    def cut_off(_tenant: str) -> None:
        failed.store.is_led = False

    failed.store.during_read = cut_off
    applied = failed.apply()
    assert isinstance(applied.failure, AttemptFailedError)
    assert failed.state is RecoveryState.FAILED
