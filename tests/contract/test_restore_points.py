"""What a restore would bring back: the highest usage of all retained intact records."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import (
    NEVER_EXPIRES,
    NO_EXPIRY,
    CaptureSource,
    CounterReading,
    Entity,
    Expiry,
    KnownExpiry,
    OmittedCounter,
    TenantPoint,
    TenantReading,
    UnreadableKey,
    Usages,
    ValueShape,
    WindowPoint,
)
from tests.contract.control_planes import NOON, ControlPlane, Counters, of, point_of, reading

HOUR = timedelta(hours=1)
MONTH = of("team", "2026-11")
TEAM: Counters = {("team", "2026-11"): {"alice": "1.5", None: "7"}}
NOTHING: Usages = {}


def usages(**by_entity: str) -> Usages:
    return {entity: Decimal(usage) for entity, usage in by_entity.items()}


def month(plane: ControlPlane, hour: int, **by_entity: str) -> None:
    """Capture usages of the month, so many hours after noon."""
    plane.capture("acme", {("team", "2026-11"): by_entity}, at=NOON + hour * HOUR)


def the_point(plane: ControlPlane, now: datetime | None = None) -> TenantPoint:
    point = plane.points.point_of("acme", now or plane.clock.now())
    assert point is not None
    return point


def the_window(plane: ControlPlane) -> WindowPoint:
    (window,) = the_point(plane).windows
    assert window.of == MONTH
    return window


# Which tenants and windows


def test_a_tenant_without_snapshots_has_no_point(plane: ControlPlane) -> None:
    assert plane.points.tenants() == frozenset()
    assert plane.points.point_of("acme", NOON) is None


def test_a_tenant_without_records_has_no_point(
    plane: ControlPlane,
) -> None:
    unreadable = (UnreadableKey("usage.b.x", "it has too few parts"),)
    plane.capture("acme", TEAM, at=NOON)
    plane.commit(plane.take(reading("b", {}, unreadable=unreadable)))
    assert plane.snapshots.tenants() == {"acme", "b"}
    assert plane.points.tenants() == {"acme"}


def test_a_point_has_usages_and_the_shape_and_expiry_of_new_keys(plane: ControlPlane) -> None:
    plane.capture("acme", TEAM, at=NOON)
    assert the_point(plane) == TenantPoint(
        tenant="acme",
        newest_at=NOON,
        windows=(
            WindowPoint(
                of=MONTH,
                usages=point_of(TEAM)[MONTH],
                newest_at=NOON,
                shape=ValueShape.TEXT,
                expiries={"alice": 86400, None: 86400},
                sources={"alice": NOON, None: NOON},
                source=CaptureSource.COUNTERS,
            ),
        ),
    )


def test_a_point_contains_only_its_tenant(plane: ControlPlane) -> None:
    plane.capture("acme", TEAM, at=NOON)
    plane.capture("acme2", {("other", "lifetime"): {"bo": "9"}}, at=NOON + HOUR)
    assert plane.points.tenants() == {"acme", "acme2"}
    assert the_point(plane).newest_at == NOON
    assert [each.of for each in the_point(plane).windows] == [MONTH]


def test_windows_are_listed_by_budget_and_token(plane: ControlPlane) -> None:
    names = [
        ("b", "lifetime"),
        ("b", "2026-11"),
        ("a", "lifetime"),
        ("é", "2026-11"),
        ("B", "2026-11"),
    ]
    plane.capture("acme", {name: {"alice": "1"} for name in names}, at=NOON)
    assert [(each.of.budget, each.of.window.token) for each in the_point(plane).windows] == [
        ("B", "2026-11"),
        ("a", "lifetime"),
        ("b", "2026-11"),
        ("b", "lifetime"),
        ("é", "2026-11"),
    ]


def test_windows_that_closed_since_the_newest_snapshot_are_listed(plane: ControlPlane) -> None:
    tokens = ("2026-11-22", "2026-W47", "2026-W48", "2026-11", "2026-Q4", "lifetime")
    sunday = datetime(2026, 11, 22, 23, 30, tzinfo=UTC)
    plane.capture("acme", {("team", token): {"alice": "1"} for token in tokens}, at=sunday)
    at_once = {each.of.window.token for each in the_point(plane, sunday).windows}
    assert at_once == {"2026-11-22", "2026-W47", "2026-11", "2026-Q4", "lifetime"}
    monday = datetime(2026, 11, 23, 0, 10, tzinfo=UTC)
    later = {each.of.window.token for each in the_point(plane, monday).windows}
    # The snapshot also contained the next week, which is open by now.
    assert later == at_once | {"2026-W48"}
    december = datetime(2026, 12, 1, tzinfo=UTC)
    assert {each.of.window.token for each in the_point(plane, december).windows} == at_once


def test_a_closed_window_missing_from_the_newest_snapshot_is_not_listed(
    plane: ControlPlane,
) -> None:
    plane.capture("acme", {("team", "2026-11-25"): {"alice": "1"}}, at=NOON)
    plane.capture("acme", {("team", "2026-11"): {"alice": "1"}}, at=NOON + HOUR)
    tomorrow = NOON + timedelta(days=1)
    assert [each.of for each in the_point(plane, tomorrow).windows] == [MONTH]
    # While it is open, it is in the point although the newest snapshot lacks it.
    assert [each.of for each in the_point(plane).windows] == [MONTH, of("team", "2026-11-25")]


def test_a_closed_window_has_the_highest_usages(plane: ControlPlane) -> None:
    plane.capture("acme", {("team", "2026-11-25"): {"alice": "1", "bo": "9"}}, at=NOON)
    plane.capture("acme", {("team", "2026-11-25"): {"alice": "2"}}, at=NOON + HOUR)
    (window,) = the_point(plane, NOON + timedelta(days=1)).windows
    assert window.usages == usages(alice="2", bo="9")
    assert window.newest_at == NOON + HOUR


def test_a_tenant_with_only_closed_windows_has_an_empty_point(plane: ControlPlane) -> None:
    plane.capture("acme", {("team", "2026-10"): {"alice": "1"}}, at=NOON)
    assert the_point(plane) == TenantPoint("acme", NOON, ())


# Which usages


def test_usages_are_the_maximum_over_all_records(plane: ControlPlane) -> None:
    month(plane, 0, alice="1", bo="9")
    month(plane, 1, alice="2", bo="9", cy="3")
    month(plane, 2, alice="3", cy="2")
    month(plane, 3, alice="4")
    window = the_window(plane)
    assert window.usages == usages(alice="4", bo="9", cy="3")
    assert window.newest_at == NOON + 3 * HOUR
    assert window.corrupt == ()
    assert point_of({("team", "2026-11"): {"alice": "4", "bo": "9", "cy": "3"}}) == (
        plane.points.current_usages("acme", plane.clock.now())
    )


@pytest.mark.parametrize(
    "usage", ["0", "0.000000000000000001", "99999999999999999999.999999999999999999"]
)
def test_usages_are_exact(plane: ControlPlane, usage: str) -> None:
    month(plane, 0, alice=usage)
    assert the_window(plane).usages == usages(alice=usage)


def test_a_window_without_readable_counters_is_listed_without_usages(
    plane: ControlPlane,
) -> None:
    omitted = (OmittedCounter(MONTH, "alice", "key", "not a number"),)
    plane.commit(plane.take(reading("acme", {}, omitted=omitted)))
    assert the_window(plane) == WindowPoint(
        MONTH,
        NOTHING,
        NOON,
        None,
        {},
        source=CaptureSource.COUNTERS,
        omitted=omitted,
        omitted_count=1,
    )


def read_expiring(
    plane: ControlPlane,
    hour: int,
    expiries: Mapping[Entity, Expiry],
    *,
    of_boards: bool = False,
    shape: ValueShape = ValueShape.TEXT,
) -> None:
    """Capture counters of the month that expire so, or leaderboards, which do not show it."""
    plane.clock.set(NOON + hour * HOUR)
    counters = tuple(
        CounterReading(
            MONTH,
            name,
            Decimal(1 + hour),
            None if of_boards else shape,
            None if of_boards else each,
        )
        for name, each in expiries.items()
    )
    source = CaptureSource.LEADERBOARDS if of_boards else CaptureSource.COUNTERS
    plane.commit(plane.take(TenantReading("acme", source, counters, (), (), is_partial=False)))


def test_the_shape_comes_from_the_newest_record_that_has_one(plane: ControlPlane) -> None:
    read_expiring(plane, 0, {"alice": 60})
    assert the_window(plane).shape is ValueShape.TEXT
    read_expiring(plane, 1, {"alice": 60}, shape=ValueShape.BARE)
    read_expiring(plane, 2, {"alice": None}, of_boards=True)
    window = the_window(plane)
    assert (window.shape, window.newest_at) == (ValueShape.BARE, NOON + 2 * HOUR)


@pytest.mark.parametrize("is_named", [False, True])
def test_each_key_has_the_expiry_of_the_newest_record_that_knows_it(
    plane: ControlPlane,
    is_named: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    def expiries() -> Mapping[Entity, KnownExpiry]:
        now = plane.clock.now()
        points = plane.points
        point = points.snapshot_of("acme", now) if is_named else points.point_of("acme", now)
        assert point is not None
        return point.windows[0].expiries

    read_expiring(plane, 0, {"alice": 60, "bo": 60, "cy": 60, None: 60})
    assert expiries() == {"alice": 60, "bo": 60, "cy": 60, None: 60}
    mixed: dict[Entity, Expiry] = {"alice": 7200, "bo": NO_EXPIRY, "cy": -5, None: NEVER_EXPIRES}
    read_expiring(plane, 1, mixed)
    assert expiries() == mixed
    read_expiring(plane, 2, {"alice": NO_EXPIRY, "bo": NO_EXPIRY, "dan": NO_EXPIRY})
    newer: dict[Entity, KnownExpiry] = dict.fromkeys(("alice", "bo", "dan"), NO_EXPIRY)
    # Cy and the aggregate are missing; the recovery point has them from earlier.
    assert expiries() == (newer if is_named else {**newer, "cy": -5, None: NEVER_EXPIRES})
    boards: dict[Entity, Expiry] = dict.fromkeys(("alice", "bo", "cy", "dan", "eve", None))
    read_expiring(plane, 3, boards, of_boards=True)
    read_expiring(plane, 4, boards, of_boards=True)
    # No record knows when Eve's key expires.
    assert expiries() == {**newer, "cy": -5, None: NEVER_EXPIRES}


def test_no_time_to_live_and_one_of_never_are_told_apart(plane: ControlPlane) -> None:
    kinds = (NO_EXPIRY, NEVER_EXPIRES)
    for hour, (alice, bo) in enumerate(itertools.product(kinds, repeat=2)):
        read_expiring(plane, hour, {"alice": alice, "bo": bo})
        assert the_window(plane).expiries == {"alice": alice, "bo": bo}


def test_a_damaged_record_knows_no_expiry(plane: ControlPlane) -> None:
    read_expiring(plane, 0, {"alice": 60, "bo": NO_EXPIRY})
    read_expiring(plane, 1, {"alice": 7200, "bo": 7200})
    plane.corrupt("acme", NOON + HOUR, MONTH)
    assert the_window(plane).expiries == {"alice": 60, "bo": NO_EXPIRY}


@pytest.mark.parametrize("is_named", [False, True])
def test_a_leaderboard_is_known_from_the_newest_record_that_knows_it(
    plane: ControlPlane,
    is_named: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    other = of("other", "lifetime")
    for hour, boards, expected in (
        (0, None, (None, None)),
        (1, frozenset({MONTH}), (True, False)),
        (2, None, (True, False)),
        (3, frozenset({other}), (False, True)),
    ):
        plane.clock.set(NOON + hour * HOUR)
        read = reading("acme", {**TEAM, ("other", "lifetime"): {"bo": "1"}})
        plane.commit(plane.take(replace(read, boards=boards)))
        now = plane.clock.now()
        points = plane.points
        point = points.snapshot_of("acme", now) if is_named else points.point_of("acme", now)
        assert point is not None
        known = {window.of: window.has_board for window in point.windows}
        assert (known[MONTH], known[other]) == expected


def test_a_leaderboard_of_one_window_says_nothing_of_the_others(plane: ControlPlane) -> None:
    read = reading("acme", {**TEAM, ("team", "lifetime"): {"alice": "1"}})
    plane.commit(plane.take(replace(read, boards=frozenset({MONTH}))))
    assert [window.has_board for window in the_point(plane).windows] == [True, False]


# Corrupt records


def test_a_corrupt_record_is_not_used(plane: ControlPlane) -> None:
    month(plane, 0, alice="1")
    month(plane, 1, alice="2")
    plane.corrupt("acme", NOON + HOUR, MONTH)
    window = the_window(plane)
    assert window.usages == usages(alice="1")
    assert window.newest_at == NOON
    assert window.corrupt == (NOON + HOUR,)
    assert the_point(plane).newest_at == NOON + HOUR


def test_a_corrupt_covering_record_does_not_hide_earlier_ones(plane: ControlPlane) -> None:
    month(plane, 0, alice="1", bo="5")
    month(plane, 1, alice="2", bo="6", cy="1")
    month(plane, 2, alice="3", bo="7", cy="2")
    month(plane, 3, alice="4")
    plane.corrupt("acme", NOON + 2 * HOUR, MONTH)
    window = the_window(plane)
    assert window.usages == usages(alice="4", bo="6", cy="1")
    assert window.newest_at == NOON + 3 * HOUR
    assert window.corrupt == (NOON + 2 * HOUR,)


def test_all_records_of_a_window_are_read_if_a_needed_one_is_corrupt(plane: ControlPlane) -> None:
    month(plane, 0, alice="1", bo="9")
    month(plane, 1, alice="2", bo="9")
    month(plane, 2, alice="3", bo="9")
    month(plane, 3, alice="4")
    plane.corrupt("acme", NOON, MONTH)
    assert the_window(plane).corrupt == ()
    plane.corrupt("acme", NOON + 3 * HOUR, MONTH)
    window = the_window(plane)
    assert window.usages == usages(alice="3", bo="9")
    assert window.corrupt == (NOON, NOON + 3 * HOUR)


def test_all_corrupt_records_are_listed(plane: ControlPlane) -> None:
    for hour in range(5):
        month(plane, hour, alice=str(hour + 1))
    for hour in (4, 2, 1):
        plane.corrupt("acme", NOON + hour * HOUR, MONTH)
    window = the_window(plane)
    assert window.usages == usages(alice="4")
    assert window.newest_at == NOON + 3 * HOUR
    assert window.corrupt == tuple(NOON + hour * HOUR for hour in (1, 2, 4))


def test_a_window_with_only_corrupt_records_lists_all_of_them(
    plane: ControlPlane,
) -> None:
    month(plane, 0, alice="1")
    month(plane, 1, alice="2")
    for hour in (0, 1):
        plane.corrupt("acme", NOON + hour * HOUR, MONTH)
    assert the_window(plane) == WindowPoint(
        of=MONTH,
        usages=NOTHING,
        newest_at=NOON + HOUR,
        shape=ValueShape.TEXT,
        expiries={},
        corrupt=(NOON, NOON + HOUR),
    )


def test_a_corrupt_record_does_not_affect_other_windows(plane: ControlPlane) -> None:
    other = {("other", "2026-11"): {"alice": "8"}}
    plane.capture("acme", {**TEAM, **other}, at=NOON)
    plane.corrupt("acme", NOON, MONTH)
    first, second = the_point(plane).windows
    assert (first.of.budget, first.usages, first.corrupt) == ("other", usages(alice="8"), ())
    assert (second.of, second.usages, second.corrupt) == (MONTH, NOTHING, (NOON,))
