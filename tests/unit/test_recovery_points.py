"""Survey and age of recovery points, with an in-memory control plane."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, cast

import pytest

from budget_recovery_dagster.domain import (
    CaptureFailure,
    Hour,
    OmittedCounter,
    RunOutcome,
    RunResult,
    age,
    is_too_old,
)
from budget_recovery_dagster.ports import RecoveryPoints
from budget_recovery_dagster.presentation.metadata import points_metadata
from budget_recovery_dagster.services import PointAges, PointSurvey, judge_point_ages, survey_points
from tests.contract.control_planes import NOON, ControlPlane, Counters, in_memory, of, reading

TEAM: Counters = {("team", "lifetime"): {"alice": "1.5", "bo": "2"}}
TODAY: Counters = {("team", "2026-11-25"): {None: "7", "alice": "7"}}
LIMIT = timedelta(minutes=90)
INSTANT = timedelta(microseconds=1)


@pytest.fixture
def plane() -> ControlPlane:
    return in_memory()


def survey_at(plane: ControlPlane, now: datetime) -> PointSurvey:
    plane.clock.set(now)
    return survey_points(plane)


def ages_at(plane: ControlPlane, now: datetime) -> PointAges:
    plane.clock.set(now)
    return judge_point_ages(plane)


def test_a_snapshot_is_too_old_after_ninety_minutes() -> None:
    assert not is_too_old(NOON, NOON + LIMIT)
    assert is_too_old(NOON, NOON + LIMIT + INSTANT)
    assert age(NOON, NOON - LIMIT) == timedelta(0)


def test_the_survey_lists_every_window_oldest_first(plane: ControlPlane) -> None:
    plane.capture("early", TEAM, at=NOON)
    plane.capture("acme", {**TEAM, **TODAY}, at=NOON + LIMIT)
    survey = survey_at(plane, NOON + 2 * LIMIT)
    assert [(each.tenant, each.point.of, each.entities, each.usage) for each in survey.windows] == [
        ("early", of("team", "lifetime"), 2, Decimal("3.5")),
        ("acme", of("team", "2026-11-25"), 2, Decimal(7)),
        ("acme", of("team", "lifetime"), 2, Decimal("3.5")),
    ]
    assert [each.point.newest_at for each in survey.windows] == [NOON, *([NOON + LIMIT] * 2)]
    assert age(NOON, survey.now) == timedelta(hours=3)
    assert survey.without_window == ()


def test_a_tenant_without_an_open_window_is_named(plane: ControlPlane) -> None:
    plane.capture("daily", TODAY, at=NOON)
    survey = survey_at(plane, NOON + timedelta(days=1))
    assert survey.windows == ()
    assert survey.without_window == ("daily",)


class CapturedMeanwhile:
    """The points of a plane in which a capture commits after each reading of them."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane, self._points = plane, plane.points

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        found = self._points.newest_points(now)
        self._plane.capture("acme", TEAM, at=now + INSTANT)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._points, name)


def test_a_capture_that_commits_meanwhile_does_not_make_a_tenant_look_emptied(
    plane: ControlPlane,
) -> None:
    plane.capture("acme", TEAM, at=NOON)
    plane.clock.set(NOON + LIMIT)
    points = cast(RecoveryPoints, CapturedMeanwhile(plane))
    assert judge_point_ages(replace(plane, points=points)).emptied == frozenset()


def test_the_age_is_that_of_each_tenants_newest_open_window(plane: ControlPlane) -> None:
    plane.capture("late", {**TEAM, **TODAY}, at=NOON)
    plane.capture("acme", {**TEAM, **TODAY}, at=NOON)
    # One window of acme is missing: that is reported by usage_never_drops, not by the age.
    plane.capture("acme", TEAM, at=NOON + LIMIT)
    assert ages_at(plane, NOON + LIMIT).is_sound
    ages = ages_at(plane, NOON + LIMIT + INSTANT)
    assert not ages.is_sound
    assert ages.too_old == {"late": NOON}
    assert (len(ages.watched), ages.newest_snapshot) == (2, NOON + LIMIT)


