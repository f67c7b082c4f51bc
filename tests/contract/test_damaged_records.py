"""Every reader of recovery points ignores damaged records and reports them."""

from datetime import timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import Damage, Hour, PruneReport
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.presentation.metadata import points_metadata
from budget_recovery_dagster.services import PointAges, PointSurvey, judge_point_ages, survey_points
from tests.contract.control_planes import NOON, ControlPlane, of, point_of, reading
from tests.contract.incident_scene import LOSS, TARGET

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
TEAM = of("team", "lifetime")
KEPT = PruneReport(records=0, captures=0, contents=0, failures=0)


def capture(plane: ControlPlane, after: timedelta, **usages: str) -> None:
    plane.capture("acme", {("team", "lifetime"): usages}, at=NOON + after)


def corrupt(plane: ControlPlane, after: timedelta) -> None:
    plane.corrupt("acme", NOON + after, TEAM)


def survey(plane: ControlPlane) -> PointSurvey:
    return survey_points(plane)


def ages(plane: ControlPlane) -> PointAges:
    return judge_point_ages(plane)


# The page and its check


def test_the_page_ignores_and_counts_a_damaged_record(plane: ControlPlane) -> None:
    capture(plane, 0 * HOUR, alice="1", bob="3")
    capture(plane, 1 * HOUR, alice="2", bob="3")
    corrupt(plane, 1 * HOUR)
    (window,) = survey(plane).windows
    assert (window.usage, window.entities) == (Decimal(4), 2)
    assert (window.point.newest_at, window.point.corrupt) == (NOON, (NOON + HOUR,))
    shown = points_metadata(survey(plane))
    assert shown["damaged_records"] == 1
    assert shown["newest_point_age_seconds"] == 3600
    (row,) = shown["points"].records
    assert (row.data["usage"], row.data["marks"]) == ("4", "damaged(1)")


def test_the_page_shows_a_window_with_only_damaged_records_as_unknown(plane: ControlPlane) -> None:
    capture(plane, 0 * HOUR, alice="1")
    capture(plane, 1 * HOUR, alice="2")
    corrupt(plane, 0 * HOUR)
    corrupt(plane, 1 * HOUR)
    found = survey(plane)
    assert not any(window.point.has_intact_record for window in found.windows)
    assert found.without_window == ()
    shown = points_metadata(found)
    assert "newest_point_age_seconds" not in shown
    (row,) = shown["points"].records
    assert (row.data["usage"], row.data["marks"]) == ("unknown", "damaged(2)")
    assert (row.data["entities"], row.data["source"]) == (0, "")


def test_a_damaged_record_fails_the_asset_check(plane: ControlPlane) -> None:
    capture(plane, 0 * HOUR, alice="1")
    assert ages(plane).is_sound
    corrupt(plane, 0 * HOUR)
    found = ages(plane)
    assert not found.is_sound
    assert (found.damage.records, found.too_old) == ({"acme": 1}, {})


# Points of all tenants


def test_the_newest_point_is_the_newest_intact_record(plane: ControlPlane) -> None:
    capture(plane, 0 * HOUR, alice="1")
    capture(plane, 1 * HOUR, alice="2")
    corrupt(plane, 1 * HOUR)
    assert plane.points.newest_points(plane.clock.now()) == {"acme": NOON}
    assert plane.reports.newest_snapshots() == {"acme": NOON + HOUR}
    corrupt(plane, 0 * HOUR)
    assert plane.points.newest_points(plane.clock.now()) == {}
    assert plane.points.tenants() == {"acme"}


def test_damaged_records_are_counted_by_tenant_like_those_of_its_point(plane: ControlPlane) -> None:
    for tenant in ("intact", "acme"):
        for hour in range(3):
            counters = {
                ("team", "lifetime"): {tenant: str(hour + 1)},
                ("team", "2026-11"): {tenant: str(hour + 10)},
                ("team", "2026-11-24"): {tenant: str(hour + 20)},
            }
            plane.capture(tenant, counters, at=NOON + hour * HOUR)
    now = plane.clock.now()
    progress: list[str] = []
    assert plane.points.damaged(now, on_progress=progress.append).records == {}
    # A run that verifies for minutes shows that it works.
    assert progress
    # A newer intact record covers this one, so no reader needs it.
    corrupt(plane, 0 * HOUR)
    # This window has closed.
    plane.corrupt("acme", NOON + 2 * HOUR, of("team", "2026-11-24"))
    assert plane.points.damaged(now).records == {}
    corrupt(plane, 2 * HOUR)
    plane.corrupt("acme", NOON + 2 * HOUR, of("team", "2026-11"))
    # If the newest record is damaged, all others of its window are read.
    assert plane.points.damaged(now).records == {"acme": 3}
    assert sum(len(each.corrupt) for each in plane.current_windows("acme")) == 3


def test_a_covered_record_is_not_counted_after_a_reset(plane: ControlPlane) -> None:
    capture(plane, 0 * HOUR, alice="5")
    recorded = plane.reset(NOON)
    capture(plane, 1 * HOUR, alice="1")
    (window,) = plane.current_windows("acme")
    assert (window.usages, window.resets) == ({"alice": Decimal(1)}, (recorded,))
    corrupt(plane, 0 * HOUR)
    assert plane.points.damaged(plane.clock.now()) == Damage({})
    (window,) = plane.current_windows("acme")
    # Only intact records have a usage that a reset excludes.
    assert (window.corrupt, window.resets) == ((), ())
    whole = plane.points.despite_resets().point_of("acme", plane.clock.now())
    assert whole is not None
    assert whole.windows[0].corrupt == (NOON,)


