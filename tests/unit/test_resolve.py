"""`resolve` closes an incident without restoring, and accepts the store in its present state."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import (
    EVERYONE,
    RESTORE_LEASE,
    Outcome,
    RecoveryState,
    RetentionPolicy,
)
from budget_recovery_dagster.errors import (
    ChoiceError,
    IncidentMovedError,
    LeaseHeldError,
    LeaseLostError,
    StoreMissingError,
    StorePermissionError,
    StoreUnreachableError,
    StoreWriteError,
)
from budget_recovery_dagster.services.restore import Acceptance, RestoreRequest, resolve_incident
from tests.fakes.usage_store import MemoryUsageStore
from tests.unit.capture_harness import REBORN
from tests.unit.manual_harness import ManualHarness, captured_manual_harness


@pytest.fixture
def harness() -> ManualHarness:
    """Return a store of two tenants: captured, lost and FAILED."""
    harness = captured_manual_harness()
    harness.fail()
    return harness


def test_resolve_accepts_the_store_and_reports_what_is_lower(harness: ManualHarness) -> None:
    resolved = harness.resolve("it was emptied on purpose.")
    assert harness.state is RecoveryState.HEALTHY
    ended = resolved.incident.ended
    assert ended is not None
    assert ended.outcome is Outcome.ACCEPTED
    assert ended.detail.startswith(
        "By ann: it was emptied on purpose. Nothing was raised. Left lower than in the "
        "snapshots: 3 counters. The largest: a, spend lifetime: 80; b, spend lifetime: 5. No reset "
        "is recorded: the next loss brings their usage back. Usage between the newest snapshot "
        "(2026-11-25 12:05:00 UTC)"
    )
    assert resolved.remainder.counters == 3
    assert (harness.usage("a"), harness.usage("b")) == (None, None)


def test_captures_and_checks_resume_with_the_accepted_store(harness: ManualHarness) -> None:
    harness.resolve()
    assert harness.baseline.identity.created_at == REBORN
    assert harness.baseline.marker is not None
    assert harness.check().check.is_good
    harness.spend("a", "1")
    harness.clock.advance(timedelta(hours=1))
    harness.capture()
    # The next loss is a loss of the accepted store.
    harness.store.recreate(REBORN + timedelta(hours=2))
    assert harness.check().check.verdict.is_alarm


def test_a_recovering_store_can_be_accepted() -> None:
    harness = captured_manual_harness()
    harness.wipe()
    harness.resolve()
    assert harness.state is RecoveryState.HEALTHY


def test_resolve_is_refused_without_an_open_incident() -> None:
    harness = captured_manual_harness()
    with pytest.raises(IncidentMovedError, match="The store is HEALTHY, and no incident is open"):
        harness.resolve()


def test_resolve_is_refused_without_a_reason(harness: ManualHarness) -> None:
    with pytest.raises(ChoiceError, match="The reason is empty"):
        harness.resolve(" ")
    assert harness.state is RecoveryState.FAILED


@pytest.mark.parametrize(
    "failure",
    [
        StoreUnreachableError("Nobody answers.", "start it."),
        StoreMissingError("There is no bucket.", "make it."),
        StorePermissionError("The marker may not be read.", "grant it."),
    ],
)
def test_a_store_that_cannot_be_observed_is_never_accepted(
    harness: ManualHarness, failure: StoreUnreachableError
) -> None:
    harness.store.observe_failure = failure
    with pytest.raises(type(failure)):
        harness.resolve()
    assert harness.state is RecoveryState.FAILED


def test_resolve_is_refused_while_a_restore_runs(harness: ManualHarness) -> None:
    with (
        harness.plane.leases.hold(RESTORE_LEASE, "bob@night"),
        pytest.raises(LeaseHeldError, match="bob@night"),
    ):
        harness.resolve()
    assert harness.state is RecoveryState.FAILED


def test_an_incident_that_another_process_closes_meanwhile_is_not_resolved_again(
    harness: ManualHarness,
) -> None:
    def opened_late() -> nullcontext[MemoryUsageStore]:
        harness.plane.leases.lose(RESTORE_LEASE)
        harness.resolve("it was emptied on purpose")
        return harness.opened()

    with pytest.raises(IncidentMovedError, match="another process closed it"):
        resolve_incident(
            harness.plane,
            opened_late,
            harness.order("too late"),
            acceptance=Acceptance.RECORD_RESETS,
            retention=RetentionPolicy(7),
            convergence_timeout=harness.convergence_timeout,
        )
    (incident,) = harness.plane.incidents.recent(2)
    assert incident.ended is not None
    assert "it was emptied on purpose" in incident.ended.detail


@pytest.mark.parametrize("kind", [StorePermissionError, StoreWriteError])
def test_a_store_that_refuses_the_marker_can_be_accepted(
    harness: ManualHarness, kind: type[StorePermissionError]
) -> None:
    harness.store.marker_failure = kind("No marker here.", "see why.")
    harness.resolve()
    assert harness.state is RecoveryState.HEALTHY
    assert any(
        "A further loss may go undetected: No marker here." in message
        for message in harness.messages
    )


def test_counters_planned_by_a_killed_worker_are_not_reported_as_raised() -> None:
    harness = captured_manual_harness()
    harness.wipe()

    class KilledError(BaseException):
        pass

    def die(key: str) -> None:
        if key.startswith("usage."):
            raise KilledError

    harness.store.before_write = die
    with pytest.raises(KilledError):
        harness.recover()
    harness.store.before_write = None
    resolved = harness.resolve("emptied on purpose")
    assert (harness.usage("a"), harness.usage("b")) == (None, None)
    ended = resolved.incident.ended
    assert ended is not None
    assert ended.restored.counters == 0
    assert "Nothing was raised." in ended.detail


def recorded(harness: ManualHarness) -> dict[tuple[str, str | None], object]:
    """Return whom the recorded resets are about, by tenant and window."""
    return {(reset.tenant, reset.window): reset.entity for reset in harness.plane.state.resets}


def lose_again(harness: ManualHarness) -> None:
    harness.clock.advance(timedelta(minutes=40))
    harness.store.recreate(harness.clock.now())
    harness.check()
    harness.recover()
    assert harness.state is RecoveryState.HEALTHY


def test_usage_that_was_removed_on_purpose_is_not_restored_after_the_next_loss(
    harness: ManualHarness,
) -> None:
    resolved = harness.resolve("it was emptied on purpose", Acceptance.RECORD_RESETS)
    assert recorded(harness) == {("a", "lifetime"): EVERYONE, ("b", "lifetime"): EVERYONE}
    stored = [replace(reset, last_excluded=0) for reset in harness.plane.state.resets]
    assert stored == list(resolved.resets)
    [first, _] = resolved.resets
    assert (first.by, first.at, first.recorded_at) == ("ann", first.at, first.at)
    assert first.reason == (
        f"incident {resolved.incident.short_id} accepted: it was emptied on purpose"
    )
    ended = resolved.incident.ended
    assert ended is not None
    assert (
        "Left lower than in the snapshots: 3 counters. The largest: a, spend lifetime: 80; b, spend"
        " lifetime: 5. Resets are recorded: restores exclude what was captured of them so far."
    ) in ended.detail
    harness.spend("a", "3", "alice")
    harness.clock.advance(timedelta(minutes=1))
    harness.capture()
    lose_again(harness)
    assert (harness.usage("a"), harness.usage("a", "alice"), harness.usage("b")) == (
        None,
        "3",
        None,
    )


def test_usage_that_is_kept_is_restored_after_the_next_loss(harness: ManualHarness) -> None:
    resolved = harness.resolve("not now", Acceptance.KEEP_SNAPSHOTS)
    assert (resolved.resets, resolved.undo_until) == ((), None)
    assert harness.plane.state.resets == []
    lose_again(harness)
    assert (harness.usage("a"), harness.usage("b")) == ("80", "5")


def test_only_counters_that_were_read_as_lower_or_absent_are_reset(
    harness: ManualHarness,
) -> None:
    # Counted again since the loss: the aggregate even more than before.
    harness.spend("a", "90")
    harness.spend("a", "3", "alice")
    # It cannot be read, so it may be as high as before.
    harness.store.put("usage.b.spend.lifetime.=", b"broken")
    resolved = harness.resolve("on purpose", Acceptance.RECORD_RESETS)
    assert recorded(harness) == {("a", "lifetime"): frozenset({"alice"})}
    assert resolved.remainder.counters == 1
    assert [(str(each.of), each.rise) for each in resolved.remainder.lower] == [
        ("spend lifetime", Decimal(27))
    ]
    assert resolved.incident.ended is not None
    assert "1 live counter skipped (unreadable)." in resolved.incident.ended.detail
    lose_again(harness)
    assert (harness.usage("a"), harness.usage("a", "alice"), harness.usage("b")) == (
        "80",
        None,
        "5",
    )


def test_counters_of_an_incomplete_reading_are_not_reset(harness: ManualHarness) -> None:
    for name in ("bob", "carl", "dora", "eve"):
        harness.spend("a", "1", name)
    doomed = iter(["eve", "dora"])

    def purge(tenant: str) -> None:
        # Without a marker, in both tries: fewer keys arrive than were announced.
        if tenant == "a" and (name := next(doomed, None)):
            harness.store.purge(f"usage.a.spend.lifetime.{name}")

    harness.store.during_read = purge
    resolved = harness.resolve("on purpose", Acceptance.RECORD_RESETS)
    assert recorded(harness) == {("b", "lifetime"): EVERYONE}
    [unseen] = resolved.remainder.unseen
    assert unseen.startswith(
        "Tenant 'a' cannot be read: Fewer counters of tenant 'a' could be read"
    )


def test_no_reset_is_recorded_if_the_incident_cannot_be_closed(harness: ManualHarness) -> None:
    def lose_lease(_tenant: str) -> None:
        harness.plane.leases.lose(RESTORE_LEASE)

    harness.store.during_read = lose_lease
    with pytest.raises(LeaseLostError):
        harness.resolve("on purpose", Acceptance.RECORD_RESETS)
    assert harness.plane.state.resets == []
    assert harness.state is RecoveryState.FAILED


def test_an_accepted_state_can_be_undone_until_the_time_that_is_shown(
    harness: ManualHarness,
) -> None:
    at = harness.clock.now()
    resolved = harness.resolve("on purpose", Acceptance.RECORD_RESETS)
    # The windows are lifetime windows, and snapshots are kept for seven days.
    until = resolved.undo_until
    assert until is not None
    assert timedelta(days=7) <= until - at < timedelta(days=7, minutes=1)
    assert resolved.incident.ended is not None
    assert f"--reason <why>`, until {until:%Y-%m-%d %H:%M:%S} UTC" in (
        resolved.incident.ended.detail
    )
    # Without usage, each capture prunes what it may.
    while harness.clock.now() + timedelta(hours=6) < until:
        harness.clock.advance(timedelta(hours=6))
        harness.spend("a", "1", "bob")
        harness.capture()
    assert harness.apply().raised == 0
    assert harness.apply(RestoreRequest(despite_resets=True)).raised == 3
    assert (harness.usage("a"), harness.usage("b")) == ("80", "5")


def test_the_end_of_the_last_window_limits_the_time_to_undo() -> None:
    harness = captured_manual_harness()
    for window in ("2026-11-25", "2026-W48"):
        harness.store.put_usage("c", "spend", window, None, "7")
    harness.store.purge("usage.a.")
    harness.store.purge("usage.b.")
    harness.capture()
    harness.plane.state.snapshots = {
        key: each for key, each in harness.plane.state.snapshots.items() if key[0] == "c"
    }
    harness.wipe()
    resolved = harness.resolve("on purpose", Acceptance.RECORD_RESETS)
    # The week ends on Monday, less than seven days later.
    assert resolved.undo_until == datetime(2026, 11, 30, tzinfo=UTC)
    assert {reset.window for reset in resolved.resets} == {"2026-11-25", "2026-W48"}
