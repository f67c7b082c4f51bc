"""PostgreSQL and the store have a clock that is 40 days ahead for one capture; then a loss."""

from datetime import UTC, datetime, timedelta

import pytest

from budget_recovery_dagster.domain import Outcome
from tests.integration.recovery_harness import Harness, outcome_of
from tests.integration.recovery_runs import usages

pytestmark = pytest.mark.slow

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
AHEAD = timedelta(days=40)
WINDOWS = ("2026-11", "2026-Q4", "lifetime")


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_capture_with_the_clock_ahead_costs_nothing_of_the_true_month(
    harness: Harness, *, is_empty: bool
) -> None:
    for window in WINDOWS:
        harness.bucket.spend("acme", "total", window, {None: "80", "alice": "30"})
    for half_day in range(-18, 1):
        harness.capture(NOON + half_day * timedelta(hours=12))
    if is_empty:
        for window in WINDOWS:
            harness.bucket.remove(f"usage.acme.total.{window}.=")
            harness.bucket.put(f"usage.acme.total.{window}.alice", b"not a number")
    ahead = harness.capture(NOON + AHEAD)
    assert ahead.pruned is not None
    assert (ahead.pruned.records, ahead.pruned.awaited_captures) == (0, 23)
    # Later captures are not refused, until the clock of PostgreSQL was set right and after it.
    for hour in (1, 2):
        assert len(harness.capture(NOON + hour * timedelta(hours=1)).stored) == 1
    harness.lose()
    harness.find_loss(NOON + timedelta(hours=2, minutes=10))
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    for window in WINDOWS:
        assert usages(harness.bucket, "acme", "total", window) == {None: "80", "alice": "30"}
