from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import psycopg
import pytest

from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.restore_ports import AuditEntry, AuditTrail
from tests.contract.control_planes import NOON, ControlPlane, of
from tests.contract.incident_scene import open_one

HOUR = timedelta(hours=1)
ENTRY = AuditEntry(
    tenant="acme",
    of=of("team", "2026-11"),
    point_at=NOON - HOUR,
    entries=12,
    raised=7,
    kept=3,
    skipped=2,
    before=Decimal("0.000000000000000001"),
    after=Decimal("12345678901234567890.123456789012345678"),
    notes=("alice is left: not a number", "2 snapshots are damaged"),
)
OTHER = replace(ENTRY, tenant="b", of=of("é {x}", "lifetime"), notes=())


@pytest.fixture
def trail(plane: ControlPlane) -> AuditTrail:
    """A trail of an incident that is open."""
    incident_id = open_one(plane).incident_id
    return AuditTrail(NOON, "run 1", "a sensor", "the store is lost", incident_id, (ENTRY, OTHER))


def trails(plane: ControlPlane, trail: AuditTrail) -> tuple[AuditTrail, ...]:
    assert trail.incident_id is not None
    return plane.audits.of_incident(trail.incident_id)


def test_a_trail_comes_back_exactly_with_its_entries_in_their_order(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    backwards = replace(trail, at=NOON + HOUR, entries=(OTHER, ENTRY))
    plane.audits.record(trail)
    plane.audits.record(backwards)
    assert trails(plane, trail) == (trail, backwards)


def test_the_oldest_trail_comes_first_and_each_run_and_time_is_one(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    first = replace(trail, entries=(ENTRY,))
    second_run = replace(first, run_id="run 2")
    later = replace(first, at=NOON + HOUR)
    rest = replace(first, entries=(OTHER,))
    for each in (later, first, second_run, rest):
        plane.audits.record(each)
    assert trails(plane, trail) == (trail, second_run, later)


def test_a_restore_without_an_incident_is_none_of_any(
    plane: ControlPlane, trail: AuditTrail
) -> None:
    plane.audits.record(replace(trail, incident_id=None))
    assert trails(plane, trail) == ()
    assert plane.audits.of_incident("no incident") == ()


def test_a_restore_that_did_nothing_leaves_no_trail(plane: ControlPlane, trail: AuditTrail) -> None:
    plane.audits.record(replace(trail, entries=()))
    assert trails(plane, trail) == ()


def test_sums_may_be_larger_than_one_usage(plane: ControlPlane, trail: AuditTrail) -> None:
    most = Decimal("9" * 26 + "." + "9" * 18)
    large = replace(trail, entries=(replace(ENTRY, before=most, after=most),))
    plane.audits.record(large)
    assert trails(plane, trail) == (large,)


def test_many_notes_are_cut_and_counted(plane: ControlPlane, trail: AuditTrail) -> None:
    notes = tuple(f"note {number}" for number in range(250))
    exactly = notes[:100]
    plane.audits.record(
        replace(trail, entries=(replace(ENTRY, notes=notes), replace(OTHER, notes=exactly)))
    )
    (kept,) = trails(plane, trail)
    assert kept.entries[0].notes == (*exactly, "and 150 more")
    assert kept.entries[1].notes == exactly


def test_any_text_can_be_kept(plane: ControlPlane, trail: AuditTrail) -> None:
    ugly, told = "NUL \0, half a pair \ud83d", "NUL \\x00, half a pair \\ud83d"
    entry = replace(ENTRY, notes=(ugly,))
    plane.audits.record(replace(trail, run_id=ugly, who=ugly, why="x" * 10_000, entries=(entry,)))
    (kept,) = trails(plane, trail)
    assert (kept.run_id, kept.who, len(kept.why)) == (told, told, 2000)
    assert kept.entries[0].notes == (told,)


def test_a_trail_is_kept_whole_or_not_at_all(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    incident_id = open_one(postgres_plane).incident_id
    impossible = replace(ENTRY, kept=-1)
    trail = AuditTrail(NOON, "r", "w", "y", incident_id, (ENTRY, impossible))
    with pytest.raises(DatabaseError, match="audit_counts_are_not_negative"):
        postgres_plane.audits.record(trail)
    assert admin.execute("select from budget_recovery.restore_audit").rowcount == 0


@pytest.mark.parametrize(
    "change",
    [
        "usage_before = 'NaN'",
        "usage_after = 'Infinity'",
        "usage_after = -1",
        "skipped = -1",
        "notes = '{}'",
        "tenant = ''",
        "incident_id = '0'",
    ],
)
def test_rows_that_make_no_sense_are_refused(
    postgres_plane: ControlPlane, admin: psycopg.Connection, change: str
) -> None:
    incident_id = open_one(postgres_plane).incident_id
    postgres_plane.audits.record(AuditTrail(NOON, "r", "w", "y", incident_id, (ENTRY,)))
    with pytest.raises(psycopg.IntegrityError):
        admin.execute(f"update budget_recovery.restore_audit set {change}".encode())
