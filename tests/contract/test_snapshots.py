from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import count

import pytest

from budget_recovery_dagster.domain import (
    Baseline,
    CaptureSource,
    Hour,
    NamedDrop,
    OmittedCounter,
    RecoveryState,
    StoreIdentity,
    TenantSnapshot,
    UnreadableKey,
)
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    BudgetRecoveryError,
    CapturesPausedError,
    HourClosedError,
    LeaseLostError,
    NotNewerError,
)
from tests.contract.control_planes import (
    BORN,
    NOON,
    WEEK,
    ControlPlane,
    Counters,
    of,
    reading,
)

HOUR = Hour(NOON)
TEAM: Counters = {("team", "lifetime"): {"alice": "1.5", None: "7"}}
MORE: Counters = {("team", "lifetime"): {"alice": "2.5", None: "8"}}


def later(hours: float) -> datetime:
    return NOON + timedelta(hours=hours)


# What a snapshot keeps


def test_a_snapshot_is_summarized_exactly(plane: ControlPlane) -> None:
    snapshot = plane.take(
        reading(
            "acme",
            {
                ("team", "2026-11"): {"alice": "1"},
                ("team", "2026-11-25"): {"alice": "1", "bo": "2"},
            },
            omitted=(OmittedCounter(of("team", "2026-11"), None, "usage.acme.x", "not a number"),),
            unreadable=(UnreadableKey("usage.acme.x.y", "2 tokens"),),
            is_partial=True,
        )
    )
    plane.commit(snapshot, run_id="run 7")
    (summary,) = plane.reports.captured_in(HOUR)
    assert (summary.tenant, summary.captured_at, summary.run_id) == ("acme", NOON, "run 7")
    assert summary.source is CaptureSource.COUNTERS
    assert summary.identity == snapshot.identity
    assert (summary.record_count, summary.entry_count, summary.omitted_count) == (2, 3, 1)
    assert (summary.unreadable_count, summary.unreadable) == (1, snapshot.unreadable)
    assert summary.drop_count == 0
    assert summary.is_partial
    assert plane.reports.captured_by("run 7") == (summary,)
    assert plane.reports.captured_by("run 8") == ()
    progress: list[str] = []
    assert plane.reports.damaged_in(HOUR, on_progress=progress.append) == ()
    assert len(progress) == 1


def test_snapshots_are_listed_by_tenant_and_time_within_their_hour(plane: ControlPlane) -> None:
    for minute in (0, 59):
        for tenant in ("b", "A", "é", "a"):
            plane.capture(tenant, TEAM, at=NOON + timedelta(minutes=minute, microseconds=999999))
    plane.capture("a", TEAM, at=later(1))
    listed = [(each.tenant, each.captured_at.minute) for each in plane.reports.captured_in(HOUR)]
    assert listed == [(tenant, minute) for tenant in ("A", "a", "b", "é") for minute in (0, 59)]
    assert plane.snapshots.tenants() == {"A", "a", "b", "é"}


def test_long_lists_are_cut_and_counted(plane: ControlPlane) -> None:
    many = [f"user {number:03}" for number in range(250)]
    plane.capture("acme", {("team", "lifetime"): dict.fromkeys(many, "2")})
    plane.clock.set(later(0.5))
    snapshot = plane.take(
        reading(
            "acme",
            {("team", "lifetime"): {many[0]: "1"}},
            unreadable=tuple(UnreadableKey(name, "why") for name in many),
            omitted=tuple(
                OmittedCounter(of("other", "lifetime"), name, name, "why") for name in many
            ),
        ),
    )
    plane.commit(snapshot, run_id="second")
    (summary,) = plane.reports.captured_by("second")
    assert (summary.drop_count, len(plane.reports.drops_of("second"))) == (250, 100)
    assert (summary.unreadable_count, len(summary.unreadable)) == (250, 100)
    assert summary.omitted_count == 250


def test_the_largest_drops_are_kept_whatever_their_names(plane: ControlPlane) -> None:
    reserved = [f"reserved {number:03}" for number in range(652)]
    plane.capture("acme", {("team", "lifetime"): dict.fromkeys(reserved, "9.00") | {"zoe": "40"}})
    plane.capture("b", {("team", "lifetime"): {"bo": "500"}})
    settled = dict.fromkeys(reserved, "8.20") | {"zoe": "0.5"}
    plane.capture("acme", {("team", "lifetime"): settled}, at=later(0.5), run_id="second")
    plane.capture("b", {("team", "lifetime"): {"bo": "400"}}, at=later(0.5), run_id="second")

    bo, zoe, *others = plane.reports.drops_of("second")
    assert (bo.tenant, bo.entity, bo.before, bo.after) == ("b", "bo", "500", "400")
    assert (zoe.tenant, zoe.entity, zoe.before, zoe.after) == ("acme", "zoe", "40", "0.5")
    assert [drop.entity for drop in others] == reserved[:99]
    # 652 times 0.80, and 39.5. Of all tenants, the most that one budget and window lacks.
    of_acme, of_b = plane.reports.captured_by("second")
    assert (of_acme.drop_count, of_acme.most_missing) == (653, Decimal("561.1"))
    assert (of_b.drop_count, of_b.most_missing) == (1, Decimal(100))
    listed, before = plane.snapshots.listed(None)
    assert (listed.drops, listed.most_missing) == (654, Decimal("561.1"))
    assert (before.drops, before.most_missing) == (0, Decimal(0))


