"""Whether a lease is held, even if the clock was wrong when it was taken."""

from datetime import UTC, datetime, timedelta

import pytest

from budget_recovery_dagster.domain import Holding, holder_at, require_free
from budget_recovery_dagster.errors import LeaseHeldError

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)


def holding(seconds: float) -> Holding:
    """Return a lease that expires so many seconds after noon."""
    return Holding("a worker", 7, NOON, NOON + timedelta(seconds=seconds))


@pytest.mark.parametrize(("seconds", "holder"), [(0.001, "a worker"), (120, "a worker")])
def test_a_lease_is_held_until_it_expires(seconds: float, holder: str) -> None:
    assert holder_at(holding(seconds), NOON) == holder
    with pytest.raises(LeaseHeldError, match="a worker, since 2026-11-25 12:00:00 UTC"):
        require_free("restore", holding(seconds), NOON)


@pytest.mark.parametrize("seconds", [-1, 0, 120.001, 3 * 3600])
def test_a_lease_is_free_if_it_expired_or_was_taken_with_a_clock_ahead(seconds: float) -> None:
    assert holder_at(holding(seconds), NOON) is None
    require_free("restore", holding(seconds), NOON)
    assert holder_at(None, NOON) is None
