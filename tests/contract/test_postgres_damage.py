"""Whatever happened to a stored snapshot, its verification says so and does not break down."""

from datetime import timedelta
from decimal import Decimal

import psycopg
import pytest

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.errors import DatabaseError
from tests.contract.control_planes import NOON, ControlPlane, Counters, point_of

HOUR = timedelta(hours=1)
TEAM: Counters = {("team", "lifetime"): {"alice": "1"}}
OTHER_USAGES = "budget 'team', window lifetime, holds other usages than were captured"


@pytest.fixture
def plane(postgres_plane: ControlPlane) -> ControlPlane:
    return postgres_plane


# The tables refuse some damage themselves, but what is on a disk can be anything.
UNCHECKED = (
    "alter table budget_recovery.budget_content"
    " drop constraint content_lists_are_flat, drop constraint content_lists_are_of_one_length,"
    " drop constraint content_has_no_null, drop constraint content_usages_are_in_bounds;"
)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            "update budget_recovery.budget_content set usages[1] = 2",
            OTHER_USAGES,
        ),
        (
            "update budget_recovery.budget_content set entities[1] = 'mallory'",
            OTHER_USAGES,
        ),
        (
            "update budget_recovery.budget_content set entities = '{a,a}', usages = '{1,1}'",
            "2 counters are stored and 1 were captured",
        ),
        (f"{UNCHECKED} update budget_recovery.budget_content set usages = '{{1,2}}'", OTHER_USAGES),
        (f"{UNCHECKED} update budget_recovery.budget_content set entities = '{{}}'", OTHER_USAGES),
        (
            f"{UNCHECKED} update budget_recovery.budget_content set usages = '{{NULL}}'",
            OTHER_USAGES,
        ),
        (
            f"{UNCHECKED} update budget_recovery.budget_content set entities = '{{NULL}}'",
            OTHER_USAGES,
        ),
        (f"{UNCHECKED} update budget_recovery.budget_content set usages = '{{NaN}}'", OTHER_USAGES),
        (
            (
                f"{UNCHECKED} update budget_recovery.budget_content"
                " set entities = '{{a,b},{c,d}}', usages = '{{1,2},{3,4}}'"
            ),
            OTHER_USAGES,
        ),
        (
            "update budget_recovery.budget_content set content_hash = sha256(content_hash)",
            OTHER_USAGES,
        ),
        (
            (
                "update budget_recovery.budget_record set window_token = '2026-11',"
                " window_start = '2026-11-01T00:00Z', window_end = 'infinity'"
            ),
            "budget 'team', window 2026-11, is stored with the edges of another window",
        ),
        (
            (
                "update budget_recovery.budget_record set window_token = '2026-13',"
                " window_start = '2026-11-01T00:00Z', window_end = '2026-12-01T00:00Z'"
            ),
            "budget 'team', window 2026-13, is no window that a budget can have",
        ),
        (
            "delete from budget_recovery.budget_record",
            "0 records are stored and 1 were captured",
        ),
        (
            "update budget_recovery.capture set omitted_count = 1",
            "0 omitted counters are stored and 1 were captured",
        ),
        (
            (
                "update budget_recovery.budget_record set window_token = '2026-11',"
                " window_start = '2026-11-02T00:00Z', window_end = '2026-12-01T00:00Z'"
            ),
            "budget 'team', window 2026-11, is stored with the edges of another window",
        ),
    ],
)
def test_damage_is_told_in_a_sentence(
    plane: ControlPlane, admin: psycopg.Connection, damage: str, sentence: str
) -> None:
    plane.capture("acme", TEAM)
    plane.capture("acme", {("team", "lifetime"): {"alice": "3"}}, at=NOON + HOUR)
    assert plane.reports.damaged_in(Hour(NOON)) == ()
    admin.execute(damage.encode())
    damaged = plane.reports.damaged_in(Hour(NOON))
    assert f"tenant 'acme', 2026-11-25 12:00:00 UTC: {sentence}." in damaged
    assert plane.reports.damaged_in(Hour(NOON + 2 * HOUR)) == ()


def test_a_missing_content_is_told_by_whoever_shows_it(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.capture("acme", TEAM)
    admin.execute(
        "alter table budget_recovery.budget_record drop constraint"
        " budget_record_content_id_fkey; delete from budget_recovery.budget_content"
    )
    with pytest.raises(DatabaseError, match="Of 1 stored contents 1 are missing"):
        plane.points.windows_of("acme", NOON)
    with plane.retained.records_of("acme", Hour(NOON)) as records:
        assert records is not None
        with pytest.raises(DatabaseError, match="Of 1 stored contents 1 are missing"):
            list(records)


def test_a_record_does_not_claim_to_cover_what_was_damaged(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.capture("acme", {("team", "lifetime"): {"alice": "8"}})
    plane.capture("acme", {("team", "lifetime"): {"alice": "9"}}, at=NOON + HOUR)
    # The newest record, which covers the one before, now says less than it did.
    admin.execute("update budget_recovery.budget_content set usages = '{1}' where usages = '{9}'")

    plane.capture("acme", {("team", "lifetime"): {"alice": "2"}}, at=NOON + 2 * HOUR)

    # 8 is the highest that is still sound; a claim to cover would have hidden it behind the 2.
    assert plane.snapshots.recovery_point("acme", NOON + 2 * HOUR) == point_of(
        {("team", "lifetime"): {"alice": "8"}}
    )
    point = plane.restore_points.point_of("acme", NOON + 2 * HOUR)
    assert point is not None
    assert point.windows[0].usages == {"alice": Decimal(8)}
