"""Clocks that were wrong: the order of commits decides, and nothing good is lost or hidden."""

from collections.abc import Collection
from datetime import datetime, timedelta
from decimal import Decimal

import psycopg
import pytest

from budget_recovery_dagster.domain import (
    EVERYONE,
    CaptureFailure,
    FallOutcome,
    Hour,
    JudgedFalls,
    ListedSnapshot,
    OmittedCounter,
    RecoveryState,
    Usages,
    WindowPoint,
)
from budget_recovery_dagster.errors import CapturesPausedError, ClockSkewError, NotNewerError
from budget_recovery_dagster.ports import Lease
from budget_recovery_dagster.services.future_snapshots import (
    FutureSnapshots,
    discard_future,
    list_future,
)
from tests.contract.control_planes import NOON, ControlPlane, Counters, of, point_of, reading

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
AHEAD = 40 * DAY
MONTH = ("team", "2026-11")
LIFETIME = ("team", "lifetime")


def spent(alice: str, **others: str) -> Counters:
    return {MONTH: {"alice": alice, **others}, LIFETIME: {"alice": alice, **others}}


def windows(plane: ControlPlane) -> dict[tuple[str, str], WindowPoint]:
    found = plane.current_windows("acme")
    return {(each.of.budget, each.of.window.token): each for each in found}


def usages(**by_entity: str) -> Usages:
    return {entity: Decimal(usage) for entity, usage in by_entity.items()}


# A clock that is ahead


def test_a_capture_with_the_clock_ahead_removes_nothing(plane: ControlPlane) -> None:
    for hour in range(-9 * 24, 1):
        plane.capture("acme", spent("5"), at=NOON + hour * HOUR)
    november = plane.reports.captured_in(Hour(NOON))
    plane.capture("acme", {LIFETIME: {"alice": "5"}}, at=NOON + AHEAD)
    # In January all windows of November have closed, and every record is older than 7 days.
    for captures in range(1, 24):
        report = plane.prune_after_gap("acme")
        assert (report.records, report.awaited_captures) == (0, 24 - captures)
        plane.capture("acme", {LIFETIME: {"alice": "5"}}, at=NOON + AHEAD + captures * MINUTE)
    assert plane.reports.captured_in(Hour(NOON)) == november
    # The gap lies 24 captures back: a clock that is right from then on is believed.
    assert plane.prune_after_gap("acme").records > 0


def test_retention_waits_for_24_captures_also_after_a_clock_was_set_back(
    plane: ControlPlane,
) -> None:
    for hour in range(-9 * 24, 1):
        plane.capture("acme", spent("5"), at=NOON + hour * HOUR)
    plane.capture("acme", spent("5"), at=NOON + AHEAD)
    for captures in range(1, 24):
        plane.capture("acme", spent("6"), at=NOON + captures * HOUR)
        report = plane.prune_after_gap("acme")
        assert (report.records, report.awaited_captures) == (0, 24 - captures)
    plane.capture("acme", spent("6"), at=NOON + 24 * HOUR)
    # 2 windows in each of 3 days are past retention.
    assert plane.prune_after_gap("acme").records == 2 * 3 * 24


def test_a_clock_that_jumps_during_a_capture_removes_nothing(plane: ControlPlane) -> None:
    for hour in range(-9 * 24, 1):
        plane.capture("acme", spent("5"), at=NOON + hour * HOUR)
    plane.clock.set(NOON + AHEAD)
    assert plane.prune_after_gap("acme").awaited_captures == 24


def test_a_few_hours_without_captures_do_not_delay_retention(plane: ControlPlane) -> None:
    for hour in (*range(-9 * 24, -23), 0):
        plane.capture("acme", spent("5"), at=NOON + hour * HOUR)
    assert plane.prune_after_gap("acme").records == 2 * 2 * 24


