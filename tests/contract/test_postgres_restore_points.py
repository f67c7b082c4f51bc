"""Recovery points from a damaged database: damage is never used and always reported."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import psycopg
import pytest

from budget_recovery_dagster.domain import Usages, WindowPoint
from budget_recovery_dagster.errors import DatabaseError
from tests.contract.control_planes import NOON, ControlPlane, of

NOTHING: Usages = {}
MONTH = of("team", "2026-11")


@pytest.fixture
def plane(postgres_plane: ControlPlane) -> ControlPlane:
    return postgres_plane


def month(plane: ControlPlane, usage: str) -> None:
    plane.capture("acme", {("team", "2026-11"): {"alice": usage}}, at=NOON)


def windows(plane: ControlPlane, now: datetime = NOON) -> tuple[WindowPoint, ...]:
    point = plane.points.point_of("acme", now)
    assert point is not None
    return point.windows


# Constraints of the tables prevent some damage, but a disk may contain anything.
UNCHECKED = (
    "alter table budget_recovery.budget_content"
    " drop constraint content_lists_are_flat, drop constraint content_lists_are_of_one_length,"
    " drop constraint content_has_no_null, drop constraint content_usages_are_in_bounds;"
)
UPDATE = "update budget_recovery.budget_content set"


@pytest.mark.parametrize(
    "damage",
    [
        f"{UPDATE} usages[1] = 0",
        f"{UPDATE} entities[1] = 'mallory'",
        f"{UPDATE} entities = '{{a,a}}', usages = '{{1,1}}'",
        f"{UNCHECKED} {UPDATE} usages = '{{1,2}}'",
        f"{UNCHECKED} {UPDATE} usages = '{{NULL}}'",
        f"{UNCHECKED} {UPDATE} entities = '{{NULL}}'",
        f"{UNCHECKED} {UPDATE} usages = '{{NaN}}'",
        f"{UNCHECKED} {UPDATE} usages = '{{Infinity}}'",
        f"{UNCHECKED} {UPDATE} entities = '{{{{a,b}},{{c,d}}}}', usages = '{{{{1,2}},{{3,4}}}}'",
        f"{UPDATE} content_hash = sha256(content_hash)",
        (
            "alter table budget_recovery.budget_record drop constraint"
            " budget_record_content_id_fkey; delete from budget_recovery.budget_content"
        ),
    ],
)
def test_records_with_a_damaged_content_are_reported_and_not_used(
    plane: ControlPlane, admin: psycopg.Connection, damage: str
) -> None:
    month(plane, "1")
    admin.execute(damage.encode())
    (window,) = windows(plane)
    assert (window.usages, window.corrupt) == (NOTHING, (NOON,))


@pytest.mark.parametrize(
    "damage",
    [
        "window_start = '2025-01-01T00:00Z', window_end = '2025-02-01T00:00Z'",
        "window_start = '2026-11-01T00:00Z', window_end = 'infinity'",
    ],
)
def test_a_window_is_defined_by_its_token(
    plane: ControlPlane, admin: psycopg.Connection, damage: str
) -> None:
    month(plane, "1")
    admin.execute(f"update budget_recovery.budget_record set {damage}".encode())
    assert windows(plane)[0].usages == {"alice": Decimal(1)}
    december = datetime(2026, 12, 5, tzinfo=UTC)
    (closed,) = windows(plane, december)
    assert not closed.of.window.is_current(december)


def test_an_unknown_shape_is_none(plane: ControlPlane, admin: psycopg.Connection) -> None:
    month(plane, "1")
    admin.execute("update budget_recovery.budget_record set value_shape = 'XML'")
    (window,) = windows(plane)
    assert (window.shape, window.expiry_seconds, window.usages) == (
        None,
        None,
        {"alice": Decimal(1)},
    )


def test_a_capture_reads_only_the_usages_of_open_windows(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.capture("acme", {("team", "2026-10"): {"alice": "9"}}, at=NOON - timedelta(days=30))
    month(plane, "1")
    # A restore needs the shape to create keys, and fails without this column.
    admin.execute("alter table budget_recovery.budget_record drop column value_shape")
    assert plane.points.current_usages("acme", NOON) == {MONTH: {"alice": Decimal(1)}}
    with pytest.raises(DatabaseError, match="value_shape"):
        plane.points.point_of("acme", NOON)


def test_many_contents_are_read_in_batches(plane: ControlPlane, admin: psycopg.Connection) -> None:
    counters = {(f"b{number:04}", "2026-11"): {"alice": str(number)} for number in range(1203)}
    plane.capture("acme", counters, at=NOON)
    admin.execute(f"{UPDATE} usages = '{{5000}}' where usages = '{{777}}'".encode())
    found = windows(plane)
    assert [each.usages for each in found if not each.corrupt] == [
        {"alice": Decimal(number)} for number in range(1203) if number != 777
    ]
    assert [each.of.budget for each in found if each.corrupt] == ["b0777"]
