"""Snapshots from leaderboards, in memory and in PostgreSQL."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import psycopg
import pytest

from budget_recovery_dagster.domain import CaptureSource, Hour, TenantReading, UnlistedEntities
from tests.contract.control_planes import NOON, ControlPlane, Counters, of, point_of, reading

HOUR = Hour(NOON)
TEAM = of("team", "lifetime")


def from_boards(counters: Counters, *, lowest: str | None = None) -> TenantReading:
    """Return a reading of boards; the one of the team is full if ``lowest`` is given."""
    counted = reading("acme", counters)
    unlisted = (
        () if lowest is None else (UnlistedEntities(TEAM, Decimal(lowest), is_truncated=True),)
    )
    return replace(
        counted,
        source=CaptureSource.LEADERBOARDS,
        counters=tuple(replace(counter, shape=None, expiry=None) for counter in counted.counters),
        unlisted=unlisted,
    )


def take(plane: ControlPlane, minute: int, read: TenantReading, run_id: str = "a run") -> None:
    plane.clock.set(NOON + timedelta(minutes=minute))
    plane.commit(plane.take(read), run_id=run_id)


def test_a_snapshot_from_leaderboards_is_stored_with_its_source(plane: ControlPlane) -> None:
    take(plane, 1, from_boards({("team", "lifetime"): {"a": "3", "b": "2"}}, lowest="2"))
    (summary,) = plane.reports.captured_in(HOUR)
    assert summary.source is CaptureSource.LEADERBOARDS
    assert (summary.record_count, summary.entry_count, summary.omitted_count) == (1, 2, 0)
    assert plane.reports.damaged_in(HOUR) == ()


def test_a_truncated_record_removes_no_entity_from_the_recovery_point(plane: ControlPlane) -> None:
    window = ("team", "lifetime")
    everybody: Counters = {window: {"a": "3", "b": "2", "c": "1"}}
    take(plane, 1, reading("acme", everybody))
    take(plane, 2, from_boards({window: {"a": "4", "b": "2"}}, lowest="2"), "board")
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(
        {window: {"a": "4", "b": "2", "c": "1"}}
    )
    assert plane.reports.drops_of("board") == ()
    take(plane, 3, from_boards({window: {"a": "4", "d": "0.5"}}, lowest="0.5"), "lost")
    assert [(drop.entity, drop.before, drop.after) for drop in plane.reports.drops_of("lost")] == [
        ("b", "2", None),
        ("c", "1", None),
    ]
    take(plane, 4, reading("acme", {window: {"a": "4", "b": "2", "c": "1", "d": "0.5"}}), "back")
    assert plane.reports.drops_of("back") == ()
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(
        {window: {"a": "4", "b": "2", "c": "1", "d": "0.5"}}
    )


def test_retention_keeps_entities_that_are_no_longer_listed(plane: ControlPlane) -> None:
    window = ("team", "lifetime")
    plane.capture("acme", {window: {"a": "3", "b": "2", "c": "1"}}, at=NOON - timedelta(days=9))
    take(plane, 0, from_boards({window: {"a": "4", "b": "2"}}, lowest="2"))
    assert plane.prune("acme").records == 0
    # A truncated record that covers all usages makes the old one unnecessary.
    take(plane, 1, from_boards({window: {"a": "4", "b": "2", "c": "2"}}, lowest="2"))
    assert plane.prune("acme").records == 1
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(
        {window: {"a": "4", "b": "2", "c": "2"}}
    )


@pytest.mark.parametrize(("lowest", "is_truncated"), [(None, False), ("2", True)])
def test_columns_are_null_if_the_source_lacks_the_value(
    postgres_plane: ControlPlane,
    admin: psycopg.Connection,
    lowest: str | None,
    is_truncated: bool,  # noqa: FBT001 - a value to be compared with
) -> None:
    take(postgres_plane, 1, from_boards({("team", "lifetime"): {"a": "2"}}, lowest=lowest))
    row = admin.execute(
        "select source, is_truncated, value_shape, expiry_seconds, covers_earlier"
        " from budget_recovery.budget_record join budget_recovery.capture"
        " using (tenant, captured_at)"
    ).fetchone()
    assert row == ("leaderboards", is_truncated, None, None, True)


def test_the_summary_of_a_snapshot_counts_its_truncated_records(plane: ControlPlane) -> None:
    boards: Counters = {("team", "lifetime"): {"a": "3"}, ("other", "lifetime"): {"b": "2"}}
    take(plane, 1, from_boards(boards, lowest="3"))
    take(plane, 2, from_boards(boards))
    assert [each.truncated_count for each in plane.reports.captured_in(HOUR)] == [1, 0]
