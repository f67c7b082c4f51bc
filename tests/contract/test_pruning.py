import random
from datetime import UTC, datetime, timedelta

import pytest

from budget_recovery_dagster.domain import (
    EVERYONE,
    CaptureFailure,
    Hour,
    PruneReport,
    RecoveryState,
    RetentionPolicy,
)
from budget_recovery_dagster.errors import CapturesPausedError
from tests.contract.control_planes import (
    NOON,
    ControlPlane,
    Counters,
    in_memory,
    of,
    on_postgres,
    point_of,
    reading,
)

NOTHING = PruneReport(records=0, captures=0, contents=0, failures=0)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def lifetime(**usages: str) -> Counters:
    return {("team", "lifetime"): usages}


def captured_at(plane: ControlPlane, at: datetime) -> list[str]:
    return [each.tenant for each in plane.reports.captured_in(Hour.containing(at))]


def test_only_records_older_than_the_cutoff_are_removed(plane: ControlPlane) -> None:
    start = NOON + timedelta(minutes=30)
    for hour in range(4):
        plane.capture("acme", lifetime(alice=str(hour)), at=start + hour * HOUR)
    plane.clock.set(start + 7 * DAY + HOUR)
    # Exactly seven days old is not older than seven days.
    assert plane.prune("acme") == PruneReport(records=1, captures=1, contents=1, failures=0)
    kept = [captured_at(plane, start + hour * HOUR) for hour in range(4)]
    assert kept == [[], ["acme"], ["acme"], ["acme"]]
    assert plane.prune("acme") == NOTHING


@pytest.mark.parametrize(("days", "left"), [(1, 24), (7, 168)])
def test_retention_counts_hours_and_not_calendar_days(
    plane: ControlPlane, days: int, left: int
) -> None:
    start = datetime(2026, 10, 20, 3, 0, 7, tzinfo=UTC)  # clocks in Europe change on the 25th
    for hour in range(200):
        plane.capture("acme", lifetime(alice=str(hour)), at=start + hour * HOUR)
    plane.clock.set(start + 199 * HOUR + timedelta(minutes=1))
    report = plane.prune("acme", policy=RetentionPolicy(days=days))
    assert report == PruneReport(200 - left, 200 - left, 200 - left, 0)
    assert captured_at(plane, start + (200 - left) * HOUR) == ["acme"]
    assert captured_at(plane, start + (199 - left) * HOUR) == []


def test_tenants_that_were_not_captured_are_not_pruned(plane: ControlPlane) -> None:
    # One tenant fails for eight days, the other is captured.
    plane.capture("failing", lifetime(alice="1"), at=NOON)
    for hour in range(8 * 24):
        plane.capture("acme", lifetime(alice="1"), at=NOON + hour * HOUR + HOUR)
        plane.prune("acme")
    assert plane.points.current_usages("failing", plane.clock.now()) == point_of(
        lifetime(alice="1")
    )
    assert captured_at(plane, NOON) == ["failing"]
    # After its next capture, its records past retention are pruned too.
    plane.capture("failing", lifetime(alice="1"), at=NOON + 8 * DAY + HOUR)
    assert plane.prune("failing").records == 1


def test_failures_are_removed_by_age_only(plane: ControlPlane) -> None:
    # A prune is never called for a tenant that is gone or for keys without a tenant.
    for day, names in enumerate((("gone", "(key usage.a.b)"), ("gone",), ("gone",))):
        plane.clock.set(NOON + day * DAY)
        noted = Hour.containing(plane.clock.now())
        plane.snapshots.record_failures(
            [CaptureFailure(name, noted, "no answer", "") for name in names], run_id=f"run {day}"
        )
    plane.clock.set(NOON + 8 * DAY)
    # Exactly seven days old is not older than seven days.
    assert plane.prune("acme") == PruneReport(records=0, captures=0, contents=0, failures=2)
    assert [len(plane.reports.failures_of(f"run {day}")) for day in range(3)] == [0, 1, 1]
    plane.clock.set(NOON + 30 * DAY)
    assert plane.prune().failures == 2


@pytest.mark.parametrize("state", [RecoveryState.RECOVERING, RecoveryState.FAILED])
def test_nothing_is_removed_while_the_store_is_not_healthy(
    plane: ControlPlane, state: RecoveryState
) -> None:
    plane.capture("acme", lifetime(alice="1"), at=NOON)
    plane.capture("acme", lifetime(alice="2"), at=NOON + 8 * DAY)
    note = CaptureFailure("gone", Hour(NOON), "no answer", "")
    plane.snapshots.record_failures([note], run_id="run")
    plane.clock.set(NOON + 30 * DAY)
    plane.set_state(state)
    with pytest.raises(CapturesPausedError, match=state.name) as refused:
        plane.prune("acme")
    assert refused.value.hint
    assert captured_at(plane, NOON) == ["acme"]
    assert plane.reports.failures_of("run") == (note,)
    plane.set_state(RecoveryState.HEALTHY)
    assert plane.prune("acme") == PruneReport(records=1, captures=1, contents=1, failures=1)


