"""Falls in PostgreSQL that a wrong clock dated in the future."""

from datetime import timedelta
from decimal import Decimal

import psycopg

from tests.contract.control_planes import NOON, ControlPlane, Counters

HOUR = timedelta(hours=1)
FULL: Counters = {("team", "2026-11"): {"alice": "40"}}


def test_a_fall_of_the_future_is_judged_by_captures_of_the_present(
    postgres_plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane = postgres_plane
    plane.capture("acme", FULL, at=NOON)
    plane.capture("acme", {}, at=NOON + HOUR)
    admin.execute(
        "update budget_recovery.usage_fall set found_at = %(at)s, judged_at = %(at)s",
        {"at": NOON + 48 * HOUR},
    )
    plane.capture("acme", {("team", "2026-11"): {"alice": "1"}}, at=NOON + 2 * HOUR)
    (fall,) = plane.falls.open()
    assert (fall.judged_at, fall.usage) == (NOON + 2 * HOUR, Decimal(39))
    plane.capture("acme", FULL, at=NOON + 3 * HOUR)
    assert plane.falls.open() == ()
