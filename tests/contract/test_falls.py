"""What is missing from an intact store: falls, counts of keys, and the bucket's configuration."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import (
    AuditEntry,
    AuditTrail,
    CaptureSource,
    ConfigurationChange,
    Fall,
    KeyCount,
    OmittedCounter,
    TenantWindow,
)
from tests.contract.control_planes import NOON, ControlPlane, Counters, of, reading
from tests.contract.incident_scene import close, open_one

HOUR = timedelta(hours=1)
MONTH, DAY = ("team", "2026-11"), ("team", "2026-11-25")
FULL: Counters = {MONTH: {"alice": "40", "bo": "5"}, DAY: {"alice": "3"}}
AT_MONTH = TenantWindow("acme", of(*MONTH))
AT_DAY = TenantWindow("acme", of(*DAY))


def falls(plane: ControlPlane) -> list[tuple[str, str, int, str]]:
    return [
        (fall.at.tenant, str(fall.at.of), fall.counters, format(fall.usage, "f"))
        for fall in plane.falls.open()
    ]


# Falls


def test_a_fall_stays_open_until_its_counters_are_as_high_as_before(plane: ControlPlane) -> None:
    plane.capture("acme", FULL, at=NOON)
    assert plane.falls.open() == ()
    plane.capture("acme", {DAY: {"alice": "3"}}, at=NOON + HOUR)
    assert plane.falls.open() == (
        Fall(AT_MONTH, NOON + HOUR, NOON + HOUR, counters=2, usage=Decimal(45)),
    )
    # Traffic fills the counters again.
    plane.capture("acme", {**FULL, MONTH: {"alice": "39.5", "bo": "6"}}, at=NOON + 2 * HOUR)
    assert plane.falls.open() == (
        Fall(AT_MONTH, NOON + HOUR, NOON + 2 * HOUR, counters=1, usage=Decimal("0.5")),
    )
    plane.capture("acme", {**FULL, MONTH: {"alice": "40", "bo": "6"}}, at=NOON + 3 * HOUR)
    assert plane.falls.open() == ()
    # The next one is another fall.
    plane.capture("acme", {**FULL, MONTH: {"alice": "40", "bo": "1"}}, at=NOON + 4 * HOUR)
    (fall,) = plane.falls.open()
    assert (fall.found_at, fall.counters, fall.usage) == (NOON + 4 * HOUR, 1, Decimal(5))


def test_the_largest_fall_of_all_tenants_comes_first(plane: ControlPlane) -> None:
    for tenant, usage in (("a", "5"), ("b", "70"), ("c", "5")):
        plane.capture(tenant, {MONTH: {None: usage}}, at=NOON)
    for tenant in ("a", "b", "c"):
        plane.capture(tenant, {}, at=NOON + HOUR)
    assert falls(plane) == [
        ("b", "team 2026-11", 1, "70"),
        ("a", "team 2026-11", 1, "5"),
        ("c", "team 2026-11", 1, "5"),
    ]


def test_a_fall_ends_with_its_window(plane: ControlPlane) -> None:
    plane.capture("acme", FULL, at=NOON)
    plane.capture("acme", {}, at=NOON + HOUR)
    assert len(plane.falls.open()) == 2
    plane.clock.set(NOON + 12 * HOUR)
    # Without a capture.
    assert falls(plane) == [("acme", "team 2026-11", 2, "45")]
    plane.capture("acme", {}, at=NOON + 13 * HOUR)
    assert falls(plane) == [("acme", "team 2026-11", 2, "45")]


def test_a_reset_ends_a_fall_with_the_next_capture(plane: ControlPlane) -> None:
    plane.capture("acme", FULL, at=NOON)
    plane.capture("acme", {DAY: {"alice": "3"}}, at=NOON + HOUR)
    plane.reset(NOON + HOUR, "alice")
    plane.capture("acme", {DAY: {"alice": "3"}}, at=NOON + 2 * HOUR)
    assert falls(plane) == [("acme", "team 2026-11", 1, "5")]
    plane.reset(NOON + 2 * HOUR)
    plane.capture("acme", {DAY: {"alice": "3"}}, at=NOON + 3 * HOUR)
    assert falls(plane) == []


def test_an_unreadable_counter_ends_no_fall(plane: ControlPlane) -> None:
    plane.capture("acme", FULL, at=NOON)
    plane.capture("acme", {MONTH: {"bo": "4"}, DAY: {"alice": "3"}}, at=NOON + HOUR)
    unreadable = OmittedCounter(of(*MONTH), "alice", "a key", "NaN")
    plane.clock.set(NOON + 2 * HOUR)
    read = reading("acme", {MONTH: {"bo": "4"}, DAY: {"alice": "3"}}, omitted=(unreadable,))
    plane.commit(plane.take(read))
    # Bo alone would be 1 counter and 1 of usage; nothing is known of Alice.
    assert falls(plane) == [("acme", "team 2026-11", 2, "41")]
    plane.clock.set(NOON + 3 * HOUR)
    plane.commit(plane.take(reading("acme", {**FULL, MONTH: {"bo": "5"}}, omitted=(unreadable,))))
    assert falls(plane) == [("acme", "team 2026-11", 2, "41")]
    plane.capture("acme", FULL, at=NOON + 4 * HOUR)
    assert falls(plane) == []


def test_a_partial_snapshot_opens_falls_only_of_lower_counters_and_ends_none(
    plane: ControlPlane,
) -> None:
    plane.capture("acme", FULL, at=NOON)
    plane.clock.set(NOON + HOUR)
    partial = replace(reading("acme", {MONTH: {"alice": "39"}}), is_partial=True)
    # Bo and the day did not arrive, which says nothing.
    plane.commit(plane.take(partial))
    assert falls(plane) == [("acme", "team 2026-11", 1, "1")]
    plane.capture(
        "acme", {MONTH: {"alice": "30", "bo": "1"}, DAY: {"alice": "3"}}, at=NOON + 2 * HOUR
    )
    found = {each: each.counted(0, 0, NOON) for each in counts(plane).values()}
    plane.falls.record_counts(found, until=9)
    plane.clock.set(NOON + 3 * HOUR)
    plane.commit(plane.take(replace(reading("acme", {MONTH: {"bo": "5"}}), is_partial=True)))
    assert falls(plane) == [("acme", "team 2026-11", 2, "14")]
    assert counts(plane)[AT_MONTH].missing == 2


def test_usage_of_aggregate_and_entities_is_not_added(plane: ControlPlane) -> None:
    plane.capture("acme", {MONTH: {None: "45", "alice": "40", "bo": "5"}}, at=NOON)
    plane.capture("acme", {MONTH: {"bo": "5"}}, at=NOON + HOUR)
    assert falls(plane) == [("acme", "team 2026-11", 2, "45")]


def test_a_restore_or_a_reset_after_the_last_judgement_is_reported(plane: ControlPlane) -> None:
    for tenant in ("acme", "b", "c"):
        plane.capture(tenant, FULL, at=NOON)
    for tenant in ("acme", "b", "c"):
        plane.capture(tenant, {}, at=NOON + HOUR)
    assert plane.falls.touched() == {}
    plane.clock.set(NOON + HOUR + timedelta(minutes=5))
    reset = plane.reset(NOON + HOUR, "bo", tenant="b")
    entry = AuditEntry("acme", of(*MONTH), NOON, 2, 2, 2, 0, 0, Decimal(0), Decimal(45), notes=())
    trail = AuditTrail(plane.clock.now(), "a run", "ann", "a test", None, (entry,))
    plane.audits.begin(trail)
    assert plane.falls.touched() == {"b": reset.recorded_at}
    plane.audits.finish(trail)
    nothing = replace(entry, tenant="c", planned=0, raised=0)
    plane.audits.finish(replace(trail, entries=(nothing,)))
    at = plane.clock.now()
    assert plane.falls.touched() == {"acme": at, "b": reset.recorded_at}
    # The next capture judges them again.
    plane.capture("acme", FULL, at=NOON + 2 * HOUR)
    plane.capture("b", {}, at=NOON + 2 * HOUR)
    assert plane.falls.touched() == {}


# Counts


def test_a_capture_counts_the_keys_of_open_windows(plane: ControlPlane) -> None:
    assert plane.falls.counts() == ((), None)
    unreadable = OmittedCounter(of(*MONTH), "cy", "a key", "NaN")
    counters: Counters = {**FULL, ("team", "2026-10"): {"alice": "1"}}
    snapshot = plane.take(reading("acme", counters, omitted=(unreadable,)))
    plane.commit(snapshot)
    sequence = snapshot.identity.last_sequence
    counts, until = plane.falls.counts()
    assert set(counts) == {
        KeyCount(AT_MONTH, 3, sequence, NOON),
        KeyCount(AT_DAY, 1, sequence, NOON),
    }
    assert until is None


def counts(plane: ControlPlane) -> dict[TenantWindow, KeyCount]:
    return {each.at: each for each in plane.falls.counts()[0]}


def test_counts_of_a_check_stay_until_the_next_capture_of_the_tenant(plane: ControlPlane) -> None:
    plane.capture("acme", FULL, at=NOON)
    plane.capture("b", FULL, at=NOON)
    later = NOON + timedelta(minutes=10)
    plane.clock.set(later)
    found = {each: each.counted(0, 1, later) for each in counts(plane).values()}
    plane.falls.record_counts(found, until=2**63 + 1)
    assert plane.falls.counts()[1] == 2**63 + 1
    assert {each.missing for each in counts(plane).values()} == {2, 3}
    assert counts(plane)[AT_MONTH].missing_since == later
    plane.capture("acme", {MONTH: {"alice": "40"}}, at=NOON + HOUR)
    assert (counts(plane)[AT_MONTH].keys, counts(plane)[AT_MONTH].missing) == (1, 0)
    # Nothing of the tenant is left in this window.
    assert AT_DAY not in counts(plane)
    assert counts(plane)[TenantWindow("b", of(*DAY))].missing == 2


def test_a_count_from_before_a_capture_does_not_replace_its_count(plane: ControlPlane) -> None:
    plane.capture("acme", FULL, at=NOON)
    before = counts(plane)
    plane.capture("acme", FULL, at=NOON + HOUR)
    late = NOON + HOUR + timedelta(minutes=1)
    plane.falls.record_counts({each: each.counted(0, 0, late) for each in before.values()}, until=9)
    assert {each.missing for each in counts(plane).values()} == {0}
    assert counts(plane)[AT_MONTH].keys == 2


@pytest.mark.parametrize("tenant", ["acme", "b", "new"])
def test_deletions_are_read_again_if_a_capture_changed_any_count_meanwhile(
    plane: ControlPlane, tenant: str
) -> None:
    for known in ("acme", "b"):
        plane.capture(known, FULL, at=NOON)
    plane.falls.record_counts({each: each for each in counts(plane).values()}, until=5)
    found = {each: each.counted(None, 1, NOON) for each in counts(plane).values()}
    plane.capture(tenant, FULL, at=NOON + HOUR)
    plane.falls.record_counts(found, until=9)
    # If only some were stored, the next check would count their deletions twice.
    assert {each.missing for each in counts(plane).values()} == {0}
    assert plane.falls.counts()[1] == 5


def test_the_end_of_an_incident_outdates_all_counts_by_any_clock(plane: ControlPlane) -> None:
    plane.capture("acme", FULL, at=NOON)
    incident = open_one(plane)
    plane.falls.record_counts({each: each for each in counts(plane).values()}, until=5)
    before = counts(plane)
    plane.clock.set(NOON + timedelta(days=1))
    close(plane, incident)
    plane.clock.set(NOON + HOUR)
    assert plane.falls.counts()[1] is None
    assert counts(plane) == {at: replace(each, is_outdated=True) for at, each in before.items()}
    # A check that began before does not end this.
    plane.falls.record_counts({each: each for each in before.values()}, until=5)
    assert plane.falls.counts()[1] is None
    again = {each: each.restarted(2, 3, NOON + HOUR) for each in counts(plane).values()}
    plane.falls.record_counts(again, until=5)
    assert {each.is_outdated for each in counts(plane).values()} == {False}


def test_a_capture_of_an_idle_store_replaces_counts_as_well(plane: ControlPlane) -> None:
    first = plane.capture("acme", FULL, at=NOON)
    before = counts(plane)
    plane.clock.set(NOON + HOUR)
    plane.commit(replace(plane.take(reading("acme", FULL)), identity=first.identity))
    plane.falls.record_counts(
        {each: each.counted(0, 0, NOON + HOUR) for each in before.values()}, until=9
    )
    assert {each.missing for each in counts(plane).values()} == {0}


def test_counts_of_closed_windows_stay_until_the_next_capture(plane: ControlPlane) -> None:
    plane.capture("acme", FULL, at=NOON)
    plane.clock.set(NOON + 12 * HOUR)
    assert set(counts(plane)) == {AT_MONTH}
    plane.falls.record_counts({each: each for each in counts(plane).values()}, until=1)
    # The clock was ahead.
    plane.clock.set(NOON)
    assert set(counts(plane)) == {AT_MONTH, AT_DAY}
    plane.capture("acme", FULL, at=NOON + 12 * HOUR)
    plane.clock.set(NOON)
    assert set(counts(plane)) == {AT_MONTH}


def test_a_capture_of_leaderboards_keeps_the_counts_of_checks(plane: ControlPlane) -> None:
    boards = replace(reading("acme", FULL), source=CaptureSource.LEADERBOARDS)
    plane.commit(plane.take(boards))
    assert counts(plane)[AT_MONTH].keys == 2
    found = {each: each.counted(700, 3, NOON) for each in counts(plane).values()}
    plane.falls.record_counts(found, until=9)
    plane.clock.set(NOON + HOUR)
    plane.commit(plane.take(boards))
    count = counts(plane)[AT_MONTH]
    # The leaderboard of a window still stands when its counters are gone.
    assert (count.keys, count.missing, count.missing_since) == (700, 3, NOON)


@pytest.mark.parametrize("by", ["restore", "reset", "counters"])
def test_what_leaderboards_cannot_name_is_missing_until_it_is_restored_or_reset(
    plane: ControlPlane, by: str
) -> None:
    boards = replace(reading("acme", FULL), source=CaptureSource.LEADERBOARDS)
    plane.commit(plane.take(boards))
    gone = {each: each.counted(0, 0, NOON) for each in counts(plane).values()}
    plane.falls.record_counts(gone, until=9)
    plane.clock.set(NOON + HOUR)
    if by == "restore":
        entry = AuditEntry("acme", of(*MONTH), NOON, 2, 2, 2, 0, 0, Decimal(0), Decimal(45), ())
        trail = AuditTrail(plane.clock.now(), "a run", "ann", "a test", None, (entry,))
        plane.audits.finish(trail)
    elif by == "reset":
        plane.reset(plane.clock.now(), window=MONTH[1])
    plane.clock.set(NOON + 2 * HOUR)
    plane.commit(plane.take(reading("acme", FULL) if by == "counters" else boards))
    missing = {at: count.missing for at, count in counts(plane).items()}
    assert missing == {AT_MONTH: 0, AT_DAY: 0 if by == "counters" else 1}


def test_what_a_clock_that_was_ahead_found_missing_ends_as_well(plane: ControlPlane) -> None:
    boards = replace(reading("acme", FULL), source=CaptureSource.LEADERBOARDS)
    plane.commit(plane.take(boards))
    gone = {each: each.counted(0, 0, NOON + timedelta(days=40)) for each in counts(plane).values()}
    plane.falls.record_counts(gone, until=9)
    plane.clock.set(NOON + HOUR)
    plane.commit(plane.take(boards))
    assert counts(plane)[AT_MONTH].missing == 2
    plane.clock.set(NOON + 2 * HOUR)
    plane.reset(plane.clock.now(), window=MONTH[1])
    plane.clock.set(NOON + 3 * HOUR)
    plane.commit(plane.take(boards))
    assert {at: count.missing for at, count in counts(plane).items()} == {AT_MONTH: 0, AT_DAY: 1}


def test_a_count_that_starts_again_has_the_sequence_of_the_new_store(plane: ControlPlane) -> None:
    plane.capture("acme", FULL, at=NOON)
    again = {each: each.restarted(5, 2**63 + 7, NOON + HOUR) for each in counts(plane).values()}
    plane.falls.record_counts(again, until=2**63 + 7)
    assert counts(plane)[AT_DAY] == KeyCount(AT_DAY, 5, 2**63 + 7, NOON + HOUR)


# The configuration of the bucket


def test_changes_of_the_configuration_are_kept_with_old_and_new_values(
    plane: ControlPlane,
) -> None:
    first = {"max_age": "unlimited", "discard": "new"}
    second = {"max_age": "60 s", "discard": "old"}
    assert plane.falls.record_configuration(first) == ()
    assert plane.falls.record_configuration(first) == ()
    plane.clock.set(NOON + HOUR)
    changes = (
        ConfigurationChange("discard", "new", "old", NOON + HOUR),
        ConfigurationChange("max_age", "unlimited", "60 s", NOON + HOUR),
    )
    assert plane.falls.record_configuration(second) == changes
    plane.clock.set(NOON + 2 * HOUR)
    back = plane.falls.record_configuration({**second, "max_age": "unlimited"})
    assert back == (ConfigurationChange("max_age", "60 s", "unlimited", NOON + 2 * HOUR),)
    assert plane.falls.configuration_changes(NOON) == (*back, *changes)
    assert plane.falls.configuration_changes(NOON + HOUR) == back
    assert plane.falls.configuration_changes(NOON + 2 * HOUR) == ()


def test_a_configuration_that_was_found_by_a_wrong_clock_is_compared_once(
    plane: ControlPlane,
) -> None:
    plane.falls.record_configuration({"discard": "new"})
    plane.clock.set(NOON + 30 * 24 * HOUR)
    plane.falls.record_configuration({"discard": "old"})
    plane.clock.set(NOON + HOUR)
    assert len(plane.falls.record_configuration({"discard": "new"})) == 1
    assert plane.falls.record_configuration({"discard": "new"}) == ()


def test_a_setting_that_a_new_release_adds_is_not_a_change(plane: ControlPlane) -> None:
    plane.falls.record_configuration({"discard": "new"})
    plane.clock.set(NOON + HOUR)
    assert plane.falls.record_configuration({"discard": "new", "history": "1"}) == ()
    plane.clock.set(NOON + 2 * HOUR)
    assert len(plane.falls.record_configuration({"discard": "new", "history": "5"})) == 1