def test_the_age_is_not_sound_without_snapshots(plane: ControlPlane) -> None:
    ages = ages_at(plane, NOON)
    assert not ages.is_sound
    assert ages.newest_snapshot is None


def test_the_age_is_not_sound_after_captures_have_stopped_and_windows_closed(
    plane: ControlPlane,
) -> None:
    plane.capture("daily", TODAY, at=NOON)
    assert ages_at(plane, NOON + LIMIT).is_sound
    ages = ages_at(plane, NOON + timedelta(days=1))
    assert not ages.is_sound
    assert ages.too_old == {}


def test_a_tenant_that_left_causes_no_warning_once_its_windows_have_closed(
    plane: ControlPlane,
) -> None:
    plane.capture("left", TODAY, at=NOON)
    plane.capture("acme", TEAM, at=NOON + timedelta(days=1))
    assert ages_at(plane, NOON + timedelta(days=1)).is_sound


def test_the_table_of_points_is_exact_and_shows_unknown_usage_as_unknown(
    plane: ControlPlane,
) -> None:
    omitted = tuple(
        OmittedCounter(of("unread", "lifetime"), entity, f"key {entity}", "not a number")
        for entity in ("alice", "bo")
    )
    counters: Counters = {
        ("team", "lifetime"): {"alice": "12345678901234567890.000000000000000001"}
    }
    taken = plane.take(reading("acme", counters, omitted=omitted, is_partial=True))
    boards = tuple(
        replace(each, is_truncated=each.of == of("team", "lifetime")) for each in taken.records
    )
    plane.commit(replace(taken, records=boards))
    plane.clock.set(NOON + LIMIT)
    plane.capture("daily", TODAY)
    shown = points_metadata(survey_at(plane, NOON + timedelta(days=1)))
    assert [dict(row.data) for row in shown["points"].records] == [
        {
            "tenant": "acme",
            "budget": "team",
            "window": "lifetime",
            "usage": "12345678901234567890.000000000000000001",
            "age": "1d 0h",
            "marks": "truncated, partial",
            "entities": 1,
            "source": "counters",
            "captured_at": "2026-11-25T12:00:00Z",
        },
        {
            "tenant": "acme",
            "budget": "unread",
            "window": "lifetime",
            "usage": "unknown",
            "age": "1d 0h",
            "marks": "partial, omitted(2)",
            "entities": 0,
            "source": "counters",
            "captured_at": "2026-11-25T12:00:00Z",
        },
        {
            "tenant": "daily",
            "budget": "",
            "window": "no open window",
            "usage": "",
            "age": "22h 30min",
            "marks": "nothing to restore",
            "entities": 0,
            "source": "",
            "captured_at": "2026-11-25T13:30:00Z",
        },
    ]
    assert (shown["tenants"], shown["tenants_without_window"]) == (2, 1)
    assert (shown["marked_windows"], shown["entities"]) == (2, 1)
    assert shown["newest_point_age_seconds"] == shown["oldest_point_age_seconds"] == 86400


def test_a_usage_that_was_reset_is_zero_and_not_unknown(plane: ControlPlane) -> None:
    plane.capture("acme", TEAM, at=NOON)
    plane.reset(NOON)
    (row,) = points_metadata(survey_at(plane, NOON))["points"].records
    assert (row.data["usage"], row.data["entities"], row.data["marks"]) == ("0", 0, "")


def test_usages_from_earlier_snapshots_are_marked(plane: ControlPlane) -> None:
    window = ("team", "lifetime")
    plane.capture("acme", {window: {"alice": "5", "bo": "2", "cy": "3", None: "1"}}, at=NOON)
    plane.capture("acme", {window: {"alice": "4", "cy": "3", "di": "1"}}, at=NOON + LIMIT)
    (row,) = points_metadata(survey_at(plane, NOON + LIMIT))["points"].records
    # In the newest snapshot alice is lower, and bo and the aggregate are missing.
    assert (row.data["marks"], row.data["entities"]) == ("earlier(3)", 5)
    assert row.data["captured_at"] == "2026-11-25T13:30:00Z"


