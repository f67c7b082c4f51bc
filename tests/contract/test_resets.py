"""Deliberate resets: they are stored exactly, and every reader of points applies them."""

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
    """Capture usages of the month, so many hours after noon."""
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


# Recorded resets


def test_resets_are_stored_exactly_and_listed_in_order(plane: ControlPlane) -> None:
    assert plane.recorded_resets() == []
    recorded = [
        RESET,
        replace(RESET, entity=None, window=None),
        replace(RESET, entity=EVERYONE, at=NOON - 400 * HOUR),
        replace(RESET, entity="everyone", reason="é\n漢字 🦀"),
    ]
    other = replace(RESET, tenant="globex", budget="*")
    for each in (recorded[0], other, *recorded[1:]):
        assert plane.resets.record(each) == each
    assert plane.recorded_resets() == [recorded[0], other, *recorded[1:]]


def test_any_operator_and_reason_can_be_stored(plane: ControlPlane) -> None:
    ugly, escaped = "NUL \0, half a pair \ud83d", "NUL \\x00, half a pair \\ud83d"
    kept = plane.resets.record(replace(RESET, by=ugly, reason=ugly))
    assert kept == replace(RESET, by=escaped, reason=escaped)
    assert plane.recorded_resets() == [kept]


@pytest.mark.parametrize(
    "change", ["of_everyone = true", "entity = ''", "window_token = ''", "at = recorded_at + '1s'"]
)
def test_invalid_rows_are_refused(
    postgres_plane: ControlPlane, admin: psycopg.Connection, change: str
) -> None:
    postgres_plane.resets.record(RESET)
    with pytest.raises(psycopg.IntegrityError):
        admin.execute(f"update budget_recovery.budget_reset set {change}".encode())


# What restores use