def test_a_snapshot_dated_in_the_future_blocks_no_capture(plane: ControlPlane) -> None:
    plane.capture("acme", spent("5"), at=NOON)
    plane.capture("acme", spent("6"), at=NOON + AHEAD)
    plane.capture("acme", spent("7"), at=NOON + HOUR)
    assert plane.reports.newest_snapshots() == {"acme": NOON + HOUR}
    assert plane.points.newest_points(NOON + HOUR) == {"acme": NOON + HOUR}
    month = windows(plane)[MONTH]
    assert (month.usages, month.newest_at) == (usages(alice="7"), NOON + HOUR)
    point = plane.points.point_of("acme", NOON + HOUR)
    assert point is not None
    assert point.newest_at == NOON + HOUR
    # A snapshot that is not in the future still refuses an older one.
    with pytest.raises(NotNewerError):
        plane.capture("acme", spent("8"), at=NOON + HOUR)


def test_a_snapshot_dated_in_the_future_counts_with_its_usages(plane: ControlPlane) -> None:
    plane.capture("acme", spent("5"), at=NOON)
    plane.capture("acme", spent("6", bob="2"), at=NOON + AHEAD)
    plane.clock.set(NOON + HOUR)
    month = windows(plane)[MONTH]
    assert month.usages == usages(alice="6", bob="2")
    # But it is not the newest: alice and bob come from another record.
    assert (month.newest_at, month.from_earlier) == (NOON, 2)


@pytest.mark.parametrize("is_past", [False, True])
def test_an_empty_record_dated_in_the_future_hides_nothing(
    plane: ControlPlane, *, is_past: bool
) -> None:
    plane.clock.set(NOON + AHEAD)
    omitted = OmittedCounter(of(*LIFETIME), "alice", "usage.acme.x", "not a number")
    empty = plane.take(reading("acme", {}, omitted=(omitted,)))
    assert (empty.records[0].usages, empty.records[0].covers_earlier) == ({}, True)
    plane.commit(empty)
    plane.capture("acme", {LIFETIME: {"alice": "5"}}, at=NOON)
    plane.capture("acme", {LIFETIME: {"alice": "6"}}, at=NOON + HOUR)
    if is_past:
        plane.clock.set(NOON + AHEAD + HOUR)
    assert windows(plane)[LIFETIME].usages == usages(alice="6")


def test_a_covering_record_covers_no_later_commit_with_an_earlier_time(
    plane: ControlPlane,
) -> None:
    plane.capture("acme", {LIFETIME: {"alice": "5"}}, at=NOON)
    ahead = plane.capture("acme", {LIFETIME: {"alice": "6"}}, at=NOON + AHEAD)
    assert ahead.records[0].covers_earlier
    plane.capture("acme", {LIFETIME: {"alice": "7", "bob": "1"}}, at=NOON + HOUR)
    plane.capture("acme", {LIFETIME: {"bob": "2"}}, at=NOON + 2 * HOUR)
    expected = usages(alice="7", bob="2")
    assert windows(plane)[LIFETIME].usages == expected
    # Also once its time has come.
    plane.clock.set(NOON + AHEAD + HOUR)
    window = windows(plane)[LIFETIME]
    assert (window.usages, window.newest_at) == (expected, NOON + 2 * HOUR)
    assert plane.reports.newest_snapshots() == {"acme": NOON + 2 * HOUR}
    incident_point = plane.points.newest_points(plane.clock.now())
    assert incident_point == {"acme": NOON + 2 * HOUR}


def test_retention_relies_on_no_record_dated_in_the_future(plane: ControlPlane) -> None:
    plane.capture("acme", {LIFETIME: {"alice": "5"}}, at=NOON)
    plane.capture("acme", {LIFETIME: {"alice": "6"}}, at=NOON + AHEAD)
    # From now on alice is missing, and only the first two records have her.
    plane.capture("acme", {LIFETIME: {"bob": "1"}}, at=NOON + 8 * DAY)
    plane.prune("acme")
    assert [each.captured_at for each in plane.reports.captured_in(Hour(NOON))] == [NOON]