def test_a_missing_budget_keeps_the_records_of_its_open_windows(
    plane: ControlPlane,
) -> None:
    quiet: Counters = {
        ("quiet", token): {"alice": "3", "bo": "4"}
        for token in ("lifetime", "2026-Q4", "2026-11", "2026-W48", "2026-11-25")
    }
    busy = lifetime(alice="1")
    plane.capture("acme", {**quiet, **busy}, at=NOON)
    plane.capture("acme", busy, at=NOON + 8 * DAY)
    # On 3 December day, week and month have closed.
    assert plane.prune("acme") == PruneReport(records=4, captures=0, contents=0, failures=0)
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(
        {
            ("quiet", "lifetime"): {"alice": "3", "bo": "4"},
            ("quiet", "2026-Q4"): {"alice": "3", "bo": "4"},
            **busy,
        }
    )
    assert captured_at(plane, NOON) == ["acme"]
    assert plane.reports.damaged_in(Hour(NOON)) == ()
    # In the new year the quarter has closed too, whatever the clock.
    plane.capture("acme", busy, at=datetime(2027, 1, 2, tzinfo=UTC))
    assert plane.prune("acme").records == 2
    assert plane.points.current_usages("acme", plane.clock.now()).keys() == {
        of("quiet", "lifetime"),
        of("team", "lifetime"),
    }


def test_only_the_newest_expired_record_with_a_missing_entity_is_kept(plane: ControlPlane) -> None:
    plane.capture("acme", lifetime(alice="1", gone="5"), at=NOON)
    plane.capture("acme", lifetime(alice="2", gone="6"), at=NOON + HOUR)
    plane.capture("acme", lifetime(alice="3"), at=NOON + 2 * HOUR)
    plane.capture("acme", lifetime(alice="4"), at=NOON + 10 * DAY)
    assert plane.prune("acme") == PruneReport(records=2, captures=2, contents=2, failures=0)
    assert captured_at(plane, NOON + HOUR) == ["acme"]
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(
        lifetime(alice="4", gone="6")
    )


def test_the_last_recovery_point_is_kept_if_no_newer_one_exists(plane: ControlPlane) -> None:
    plane.capture("acme", lifetime(alice="1"), at=NOON)
    plane.clock.set(NOON + 400 * DAY)
    assert plane.prune("acme") == NOTHING
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(lifetime(alice="1"))


def test_a_window_that_has_not_begun_is_not_pruned(plane: ControlPlane) -> None:
    plane.capture("acme", {("team", "2027-Q4"): {"alice": "1"}}, at=NOON)
    plane.clock.set(NOON + 30 * DAY)
    assert plane.prune("acme") == NOTHING


def test_a_window_is_kept_until_no_unnoticed_clock_can_have_ended_it(plane: ControlPlane) -> None:
    # A clock that is less than a day ahead makes no gap between captures, and may be in December.
    month, start = ("team", "2026-11"), datetime(2026, 11, 10, 12, tzinfo=UTC)
    plane.capture("acme", {month: {"alice": "100"}}, at=start)
    plane.capture("acme", {month: {"alice": "20"}}, at=datetime(2026, 11, 30, 2, tzinfo=UTC))
    plane.end_gap()
    plane.clock.set(datetime(2026, 12, 1, 1, tzinfo=UTC))
    assert plane.prune("acme") == NOTHING
    plane.clock.set(datetime(2026, 11, 30, 3, tzinfo=UTC))
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(
        {month: {"alice": "100"}}
    )
    plane.clock.set(datetime(2026, 12, 2, 0, 0, 1, tzinfo=UTC))
    plane.end_gap()
    assert plane.prune("acme").records == 1


def test_a_content_is_removed_only_with_its_last_record(plane: ControlPlane) -> None:
    plane.capture("acme", lifetime(alice="1"), at=NOON)
    plane.capture("other", lifetime(alice="1"), at=NOON + DAY)
    plane.capture("acme", lifetime(alice="2"), at=NOON + 8 * DAY)
    assert plane.prune("acme") == PruneReport(records=1, captures=1, contents=0, failures=0)
    plane.capture("other", lifetime(alice="2"), at=NOON + 9 * DAY)
    assert plane.prune("other") == PruneReport(records=1, captures=1, contents=1, failures=0)


def test_a_snapshot_without_records_is_pruned_too(plane: ControlPlane) -> None:
    plane.capture("acme", lifetime(alice="1"), at=NOON)
    plane.clock.set(NOON + timedelta(minutes=30))
    empty_with_drops = plane.take(reading("acme", {}))
    plane.commit(empty_with_drops)
    plane.capture("acme", lifetime(alice="1"), at=NOON + 8 * DAY)
    assert plane.prune("acme") == PruneReport(records=1, captures=2, contents=0, failures=0)


