"""Merged audits of the restores of an incident, including interrupted ones."""

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from budget_recovery_dagster.domain import (
    AuditEntry,
    AuditTrail,
    Bound,
    Entity,
    IncidentAmounts,
    LossAmounts,
    ManualRestore,
    MergedAudits,
    Restored,
    WindowAmounts,
)
from tests.contract.control_planes import NOON, ControlPlane, of
from tests.contract.incident_scene import claim_attempt, open_one

HOUR = timedelta(hours=1)
ENTRY = AuditEntry(
    tenant="acme",
    of=of("team", "2026-11"),
    point_at=NOON - HOUR,
    entries=12,
    planned=8,
    raised=7,
    kept=3,
    skipped=2,
    before=Decimal("0.000000000000000001"),
    after=Decimal("12345678901234567890.123456789012345678"),
    notes=("alice is left: not a number", "2 snapshots are damaged"),
)
OTHER = replace(ENTRY, tenant="b", of=of("é {x}", "lifetime"), notes=())
MOST = Decimal("9" * 38 + "." + "9" * 18)
"""The largest sum that can be stored."""


@pytest.fixture
def trail(plane: ControlPlane) -> AuditTrail:
    """Return a trail of an open incident."""
    incident_id = open_one(plane).incident_id
    return AuditTrail(NOON, "run 1", "a sensor", "the store is lost", incident_id, (ENTRY, OTHER))


def merged(plane: ControlPlane, trail: AuditTrail, count: int = 1000) -> MergedAudits:
    assert trail.incident_id is not None
    return plane.audits.largest(trail.incident_id, count)


def restored(plane: ControlPlane, trail: AuditTrail) -> Restored:
    assert trail.incident_id is not None
    return plane.audits.restored_in(trail.incident_id)


def of_one(trail: AuditTrail, *, later: int = 0, planned: int = 0, raised: int = 0) -> AuditTrail:
    """Return a trail with a single entry, so many hours later."""
    entry = replace(ENTRY, planned=planned, raised=raised)
    return replace(trail, at=NOON + later * HOUR, entries=(entry,))


# What is stored


def test_audits_are_stored_exactly(plane: ControlPlane, trail: AuditTrail) -> None:
    plane.audits.finish(trail)
    assert merged(plane, trail).largest == (ENTRY, OTHER)
    assert merged(plane, trail).windows == 2
    assert restored(plane, trail) == Restored(tenants=2, windows=2, counters=14, boards=0)


def test_an_incident_without_audits_has_no_results(plane: ControlPlane, trail: AuditTrail) -> None:
    plane.audits.begin(replace(trail, entries=()))
    plane.audits.finish(replace(trail, entries=()))
    plane.audits.finish(replace(trail, incident_id=None))
    nothing = MergedAudits(0, ())
    assert merged(plane, trail) == plane.audits.largest("no incident", 9) == nothing
    assert restored(plane, trail) == plane.audits.restored_in("no incident") == Restored()