def test_a_failed_capture_is_not_hidden_by_a_snapshot_dated_in_the_future(
    plane: ControlPlane,
) -> None:
    plane.capture("acme", spent("5"), at=NOON)
    plane.capture("acme", spent("5"), at=NOON + AHEAD)
    plane.clock.set(NOON + HOUR)
    failure = CaptureFailure("acme", Hour(NOON + HOUR), "no answer", "")
    plane.snapshots.record_failures([failure], run_id="run")
    assert plane.reports.failing()["acme"].newest_snapshot == NOON


def test_a_failure_dated_in_the_future_is_over_after_the_next_capture(plane: ControlPlane) -> None:
    plane.clock.set(NOON + AHEAD)
    failure = CaptureFailure("acme", Hour(NOON + AHEAD), "no answer", "")
    plane.snapshots.record_failures([failure], run_id="run")
    assert plane.reports.failing()["acme"].newest_snapshot is None
    plane.capture("acme", spent("5"), at=NOON)
    assert plane.reports.failing() == {}


# A clock that was set back


def test_a_capture_during_which_the_clock_is_set_back_is_refused(plane: ControlPlane) -> None:
    plane.clock.set(NOON + AHEAD)
    snapshot = plane.take(reading("acme", spent("5")))
    plane.clock.set(NOON)
    with pytest.raises(ClockSkewError, match="was set back during the capture"):
        plane.commit(snapshot)
    assert plane.snapshots.tenants() == frozenset()


def test_captures_with_a_clock_behind_are_the_newest(plane: ControlPlane) -> None:
    plane.capture("acme", {LIFETIME: {"alice": "5"}}, at=NOON)
    behind = NOON - 30 * DAY
    plane.capture("acme", {LIFETIME: {"alice": "6"}}, at=behind)
    assert windows(plane)[LIFETIME].newest_at == behind
    plane.clock.set(NOON + HOUR)
    window = windows(plane)[LIFETIME]
    assert (window.usages, window.newest_at) == (usages(alice="6"), behind)
    newest = plane.snapshots.newest_identity()
    assert newest is not None
    assert newest == plane.reports.captured_in(Hour(behind))[0].identity
    # It is past retention at once, but needed: no later record holds as much.
    plane.prune("acme")
    assert windows(plane)[LIFETIME].usages == usages(alice="6")


# Resets


@pytest.mark.parametrize("is_past", [False, True])
def test_a_reset_for_now_excludes_a_record_dated_in_the_future(
    plane: ControlPlane, *, is_past: bool
) -> None:
    plane.capture("acme", {LIFETIME: {"alice": "5", "bob": "1"}}, at=NOON)
    plane.capture("acme", {LIFETIME: {"alice": "6", "bob": "1"}}, at=NOON + AHEAD)
    plane.clock.set(NOON + HOUR)
    recorded = plane.reset(NOON + HOUR, "alice")
    plane.capture("acme", {LIFETIME: {"alice": "1", "bob": "2"}}, at=NOON + 2 * HOUR)
    if is_past:
        plane.clock.set(NOON + AHEAD + HOUR)
    window = windows(plane)[LIFETIME]
    assert (window.usages, window.resets) == (usages(alice="1", bob="2"), (recorded,))


@pytest.mark.parametrize("is_past", [False, True])
def test_a_reset_recorded_with_the_clock_ahead_excludes_nothing_later(
    plane: ControlPlane, *, is_past: bool
) -> None:
    plane.capture("acme", {LIFETIME: {"alice": "5"}}, at=NOON)
    plane.clock.set(NOON + AHEAD)
    plane.reset(NOON + AHEAD, EVERYONE)
    plane.capture("acme", {LIFETIME: {"alice": "2"}}, at=NOON + HOUR)
    if is_past:
        plane.clock.set(NOON + AHEAD + HOUR)
    assert windows(plane)[LIFETIME].usages == usages(alice="2")
    assert plane.points.current_usages("acme", plane.clock.now()) == point_of(
        {LIFETIME: {"alice": "2"}}
    )


