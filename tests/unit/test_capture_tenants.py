"""Captures of several tenants: failures are isolated, and no usage is forgotten."""

from datetime import timedelta
from decimal import Decimal

from budget_recovery_dagster.domain import BudgetWindow, CaptureSource, Uncaptured, Window
from budget_recovery_dagster.errors import (
    StoreReadError,
    StoreUnreachableError,
)
from tests.unit.capture_harness import DENIED, Harness, names


def test_an_unreadable_tenant_does_not_affect_others(harness: Harness) -> None:
    harness.store.failures["b"] = DENIED

    captured = harness.capture("one")

    assert names(captured.stored) == ["a", "c"]
    assert [(f.tenant, f.reason) for f in captured.failed] == [
        ("b", "The user may not read tenant b.")
    ]
    assert captured.stopped_by is None
    assert harness.outcomes == list(captured.outcomes)
    assert [s.tenant for s in harness.plane.reports.captured_by("one")] == ["a", "c"]
    assert [(f.name, f.hint) for f in harness.plane.reports.failures_of("one")] == [
        ("b", "grant it.")
    ]


def test_pruning_skips_a_tenant_that_failed_in_this_run(harness: Harness) -> None:
    # Two snapshots each, so that the older one of a healthy tenant is no longer needed.
    harness.capture()
    harness.clock.advance(timedelta(hours=1))
    harness.capture()
    harness.clock.advance(timedelta(days=8))
    harness.store.failures["b"] = DENIED
    # After a gap, so many captures must follow.
    for _ in range(24):
        harness.clock.advance(timedelta(minutes=1))
        harness.capture()

    kept = dict.fromkeys("abc", 0)
    for tenant, _ in harness.plane.state.snapshots:
        kept[tenant] += 1
    assert kept == {"a": 24, "b": 2, "c": 24}


def test_an_unexpected_error_is_reported_and_does_not_affect_other_tenants(
    harness: Harness,
) -> None:
    def break_down() -> None:
        raise RuntimeError("out of cheese")

    harness.while_reading("b", break_down)
    captured = harness.capture()
    assert names(captured.stored) == ["a", "c"]
    assert captured.failed[0].reason == "Unexpected RuntimeError: out of cheese"
    assert isinstance(captured.failed[0].error, RuntimeError)


def test_known_tenants_are_captured_even_if_the_listing_fails(harness: Harness) -> None:
    harness.capture()
    harness.clock.advance(timedelta(minutes=1))
    failure = harness.store.listing_failure = StoreReadError("Too many keys.", "look.")
    captured = harness.capture()
    assert names(captured.stored) == ["a", "b", "c"]
    assert captured.stopped_by is failure
    # The leaderboards could not be listed either: what was known stays known, here that there are
    # none.
    assert harness.store.reader(CaptureSource.COUNTERS).read("a").boards is None
    point = harness.plane.points.point_of("a", harness.clock.now())
    assert point is not None
    assert {window.has_board for window in point.windows} == {False}


def test_the_last_good_recovery_point_survives_eight_days_of_failed_captures(
    harness: Harness,
) -> None:
    harness.capture()
    harness.store.identity_failure = StoreUnreachableError("No answer.", "see whether NATS runs.")
    for _ in range(8 * 24):
        harness.clock.advance(timedelta(hours=1))
        harness.capture()
    harness.store.identity_failure = None
    assert harness.known("a") == Decimal(10)
    assert harness.capture().stored != ()
    assert harness.known("a") == Decimal(10)


def test_a_budget_missing_for_eight_days_keeps_its_recovery_point(harness: Harness) -> None:
    harness.store.put_usage("a", "other", "lifetime", "bob", "5")
    harness.capture()
    harness.store.purge("usage.a.other.")
    for _ in range(8 * 24 + 1):
        harness.clock.advance(timedelta(hours=1))
        captured = harness.capture()
        assert captured.stored[0].drops == 1
    other = BudgetWindow("other", Window.parse("lifetime"))
    point = harness.plane.points.current_usages("a", harness.clock.now())
    assert point[other] == {"bob": Decimal(5)}
    # One record of it, and a week of records of the other budget.
    records = [
        s.records for (tenant, _), s in harness.plane.state.snapshots.items() if tenant == "a"
    ]
    assert sum(other in record for record in records) == 1
    assert len(records) <= 7 * 24 + 2


def test_a_tenant_missing_from_the_store_is_reported_as_dropped_and_kept(harness: Harness) -> None:
    harness.capture()
    harness.clock.advance(timedelta(hours=1))
    harness.store.purge("usage.b.")
    captured = harness.capture()
    assert [(o.tenant, o.drops) for o in captured.stored] == [("a", 0), ("b", 1), ("c", 0)]
    assert harness.known("b") == Decimal(10)