def test_the_records_of_one_tenant_can_be_verified(plane: ControlPlane) -> None:
    for tenant in ("acme", "globex"):
        plane.capture(tenant, {("team", "lifetime"): {tenant: "1"}}, at=NOON)
        plane.corrupt(tenant, NOON, TEAM)
    assert plane.points.damaged(NOON) == Damage({"acme": 1, "globex": 1})
    assert plane.points.damaged(NOON, tenant="globex") == Damage({"globex": 1})


def test_without_time_every_chosen_tenant_is_unverified(plane: ControlPlane) -> None:
    for tenant in ("acme", "globex"):
        plane.capture(tenant, {("team", "lifetime"): {tenant: "1"}}, at=NOON)
        plane.corrupt(tenant, NOON, TEAM)
    no_time = timedelta(0)
    assert plane.points.damaged(NOON, within=no_time) == Damage({}, ("acme", "globex"))
    one = plane.points.damaged(NOON, tenant="globex", within=no_time)
    assert one == Damage({}, ("globex",))
    enough = plane.points.damaged(NOON, within=timedelta(minutes=1))
    assert enough == Damage({"acme": 1, "globex": 1})


def test_an_incident_records_the_newest_snapshot_with_an_intact_record(
    plane: ControlPlane,
) -> None:
    capture(plane, 0 * HOUR, alice="1")
    capture(plane, 1 * HOUR, alice="2")
    corrupt(plane, 1 * HOUR)
    incident = plane.incidents.open(LOSS, target=TARGET, judged=plane.baseline)
    assert incident.newest_point_at == NOON


# Drops


def test_drops_are_not_compared_with_damaged_records(plane: ControlPlane) -> None:
    capture(plane, 0 * HOUR, alice="1")
    corrupt(plane, 0 * HOUR)
    assert plane.points.current_usages("acme", plane.clock.now()) == {}
    later = plane.take(reading("acme", {("team", "lifetime"): {"alice": "1"}}), at=NOON + HOUR)
    assert later.drops == ()


# Retention


def test_pruning_keeps_intact_records_covered_only_by_a_damaged_one(
    plane: ControlPlane,
) -> None:
    capture(plane, 0 * HOUR, alice="1", bob="5")
    capture(plane, 8 * DAY, alice="2", bob="6")
    corrupt(plane, 8 * DAY)
    assert plane.prune("acme") == KEPT
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(
        {("team", "lifetime"): {"alice": "1", "bob": "5"}}
    )


def test_pruning_removes_records_covered_by_an_intact_one(plane: ControlPlane) -> None:
    capture(plane, 0 * HOUR, alice="1")
    capture(plane, 7 * DAY, alice="2")
    capture(plane, 8 * DAY, alice="3")
    corrupt(plane, 8 * DAY)
    assert plane.prune("acme").records == 1
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(
        {("team", "lifetime"): {"alice": "2"}}
    )


def test_a_damaged_record_that_no_record_covers_is_kept_and_reported(plane: ControlPlane) -> None:
    capture(plane, 0 * HOUR, alice="1")
    corrupt(plane, 0 * HOUR)
    plane.clock.set(NOON + 30 * DAY)
    assert plane.prune("acme") == KEPT
    assert plane.points.damaged(plane.clock.now()).records == {"acme": 1}
    capture(plane, 30 * DAY, alice="2")
    assert plane.prune("acme").records == 1
    assert plane.points.damaged(plane.clock.now()).records == {}


def test_pruning_keeps_the_intact_record_excluded_by_a_reset_and_not_a_damaged_one(
    plane: ControlPlane,
) -> None:
    capture(plane, 0 * HOUR, alice="5")
    capture(plane, 1 * HOUR, alice="6")
    plane.reset(NOON + 1 * HOUR, "alice")
    capture(plane, 2 * HOUR, alice="1")
    corrupt(plane, 1 * HOUR)
    capture(plane, 30 * DAY, alice="2")
    plane.prune("acme")
    overriding = plane.points.despite_resets().point_of("acme", plane.clock.now())
    assert overriding is not None
    assert overriding.windows[0].usages == {"alice": Decimal(5)}


# Contents that are stored again


def test_a_new_record_does_not_share_a_damaged_content(plane: ControlPlane) -> None:
    capture(plane, 0 * HOUR, alice="1")
    corrupt(plane, 0 * HOUR)
    capture(plane, 1 * HOUR, alice="1")
    assert plane.reports.damaged_in(Hour(NOON + HOUR)) == ()
    assert len(plane.reports.damaged_in(Hour(NOON))) == 1
    assert plane.points.damaged(plane.clock.now()).records == {}
    capture(plane, 2 * HOUR, alice="1")
    assert plane.current_windows("acme")[0].usages == {"alice": Decimal(1)}


# Whole snapshots


def test_records_read_for_a_table_are_verified(plane: ControlPlane) -> None:
    capture(plane, 0 * HOUR, alice="1")
    corrupt(plane, 0 * HOUR)
    with plane.snapshots.records_of("acme", Hour(NOON)) as records:
        assert records is not None
        with pytest.raises(DatabaseError, match=r"damaged \(checksum mismatch\): tenant 'acme'"):
            list(records)
