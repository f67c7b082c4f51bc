"""A stored content is damaged, and nine days of captures follow: nothing believes it.

Every path that reads contents is asked: sharing, covering, pruning, points, views, tables, reports.
"""

from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal

import psycopg
import pytest

from budget_recovery_dagster.domain import Hour, Usages, hash_usages
from budget_recovery_dagster.errors import DatabaseError
from tests.contract.control_planes import NOON, ControlPlane, Counters, of

pytestmark = pytest.mark.slow

HOUR = timedelta(hours=1)
NINE_DAYS = range(2, 2 + 9 * 24, 3)
"""Every third hour."""
LIFETIME = ("team", "lifetime")
UNCHECKED = (
    "alter table budget_recovery.budget_content"
    " drop constraint content_lists_are_flat, drop constraint content_lists_are_of_one_length,"
    " drop constraint content_has_no_null, drop constraint content_usages_are_in_bounds;"
)
HIGHER = "update budget_recovery.budget_content set usages = '{999}' where usages = '{30}'"
LOWER = "update budget_recovery.budget_content set usages = '{1}' where usages = '{30}'"
OTHER_NAME = "update budget_recovery.budget_content set entities = '{bob}' where usages = '{30}'"
NO_LIST = (
    f"{UNCHECKED} update budget_recovery.budget_content set entities = '{{}}'"
    " where usages = '{30}'"
)
NULL = (
    f"{UNCHECKED} update budget_recovery.budget_content set usages = '{{NULL}}'"
    " where usages = '{30}'"
)
GONE = (
    "alter table budget_recovery.budget_record drop constraint budget_record_content_id_fkey;"
    " delete from budget_recovery.budget_content where usages = '{30}'"
)
DAMAGES = [
    pytest.param(HIGHER, id="higher"),
    pytest.param(LOWER, id="lower"),
    pytest.param(OTHER_NAME, id="another entity"),
    pytest.param(NO_LIST, id="lists of two lengths"),
    pytest.param(NULL, id="a null"),
    pytest.param(GONE, id="missing"),
]


@pytest.fixture
def plane(postgres_plane: ControlPlane, admin: psycopg.Connection) -> ControlPlane:
    """Return a plane with 20, then 30, in the lifetime of alice; and an idle tenant."""
    postgres_plane.capture("idle", {("other", "lifetime"): {"x": "7"}}, at=NOON)
    postgres_plane.capture("acme", {LIFETIME: {"alice": "20"}}, at=NOON)
    postgres_plane.capture("acme", {LIFETIME: {"alice": "30"}}, at=NOON + HOUR)
    return postgres_plane


def pass_days(plane: ControlPlane, counters: Counters) -> None:
    """Capture and prune for nine days."""
    for hour in NINE_DAYS:
        plane.capture("acme", counters, at=NOON + hour * HOUR)
        assert plane.prune_after_gap("acme").awaited_captures == 0


def restorable(plane: ControlPlane, admin: psycopg.Connection) -> Usages:
    """Return what every reader of points shows of alice's budget; require that they agree."""
    now = plane.clock.now()
    (window,) = plane.current_windows("acme")
    rows = admin.execute(
        "select entity, usage from budget_recovery.recovery_point where tenant = 'acme'"
    ).fetchall()
    assert dict(rows) == window.usages
    assert plane.points.current_usages("acme", now).get(of(*LIFETIME), {}) == window.usages
    assert sum(plane.points.damaged(now).records.values()) == len(window.corrupt)
    return window.usages


def contents(admin: psycopg.Connection, usages: Usages) -> Sequence[tuple[bool, int]]:
    """Return whether each content with the hash of these usages is intact, and its records."""
    return admin.execute(
        "select budget_recovery.is_stored_intact(c.content_id), count(r.content_id)"
        " from budget_recovery.budget_content c"
        " left join budget_recovery.budget_record r using (content_id)"
        " where c.content_hash = %s group by c.content_id order by c.content_id",
        (hash_usages(usages),),
    ).fetchall()


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_next_capture_of_the_same_usages_writes_them_anew(
    plane: ControlPlane, admin: psycopg.Connection, damage: str
) -> None:
    admin.execute(damage.encode())
    assert restorable(plane, admin) == {"alice": Decimal(20)}
    plane.capture("acme", {LIFETIME: {"alice": "30"}}, at=NOON + 2 * HOUR)
    assert contents(admin, {"alice": Decimal(30)}) == (
        [(True, 1)] if damage == GONE else [(False, 1), (True, 1)]
    )
    assert restorable(plane, admin) == {"alice": Decimal(30)}


