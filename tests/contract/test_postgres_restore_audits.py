"""The table of audits: only whole trails and valid rows."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import psycopg
import pytest

from budget_recovery_dagster.domain import AuditTrail, Bound, LossAmounts
from budget_recovery_dagster.errors import DatabaseError
from tests.contract.control_planes import NOON, ControlPlane
from tests.contract.incident_scene import open_one
from tests.contract.test_restore_audits import ENTRY, OTHER


@pytest.fixture
def trail(postgres_plane: ControlPlane) -> AuditTrail:
    incident_id = open_one(postgres_plane).incident_id
    return AuditTrail(NOON, "run 1", "a host", "lost", incident_id, (ENTRY, OTHER))


def test_finishing_an_audit_updates_its_row_with_the_time(
    postgres_plane: ControlPlane, trail: AuditTrail, admin: psycopg.Connection
) -> None:
    columns = b"select audit_id, at, run_id, who, why, planned, raised, finished_at"
    query = columns + b" from budget_recovery.restore_audit order by audit_id"
    postgres_plane.audits.begin(replace(trail, entries=(replace(ENTRY, raised=0),)))
    [(audit_id, *begun)] = admin.execute(query).fetchall()
    assert begun == [NOON, "run 1", "a host", "lost", 8, 0, None]
    later = NOON + timedelta(minutes=5)
    postgres_plane.clock.set(later)
    postgres_plane.audits.finish(trail)
    first, second = admin.execute(query).fetchall()
    assert first == (audit_id, NOON, "run 1", "a host", "lost", 8, 7, later)
    assert second[1:] == first[1:]


def test_a_trail_is_stored_as_a_whole_or_not_at_all(
    postgres_plane: ControlPlane, trail: AuditTrail, admin: psycopg.Connection
) -> None:
    impossible = replace(trail, entries=(ENTRY, replace(OTHER, planned=-1)))
    for keep in (postgres_plane.audits.begin, postgres_plane.audits.finish):
        with pytest.raises(DatabaseError, match="audit_counts_are_not_negative"):
            keep(impossible)
    assert admin.execute("select from budget_recovery.restore_audit").rowcount == 0


@pytest.mark.parametrize(
    "change",
    [
        "usage_before = 'NaN'",
        "usage_after = 'Infinity'",
        "usage_after = -1",
        "planned = -1",
        "skipped = -1",
        "notes = '{}'",
        "usage_restored = -1",
        "usage_counted = 'NaN'",
        "counted_bound = 'sure'",
        "counted_bound = null",
        "usage_counted = null",
        "counted_bound = 'unknown'",
        "shares = '[]'",
        "tenant = ''",
        "incident_id = '0'",
        "tenant = 'one', budget_id = 'one', window_token = 'lifetime'",
    ],
)
def test_invalid_rows_are_refused(
    postgres_plane: ControlPlane, trail: AuditTrail, admin: psycopg.Connection, change: str
) -> None:
    counted = replace(ENTRY, amounts=LossAmounts(Decimal(7), Decimal(3), Bound.EXACT))
    postgres_plane.audits.finish(replace(trail, entries=(counted, OTHER)))
    with pytest.raises(psycopg.IntegrityError):
        admin.execute(f"update budget_recovery.restore_audit set {change}".encode())