def test_a_leaderboard_that_several_restores_wrote_counts_once(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    wrote = replace(ENTRY, wrote_board=True)
    plane.audits.finish(replace(trail, entries=(wrote, OTHER)))
    assert restored(plane, trail).boards == 1
    # A later restore writes it again, and that of a window that an earlier one had raised.
    later = (wrote, replace(OTHER, planned=0, raised=0, wrote_board=True))
    plane.audits.finish(replace(trail, at=NOON + HOUR, entries=later))
    assert restored(plane, trail).boards == 2
    assert [entry.wrote_board for entry in merged(plane, trail).largest] == [True, True]
    plane.audits.finish(replace(trail, at=NOON + 2 * HOUR, entries=(ENTRY, OTHER)))
    assert restored(plane, trail).boards == 2


def test_many_notes_are_cut_and_counted(plane: ControlPlane, trail: AuditTrail) -> None:
    notes = tuple(f"note {number}" for number in range(250))
    exactly = notes[:100]
    plane.audits.finish(
        replace(trail, entries=(replace(ENTRY, notes=notes), replace(OTHER, notes=exactly)))
    )
    first, second = merged(plane, trail).largest
    assert first.notes == (*exactly, "and 150 more")
    assert second.notes == exactly


def test_any_text_can_be_stored_and_matched_again(plane: ControlPlane, trail: AuditTrail) -> None:
    ugly = "NUL \0, half a pair \ud83d" + "x" * 10_000
    entry = replace(ENTRY, notes=("NUL \0, half a pair \ud83d",))
    trail = replace(trail, run_id=ugly, who=ugly, why=ugly, entries=(entry,))
    plane.audits.begin(trail)
    plane.audits.finish(trail)
    (kept,) = merged(plane, trail).largest
    assert kept.notes == ("NUL \\x00, half a pair \\ud83d",)
    assert kept.raised == 7


# Audits that were begun, and their ends


def test_a_finished_audit_replaces_the_one_that_was_begun(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    begun = replace(ENTRY, raised=0, kept=0, skipped=0, planned=9, notes=(), after=Decimal(5))
    plane.audits.begin(replace(trail, entries=(begun,)))
    assert merged(plane, trail).largest == (replace(begun, raised=9),)
    plane.audits.finish(trail)
    assert merged(plane, trail).largest == (ENTRY, OTHER)
    assert restored(plane, trail).counters == 14


def test_an_audit_can_be_begun_again_until_it_is_finished(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    plane.audits.begin(of_one(trail, planned=3))
    plane.audits.begin(of_one(trail, planned=4))
    assert restored(plane, trail).counters == 4
    plane.audits.finish(of_one(trail, planned=4, raised=2))
    plane.audits.begin(of_one(trail, planned=5))
    assert restored(plane, trail).counters == 2


def test_an_audit_can_be_finished_again(plane: ControlPlane, trail: AuditTrail) -> None:
    plane.audits.finish(of_one(trail, planned=4, raised=1))
    plane.audits.finish(of_one(trail, planned=4, raised=3))
    assert restored(plane, trail).counters == 3


@pytest.mark.parametrize(
    "change", [{"run_id": "run 2"}, {"at": NOON + timedelta(microseconds=1)}], ids=str
)
def test_another_run_or_time_is_another_restore(
    plane: ControlPlane, trail: AuditTrail, change: dict[str, object]
) -> None:
    plane.audits.begin(of_one(trail, planned=5))
    (entry,) = of_one(trail, planned=2, raised=2).entries
    plane.audits.finish(replace(trail, entries=(entry,), **change))  # type: ignore[arg-type]
    # The restore that was begun raised 3 of 5, because 2 were still planned after it.
    assert restored(plane, trail).counters == 5


def test_another_tenant_budget_or_window_is_another_entry(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    names = [("a", "t", "2026-11"), ("a", "t", "lifetime"), ("a", "u", "2026-11")]
    names += [("b", "t", "2026-11")]
    entries = [replace(ENTRY, tenant=tenant, of=of(*rest)) for tenant, *rest in names]
    for entry in entries:
        plane.audits.finish(replace(trail, entries=(entry,)))
    assert merged(plane, trail).largest == tuple(entries)
    assert restored(plane, trail) == Restored(tenants=2, windows=4, counters=28)


# Several restores of an incident


@pytest.mark.parametrize(
    ("planned_next", "raised"), [(10, 0), (4, 6), (0, 10), (12, 0)], ids=["none", "some", "all", ""]
)
def test_an_interrupted_restore_raised_what_the_next_one_did_not_plan(
    plane: ControlPlane, trail: AuditTrail, planned_next: int, raised: int
) -> None:
    plane.audits.begin(of_one(trail, planned=10))
    plane.audits.finish(of_one(trail, later=1, planned=planned_next))
    assert restored(plane, trail).counters == raised
    assert restored(plane, trail).windows == bool(raised)
    assert merged(plane, trail).largest[0].raised == raised


def test_each_of_several_interrupted_restores_counts_what_it_raised(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    for later, planned in enumerate((10, 7, 3)):
        plane.audits.begin(of_one(trail, later=later, planned=planned))
    assert restored(plane, trail).counters == 10
    plane.audits.finish(of_one(trail, later=3, planned=2, raised=1))
    assert restored(plane, trail).counters == 3 + 4 + 1 + 1


def test_restores_are_merged_by_time_and_not_by_order_of_writing(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    first = replace(ENTRY, before=Decimal(1), after=Decimal(2), notes=("first",), planned=8)
    last = replace(ENTRY, before=Decimal(5), after=Decimal(6), notes=("last",), planned=3, raised=0)
    plane.audits.finish(replace(trail, at=NOON + HOUR, entries=(last,)))
    plane.audits.begin(replace(trail, entries=(first,)))
    assert merged(plane, trail).largest == (replace(last, before=Decimal(1), raised=5),)


def test_counters_raised_again_after_a_further_loss_count_once(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    plane.audits.finish(of_one(trail, planned=12, raised=12))
    plane.audits.begin(of_one(trail, later=1, planned=12))
    plane.audits.finish(of_one(trail, later=2, planned=1, raised=1))
    assert restored(plane, trail).counters == ENTRY.entries
    fewer = replace(ENTRY, entries=4, planned=0, raised=0)
    plane.audits.finish(replace(trail, at=NOON + 3 * HOUR, entries=(fewer,)))
    assert restored(plane, trail).counters == 4
    assert merged(plane, trail).largest[0].raised == 4


def test_a_merged_entry_has_the_first_usage_before_and_the_last_result(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    last = AuditEntry(
        tenant=ENTRY.tenant,
        of=ENTRY.of,
        point_at=NOON,
        entries=20,
        planned=5,
        raised=4,
        kept=15,
        skipped=1,
        before=Decimal(90),
        after=Decimal(100),
        notes=(),
    )
    plane.audits.finish(trail)
    plane.audits.finish(replace(trail, at=NOON + HOUR, run_id="run 2", entries=(last,)))
    audits = merged(plane, trail)
    assert audits.largest == (OTHER, replace(last, before=ENTRY.before, raised=7 + 4))
    assert audits.windows == 2


def test_windows_without_raised_counters_are_listed_but_not_counted(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    kept = replace(OTHER, planned=0, raised=0)
    plane.audits.finish(replace(trail, entries=(ENTRY, kept)))
    assert restored(plane, trail) == Restored(tenants=1, windows=1, counters=7)
    assert merged(plane, trail).largest == (ENTRY, kept)


# Amounts and their order


def test_amounts_are_exact(plane: ControlPlane, trail: AuditTrail) -> None:
    large = replace(ENTRY, before=MOST, after=MOST)
    small = replace(OTHER, before=Decimal("1E-18"), after=Decimal("2E-18"))
    plane.audits.finish(replace(trail, entries=(large, small)))
    assert set(merged(plane, trail).largest) == {large, small}


def test_entries_are_listed_by_exact_rise(plane: ControlPlane, trail: AuditTrail) -> None:
    first = replace(ENTRY, tenant="z", before=Decimal("1E-18"), after=MOST, notes=())
    second = replace(ENTRY, tenant="y", before=Decimal("2E-18"), after=MOST)
    level = replace(ENTRY, tenant="x", before=MOST, after=MOST)
    fell = replace(ENTRY, tenant="w", before=MOST, after=Decimal(0))
    plane.audits.finish(replace(trail, entries=(fell, level, second, first)))
    assert merged(plane, trail).largest == (first, second, level, fell)
    some = merged(plane, trail, 2)
    assert (some.largest, some.windows) == ((first, second), 4)
    none = merged(plane, trail, 0)
    assert (none.largest, none.windows) == ((), 4)


def test_entries_with_equal_rises_are_listed_by_notes_and_then_by_name(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    names = [
        ("B", "t", "lifetime"),
        ("a", "T", "2026-11"),
        ("a", "t", "2026-11"),
        ("a", "t", "lifetime"),
        ("é", "a", "2026-11"),
    ]
    silent = [replace(ENTRY, tenant=tenant, of=of(*rest), notes=()) for tenant, *rest in names]
    noted = replace(ENTRY, tenant="é", of=of("z", "lifetime"), notes=("left",))
    plane.audits.finish(replace(trail, entries=(*reversed(silent), noted)))
    assert merged(plane, trail).largest == (noted, *silent)
    assert merged(plane, trail, 1).largest == (noted,)


def test_many_entries_are_stored_and_merged_in_seconds(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    entries = tuple(
        replace(ENTRY, tenant=f"t{number % 100:02}", of=of(f"b{number}", "lifetime"), notes=())
        for number in range(25_000)
    )
    started = time.monotonic()
    plane.audits.begin(replace(trail, entries=entries))
    plane.audits.finish(replace(trail, at=NOON + HOUR, entries=entries))
    assert restored(plane, trail) == Restored(tenants=100, windows=25_000, counters=175_000)
    audits = merged(plane, trail, 200)
    assert (audits.windows, len(audits.largest)) == (25_000, 200)
    # Quadratic work would take minutes.
    assert time.monotonic() - started < 30


# What an incident cost


def with_amounts(
    entry: AuditEntry, restored: str, counted: str | None, bound: Bound = Bound.EXACT, **more: Any
) -> AuditEntry:
    known = None if counted is None else Decimal(counted)
    return replace(entry, amounts=LossAmounts(Decimal(restored), known, bound, **more))


def amounts(plane: ControlPlane, trail: AuditTrail, count: int = 100) -> IncidentAmounts:
    assert trail.incident_id is not None
    return plane.audits.amounts_in(trail.incident_id, count)


def known(plane: ControlPlane, trail: AuditTrail, tenant: str) -> Mapping[Any, LossAmounts]:
    assert trail.incident_id is not None
    return plane.audits.amounts_of(trail.incident_id, tenant)


def test_amounts_are_those_of_the_newest_entry_that_has_some(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    first = with_amounts(ENTRY, "7", "3")
    plane.audits.finish(replace(trail, entries=(first,)))
    later = with_amounts(ENTRY, "8", "3.000000000000000001", Bound.AT_MOST)
    plane.audits.finish(replace(trail, at=NOON + HOUR, entries=(later,)))
    # A verification that writes nothing has none.
    plane.audits.finish(replace(trail, at=NOON + 2 * HOUR, entries=(replace(ENTRY, raised=0),)))
    assert known(plane, trail, "acme") == {ENTRY.of: later.amounts}
    assert known(plane, trail, "b") == {}
    [entry] = merged(plane, trail).largest
    assert entry.amounts == later.amounts
    shown = WindowAmounts(
        "acme", ENTRY.of, Decimal(8), Decimal("3.000000000000000001"), Bound.AT_MOST
    )
    assert amounts(plane, trail) == IncidentAmounts(1, 1, 0, (shown,), (shown,))


def test_amounts_of_a_restore_that_did_not_end_are_at_least_those(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    shares: dict[Entity, Decimal] = {None: Decimal(3), "é": Decimal("1E-18")}
    begun = with_amounts(ENTRY, "7", "3", shares=shares, is_begun=True)
    plane.audits.begin(replace(trail, entries=(begun,)))
    assert known(plane, trail, "acme") == {ENTRY.of: begun.amounts}
    assert amounts(plane, trail).counted == (
        WindowAmounts("acme", ENTRY.of, Decimal(7), Decimal(3), Bound.AT_LEAST),
    )
    ended = with_amounts(ENTRY, "6", "4", Bound.EXACT, shares={"é": Decimal(4)})
    plane.audits.finish(replace(trail, entries=(ended,)))
    assert known(plane, trail, "acme") == {ENTRY.of: ended.amounts}
    assert amounts(plane, trail).counted[0].bound is Bound.EXACT


def test_amounts_are_listed_by_size_and_counted(plane: ControlPlane, trail: AuditTrail) -> None:
    entries = (
        with_amounts(ENTRY, "1", "2"),
        with_amounts(replace(ENTRY, of=of("z", "lifetime")), "5", "2"),
        with_amounts(replace(ENTRY, of=of("a", "lifetime")), "0", "9"),
        with_amounts(replace(ENTRY, of=of("b", "lifetime")), "3", "0"),
        with_amounts(OTHER, "0", None, Bound.UNKNOWN),
        # Earlier versions knew none, and a window in which nothing was raised cost nothing.
        replace(ENTRY, tenant="old"),
        replace(ENTRY, tenant="quiet", planned=0, raised=0),
    )
    plane.audits.finish(replace(trail, entries=entries))
    found = amounts(plane, trail)
    assert (found.restored_windows, found.counted_windows, found.unknown_windows) == (3, 3, 2)
    assert [each.of.budget for each in found.restored] == ["z", "b", "team"]
    # Equal amounts are in the order of their names.
    assert [each.of.budget for each in found.counted] == ["a", "team", "z"]
    cut = amounts(plane, trail, 1)
    assert (cut.restored, cut.counted) == (found.restored[:1], found.counted[:1])
    assert (cut.restored_windows, cut.counted_windows, cut.unknown_windows) == (3, 3, 2)
    assert plane.audits.amounts_in("another incident", 9) == IncidentAmounts()


# Windows that were raised


def test_the_windows_that_an_incident_raised_are_known_even_if_a_restore_did_not_finish(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    def entry(budget: str, *, planned: int, raised: int, tenant: str = "acme") -> AuditEntry:
        window = of(budget, "2026-11")
        return replace(ENTRY, tenant=tenant, of=window, planned=planned, raised=raised)

    assert trail.incident_id is not None
    finished = (
        entry("raised", planned=3, raised=2),
        entry("refused", planned=3, raised=0),
        entry("noted", planned=0, raised=0),
        entry("theirs", planned=1, raised=1, tenant="b"),
    )
    plane.audits.finish(replace(trail, entries=finished))
    begun = (entry("begun", planned=1, raised=0), entry("refused", planned=0, raised=0))
    plane.audits.begin(replace(trail, at=NOON + HOUR, entries=begun))
    elsewhere = (entry("manual", planned=1, raised=1),)
    plane.audits.finish(replace(trail, at=NOON + HOUR, incident_id=None, entries=elsewhere))
    assert plane.audits.windows_begun(trail.incident_id, "acme") == {
        of("raised", "2026-11"),
        of("begun", "2026-11"),
    }
    assert plane.audits.windows_begun(trail.incident_id, "b") == {of("theirs", "2026-11")}
    assert plane.audits.windows_begun("another incident", "acme") == frozenset()


# Manual restores


def manual(plane: ControlPlane, count: int = 9) -> list[str]:
    """Return the commands and runs of manual restores after NOON, the last recorded first."""
    return [each.run_id for each in plane.audits.manual_restores(NOON, count)]


def of_command(number: int, *entries: AuditEntry, minutes: int = 1) -> AuditTrail:
    at = NOON + timedelta(minutes=minutes)
    return AuditTrail(at, f"command {number}", "ann@ops", "ticket 7", None, entries or (ENTRY,))


def test_a_restore_without_an_attempt_is_manual(plane: ControlPlane) -> None:
    incident = claim_attempt(plane, open_one(plane), run_id="run 1")
    trail = of_command(1)
    for run_id in ("run 1", "run 2"):
        of_incident = replace(trail, run_id=run_id, incident_id=incident.incident_id)
        plane.audits.finish(of_incident)
    plane.audits.finish(trail)
    assert plane.audits.manual_restores(NOON, 9) == (
        ManualRestore("command 1", trail.at, "ann@ops", "ticket 7", None),
        ManualRestore("run 2", trail.at, "ann@ops", "ticket 7", incident.incident_id),
    )


def test_manual_restores_are_listed_by_recording_after_a_time_and_up_to_a_number(
    plane: ControlPlane,
) -> None:
    plane.audits.finish(of_command(1, minutes=0))
    # The clock was ahead.
    plane.audits.finish(of_command(2, minutes=90))
    plane.audits.begin(of_command(3))
    plane.audits.finish(of_command(4))
    # It was begun before.
    plane.audits.finish(of_command(3))
    assert manual(plane) == ["command 4", "command 3", "command 2"]
    assert manual(plane, 2) == ["command 4", "command 3"]


def test_manual_restores_that_raised_nothing_are_not_listed(plane: ControlPlane) -> None:
    refused = replace(ENTRY, raised=0)
    plane.audits.finish(of_command(1, refused))
    plane.audits.begin(of_command(2, replace(refused, planned=0)))
    plane.audits.finish(of_command(3, refused, OTHER))
    assert manual(plane) == ["command 3"]


def test_a_manual_restore_names_the_tenants_that_it_did_not_finish(plane: ControlPlane) -> None:
    c = replace(OTHER, tenant="c")
    plane.audits.begin(of_command(1, c, OTHER, replace(c, of=of("t", "2026-11"))))
    plane.audits.begin(of_command(1, replace(ENTRY, planned=0)))
    plane.audits.finish(of_command(1, replace(OTHER, tenant="d")))
    (restore,) = plane.audits.manual_restores(NOON, 9)
    assert restore.unfinished == ("b", "c")


def test_what_one_restore_raised_is_told_apart_from_other_restores_of_its_incident(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    first = replace(trail, run_id="command 1")
    wrote = replace(OTHER, raised=2, wrote_board=True)
    plane.audits.finish(first)
    plane.audits.finish(replace(first, at=NOON + HOUR, run_id="command 2", entries=(wrote,)))
    assert plane.audits.raised_by("command 2", 9) == (
        Restored(tenants=1, windows=1, counters=2, boards=1),
        MergedAudits(1, (wrote,)),
    )
    restored, audits = plane.audits.raised_by("command 1", 1)
    assert (restored.counters, audits) == (14, MergedAudits(2, (ENTRY,)))
    assert plane.audits.raised_by("command 3", 9) == (Restored(), MergedAudits(0, ()))


def test_an_unfinished_manual_restore_counts_as_planned(plane: ControlPlane) -> None:
    plane.audits.begin(of_command(1, replace(ENTRY, raised=0)))
    restored, audits = plane.audits.raised_by("command 1", 9)
    assert restored.counters == ENTRY.planned
    assert audits.largest == (replace(ENTRY, raised=ENTRY.planned),)