def test_drops_are_stored_as_plain_digits(plane: ControlPlane) -> None:
    plane.capture(
        "acme", {("team", "lifetime"): {"alice": "0.000000000000000002", "bo": "1000", None: "5"}}
    )
    plane.capture(
        "acme",
        {("team", "lifetime"): {"alice": "0.000000000000000001", None: "4"}},
        at=later(0.5),
        run_id="second",
    )
    name = {"tenant": "acme", "budget": "team", "window": "lifetime"}
    assert set(plane.reports.drops_of("second")) == {
        NamedDrop(
            **name,
            entity="alice",
            before="0.000000000000000002",
            after="0.000000000000000001",
        ),
        NamedDrop(**name, entity="bo", before="1000", after=None),
        NamedDrop(**name, entity=None, before="5", after="4"),
    }
    assert plane.reports.drops_of("a run") == ()


def test_an_empty_snapshot_is_not_stored_but_its_identity_is_accepted(plane: ControlPlane) -> None:
    snapshot = plane.take(reading("nobody", {}))
    assert plane.commit(snapshot) == Baseline(snapshot.identity, 1) == plane.baseline
    assert plane.snapshots.tenants() == frozenset()
    assert plane.reports.newest_run(HOUR) is None


# The baseline


def test_each_commit_accepts_the_identity_that_was_judged(plane: ControlPlane) -> None:
    first = plane.take(reading("a", TEAM))
    assert plane.commit(first) == Baseline(first.identity, 1) == plane.baseline
    second = plane.take(reading("b", TEAM))
    assert plane.commit(second) == Baseline(second.identity, 2) == plane.baseline
    plane = replace(plane, sequences=count(2))
    same = plane.take(reading("c", TEAM))
    assert plane.commit(same) == Baseline(second.identity, 2) == plane.baseline


def test_the_newest_identity_is_that_of_the_last_snapshot(plane: ControlPlane) -> None:
    assert plane.snapshots.newest_identity() is None
    plane.capture("z", TEAM)
    last = plane.capture("a", TEAM)
    assert plane.snapshots.newest_identity() == last.identity


@pytest.mark.parametrize("sequence", [9007199254740993, 2**63, 2**64 - 1])
def test_sequences_are_exact_over_the_whole_range(plane: ControlPlane, sequence: int) -> None:
    plane = replace(plane, sequences=count(sequence))
    plane.capture("acme", TEAM)
    expected = StoreIdentity(BORN, sequence)
    assert plane.snapshots.newest_identity() == expected
    assert plane.baseline == Baseline(expected, 1)
    assert plane.reports.captured_in(HOUR)[0].identity == expected


# A refused commit changes nothing


def refused(plane: ControlPlane, snapshot: TenantSnapshot, error: type[Exception]) -> str:
    """Require that a commit is refused and changes nothing; return the message of the error."""
    before = plane.baseline, plane.reports.captured_in(HOUR), plane.snapshots.tenants()
    with pytest.raises(error) as raised:
        plane.commit(snapshot)
    assert (
        plane.baseline,
        plane.reports.captured_in(HOUR),
        plane.snapshots.tenants(),
    ) == before
    if isinstance(raised.value, BudgetRecoveryError):
        assert raised.value.hint
    return str(raised.value)


@pytest.mark.parametrize("state", [RecoveryState.RECOVERING, RecoveryState.FAILED])
def test_nothing_is_stored_while_the_store_is_not_healthy(
    plane: ControlPlane, state: RecoveryState
) -> None:
    plane.set_state(state)
    assert state.name in refused(plane, plane.take(reading("acme", TEAM)), CapturesPausedError)


def test_an_empty_snapshot_is_refused_while_the_store_is_not_healthy(plane: ControlPlane) -> None:
    plane.set_state(RecoveryState.RECOVERING)
    refused(plane, plane.take(reading("acme", {})), CapturesPausedError)


