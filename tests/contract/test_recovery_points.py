from datetime import UTC, datetime, timedelta
from decimal import Decimal

import psycopg
import pytest

from budget_recovery_dagster.domain import EVERYONE, Entity, Hour, OmittedCounter, Period, Window
from tests.contract.control_planes import NOON, ControlPlane, Counters, of, point_of, reading

HOUR = Hour(NOON)
LATER = NOON + timedelta(minutes=30)
TEAM: Counters = {("team", "lifetime"): {"alice": "1.5", None: "7"}}
MORE: Counters = {("team", "lifetime"): {"alice": "2.5", None: "8"}}


def test_a_recovery_point_contains_only_open_windows(plane: ControlPlane) -> None:
    tokens = ("2026-11-24", "2026-11-25", "2026-W47", "2026-W48", "2026-11", "2026-Q4", "lifetime")
    plane.capture("acme", {("team", token): {"alice": "1"} for token in tokens})
    point = plane.points.current_usages("acme", NOON)
    assert {each.window.token for each in point} == set(tokens) - {"2026-11-24", "2026-W47"}
    midnight = datetime(2026, 11, 26, tzinfo=UTC)
    assert of("team", "2026-11-25") in plane.points.current_usages(
        "acme", midnight - timedelta(microseconds=1)
    )
    assert of("team", "2026-11-25") not in plane.points.current_usages("acme", midnight)


def test_a_recovery_point_is_the_maximum_over_records(plane: ControlPlane) -> None:
    for minute, usages in enumerate(
        (
            {"alice": "1", "bo": "9"},
            {"alice": "2", "bo": "9", "cy": "3"},
            {"alice": "3", "cy": "2"},
            {"alice": "4"},
        )
    ):
        plane.capture("acme", {("team", "2026-11"): usages}, at=NOON + timedelta(minutes=minute))
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(
        {("team", "2026-11"): {"alice": "4", "bo": "9", "cy": "3"}}
    )


def test_a_budget_missing_from_the_last_snapshot_is_still_in_the_point(
    plane: ControlPlane,
) -> None:
    plane.capture("acme", TEAM)
    plane.capture("acme", {("other", "lifetime"): {"alice": "1"}}, at=LATER)
    assert plane.points.current_usages("acme", LATER) == point_of(
        {**TEAM, ("other", "lifetime"): {"alice": "1"}}
    )


def test_a_window_without_readable_counters_is_not_in_the_point(plane: ControlPlane) -> None:
    omitted = (OmittedCounter(of("team", "lifetime"), "alice", "key", "not a number"),)
    plane.commit(plane.take(reading("acme", {}, omitted=omitted)))
    assert plane.points.current_usages("acme", NOON) == {}
    assert plane.reports.captured_in(HOUR)[0].omitted_count == 1


def test_a_recovery_point_contains_only_its_tenant(plane: ControlPlane) -> None:
    plane.capture("acme", TEAM)
    plane.capture("acme2", MORE)
    assert plane.points.current_usages("acme", NOON) == point_of(TEAM)
    assert plane.points.current_usages("unknown", NOON) == {}


@pytest.mark.parametrize(
    "usage",
    [
        "0",
        "0.000000000000000001",
        "16777216.01",
        "12345678901234567890.123456789012345678",
        "99999999999999999999.999999999999999999",
        "100000",
    ],
)
def test_usages_are_exact(plane: ControlPlane, usage: str) -> None:
    plane.capture("acme", {("team", "lifetime"): {"alice": usage}})
    point = plane.points.current_usages("acme", NOON)
    assert point == {of("team", "lifetime"): {"alice": Decimal(usage)}}
    assert plane.reports.damaged_in(HOUR) == ()