def test_usages_excluded_by_a_reset_are_kept_for_despite_resets(plane: ControlPlane) -> None:
    plane.capture("acme", lifetime(alice="1", bo="3"), at=NOON)
    plane.capture("acme", lifetime(alice="5", bo="4"), at=NOON + HOUR)
    plane.reset(NOON + HOUR, "alice")
    # It covers all eligible usages, but not all usages.
    after = plane.capture("acme", lifetime(alice="2", bo="4"), at=NOON + 2 * HOUR)
    assert after.records[0].covers_earlier
    plane.capture("acme", lifetime(alice="3", bo="4"), at=NOON + 3 * HOUR)
    for days in (7, 30):
        plane.capture("acme", lifetime(alice="3", bo="5"), at=NOON + days * DAY + 4 * HOUR)
        plane.prune("acme")
        now = plane.clock.now()
        assert plane.points.current_usages("acme", now) == point_of(lifetime(alice="3", bo="5"))
        overriding = plane.points.despite_resets().point_of("acme", now)
        assert overriding is not None
        (window,) = overriding.windows
        assert window.usages == {"alice": 5, "bo": 5}
    # Only the old record with the highest usage is left.
    assert [captured_at(plane, NOON + hour * HOUR) for hour in range(4)] == [[], ["acme"], [], []]


def test_eligible_usages_are_kept_even_if_older_records_are_higher(plane: ControlPlane) -> None:
    plane.capture("acme", lifetime(alice="9"), at=NOON)
    plane.reset(NOON, "alice")
    plane.capture("acme", lifetime(alice="2"), at=NOON + HOUR)
    plane.capture("acme", lifetime(bo="1"), at=NOON + 2 * HOUR)
    plane.capture("acme", lifetime(bo="2"), at=NOON + 30 * DAY)
    plane.prune("acme")
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(
        lifetime(alice="2", bo="2")
    )


def test_pruning_without_tenants_does_nothing(plane: ControlPlane) -> None:
    plane.capture("acme", lifetime(alice="1"), at=NOON - 30 * DAY)
    assert plane.prune() == NOTHING


def points_of(plane: ControlPlane, now: datetime) -> tuple[object, ...]:
    """Return the results of all readers of recovery points for a tenant."""
    return (
        plane.points.current_usages("acme", now),
        plane.points.newest_points(now),
        plane.points.damaged(now),
        plane.points.point_of("acme", now),
        plane.points.despite_resets().point_of("acme", now),
        plane.points.snapshot_of("acme", now),
    )


# Without nested loops, rows come in another order wherever a query does not ask for one.
@pytest.mark.parametrize(("seed", "planner"), [(0, ""), (1, ""), (0, "-c enable_nestloop=off")])
def test_postgres_and_memory_agree_on_random_histories(
    seed: int, planner: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake takes the maximum of all its records; PostgreSQL reads as little as possible.

    Resets of one of the two budgets are recorded at once, late, and repeatedly.
    """
    monkeypatch.setenv("PGOPTIONS", planner)
    chance = random.Random(seed)  # noqa: S311 - a reproducible course of events
    tokens = ("lifetime", "2026-Q4", "2026-11", "2026-12")
    with on_postgres(database_url) as postgres:
        planes = (in_memory(), postgres)
        counters: dict[tuple[str, str], dict[str | None, str]] = {}
        now = NOON
        for _ in range(40):
            now += timedelta(hours=chance.randrange(1, 26))
            is_ahead = chance.random() < 0.1
            for key in [(budget, token) for budget in ("a", "b") for token in tokens]:
                if chance.random() < 0.05:
                    counters.pop(key, None)
                if chance.random() < 0.3:
                    usages = counters.setdefault(key, {})
                    usages[chance.choice(["x", "y", None])] = str(chance.randrange(100))
                    if chance.random() < 0.3:
                        usages.pop(chance.choice(["x", "y", None]), None)
            for plane in planes:
                # Sometimes the clock is 40 days ahead for one capture, and then right again.
                plane.capture("acme", counters, at=now + 40 * DAY if is_ahead else now)
                plane.clock.set(now)
            if chance.random() < 0.2:
                who = chance.choice(["x", "y", None, EVERYONE])
                at = now - timedelta(hours=chance.randrange(60))
                window = chance.choice([None, "lifetime"])
                for plane in planes:
                    plane.reset(at, who, budget="a", window=window)
            reports = [plane.prune("acme", policy=RetentionPolicy(days=2)) for plane in planes]
            assert reports[0] == reports[1]
            assert points_of(planes[0], now) == points_of(planes[1], now)