def test_a_reset_of_one_entity_does_not_exclude_others(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    recorded = plane.reset(NOON, "alice")
    window = the_window(plane)
    assert window.usages == usages(bob="3")
    assert window.sources == {"bob": NOON}
    assert window.resets == (recorded,)
    assert (window.of, window.newest_at, window.corrupt) == (MONTH, NOON, ())


def test_the_aggregate_is_reset_separately(plane: ControlPlane) -> None:
    plane.capture("acme", {("team", "2026-11"): {"alice": "5", None: "8"}}, at=NOON)
    plane.reset(NOON, None)
    assert the_window(plane).usages == usages(alice="5")
    plane.reset(NOON, EVERYONE)
    assert the_window(plane).usages == {}


def test_one_reset_of_several_entities_concerns_exactly_these(plane: ControlPlane) -> None:
    used: Counters = {("team", "2026-11"): {"alice": "5", "bob": "3", None: "8"}}
    plane.capture("acme", used, at=NOON)
    several = plane.resets.record(replace(RESET, entity=frozenset({"alice", None})))
    # At the same time, by the same person, for the same reason: still resets of their own.
    singles = [plane.resets.record(replace(RESET, entity=who)) for who in ("alice", None)]
    window = the_window(plane)
    assert window.usages == usages(bob="3")
    assert window.resets == (several, *singles)
    assert despite(plane).usages == {"alice": Decimal(5), "bob": Decimal(3), None: Decimal(8)}
    plane.capture("acme", used, at=NOON + HOUR)
    assert the_window(plane).usages == {"alice": Decimal(5), "bob": Decimal(3), None: Decimal(8)}
    assert the_window(plane).resets == (several, *singles)


def test_a_reset_of_many_thousand_entities_is_read_at_once(plane: ControlPlane) -> None:
    names = [f"user:{number}@example.com" for number in range(20_000)]
    plane.capture("acme", {("team", "2026-11"): dict.fromkeys([*names, "kept"], "1")}, at=NOON)
    plane.resets.record(replace(RESET, entity=frozenset(names)))
    window = the_window(plane)
    assert window.usages == usages(kept="1")
    [reset] = window.resets
    assert reset.entity == frozenset(names)
    assert plane.points.current_usages("acme", NOON) == {MONTH: usages(kept="1")}


def test_a_reset_concerns_only_its_tenant_budget_and_window(plane: ControlPlane) -> None:
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


def test_usage_after_the_reset_is_restored(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    plane.reset(NOON + MINUTE, "alice")
    month(plane, 1, alice="1", bob="3")
    month(plane, 2, alice="2", bob="4")
    window = the_window(plane)
    assert window.usages == usages(alice="2", bob="4")
    assert window.sources == {"alice": NOON + 2 * HOUR, "bob": NOON + 2 * HOUR}
    # It is reported although a record covers all eligible usages.
    assert [reset.entity for reset in window.resets] == ["alice"]


@pytest.mark.parametrize(
    ("who", "is_reported"), [("alice", True), (None, True), (EVERYONE, True), ("nobody", False)]
)
def test_a_reset_that_excludes_something_is_reported_even_if_a_newer_record_covers_it(
    plane: ControlPlane, who: Entity | Everyone, *, is_reported: bool
) -> None:
    used: Counters = {("team", "2026-11"): {"alice": "5", None: "8"}}
    plane.capture("acme", used, at=NOON)
    recorded = plane.reset(NOON, who)
    assert plane.capture("acme", used, at=NOON + HOUR).records[0].covers_earlier
    window = the_window(plane)
    assert window.usages == {"alice": Decimal(5), None: Decimal(8)}
    assert window.resets == ((recorded,) if is_reported else ())


def test_a_reset_that_excludes_nothing_is_not_reported(plane: ControlPlane) -> None:
    plane.reset(NOON, "bob")
    plane.reset(NOON - MINUTE, "alice")
    month(plane, 0, alice="5")
    assert the_window(plane).resets == ()


def test_a_reset_may_be_recorded_later(plane: ControlPlane) -> None:
    for hour, used in enumerate(("5", "1", "2")):
        month(plane, hour, alice=used)
    assert the_window(plane).usages == usages(alice="5")
    plane.reset(NOON + MINUTE, "alice")
    assert the_window(plane).usages == usages(alice="2")


def test_several_resets_of_one_entity_apply_together(plane: ControlPlane) -> None:
    for hour, used in enumerate(("9", "5", "1")):
        month(plane, hour, alice=used)
    later = plane.reset(NOON + HOUR, "alice")
    earlier = plane.reset(NOON, "alice")
    window = the_window(plane)
    assert window.usages == usages(alice="1")
    assert window.resets == (later, earlier)


# Despite resets


def test_despite_resets_includes_all_usages(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    plane.reset(NOON, EVERYONE)
    # It covers all eligible usages: there are none.
    snapshot = month(plane, 1, alice="1", bob="4")
    assert snapshot.records[0].covers_earlier
    month(plane, 2, alice="2", bob="4")
    assert the_window(plane).usages == usages(alice="2", bob="4")
    window = despite(plane)
    assert window.usages == usages(alice="5", bob="4")
    assert window.sources == {"alice": NOON, "bob": NOON + 2 * HOUR}
    assert window.resets == ()


def test_despite_resets_includes_usages_that_were_missing_meanwhile(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="7")
    month(plane, 1, alice="6")
    plane.reset(NOON + HOUR + MINUTE, "alice")
    month(plane, 2, alice="1", bob="7")
    month(plane, 3, alice="1", bob="8")
    assert the_window(plane).usages == usages(alice="1", bob="8")
    assert despite(plane).usages == usages(alice="6", bob="8")


def test_damage_is_reported_with_and_despite_resets(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    month(plane, 1, alice="6", bob="4")
    plane.reset(NOON + HOUR, "alice")
    month(plane, 2, alice="1", bob="5")
    plane.corrupt("acme", NOON + 2 * HOUR, MONTH)
    assert the_window(plane).usages == usages(bob="4")
    assert despite(plane).usages == usages(alice="6", bob="4")
    assert the_window(plane).corrupt == despite(plane).corrupt == (NOON + 2 * HOUR,)


def test_a_chosen_snapshot_excludes_reset_usage_unless_despite_resets(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    month(plane, 1, alice="1", bob="4")
    recorded = plane.reset(NOON, "alice")
    named = plane.points.snapshot_of("acme", NOON)
    assert named is not None
    assert (named.windows[0].usages, named.windows[0].resets) == (usages(bob="3"), (recorded,))
    whole = plane.points.despite_resets().snapshot_of("acme", NOON)
    assert whole is not None
    assert whole.windows[0].usages == usages(alice="5", bob="3")
    assert whole.windows[0].resets == ()
    later = plane.points.snapshot_of("acme", NOON + HOUR)
    assert later is not None
    assert (later.windows[0].usages, later.windows[0].resets) == (usages(alice="1", bob="4"), ())


def test_despite_resets_does_not_affect_other_readers(plane: ControlPlane) -> None:
    month(plane, 0, alice="5")
    plane.reset(NOON, "alice")
    overriding = plane.points.despite_resets()
    assert overriding.tenants() == plane.points.tenants() == {"acme"}
    assert the_window(plane, overriding).usages == usages(alice="5")
    assert the_window(plane).usages == {}
    assert the_window(plane, overriding.despite_resets()).usages == usages(alice="5")


# What captures compare with, and what users see


def test_a_reset_counter_is_not_a_drop(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    assert [drop.entity for drop in month(plane, 1, bob="3").drops] == ["alice"]
    plane.reset(NOON + HOUR + MINUTE, "alice")
    cleared = month(plane, 2, bob="3")
    assert cleared.drops == ()
    assert cleared.records[0].covers_earlier
    # Drops of other entities are still reported.
    assert [drop.entity for drop in month(plane, 3, alice="1").drops] == ["bob"]


def test_a_reset_of_everyone_excludes_all_usages(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bob="3")
    plane.reset(NOON + MINUTE)
    assert plane.points.current_usages("acme", NOON + HOUR) == {}
    assert month(plane, 1).drops == ()


def test_current_windows_exclude_usages_that_were_reset(plane: ControlPlane) -> None:
    # No later record contains cy, so all records are read.
    month(plane, 0, alice="5", bob="3", cy="1")
    month(plane, 1, alice="5", bob="3")
    month(plane, 2, bob="4")
    month(plane, 3, alice="5", bob="3")
    plane.reset(NOON + HOUR, "alice")
    (before,) = plane.current_windows("acme")
    # Two records share a content; only the newer one is eligible.
    assert before.usages == usages(alice="5", bob="4", cy="1")
    plane.reset(NOON + 3 * HOUR, "alice")
    (point,) = plane.current_windows("acme")
    assert point.usages == usages(bob="4", cy="1")
    # In the newest record bob is lower, and cy is missing.
    assert (point.newest_at, point.from_earlier) == (NOON + 3 * HOUR, 2)
    plane.reset(NOON + 3 * HOUR)
    (point,) = plane.current_windows("acme")
    assert (point.usages, point.newest_at, point.from_earlier) == ({}, NOON + 3 * HOUR, 0)