NAMES = [
    "a b",
    "tab\tline\nreturn\rend",
    "quote \" and ' and \\ and \\N",
    "{braces},{NULL}",
    "NULL",
    "*",
    ">",
    "%s %(name)s %%",
    "🦀 é é 漢字 \u202e",
    "\x01\x7f\u0085",
    " ",
    "x" * 600,
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_may_contain_any_character(plane: ControlPlane, name: str) -> None:
    counters: Counters = {(name, "lifetime"): {name: "1", None: "2"}}
    plane.capture(name, counters, run_id=name)
    assert plane.snapshots.tenants() == {name}
    assert plane.points.current_usages(name, NOON) == point_of(counters)
    assert [each.tenant for each in plane.reports.captured_by(name)] == [name]
    plane.capture(name, {}, at=LATER, run_id="second")
    assert {drop.entity for drop in plane.reports.drops_of("second")} == {name, None}
    assert plane.reports.damaged_in(HOUR) == ()


def test_the_view_contains_what_a_restore_would_use(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    """The view uses the server's clock, so the windows are those of today."""
    plane = postgres_plane
    today = datetime.now(UTC)
    month = Window.containing(Period.MONTH, today).token
    first: Counters = {
        ("team", "lifetime"): {"alice": "5", "bob": "1", None: "6"},
        ("team", month): {"alice": "2"},
        ("team", "2020-01"): {"alice": "100"},
    }
    lower: Counters = {("team", "lifetime"): {"alice": "3", "bob": "4"}}
    before = today - timedelta(hours=1)
    plane.capture("acme", first, at=before)
    plane.capture("acme", lower, at=today)
    plane.capture("other", {("team", "lifetime"): {"alice": "7"}})
    point = plane.points.current_usages("acme", today)
    rows = admin.execute(
        "select budget_id, window_token, entity, usage, last_captured_at"
        " from budget_recovery.recovery_point where tenant = 'acme'"
        " order by window_token, entity nulls first"
    ).fetchall()
    assert rows == [
        ("team", month, "alice", Decimal(2), before),
        ("team", "lifetime", None, Decimal(6), before),
        ("team", "lifetime", "alice", Decimal(5), today),
        ("team", "lifetime", "bob", Decimal(4), today),
    ]
    assert point == {
        of(budget, token): {row[2]: row[3] for row in rows if (row[0], row[1]) == (budget, token)}
        for budget, token in {(row[0], row[1]) for row in rows}
    }


def test_the_view_excludes_usages_that_were_reset(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane = postgres_plane
    today = datetime.now(UTC)
    month = Window.containing(Period.MONTH, today).token
    usages = {"alice": "5", "bob": "1", None: "6"}
    for budget in ("all", "aggregate", "one"):
        plane.capture(budget, {(budget, "lifetime"): usages, (budget, month): usages}, at=today)
    plane.capture(
        "one", {("one", "lifetime"): {"alice": "2", "bob": "3"}}, at=today + timedelta(hours=1)
    )
    plane.reset(today, EVERYONE, tenant="all", budget="all", window=month)
    plane.reset(today, None, tenant="aggregate", budget="aggregate")
    plane.reset(today, "alice", tenant="one", budget="one", window="lifetime")
    rows = admin.execute(
        "select budget_id, window_token = 'lifetime', entity, usage"
        " from budget_recovery.recovery_point order by 1, 2 desc, 3 nulls first"
    ).fetchall()
    alice, bob, whole = ("alice", Decimal(5)), ("bob", Decimal(1)), (None, Decimal(6))
    assert rows == [
        *[("aggregate", True, *each) for each in (alice, bob)],
        *[("aggregate", False, *each) for each in (alice, bob)],
        *[("all", True, *each) for each in (whole, alice, bob)],
        ("one", True, None, Decimal(6)),
        ("one", True, "alice", Decimal(2)),
        ("one", True, "bob", Decimal(3)),
        *[("one", False, *each) for each in (whole, alice, bob)],
    ]


def test_the_view_is_fast_after_the_reset_of_many_entities(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane = postgres_plane
    today = datetime.now(UTC)
    names = [f"entity-{number:05}" for number in range(20_000)]
    for hours in range(5):
        usages: dict[Entity, str] = {**dict.fromkeys(names, str(hours + 1)), "other": "1"}
        at = today - timedelta(hours=5 - hours)
        plane.capture("acme", {("team", "lifetime"): usages}, at=at)
    plane.reset(today, frozenset(names), tenant="acme", budget="team")
    with admin.transaction():
        # Compared one by one, they take minutes.
        admin.execute("set local statement_timeout = '20s'")
        rows = admin.execute("select entity, usage from budget_recovery.recovery_point").fetchall()
    assert rows == [("other", Decimal(1))]


def test_the_view_ignores_damaged_records(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane = postgres_plane
    today = datetime.now(UTC)
    before, lost = today - timedelta(hours=1), of("lost", "lifetime")
    plane.capture("acme", {**TEAM, ("lost", "lifetime"): {"alice": "4"}}, at=before)
    plane.capture("acme", MORE, at=today)
    plane.corrupt("acme", today, of("team", "lifetime"))
    plane.corrupt("acme", before, lost)
    rows = admin.execute(
        "select budget_id, entity, usage, last_captured_at from budget_recovery.recovery_point"
        " order by entity nulls first"
    ).fetchall()
    assert rows == [
        ("team", None, Decimal(7), before),
        ("team", "alice", Decimal("1.5"), before),
    ]
    damaged = admin.execute(
        "select tenant, captured_at, budget_id, window_token from budget_recovery.damaged_record"
        " order by captured_at"
    ).fetchall()
    assert damaged == [
        ("acme", before, "lost", "lifetime"),
        ("acme", today, "team", "lifetime"),
    ]


def test_windows_of_the_view_are_open_by_their_token(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane = postgres_plane
    today = datetime.now(UTC)
    tokens = sorted(Window.containing(period, today).token for period in Period)
    closed = ("2020-01-01", "2020-W01", "2020-01", "2020-Q1")
    plane.capture("acme", {("team", token): {"a": "1"} for token in (*tokens, *closed)}, at=today)
    admin.execute(
        "update budget_recovery.budget_record"
        " set window_start = '2020-01-01', window_end = '2020-01-02'"
        " where window_start is not null"
    )
    rows = admin.execute("select window_token from budget_recovery.recovery_point").fetchall()
    assert sorted(token for (token,) in rows) == tokens
    assert {each.window.token for each in plane.points.current_usages("acme", today)} == set(tokens)
