"""Sources and marks of recovery points, and points of one chosen snapshot."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import psycopg
import pytest

from budget_recovery_dagster.domain import (
    NO_EXPIRY,
    CaptureSource,
    CounterReading,
    Expiry,
    OmittedCounter,
    TenantPoint,
    TenantReading,
    UnlistedEntities,
    UnreadableKey,
    ValueShape,
    WindowPoint,
)
from budget_recovery_dagster.errors import DatabaseError
from tests.contract.control_planes import NOON, ControlPlane, Counters, of, reading

HOUR = timedelta(hours=1)
MONTH = of("team", "2026-11")
UNREADABLE = UnreadableKey("usage.b.x", "it has too few parts")
NAN = OmittedCounter(MONTH, "cy", "usage.acme.team.2026-11.cy", "'NaN' is not a decimal number")


def month(plane: ControlPlane, hour: int, **by_entity: str) -> None:
    plane.capture("acme", {("team", "2026-11"): by_entity}, at=NOON + hour * HOUR)


def the_point(plane: ControlPlane, named: datetime | None = None) -> TenantPoint:
    if named is not None:
        point = plane.points.snapshot_of("acme", named)
    else:
        point = plane.points.point_of("acme", plane.clock.now())
    assert point is not None
    return point


def the_window(plane: ControlPlane, named: datetime | None = None) -> WindowPoint:
    (window,) = the_point(plane, named).windows
    return window


def capture_marked(plane: ControlPlane, hour: int, *omitted: OmittedCounter) -> None:
    """Capture a full leaderboard, with omissions, of a partial snapshot with unreadable keys."""
    plane.clock.set(NOON + hour * HOUR)
    read = reading(
        "acme",
        {("team", "2026-11"): {"alice": str(hour + 1)}},
        omitted=omitted,
        unreadable=(UNREADABLE,) * 101,
        is_partial=True,
    )
    full = (UnlistedEntities(MONTH, None, is_truncated=True),)
    plane.commit(plane.take(replace(read, unlisted=full)))


# Where each usage comes from


def test_each_usage_comes_from_the_newest_snapshot_with_that_value(plane: ControlPlane) -> None:
    month(plane, 0, alice="1", bo="9", cy="3", di="4")
    month(plane, 1, alice="2", bo="9", cy="2", di="4")
    month(plane, 2, alice="2", cy="2", di="3.9")
    assert the_window(plane).sources == {
        "alice": NOON + 2 * HOUR,
        "bo": NOON + HOUR,
        "cy": NOON,
        "di": NOON + HOUR,
    }


def test_equal_snapshots_are_separate_sources(plane: ControlPlane) -> None:
    for hour in range(3):
        month(plane, hour, alice="1", bo="2")
    month(plane, 3, bo="2")
    window = the_window(plane)
    assert window.sources == {"alice": NOON + 2 * HOUR, "bo": NOON + 3 * HOUR}
    assert window.newest_at == NOON + 3 * HOUR


def test_no_usage_comes_from_a_corrupt_record(plane: ControlPlane) -> None:
    month(plane, 0, alice="1")
    month(plane, 1, alice="2")
    month(plane, 2, alice="2", bo="1")
    plane.corrupt("acme", NOON + 2 * HOUR, MONTH)
    assert the_window(plane).sources == {"alice": NOON + HOUR}


# Marks of the newest record


def test_an_intact_and_complete_record_has_no_marks(plane: ControlPlane) -> None:
    month(plane, 0, alice="1")
    window, point = the_window(plane), the_point(plane)
    assert (window.is_truncated, window.is_partial) == (False, False)
    assert (window.omitted, window.omitted_count) == ((), 0)
    assert (point.unreadable, point.unreadable_count) == ((), 0)


def test_marks_come_from_the_newest_record(plane: ControlPlane) -> None:
    month(plane, 0, alice="1")
    capture_marked(plane, 1, NAN)
    window, point = the_window(plane), the_point(plane)
    assert (window.is_truncated, window.is_partial) == (True, True)
    assert (window.omitted, window.omitted_count) == ((NAN,), 1)
    assert (point.unreadable, point.unreadable_count) == ((UNREADABLE,) * 100, 101)
    month(plane, 2, alice="3")
    window, point = the_window(plane), the_point(plane)
    assert (window.is_truncated, window.is_partial, window.omitted_count) == (False, False, 0)
    assert (point.unreadable, point.unreadable_count) == ((), 0)


def test_marks_come_from_the_newest_intact_record_if_the_newest_is_damaged(
    plane: ControlPlane,
) -> None:
    capture_marked(plane, 0, NAN)
    month(plane, 1, alice="2")
    plane.corrupt("acme", NOON + HOUR, MONTH)
    window = the_window(plane)
    assert (window.newest_at, window.is_truncated, window.is_partial) == (NOON, True, True)
    assert window.omitted == (NAN,)
    plane.corrupt("acme", NOON, MONTH)
    window = the_window(plane)
    assert (window.is_truncated, window.is_partial, window.omitted) == (False, False, ())


@pytest.mark.parametrize(
    "omitted",
    [
        OmittedCounter(MONTH, None, "usage.acme.team.2026-11.=", "it is negative"),
        OmittedCounter(MONTH, None, "leaderboard.acme.team.2026-11", "no entity", False),  # noqa: FBT003 - as read
        OmittedCounter(MONTH, "é\n", "usage.acme.team.2026-11.=C3=A9=0A", "not JSON: '\n'"),
    ],
)
def test_omitted_counters_are_stored_exactly_even_without_an_entity(
    plane: ControlPlane, omitted: OmittedCounter
) -> None:
    capture_marked(plane, 0, omitted)
    assert the_window(plane).omitted == (omitted,)


def test_a_long_list_of_omissions_is_cut_and_counted(plane: ControlPlane) -> None:
    many = [replace(NAN, entity=f"e{number:03}", reason="x" * 3000) for number in range(102)]
    capture_marked(plane, 0, *many)
    window = the_window(plane)
    assert window.omitted_count == 102
    assert [each.entity for each in window.omitted] == [f"e{number:03}" for number in range(100)]
    assert {len(each.reason) for each in window.omitted} == {2000}


# One chosen snapshot


def test_a_missing_snapshot_is_none(plane: ControlPlane) -> None:
    month(plane, 0, alice="1")
    assert plane.points.snapshot_of("acme", NOON + HOUR) is None
    assert plane.points.snapshot_of("acme2", NOON) is None


def test_a_chosen_snapshot_contains_only_its_own_usages(plane: ControlPlane) -> None:
    month(plane, 0, alice="5", bo="1")
    month(plane, 1, alice="3")
    month(plane, 2, alice="9", cy="1")
    assert the_point(plane, NOON + HOUR) == TenantPoint(
        tenant="acme",
        newest_at=NOON + HOUR,
        windows=(
            WindowPoint(
                of=MONTH,
                usages={"alice": Decimal(3)},
                newest_at=NOON + HOUR,
                shape=ValueShape.TEXT,
                expiries={"alice": 86400},
                sources={"alice": NOON + HOUR},
                source=CaptureSource.COUNTERS,
            ),
        ),
    )


def test_a_chosen_snapshot_lists_closed_windows_too_by_budget_and_token(
    plane: ControlPlane,
) -> None:
    names = [("b", "lifetime"), ("b", "2020-01"), ("a", "2026-11-20"), ("é", "2030-Q1")]
    plane.capture("acme", {name: {"alice": "1"} for name in names}, at=NOON)
    plane.clock.set(datetime(2026, 12, 5, tzinfo=UTC))
    windows = [(each.of.budget, each.of.window.token) for each in the_point(plane, NOON).windows]
    assert windows == [("a", "2026-11-20"), ("b", "2020-01"), ("b", "lifetime"), ("é", "2030-Q1")]


def test_a_chosen_snapshot_has_its_own_marks(plane: ControlPlane) -> None:
    capture_marked(plane, 0, NAN)
    month(plane, 1, alice="2")
    window, point = the_window(plane, NOON), the_point(plane, NOON)
    assert (window.is_truncated, window.is_partial, window.omitted) == (True, True, (NAN,))
    assert point.unreadable_count == 101
    assert the_point(plane, NOON + HOUR).unreadable_count == 0


def test_a_snapshot_without_records_can_be_chosen(plane: ControlPlane) -> None:
    plane.commit(plane.take(reading("acme", {}, unreadable=(UNREADABLE,))))
    assert the_point(plane, NOON) == TenantPoint("acme", NOON, (), (UNREADABLE,), 1)


def test_shape_and_expiries_come_from_the_newest_record_that_has_them(
    plane: ControlPlane,
) -> None:
    def read(shape: ValueShape | None, expiry: Expiry) -> TenantReading:
        counter = CounterReading(MONTH, "alice", Decimal(1), shape, expiry)
        source = CaptureSource.COUNTERS if shape else CaptureSource.LEADERBOARDS
        return TenantReading("acme", source, (counter,), (), (), is_partial=False)

    records: list[tuple[ValueShape | None, Expiry]] = [
        (None, None),
        (ValueShape.TEXT, NO_EXPIRY),
        (ValueShape.BARE, 60),
        (None, None),
    ]
    for hour, known in enumerate(records):
        plane.clock.set(NOON + hour * HOUR)
        plane.commit(plane.take(read(*known)))
    for hour in range(4):
        window = the_window(plane, NOON + hour * HOUR)
        assert (window.shape, window.expiries) == (ValueShape.BARE, {"alice": 60})


def test_a_damaged_record_of_a_chosen_snapshot_is_reported_and_not_replaced(
    plane: ControlPlane,
) -> None:
    counters: Counters = {("team", "2026-11"): {"alice": "5"}, ("b", "2026-11"): {"bo": "1"}}
    plane.capture("acme", counters, at=NOON)
    plane.capture("acme", counters, at=NOON + HOUR)
    # The records share their content, so both are damaged.
    plane.corrupt("acme", NOON + HOUR, MONTH)
    intact, damaged = the_point(plane, NOON + HOUR).windows
    assert (intact.usages, intact.corrupt) == ({"bo": Decimal(1)}, ())
    assert (damaged.of, damaged.usages, damaged.sources) == (MONTH, {}, {})
    assert damaged.corrupt == (NOON + HOUR,)


def test_a_record_with_an_invalid_window_is_reported(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    month(postgres_plane, 0, alice="1")
    admin.execute("update budget_recovery.budget_record set window_token = '2026-13'")
    with pytest.raises(DatabaseError, match="is damaged: '2026-13' is not a budget window"):
        postgres_plane.points.snapshot_of("acme", NOON)