def test_after_nine_days_only_intact_records_are_left(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    admin.execute(HIGHER.encode())
    pass_days(plane, {LIFETIME: {"alice": "30"}})
    # Seven days of eight captures, and one that is exactly seven days old. They share one content.
    assert contents(admin, {"alice": Decimal(30)}) == [(True, 7 * 8 + 1)]
    assert restorable(plane, admin) == {"alice": Decimal(30)}
    assert plane.points.damaged(plane.clock.now()).records == {}


@pytest.mark.parametrize("damage", [HIGHER, LOWER, GONE], ids=["higher", "lower", "missing"])
@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param({}, {"alice": Decimal(20)}, id="the counter is gone"),
        pytest.param({"alice": "2"}, {"alice": Decimal(20)}, id="the counter is low"),
        pytest.param({"bob": "5"}, {"alice": Decimal(20), "bob": Decimal(5)}, id="another counter"),
    ],
)
def test_the_last_good_value_survives_nine_days(
    plane: ControlPlane,
    admin: psycopg.Connection,
    damage: str,
    held: dict[str | None, str],
    expected: Usages,
) -> None:
    admin.execute(damage.encode())
    pass_days(plane, {LIFETIME: held} if held else {("spare", "2026-Q4"): {None: "1"}})
    if not held:
        admin.execute("delete from budget_recovery.budget_record where budget_id = 'spare'")
    assert restorable(plane, admin) == expected
    (window,) = plane.current_windows("acme")
    # The damage stays visible: no intact record holds as much.
    assert window.corrupt == (NOON + HOUR,)
    # A restore of the named snapshot uses nothing of it, and says so.
    named = plane.points.snapshot_of("acme", NOON + HOUR)
    assert named is not None
    assert (named.windows[0].usages, named.windows[0].has_intact_record) == ({}, False)


def test_a_table_of_a_damaged_snapshot_is_refused_and_those_of_others_are_written(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    admin.execute(HIGHER.encode())
    plane.capture("acme", {LIFETIME: {"alice": "30"}}, at=NOON + 2 * HOUR)
    with plane.snapshots.records_of("acme", Hour(NOON + HOUR)) as records:
        assert records is not None
        with pytest.raises(DatabaseError, match="checksum mismatch"):
            list(records)
    for hour in (0, 2):
        with plane.snapshots.records_of("acme", Hour(NOON + hour * HOUR)) as records:
            assert records is not None
            assert [each.usages["alice"] for each in records] == [20 if hour == 0 else 30]
    assert len(plane.reports.damaged_in(Hour(NOON + HOUR))) == 1
    assert plane.reports.damaged_in(Hour(NOON + 2 * HOUR)) == ()


def test_damage_to_the_only_content_of_an_idle_tenant_is_shown_and_mended_by_its_next_capture(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    # All records of an idle counter share one content.
    for hour in range(2, 30):
        plane.capture("idle", {("other", "lifetime"): {"x": "7"}}, at=NOON + hour * HOUR)
    admin.execute("update budget_recovery.budget_content set usages = '{70}' where usages = '{7}'")
    (window,) = plane.current_windows("idle")
    assert (window.usages, len(window.corrupt)) == ({}, 29)
    assert plane.points.newest_points(plane.clock.now()).keys() == {"acme"}
    plane.capture("idle", {("other", "lifetime"): {"x": "7"}}, at=NOON + 30 * HOUR)
    (window,) = plane.current_windows("idle")
    assert window.usages == {"x": Decimal(7)}
    # The new record covers the damaged ones: nothing is missing any more.
    assert window.corrupt == ()
    assert plane.points.newest_points(plane.clock.now())["idle"] == NOON + 30 * HOUR