def test_a_reset_excludes_what_a_running_capture_read_before_it(plane: ControlPlane) -> None:
    plane.capture("acme", {LIFETIME: {"alice": "5"}}, at=NOON)
    read_before = plane.take(reading("acme", {LIFETIME: {"alice": "6"}}), at=NOON + MINUTE)
    plane.clock.set(NOON + 2 * MINUTE)
    plane.reset(NOON + 2 * MINUTE, "alice")
    plane.clock.set(NOON + 3 * MINUTE)
    plane.commit(read_before)
    assert windows(plane)[LIFETIME].usages == {}


def test_a_reset_for_an_earlier_time_keeps_what_was_captured_after_it(plane: ControlPlane) -> None:
    plane.capture("acme", {LIFETIME: {"alice": "5"}}, at=NOON)
    plane.capture("acme", {LIFETIME: {"alice": "1"}}, at=NOON + HOUR)
    plane.capture("acme", {LIFETIME: {"alice": "2"}}, at=NOON + AHEAD)
    plane.clock.set(NOON + 2 * HOUR)
    plane.reset(NOON + MINUTE, "alice")
    # The record dated in the future was committed after one that is surely later than the reset.
    assert windows(plane)[LIFETIME].usages == usages(alice="2")


# Discarding


def discard(
    plane: ControlPlane, lease: Lease, times: Collection[datetime] = (NOON + AHEAD,)
) -> tuple[ListedSnapshot, ...]:
    return plane.snapshots.discard_future(
        times, falls=JudgedFalls(), now=plane.clock.now(), by="ann", reason="clock", lease=lease
    )


def test_only_snapshots_dated_in_the_future_are_discarded(plane: ControlPlane) -> None:
    plane.capture("acme", spent("5"), at=NOON)
    plane.capture("acme", spent("9"), at=NOON + AHEAD)
    plane.capture("b", spent("9"), at=NOON + AHEAD)
    plane.capture("acme", spent("6"), at=NOON + HOUR)
    found = plane.snapshots.in_future(NOON + HOUR)
    assert [(each.captured_at, each.tenants) for each in found] == [(NOON + AHEAD, 2)]
    with plane.lease() as lease:
        # Neither a snapshot with a good time nor one that was not confirmed.
        for times in ({NOON}, {NOON + 2 * AHEAD}):
            assert discard(plane, lease, times) == ()
        assert discard(plane, lease) == found
        assert discard(plane, lease) == ()
    assert [each.captured_at for each in plane.snapshots.listed(None)] == [NOON + HOUR, NOON]
    assert plane.snapshots.tenants() == {"acme"}
    assert windows(plane)[MONTH].usages == usages(alice="6")