def test_nothing_is_stored_in_an_hour_that_has_closed(plane: ControlPlane) -> None:
    snapshot = plane.take(reading("acme", TEAM))
    plane.clock.set(HOUR.end)
    assert HOUR.key in refused(plane, snapshot, HourClosedError)
    plane.clock.set(HOUR.end - timedelta(microseconds=1))
    plane.commit(snapshot)


def test_a_snapshot_of_another_hour_is_refused(plane: ControlPlane) -> None:
    snapshot = plane.take(reading("acme", TEAM))
    with plane.lease() as lease, pytest.raises(ValueError, match="is not of the hour"):
        plane.snapshots.commit(
            snapshot, hour=Hour(HOUR.end), run_id="r", lease=lease, judged=plane.baseline
        )
    assert plane.snapshots.tenants() == frozenset()


@pytest.mark.parametrize("minutes", [0, -1])
def test_a_snapshot_not_newer_than_the_last_is_refused(plane: ControlPlane, minutes: int) -> None:
    plane.capture("acme", TEAM, at=later(0.5))
    stale = plane.take(reading("acme", MORE), at=later(0.5) + timedelta(minutes=minutes))
    refused(plane, stale, NotNewerError)
    plane.commit(plane.take(reading("other", MORE), at=stale.captured_at))


@pytest.mark.parametrize("version", [None, 1, 3])
def test_a_commit_judged_on_another_baseline_is_refused(
    plane: ControlPlane, version: int | None
) -> None:
    plane.capture("a", TEAM)
    plane.capture("b", TEAM)
    snapshot = plane.take(reading("acme", TEAM))
    judged = None if version is None else Baseline(StoreIdentity(BORN, 1), version)
    with plane.lease() as lease, pytest.raises(BaselineMovedError):
        plane.snapshots.commit(snapshot, hour=HOUR, run_id="r", lease=lease, judged=judged)
    assert plane.snapshots.tenants() == {"a", "b"}


def test_a_commit_judged_on_another_identity_of_the_same_version_is_refused(
    plane: ControlPlane,
) -> None:
    # As if the row of the store was lost and created again, with version 1.
    plane.capture("a", TEAM)
    snapshot = plane.take(reading("acme", TEAM))
    judged = Baseline(StoreIdentity(BORN, 77), version=1)
    with plane.lease() as lease, pytest.raises(BaselineMovedError, match="sequence 77"):
        plane.snapshots.commit(snapshot, hour=HOUR, run_id="r", lease=lease, judged=judged)
    assert plane.snapshots.tenants() == {"a"}


def test_a_commit_judged_on_a_missing_baseline_is_refused(plane: ControlPlane) -> None:
    snapshot = plane.take(reading("acme", TEAM))
    judged = Baseline(StoreIdentity(BORN, 1), 1)
    with plane.lease() as lease, pytest.raises(BaselineMovedError):
        plane.snapshots.commit(snapshot, hour=HOUR, run_id="r", lease=lease, judged=judged)


def test_nothing_is_stored_or_pruned_under_a_lost_lease(plane: ControlPlane) -> None:
    plane.capture("acme", TEAM, at=NOON - timedelta(days=30))
    plane.clock.set(NOON)
    snapshot = plane.take(reading("acme", MORE))
    with plane.lease() as lost:
        plane.lose_lease(lost)
        with plane.lease() as current:
            with pytest.raises(LeaseLostError):
                plane.snapshots.commit(
                    snapshot, hour=HOUR, run_id="r", lease=lost, judged=plane.baseline
                )
            with pytest.raises(LeaseLostError):
                plane.snapshots.prune(["acme"], policy=WEEK, now=NOON, lease=lost)
            assert plane.reports.captured_in(HOUR) == ()
            plane.snapshots.commit(
                snapshot, hour=HOUR, run_id="r", lease=current, judged=plane.baseline
            )


def test_nothing_is_stored_or_pruned_under_a_lease_of_another_name(plane: ControlPlane) -> None:
    plane.capture("acme", TEAM, at=NOON - timedelta(days=30))
    plane.clock.set(NOON)
    snapshot = plane.take(reading("acme", MORE))
    with plane.leases.hold("restore", "a test") as other:
        with pytest.raises(ValueError, match="the lease capture, not restore"):
            plane.snapshots.commit(
                snapshot, hour=HOUR, run_id="r", lease=other, judged=plane.baseline
            )
        with pytest.raises(ValueError, match="the lease capture, not restore"):
            plane.snapshots.prune(["acme"], policy=WEEK, now=NOON, lease=other)
    assert plane.reports.captured_in(HOUR) == ()
    assert plane.prune("acme").records == 0
    plane.commit(snapshot)
