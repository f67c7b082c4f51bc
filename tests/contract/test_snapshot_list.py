"""The list of snapshots that a restore can use."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

from budget_recovery_dagster.domain import (
    CaptureSource,
    ListedSnapshot,
    OmittedCounter,
    UnreadableKey,
)
from tests.contract.control_planes import NOON, ControlPlane, Counters, of, reading

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
TWO: Counters = {("team", "lifetime"): {"alice": "1", "bo": "2"}, ("team", "2026-11"): {None: "3"}}
PLAIN = ListedSnapshot(
    NOON,
    CaptureSource.COUNTERS,
    1,
    2,
    3,
    omitted=0,
    unreadable=0,
    drops=0,
    most_missing=Decimal(0),
    partial=0,
    is_pruned=False,
)


def test_the_list_is_empty_without_snapshots(plane: ControlPlane) -> None:
    assert plane.snapshots.listed(None) == plane.snapshots.listed("acme") == ()
    assert plane.snapshots.budgets_of("acme") == ()


def test_snapshots_of_a_tenant_are_listed_newest_first_with_their_counts(
    plane: ControlPlane,
) -> None:
    plane.capture("acme", TWO, at=NOON)
    plane.capture("acme2", TWO, at=NOON + 2 * HOUR)
    plane.clock.set(NOON + HOUR)
    read = reading(
        "acme",
        {("team", "lifetime"): {"alice": "0.5"}},
        omitted=(OmittedCounter(of("team", "lifetime"), "cy", "key", "NaN"),),
        unreadable=(UnreadableKey("usage.b", "few parts"), UnreadableKey("usage.c", "few parts")),
        is_partial=True,
    )
    plane.commit(plane.take(read))
    assert plane.snapshots.listed("acme") == (
        # Bo and the aggregate did not arrive.
        ListedSnapshot(
            NOON + HOUR,
            CaptureSource.COUNTERS,
            1,
            1,
            1,
            omitted=1,
            unreadable=2,
            drops=1,
            most_missing=Decimal("0.5"),
            partial=1,
            is_pruned=False,
        ),
        PLAIN,
    )
    assert plane.snapshots.listed("ac") == ()


def test_snapshots_of_all_tenants_are_summed_by_time(plane: ControlPlane) -> None:
    plane.capture("acme", TWO, at=NOON)
    plane.capture("b", TWO, at=NOON)
    plane.commit(plane.take(reading("c", {}, is_partial=True), at=NOON))
    plane.capture("acme", TWO, at=NOON + HOUR)
    assert plane.snapshots.listed(None) == (
        replace(PLAIN, captured_at=NOON + HOUR),
        ListedSnapshot(
            NOON,
            CaptureSource.COUNTERS,
            3,
            4,
            6,
            omitted=0,
            unreadable=0,
            drops=0,
            most_missing=Decimal(0),
            partial=1,
            is_pruned=False,
        ),
    )


def test_snapshots_of_the_same_time_are_listed_by_source(plane: ControlPlane) -> None:
    plane.capture("acme", TWO, at=NOON)
    by_boards = replace(reading("b", TWO), source=CaptureSource.LEADERBOARDS)
    plane.commit(plane.take(by_boards, at=NOON))
    assert plane.snapshots.listed(None) == (
        PLAIN,
        replace(PLAIN, source=CaptureSource.LEADERBOARDS),
    )


def test_a_partly_pruned_snapshot_is_marked(plane: ControlPlane) -> None:
    quiet: Counters = {("quiet", "lifetime"): {"alice": "3"}}
    plane.capture("acme", {**quiet, **TWO}, at=NOON)
    plane.capture("b", TWO, at=NOON)
    plane.capture("acme", TWO, at=NOON + 8 * DAY)
    plane.prune("acme")
    pruned = replace(PLAIN, records=3, entries=4, is_pruned=True)
    assert plane.snapshots.listed("acme")[1] == pruned
    assert plane.snapshots.listed("b") == (PLAIN,)
    assert plane.snapshots.listed(None)[-1] == replace(pruned, tenants=2, records=5, entries=7)


def test_budgets_with_a_retained_record_are_listed_by_name(plane: ControlPlane) -> None:
    names = ("b", "é", "B", "a", "a b")
    plane.capture("acme", {(name, "2026-11"): {"x": "1"} for name in names}, at=NOON)
    more: Counters = {("a", token): {"x": "1"} for token in ("lifetime", "2026-Q4", "2026-11")}
    plane.capture("acme", more, at=NOON + HOUR)
    plane.capture("acme2", {("other", "lifetime"): {"x": "1"}})
    assert plane.snapshots.budgets_of("acme") == ("B", "a", "a b", "b", "é")
    # All older records are pruned: their windows have closed in December.
    plane.capture("acme", more, at=NOON + 30 * DAY)
    plane.prune("acme")
    assert plane.snapshots.budgets_of("acme") == ("a",)
