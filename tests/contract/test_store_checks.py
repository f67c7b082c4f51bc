from dataclasses import replace
from datetime import timedelta

import pytest

from budget_recovery_dagster.domain import CHECKS_KEPT, Check, StoreIdentity, Verdict
from tests.contract.control_planes import BORN, NOON, ControlPlane

GOOD = Check(
    checked_at=NOON,
    checked_by="tick 1",
    verdict=Verdict.SAME,
    reason="The store is the accepted one.",
    identity=StoreIdentity(BORN, 9007199254740993),
)
BLIND = replace(GOOD, verdict=Verdict.UNKNOWN, reason="no answer", identity=None)
DAY = timedelta(days=1)


def record(plane: ControlPlane, *checks: Check) -> None:
    """Record checks, each at its own time."""
    for check in checks:
        plane.clock.set(check.checked_at)
        plane.registry.record_check(check)


def test_the_list_is_empty_without_checks(plane: ControlPlane) -> None:
    assert plane.registry.newest_checks(10) == ()
    assert plane.registry.newest_good_check() is None


@pytest.mark.parametrize("verdict", Verdict)
def test_a_check_with_any_verdict_is_stored_exactly(plane: ControlPlane, verdict: Verdict) -> None:
    for check in (replace(GOOD, verdict=verdict), replace(BLIND, verdict=verdict)):
        plane.registry.record_check(check)
        assert plane.registry.newest_checks(1) == (check,)


def test_checks_are_listed_newest_first_and_then_by_order_of_writing(plane: ControlPlane) -> None:
    later = replace(GOOD, checked_at=NOON + timedelta(minutes=10))
    second = replace(GOOD, checked_by="tick 2")
    plane.clock.set(later.checked_at)
    for check in (later, GOOD, second):
        plane.registry.record_check(check)
    assert plane.registry.newest_checks(10) == (later, second, GOOD)
    assert plane.registry.newest_checks(2) == (later, second)
    assert plane.registry.newest_checks(0) == ()


@pytest.mark.parametrize("verdict", [v for v in Verdict if not v.is_good])
def test_a_check_with_a_loss_or_unknown_is_not_good(plane: ControlPlane, verdict: Verdict) -> None:
    record(plane, GOOD, replace(BLIND, verdict=verdict, checked_at=NOON + DAY))
    assert plane.registry.newest_good_check() == GOOD


@pytest.mark.parametrize("verdict", [Verdict.FIRST_SEEN, Verdict.SAME])
def test_a_check_that_first_saw_or_recognized_the_store_is_good(
    plane: ControlPlane, verdict: Verdict
) -> None:
    newer = replace(GOOD, verdict=verdict, checked_at=NOON + DAY)
    record(plane, GOOD, newer)
    assert plane.registry.newest_good_check() == newer


def test_checks_of_the_last_thirty_days_are_kept(plane: ControlPlane) -> None:
    first = replace(GOOD, checked_by="first")
    second = replace(GOOD, checked_at=NOON + timedelta(microseconds=1))
    newest = replace(GOOD, checked_at=NOON + 30 * DAY)
    record(plane, first, second, *[newest] * CHECKS_KEPT)
    assert plane.registry.newest_checks(2 * CHECKS_KEPT)[-2:] == (second, first)
    record(plane, replace(GOOD, checked_at=NOON + 30 * DAY + timedelta(microseconds=1)))
    assert plane.registry.newest_checks(2 * CHECKS_KEPT)[-2:] == (newest, second)


def test_a_clock_that_is_ahead_removes_none_of_the_newest_checks(plane: ControlPlane) -> None:
    ahead = replace(BLIND, checked_at=NOON + 40 * DAY)
    record(plane, BLIND, GOOD, ahead)
    assert plane.registry.newest_checks(10) == (ahead, GOOD, BLIND)


def test_the_newest_good_check_is_kept_indefinitely(plane: ControlPlane) -> None:
    older_good = replace(GOOD, checked_by="tick 0", checked_at=NOON - timedelta(minutes=10))
    blind = replace(BLIND, checked_at=NOON + timedelta(minutes=10))
    much_later = replace(BLIND, checked_at=NOON + 400 * DAY)
    record(plane, older_good, GOOD, blind, *[much_later] * CHECKS_KEPT)
    assert plane.registry.newest_checks(2 * CHECKS_KEPT)[CHECKS_KEPT:] == (GOOD,)
    assert plane.registry.newest_good_check() == GOOD
    record(plane, replace(GOOD, checked_at=NOON + 401 * DAY))
    assert plane.registry.newest_checks(2 * CHECKS_KEPT)[-1] == much_later


def test_any_text_can_be_stored(plane: ControlPlane) -> None:
    plane.registry.record_check(
        replace(GOOD, checked_by="half a pair \ud83d", reason="NUL \0 " * 10_000)
    )
    (kept,) = plane.registry.newest_checks(1)
    assert kept.checked_by == "half a pair \\ud83d"
    assert kept.reason.startswith("NUL \\x00 NUL")
    assert len(kept.reason) == 2000


def test_a_check_dated_in_the_future_hides_no_later_one(plane: ControlPlane) -> None:
    ahead = replace(GOOD, checked_by="ahead", checked_at=NOON + 40 * DAY)
    record(plane, ahead)
    assert plane.registry.newest_checks(10) == (ahead,)
    record(plane, GOOD)
    assert plane.registry.newest_checks(10) == (GOOD, ahead)
    assert plane.registry.newest_good_check() == GOOD
    blind = replace(BLIND, checked_at=NOON + timedelta(minutes=10))
    record(plane, blind)
    assert plane.registry.newest_checks(10) == (blind, GOOD, ahead)