def test_a_missing_tenant_is_pruned_after_its_windows_have_closed(harness: Harness) -> None:
    harness.store.purge()
    harness.store.put_usage("d", "spend", "2026-11-25", None, "1")
    harness.spend("a", "10")
    harness.capture()
    harness.store.purge("usage.d.")
    for _ in range(9):
        harness.clock.advance(timedelta(days=1))
        harness.capture()
    assert harness.plane.snapshots.tenants() == {"a"}


def test_a_partial_reading_is_stored_with_a_mark_and_the_point_keeps_the_rest(
    harness: Harness,
) -> None:
    for entity in ("x", "y", "z"):
        harness.spend("a", "3", entity)
    harness.capture()
    harness.clock.advance(timedelta(minutes=1))

    # Both the read and its retry find fewer keys than announced.
    doomed = iter(["usage.a.spend.lifetime.z", "usage.a.spend.lifetime.y"])

    def purge_next(read: str) -> None:
        if read == "a":
            harness.store.purge(next(doomed))

    harness.store.during_read = purge_next
    stored = harness.capture().stored[0]

    # What did not arrive is unknown, so it is no drop.
    assert (stored.tenant, stored.is_partial, stored.entries, stored.drops) == ("a", True, 2, 0)
    assert harness.known("a", "y") == harness.known("a", "z") == Decimal(3)


def test_an_empty_partial_reading_is_not_an_absent_tenant(harness: Harness) -> None:
    harness.store.put_usage("new", "spend", "lifetime", "x", "1")
    harness.store.put_usage("new", "spend", "lifetime", "y", "1")
    purges = iter(["usage.new.spend.lifetime.y", "usage.new."])

    def purge_next(read: str) -> None:
        if read == "new":
            harness.store.purge(next(purges))

    harness.store.during_read = purge_next
    new = harness.capture().stored[-1]
    assert (new.tenant, new.is_partial) == ("new", True)


def test_unreadable_values_are_omitted_and_stay_in_the_recovery_point(harness: Harness) -> None:
    harness.spend("a", "7", "bob")
    harness.capture()
    harness.clock.advance(timedelta(minutes=1))
    harness.store.put("usage.a.spend.lifetime.bob", b'{"usage": "NaN"}')
    captured = harness.capture("second")
    assert (captured.stored[0].entries, captured.stored[0].omitted) == (1, 1)
    assert captured.stored[0].drops == 0
    assert harness.known("a", "bob") == Decimal(7)


def test_an_empty_store_has_nothing_to_capture() -> None:
    captured = Harness().capture()
    assert (captured.outcomes, captured.stopped_by) == ((), None)


def test_keys_that_name_no_tenant_are_reported(harness: Harness) -> None:
    harness.store.put("usage.=zz.spend.lifetime.=", b"1")
    captured = harness.capture("a run")
    assert names(captured.stored) == ["a", "b", "c"]
    (noted,) = harness.plane.reports.failures_of("a run")
    assert (noted.kind, noted.name) == (Uncaptured.KEY, "usage.=zz.spend.lifetime.=")
    assert [bad.key for bad in captured.unreadable] == ["usage.=zz.spend.lifetime.="]


def test_captures_that_outlast_the_hour_reach_all_tenants_in_turn(harness: Harness) -> None:
    # From 12:05 on, two tenants are read in the first hour, and one in each of the next hours.
    harness.store.during_read = lambda _: harness.clock.advance(timedelta(minutes=25))
    captures = [harness.capture() for _ in range(4)]
    assert [names(captured.stored) for captured in captures] == [["a", "b"], ["c"], ["a"], ["b"]]
    assert [outcome.tenant for outcome in captures[1].outcomes] == ["c", "a", "b"]
    assert [outcome.tenant for outcome in captures[3].outcomes] == ["b", "c", "a"]


def test_tenants_that_a_capture_did_not_reach_fail_with_the_oldest_snapshot_first(
    harness: Harness,
) -> None:
    harness.capture()
    harness.clock.advance(timedelta(hours=1))
    harness.store.failures["a"] = StoreReadError("Slow.", "wait.")
    harness.capture()
    harness.clock.advance(timedelta(hours=1))
    harness.spend("new", "1")
    assert [outcome.tenant for outcome in harness.capture().outcomes] == ["new", "a", "b", "c"]


def test_a_stray_key_of_a_new_tenant_does_not_hide_it(harness: Harness) -> None:
    for key in ("usage.a", "usage.new", "usage.other"):
        harness.store.put(key, b"1")
    harness.spend("new", "1")
    harness.store.put("usage.b", b"1")
    captured = harness.capture("a run")
    assert names(captured.stored) == ["a", "b", "c", "new"]
    stray = ["usage.a", "usage.b", "usage.new", "usage.other"]
    assert [bad.key for bad in captured.unreadable] == stray
    assert [each.name for each in harness.plane.reports.failures_of("a run")] == stray
