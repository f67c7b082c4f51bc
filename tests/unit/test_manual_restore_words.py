"""What a restore by hand tells is so: what is unknown, uncompared, cut short, lost meanwhile."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

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
from budget_recovery_dagster.services import preview_restore
from budget_recovery_dagster.services.restore import Remainder
from tests.unit.capture_house import LIFETIME, NOW, REBORN
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


def test_what_is_unknown_is_told_at_the_end(failed: HandHouse) -> None:
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


def test_of_a_tenant_that_could_not_be_read_nothing_is_said_to_be_as_previewed(
    failed: HandHouse,
) -> None:
    failed.preview()
    failed.store.failures["a"] = StoreReadError("Reading a took too long.", "read again.")
    applied = failed.apply()
    assert (applied.uncompared, applied.differences) == (("a",), ())
    assert comparison(applied).startswith("1 tenant not compared. ")


def test_a_tenant_that_is_in_no_snapshot_any_more_is_told(failed: HandHouse) -> None:
    failed.preview()
    for key in [key for key in failed.plane.state.snapshots if key[0] == "b"]:
        del failed.plane.state.snapshots[key]
    applied = failed.apply()
    assert [(each.tenant, each.change) for each in applied.differences] == [("b", Change.GONE)]
    assert applied.absent == ("b",)


def test_a_snapshot_that_is_pruned_while_the_store_is_waited_for_is_refused(
    house: HandHouse,
) -> None:
    house.clock.advance(timedelta(hours=1))
    house.capture()
    house.fail()
    converged = house.store.cluster

    def prune(seen_at: datetime) -> ClusterView:
        house.plane.state.snapshots.pop(("a", NOW), None)
        return converged(seen_at)

    house.store.cluster = prune
    before = house.store.stream
    with pytest.raises(ChoiceError, match="No retained snapshot matches"):
        house.apply(replace(OF_A, snapshot="2026-11-25T12:05"))
    assert house.store.stream == before


def test_one_is_held_to_the_preview_that_one_has_seen(failed: HandHouse) -> None:
    mine = failed.preview(OF_A)
    failed.store.recreate(REBORN + timedelta(minutes=1))
    preview_restore(failed.plane, failed.opened, OF_A, by="bob", on_progress=failed.said.append)
    order = failed.order("as I have seen it")
    with pytest.raises(PreviewOutdatedError):
        failed.carry_out(OF_A, order, mine.preview_id)
    for request, preview_id in ((OF_B, mine.preview_id), (OF_A, "a\0"), (OF_A, "")):
        with pytest.raises(ChoiceError, match="has these options: tenant"):
            failed.carry_out(request, order, preview_id)


def test_a_purge_since_the_preview_is_noticed_by_the_marker(failed: HandHouse) -> None:
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


def test_what_was_raised_before_the_store_went_away_is_told(failed: HandHouse) -> None:
    def go_away(tenant: str) -> None:
        if tenant == "b":
            away = StoreUnreachableError("Nobody answers.", "start it.")
            failed.store.look_failure = failed.store.failures["b"] = away

    failed.store.in_mid_reading = go_away
    applied = failed.apply()
    assert isinstance(applied.failure, StoreUnreachableError)
    assert applied.raised == 2
    assert failed.usage("a") == "80"


def test_a_loss_that_a_check_finds_meanwhile_is_told_as_one(failed: HandHouse) -> None:
    def lose() -> None:
        failed.store.recreate(REBORN + timedelta(minutes=1))
        failed.check()

    failed.before_write(3, lose)
    applied = failed.apply()
    assert isinstance(applied.failure, StoreLostError)
    assert applied.failure.message.startswith("The store was lost once more during the restore.")


def test_an_incident_that_is_opened_meanwhile_is_told(house: HandHouse) -> None:
    house.spend("a", "3", "alice")

    def lose() -> None:
        house.store.recreate(REBORN)
        house.check()

    house.before_write(1, lose)
    applied = house.apply(OF_A)
    assert isinstance(applied.failure, StoreLostError)
    assert applied.failure.message.endswith("has been opened.")


def test_a_leader_that_is_cut_off_at_the_end_ends_nothing(failed: HandHouse) -> None:
    def cut_off(_tenant: str) -> None:
        failed.store.is_led = False

    failed.store.in_mid_reading = cut_off
    applied = failed.apply()
    assert isinstance(applied.failure, AttemptFailedError)
    assert failed.state is RecoveryState.FAILED
