"""Deliberate resets: kept as they were told, and heeded by everything that reads points."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import psycopg
import pytest

from budget_recovery_dagster.domain import (
    EVERYONE,
    Entity,
    Everyone,
    Reset,
    TenantSnapshot,
    Usages,
    WindowPoint,
)
from budget_recovery_dagster.ports import RecoveryPoints
from tests.contract.control_planes import NOON, ControlPlane, Counters, of

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
MONTH = of("team", "2026-11")
LIFETIME = of("team", "lifetime")
RESET = Reset("acme", "team", "2026-11", "alice", NOON, "ann", "pardoned", NOON + MINUTE)


def usages(**by_entity: str) -> Usages:
    return {entity: Decimal(usage) for entity, usage in by_entity.items()}


def month(plane: ControlPlane, hour: int, **by_entity: str) -> TenantSnapshot:
    """Capture so many hours after noon what the month holds."""
    return plane.capture("acme", {("team", "2026-11"): by_entity}, at=NOON + hour * HOUR)


def windows(
    plane: ControlPlane, points: RecoveryPoints | None = None
) -> dict[tuple[str, str], WindowPoint]:
    point = (points or plane.points).point_of("acme", plane.clock.now())
    assert point is not None
    return {(each.of.budget, each.of.window.token): each for each in point.windows}


def the_window(plane: ControlPlane, points: RecoveryPoints | None = None) -> WindowPoint:
    (window,) = windows(plane, points).values()
    return window


def despite(plane: ControlPlane) -> WindowPoint:
    return the_window(plane, plane.points.despite_resets())


# The record of them


def test_resets_are_kept_as_they_were_told_and_come_in_order(plane: ControlPlane) -> None:
    assert plane.resets.of_tenant("acme") == plane.resets.recent(9) == ()
    told = [
        RESET,
        replace(RESET, entity=None, window=None),
        replace(RESET, entity=EVERYONE, at=NOON - 400 * HOUR),
        replace(RESET, entity="everyone", reason="é\n漢字 🦀"),
    ]
    other = replace(RESET, tenant="globex", budget="*")
    for each in (told[0], other, *told[1:]):
        assert plane.resets.record(each) == each
    assert plane.resets.of_tenant("acme") == tuple(told)
    assert plane.resets.of_tenant("globex") == (other,)
    assert plane.resets.of_tenant("ac") == ()
    assert plane.resets.recent(2) == (told[3], told[2])
    assert plane.resets.recent(9) == (*reversed(told[1:]), other, told[0])


def test_anybody_may_reset_for_any_reason(plane: ControlPlane) -> None:
    ugly, told = "NUL \0, half a pair \ud83d", "NUL \\x00, half a pair \\ud83d"
    kept = plane.resets.record(replace(RESET, by=ugly, reason=ugly))
    assert kept == replace(RESET, by=told, reason=told)
    assert plane.resets.of_tenant("acme") == (kept,)


@pytest.mark.parametrize(
    "change", ["of_everyone = true", "entity = ''", "window_token = ''", "at = recorded_at + '1s'"]
)
def test_rows_that_make_no_sense_are_refused(
    postgres_plane: ControlPlane, admin: psycopg.Connection, change: str
) -> None:
    postgres_plane.resets.record(RESET)
    with pytest.raises(psycopg.IntegrityError):
        admin.execute(f"update budget_recovery.budget_reset set {change}".encode())


# What restores use


def test_a_reset_of_one_entity_leaves_the_others_restorable(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    told = plane.reset(NOON, "alice")
    window = the_window(plane)
    assert window.usages == usages(bob="3")
    assert window.sources == {"bob": NOON}
    assert window.resets == (told,)
    assert (window.of, window.newest_at, window.corrupt) == (MONTH, NOON, ())


def test_the_aggregate_is_reset_by_itself(plane: ControlPlane) -> None:
    plane.capture("acme", {("team", "2026-11"): {"alice": "5", None: "8"}}, at=NOON)
    plane.reset(NOON, None)
    assert the_window(plane).usages == usages(alice="5")
    plane.reset(NOON, EVERYONE)
    assert the_window(plane).usages == {}


def test_only_its_tenant_budget_and_window_is_reset(plane: ControlPlane) -> None:
    names = [("team", "2026-11"), ("team", "lifetime"), ("other", "2026-11")]
    plane.capture("acme", {name: {"alice": "5"} for name in names}, at=NOON)
    plane.capture("acme2", {names[0]: {"alice": "5"}}, at=NOON)
    plane.reset(NOON, "alice", tenant="acme2")
    assert all(window.usages == usages(alice="5") for window in windows(plane).values())
    plane.reset(NOON, "alice", window="2026-11")
    left = {key: window.usages for key, window in windows(plane).items()}
    assert left == {names[0]: {}, names[1]: usages(alice="5"), names[2]: usages(alice="5")}
    plane.reset(NOON, "alice")
    assert windows(plane)[names[1]].usages == {}
    assert windows(plane)[names[2]].usages == usages(alice="5")


def test_what_was_used_since_the_reset_is_restored(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    plane.reset(NOON + MINUTE, "alice")
    month(plane, 1, alice="1", bob="3")
    month(plane, 2, alice="2", bob="4")
    window = the_window(plane)
    assert window.usages == usages(alice="2", bob="4")
    assert window.sources == {"alice": NOON + 2 * HOUR, "bob": NOON + 2 * HOUR}
    # It is told though a record covers all that is eligible.
    assert [reset.entity for reset in window.resets] == ["alice"]


@pytest.mark.parametrize(
    ("who", "is_told"), [("alice", True), (None, True), (EVERYONE, True), ("nobody", False)]
)
def test_what_is_kept_out_is_told_though_a_newer_record_covers_it(
    plane: ControlPlane, who: Entity | Everyone, *, is_told: bool
) -> None:
    used: Counters = {("team", "2026-11"): {"alice": "5", None: "8"}}
    plane.capture("acme", used, at=NOON)
    told = plane.reset(NOON, who)
    assert plane.capture("acme", used, at=NOON + HOUR).records[0].covers_earlier
    window = the_window(plane)
    assert window.usages == {"alice": Decimal(5), None: Decimal(8)}
    assert window.resets == ((told,) if is_told else ())


def test_a_reset_that_keeps_nothing_out_is_not_told(plane: ControlPlane) -> None:
    plane.reset(NOON, "bob")
    plane.reset(NOON - MINUTE, "alice")
    month(plane, 0, alice="5")
    assert the_window(plane).resets == ()


def test_a_reset_may_be_told_later_than_it_was(plane: ControlPlane) -> None:
    for hour, used in enumerate(("5", "1", "2")):
        month(plane, hour, alice=used)
    assert the_window(plane).usages == usages(alice="5")
    plane.reset(NOON + MINUTE, "alice")
    assert the_window(plane).usages == usages(alice="2")


def test_several_resets_of_one_entity_hold_all_together(plane: ControlPlane) -> None:
    for hour, used in enumerate(("9", "5", "1")):
        month(plane, hour, alice=used)
    later = plane.reset(NOON + HOUR, "alice")
    plane.reset(NOON, "alice")
    window = the_window(plane)
    assert window.usages == usages(alice="1")
    assert window.resets == (later, plane.resets.of_tenant("acme")[1])


# Overriding


def test_despite_resets_everything_is_there_again(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    plane.reset(NOON, EVERYONE)
    # A record that covers what is eligible, which is nothing.
    snapshot = month(plane, 1, alice="1", bob="4")
    assert snapshot.records[0].covers_earlier
    month(plane, 2, alice="2", bob="4")
    assert the_window(plane).usages == usages(alice="2", bob="4")
    window = despite(plane)
    assert window.usages == usages(alice="5", bob="4")
    assert window.sources == {"alice": NOON, "bob": NOON + 2 * HOUR}
    assert window.resets == ()


def test_what_went_missing_between_is_there_despite_resets(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="7")
    month(plane, 1, alice="6")
    plane.reset(NOON + HOUR + MINUTE, "alice")
    month(plane, 2, alice="1", bob="7")
    month(plane, 3, alice="1", bob="8")
    assert the_window(plane).usages == usages(alice="1", bob="8")
    assert despite(plane).usages == usages(alice="6", bob="8")


def test_damage_is_found_with_resets_and_despite_them(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    month(plane, 1, alice="6", bob="4")
    plane.reset(NOON + HOUR, "alice")
    month(plane, 2, alice="1", bob="5")
    plane.corrupt("acme", NOON + 2 * HOUR, MONTH)
    assert the_window(plane).usages == usages(bob="4")
    assert despite(plane).usages == usages(alice="6", bob="4")
    assert the_window(plane).corrupt == despite(plane).corrupt == (NOON + 2 * HOUR,)


def test_a_named_snapshot_is_without_what_was_reset_unless_despite(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    month(plane, 1, alice="1", bob="4")
    told = plane.reset(NOON, "alice")
    named = plane.points.snapshot_of("acme", NOON)
    assert named is not None
    assert (named.windows[0].usages, named.windows[0].resets) == (usages(bob="3"), (told,))
    whole = plane.points.despite_resets().snapshot_of("acme", NOON)
    assert whole is not None
    assert whole.windows[0].usages == usages(alice="5", bob="3")
    assert whole.windows[0].resets == ()
    later = plane.points.snapshot_of("acme", NOON + HOUR)
    assert later is not None
    assert (later.windows[0].usages, later.windows[0].resets) == (usages(alice="1", bob="4"), ())


def test_the_override_leaves_the_others_heeding(plane: ControlPlane) -> None:
    month(plane, 0, alice="5")
    plane.reset(NOON, "alice")
    overriding = plane.points.despite_resets()
    assert overriding.tenants() == plane.points.tenants() == {"acme"}
    assert the_window(plane, overriding).usages == usages(alice="5")
    assert the_window(plane).usages == {}
    assert the_window(plane, overriding.despite_resets()).usages == usages(alice="5")


# What captures compare with, and what people see


def test_after_a_reset_no_drop_is_warned_about(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    assert [drop.entity for drop in month(plane, 1, bob="3").drops] == ["alice"]
    plane.reset(NOON + HOUR + MINUTE, "alice")
    cleared = month(plane, 2, bob="3")
    assert cleared.drops == ()
    assert cleared.records[0].covers_earlier
    # Of the others a drop is one as ever.
    assert [drop.entity for drop in month(plane, 3, alice="1").drops] == ["bob"]


def test_a_reset_of_everyone_leaves_nothing_to_compare_with(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    plane.reset(NOON + MINUTE)
    assert plane.points.current_usages("acme", NOON + HOUR) == {}
    assert month(plane, 1).drops == ()


def test_the_points_that_people_see_are_without_what_was_reset(plane: ControlPlane) -> None:
    # Of cy nobody covers the first, so that all are read.
    month(plane, 0, alice="5", bob="3", cy="1")
    month(plane, 1, alice="5", bob="3")
    month(plane, 2, bob="4")
    month(plane, 3, alice="5", bob="3")
    plane.reset(NOON + HOUR, "alice")
    (before,) = plane.current_windows("acme")
    # One content, of which the newer record is eligible.
    assert before.usages == usages(alice="5", bob="4", cy="1")
    plane.reset(NOON + 3 * HOUR, "alice")
    (point,) = plane.current_windows("acme")
    assert point.usages == usages(bob="4", cy="1")
    # bob is lower in the newest record, cy is missing from it.
    assert (point.newest_at, point.from_earlier) == (NOON + 3 * HOUR, 2)
    plane.reset(NOON + 3 * HOUR)
    (point,) = plane.current_windows("acme")
    assert (point.usages, point.newest_at, point.from_earlier) == ({}, NOON + 3 * HOUR, 0)
