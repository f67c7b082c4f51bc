"""Recovery points from a damaged database: damage is never used and always reported."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budget_recovery_dagster.domain import (
    NEVER_EXPIRES,
    NO_EXPIRY,
    CaptureSource,
    CounterReading,
    Entity,
    KnownExpiry,
    NoExpiry,
    TenantReading,
    Usages,
    ValueShape,
    WindowPoint,
    hash_expiries,
)
from budget_recovery_dagster.errors import DatabaseError
from tests.contract.control_planes import NOON, ControlPlane, of

NOTHING: Usages = {}
MONTH = of("team", "2026-11")
HOUR = timedelta(hours=1)


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
    assert (window.shape, window.usages) == (None, {"alice": Decimal(1)})


def test_records_of_version_1_know_one_expiry_or_none(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    """Its null with a shape: all keys had no expiry, or only some of them."""
    as_stored = "update budget_recovery.budget_record set expiry_kind = null, expiry_seconds = "
    month(plane, "1")
    admin.execute(f"{as_stored}86400".encode())
    assert windows(plane)[0].expiries == {"alice": 86400}
    admin.execute(f"{as_stored}null".encode())
    (window,) = windows(plane)
    assert (window.shape, window.expiries) == (ValueShape.TEXT, {})


DIFFERENT: Mapping[Entity, KnownExpiry] = {
    None: 3600,
    "alice": NO_EXPIRY,
    "bø": -7,
    "cy": NEVER_EXPIRES,
}


def capture_expiring(plane: ControlPlane, expiries: Mapping[Entity, KnownExpiry]) -> None:
    counters = tuple(
        CounterReading(MONTH, entity, Decimal(5), ValueShape.TEXT, expiry)
        for entity, expiry in expiries.items()
    )
    source = CaptureSource.COUNTERS
    plane.commit(plane.take(TenantReading("acme", source, counters, (), (), is_partial=False)))


def test_an_hour_costs_only_the_expiries_that_changed(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    def stored() -> list[tuple[object, ...]]:
        return admin.execute(
            "select r.expiry_seconds, r.expiry_kind, c.content_id, c.entities, c.expiries,"
            " c.never_expires"
            " from budget_recovery.budget_record r join budget_recovery.budget_content c"
            " using (content_id) order by r.captured_at"
        ).fetchall()

    for hour, expiries in enumerate(
        [
            DIFFERENT,
            DIFFERENT,
            dict.fromkeys(DIFFERENT, 3600),
            dict.fromkeys(DIFFERENT, NO_EXPIRY),
            dict.fromkeys(DIFFERENT, NEVER_EXPIRES),
            {**DIFFERENT, None: 7200},
        ]
    ):
        plane.clock.set(NOON + hour * HOUR)
        capture_expiring(plane, expiries)
    (first, second, same, none, never, changed) = stored()
    assert first == second
    assert first[:2] == (None, "per_key")
    assert first[3:] == (
        ["", "alice", "bø", "cy"],
        [3600, None, -7, None],
        [False, False, False, True],
    )
    # Without differences the usages alone are the content.
    alike = (same, none, never)
    assert [row[:2] for row in alike] == [(3600, None), (None, "none"), (None, "never")]
    assert {row[4:] for row in alike} == {(None, None)}
    assert same[2] == none[2] == never[2]
    assert changed[4] == [7200, None, -7, None]
    assert len({row[2] for row in (first, same, changed)}) == 3
    assert windows(plane)[0].expiries == {**DIFFERENT, None: 7200}


@pytest.mark.parametrize(
    "damage",
    [
        "expiries = '{3600,null,-8,null}'",
        "expiries = '{3600,5,-7,null}'",
        "expiries = '{null,3600,-7,null}'",
        "never_expires = '{f,t,f,t}'",
        "never_expires = '{f,f,f,f}'",
        "never_expires = '{f,f,f,null}'",
        "never_expires = '{f,null,f,t}'",
        "expiry_hash = sha256('')",
        "expiries = null, never_expires = null, expiry_hash = null",
    ],
)
def test_damaged_expiries_are_unknown_and_the_usages_still_count(
    plane: ControlPlane, admin: psycopg.Connection, damage: str
) -> None:
    capture_expiring(plane, DIFFERENT)
    admin.execute(f"update budget_recovery.budget_content set {damage}".encode())
    (window,) = windows(plane)
    assert (window.expiries, window.corrupt) == ({}, ())
    assert window.usages == dict.fromkeys(DIFFERENT, Decimal(5))
    # The next record does not share the damaged content.
    plane.clock.set(NOON + HOUR)
    capture_expiring(plane, DIFFERENT)
    assert windows(plane)[0].expiries == DIFFERENT


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@given(
    st.dictionaries(
        st.none() | names,
        st.integers(-(2**40), 2**40) | st.sampled_from(NoExpiry),
        max_size=8,
    )
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
def test_the_server_hashes_expiries_as_the_captures_do(
    admin: psycopg.Connection, expiries: Mapping[Entity, KnownExpiry]
) -> None:
    entities = [entity or "" for entity in expiries]
    seconds = [each if isinstance(each, int) else None for each in expiries.values()]
    never = [each is NEVER_EXPIRES for each in expiries.values()]
    row = admin.execute(
        "select budget_recovery.expiries_are_intact(%s, %s::text[], %s::bigint[], %s::boolean[])",
        (hash_expiries(expiries), entities, seconds, never),
    ).fetchone()
    assert row == (True,)


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