def test_a_discarded_number_is_not_given_out_again(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane = postgres_plane
    plane.capture("acme", spent("5"), at=NOON + AHEAD)
    plane.clock.set(NOON)
    with plane.lease() as lease:
        discard(plane, lease)
    plane.capture("acme", spent("6"), at=NOON + HOUR)
    assert admin.execute("select commit_number from budget_recovery.capture").fetchall() == [(2,)]
    assert admin.execute(
        "select commit_number, discarded_at from budget_recovery.discarded_capture"
    ).fetchall() == [(1, NOON)]


@pytest.mark.parametrize("state", [RecoveryState.RECOVERING, RecoveryState.FAILED])
def test_nothing_is_discarded_while_the_store_is_not_healthy(
    plane: ControlPlane, state: RecoveryState
) -> None:
    plane.capture("acme", spent("5"), at=NOON + AHEAD)
    plane.clock.set(NOON)
    plane.set_state(state)
    with plane.lease() as lease, pytest.raises(CapturesPausedError, match=state.name):
        discard(plane, lease)
    assert len(plane.snapshots.in_future(NOON)) == 1


# What only they hold


def only_in_future(plane: ControlPlane) -> list[tuple[str, str, int, str]]:
    return [
        (each.at.tenant, str(each.at.of), each.counters, format(each.usage, "f"))
        for each in list_future(plane, None).lost
    ]


def discard_all(plane: ControlPlane) -> FutureSnapshots:
    found = list_future(plane, None).found
    return discard_future(plane, found, None, by="ann", reason="clock", holder="a test")


def open_falls(plane: ControlPlane) -> list[tuple[str, str, int, str]]:
    return [
        (fall.at.tenant, str(fall.at.of), fall.counters, format(fall.usage, "f"))
        for fall in plane.falls.open()
    ]


def test_what_only_future_snapshots_hold_is_listed_largest_first(plane: ControlPlane) -> None:
    plane.capture("acme", {LIFETIME: {"alice": "30", "bob": "9"}, MONTH: {"alice": "1"}}, at=NOON)
    plane.capture("b", {LIFETIME: {"alice": "5"}}, at=NOON)
    plane.capture("c", {LIFETIME: {"alice": "5"}}, at=NOON)
    ahead: dict[str, Counters] = {
        # Lower in the other snapshot, and missing there; December is not open at noon.
        "acme": {
            LIFETIME: {"alice": "31.5", "bob": "9", "cy": "2", None: "3"},
            MONTH: {"alice": "8"},
            ("team", "2026-12"): {"alice": "7"},
        },
        "b": {LIFETIME: {"alice": "5"}},
        "c": {("team", "2026-11-25"): {"dan": "40"}},
    }
    for tenant, counters in ahead.items():
        plane.capture(tenant, counters, at=NOON + AHEAD)
    plane.clock.set(NOON + HOUR)
    assert only_in_future(plane) == [
        ("c", "team 2026-11-25", 1, "40"),
        ("acme", "team 2026-11", 1, "7"),
        ("acme", "team lifetime", 3, "3"),
    ]
    before = {tenant: plane.points.current_usages(tenant, NOON + HOUR) for tenant in ahead}
    without = {
        tenant: plane.points.current_usages(tenant, NOON + HOUR, without=[NOON + AHEAD])
        for tenant in ahead
    }
    assert before != without
    discarded = discard_all(plane)
    assert (len(discarded.found), discarded.lost_counters) == (1, 5)
    assert {t: plane.points.current_usages(t, NOON + HOUR) for t in ahead} == without


def test_a_later_snapshot_with_as_much_loses_nothing(plane: ControlPlane) -> None:
    plane.capture("acme", {LIFETIME: {"alice": "5"}}, at=NOON)
    plane.capture("acme", {LIFETIME: {"alice": "6"}}, at=NOON + AHEAD)
    plane.capture("acme", {LIFETIME: {"alice": "7"}}, at=NOON + HOUR)
    assert only_in_future(plane) == []
    # A damaged record holds nothing.
    plane.corrupt("acme", NOON + HOUR, of(*LIFETIME))
    assert only_in_future(plane) == [("acme", "team lifetime", 1, "1")]


def test_what_is_discarded_alone_is_compared(plane: ControlPlane) -> None:
    plane.capture("acme", spent("5"), at=NOON)
    plane.capture("acme", spent("7"), at=NOON + AHEAD)
    plane.capture("acme", spent("6"), at=NOON + 2 * AHEAD)
    plane.clock.set(NOON + HOUR)
    newest, older = list_future(plane, None).found
    assert list_future(plane, None, only=[newest]).lost == ()
    assert [each.usage for each in list_future(plane, None, only=[older]).lost] == [1, 1]
    discarded = discard_future(plane, [older], None, by="ann", reason="clock", holder="a test")
    assert [each.captured_at for each in discarded.found] == [older.captured_at]
    assert [each.usage for each in discarded.lost] == [1, 1]
    assert only_in_future(plane) == [
        ("acme", "team 2026-11", 1, "1"),
        ("acme", "team lifetime", 1, "1"),
    ]


# Falls that were found with the clock ahead


@pytest.mark.parametrize("is_purged", [False, True])
@pytest.mark.parametrize("since", [timedelta(0), MINUTE])
def test_a_reset_after_the_clock_was_put_right_ends_a_fall_found_before(
    plane: ControlPlane, since: timedelta, *, is_purged: bool
) -> None:
    left: Counters = {} if is_purged else {LIFETIME: {"alice": "30"}}
    plane.capture("acme", {LIFETIME: {"alice": "31"}}, at=NOON)
    plane.capture("acme", left, at=NOON + AHEAD)
    assert [fall.counters for fall in plane.falls.open()] == [1]
    plane.clock.set(NOON + HOUR)
    # Also one for an earlier time.
    plane.reset(NOON + HOUR - since, "alice")
    plane.capture("acme", left, at=NOON + 2 * HOUR)
    assert [outcome for *_, outcome in plane.fall_outcomes()] == [FallOutcome.RESET]


@pytest.mark.parametrize("ahead", [timedelta(0), AHEAD])
def test_a_reset_from_before_a_fall_does_not_end_it(plane: ControlPlane, ahead: timedelta) -> None:
    plane.capture("acme", {LIFETIME: {"alice": "31", "bob": "9"}}, at=NOON)
    plane.clock.set(NOON + HOUR + ahead)
    plane.reset(NOON + HOUR + ahead, "bob")
    plane.capture("acme", {LIFETIME: {"alice": "30"}}, at=NOON + HOUR)
    assert open_falls(plane) == [("acme", "team lifetime", 1, "1")]
    plane.capture("acme", {LIFETIME: {"alice": "31"}}, at=NOON + 2 * HOUR)
    assert [outcome for *_, outcome in plane.fall_outcomes()] == [FallOutcome.RESTORED]


# Falls that rest on discarded snapshots


@pytest.fixture
def fallen(plane: ControlPlane) -> ControlPlane:
    """Return a plane in which alice's 31 of the lifetime is only in a snapshot from the future."""
    plane.capture("acme", {LIFETIME: {"alice": "30", "bob": "9"}}, at=NOON)
    plane.capture("acme", {LIFETIME: {"alice": "31", "bob": "9"}}, at=NOON + AHEAD)
    return plane


def test_a_fall_that_rests_on_discarded_snapshots_ends_as_discarded(fallen: ControlPlane) -> None:
    fallen.capture("acme", {LIFETIME: {"alice": "30", "bob": "9"}}, at=NOON + HOUR)
    assert open_falls(fallen) == [("acme", "team lifetime", 1, "1")]
    fallen.clock.set(NOON + HOUR + MINUTE)
    discarded = discard_all(fallen)
    assert [each.outcome for each in discarded.falls.ended] == [FallOutcome.DISCARDED]
    ended = [("acme", "team lifetime", NOON + HOUR + MINUTE, FallOutcome.DISCARDED)]
    assert (fallen.falls.open(), fallen.fall_outcomes()) == ((), ended)
    fallen.capture("acme", {LIFETIME: {"alice": "30", "bob": "9"}}, at=NOON + 2 * HOUR)
    assert (fallen.falls.open(), fallen.fall_outcomes()) == ((), ended)


def test_a_fall_keeps_what_other_snapshots_hold(fallen: ControlPlane) -> None:
    fallen.capture("acme", {LIFETIME: {"alice": "20", "bob": "9"}}, at=NOON + HOUR)
    assert open_falls(fallen) == [("acme", "team lifetime", 1, "11")]
    discard_all(fallen)
    assert open_falls(fallen) == [("acme", "team lifetime", 1, "10")]
    fallen.capture("acme", {LIFETIME: {"alice": "30", "bob": "9"}}, at=NOON + 2 * HOUR)
    assert [outcome for *_, outcome in fallen.fall_outcomes()] == [FallOutcome.RESTORED]


def test_a_fall_of_a_purged_window_keeps_what_other_snapshots_hold(fallen: ControlPlane) -> None:
    fallen.capture("acme", {}, at=NOON + HOUR)
    assert open_falls(fallen) == [("acme", "team lifetime", 2, "40")]
    discard_all(fallen)
    assert open_falls(fallen) == [("acme", "team lifetime", 2, "39")]


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_fall_of_other_counters_stays_as_it_is(plane: ControlPlane, *, is_partial: bool) -> None:
    plane.capture("acme", {LIFETIME: {"alice": "30", "bob": "9"}}, at=NOON)
    # It finds the fall of bob, and what alice has spent since is nowhere else.
    plane.capture("acme", {LIFETIME: {"alice": "31", "bob": "0"}}, at=NOON + AHEAD)
    if is_partial:
        plane.clock.advance(HOUR)
        read = reading("acme", {LIFETIME: {"alice": "31"}}, is_partial=True)
        plane.commit(plane.take(read))
    plane.clock.set(NOON + HOUR)
    before = plane.falls.open()
    assert open_falls(plane) == [("acme", "team lifetime", 1, "9")]
    assert only_in_future(plane) == [("acme", "team lifetime", 1, "1")]
    assert discard_all(plane).falls == JudgedFalls()
    assert plane.falls.open() == before
    plane.capture("acme", {LIFETIME: {"alice": "31", "bob": "9"}}, at=NOON + 2 * HOUR)
    assert [outcome for *_, outcome in plane.fall_outcomes()] == [FallOutcome.RESTORED]


@pytest.mark.parametrize("unread", ["partial", "omitted", "damaged"])
def test_a_fall_that_cannot_be_judged_ends_as_discarded(fallen: ControlPlane, unread: str) -> None:
    low = {LIFETIME: {"alice": "30", "bob": "0"}}
    fallen.capture("acme", low, at=NOON + HOUR)
    assert open_falls(fallen) == [("acme", "team lifetime", 2, "10")]
    omitted = OmittedCounter(of(*LIFETIME), "bob", "usage.acme.team.lifetime.bob", "not a number")
    without_bob = reading(
        "acme",
        {LIFETIME: {"alice": "30"}},
        omitted=(omitted,) if unread == "omitted" else (),
        is_partial=unread == "partial",
    )
    fallen.clock.set(NOON + 2 * HOUR)
    if unread == "damaged":
        fallen.capture("acme", low)
        fallen.corrupt("acme", NOON + 2 * HOUR, of(*LIFETIME))
    else:
        fallen.commit(fallen.take(without_bob))
    discard_all(fallen)
    assert [outcome for *_, outcome in fallen.fall_outcomes()] == [FallOutcome.DISCARDED]
    # What other snapshots hold is found again.
    fallen.capture("acme", low, at=NOON + 3 * HOUR)
    assert open_falls(fallen) == [("acme", "team lifetime", 1, "9")]


# The view


def test_the_view_follows_the_order_of_commits(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane = postgres_plane
    [(now,)] = admin.execute("select now()").fetchall()
    plane.capture("acme", {LIFETIME: {"alice": "5", "bob": "1"}}, at=now - 2 * HOUR)
    plane.capture("acme", {LIFETIME: {"alice": "6", "cy": "1"}}, at=now + AHEAD)
    plane.clock.set(now - HOUR)
    plane.reset(now - HOUR, "alice")
    plane.capture("acme", {LIFETIME: {"alice": "2", "bob": "1"}}, at=now)
    rows = admin.execute(
        "select entity, usage, last_captured_at from budget_recovery.recovery_point order by entity"
    ).fetchall()
    assert rows == [
        ("alice", Decimal(2), now),
        ("bob", Decimal(1), now),
        ("cy", Decimal(1), now + AHEAD),
    ]
    assert plane.points.current_usages("acme", now) == {
        of(*LIFETIME): {entity: usage for entity, usage, _ in rows}
    }