def fail(plane: ControlPlane, tenant: str, at: datetime) -> None:
    plane.clock.set(at)
    failure = CaptureFailure(tenant, Hour.containing(at), "not permitted", "grant it.")
    plane.snapshots.record_failures([failure], run_id=f"run at {at}")


def test_a_tenant_whose_captures_fail_is_too_old_even_after_its_windows_have_closed(
    plane: ControlPlane,
) -> None:
    midnight = datetime(2026, 11, 26, tzinfo=UTC)
    plane.capture("daily", TODAY, at=midnight - timedelta(minutes=30))
    fail(plane, "daily", midnight + timedelta(minutes=30))
    fail(plane, "never seen", midnight + timedelta(minutes=30))
    plane.capture("acme", TEAM, at=midnight + timedelta(minutes=30))
    plane.capture("acme", TEAM, at=midnight + LIMIT)
    assert ages_at(plane, midnight + timedelta(hours=1)).too_old == {"never seen": None}
    ages = ages_at(plane, midnight + LIMIT)
    assert ages.too_old == {"daily": midnight - timedelta(minutes=30), "never seen": None}
    assert not ages.is_sound
    plane.capture("daily", TODAY, at=midnight + LIMIT)
    plane.capture("never seen", TODAY, at=midnight + LIMIT + INSTANT)
    assert ages_at(plane, midnight + LIMIT + INSTANT).is_sound


def test_a_snapshot_from_the_future_has_no_age(plane: ControlPlane) -> None:
    plane.capture("acme", TEAM, at=NOON)
    assert ages_at(plane, NOON - timedelta(minutes=1)).is_sound
    ages = ages_at(plane, NOON - timedelta(minutes=1) - INSTANT)
    assert ages.future == NOON
    assert not ages.is_sound


def test_a_tenant_that_left_is_not_too_old_although_its_window_is_open(
    plane: ControlPlane,
) -> None:
    lifetime = of("team", "lifetime")
    unreadable = OmittedCounter(lifetime, "alice", "usage.unread.team.lifetime.alice", "no number")
    plane.capture("emptied", TEAM, at=NOON)
    plane.commit(plane.take(reading("unread", {}, omitted=(unreadable,))))
    plane.capture("acme", TEAM)
    plane.reset(NOON, tenant="emptied")
    # Nothing is expected of the one, because of the reset, and nothing was known of the other.
    for tenant in ("emptied", "unread"):
        plane.clock.set(NOON + timedelta(hours=1))
        plane.commit(plane.take(reading(tenant, {})))
    plane.capture("acme", TEAM, at=NOON + LIMIT)
    ages = ages_at(plane, NOON + LIMIT + INSTANT)
    assert ages.too_old == {}
    assert ages.is_sound
    plane.capture("emptied", TEAM)
    assert ages_at(plane, NOON + 2 * LIMIT + 2 * INSTANT).too_old.keys() == {"acme", "emptied"}


def test_a_store_with_nothing_to_store_is_not_too_old(plane: ControlPlane) -> None:
    plane.capture("daily", TODAY, at=NOON)
    tomorrow = NOON + timedelta(days=1)
    plane.clock.set(tomorrow)
    assert not ages_at(plane, tomorrow).is_sound
    with plane.lease() as lease:
        number = plane.snapshots.begin_run("run", Hour(tomorrow), started_at=tomorrow, lease=lease)
    nothing = RunResult(RunOutcome.NOTHING_TO_STORE, 0, 1, 0, None, None)
    plane.snapshots.end_run(number, nothing)
    assert ages_at(plane, tomorrow + LIMIT).is_sound
    assert not ages_at(plane, tomorrow + LIMIT + INSTANT).is_sound
