"""Who holds a lease, by a clock that may have been wrong."""

from datetime import UTC, datetime, timedelta

import pytest

from budget_recovery_dagster.domain import Holding, holder_at, require_free
from budget_recovery_dagster.errors import LeaseHeldError

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)


def holding(seconds: float) -> Holding:
    """A lease that is to last so many seconds from noon."""
    return Holding("a worker", 7, NOON, NOON + timedelta(seconds=seconds))


@pytest.mark.parametrize(("seconds", "holder"), [(0.001, "a worker"), (120, "a worker")])
def test_a_lease_is_held_until_it_expires(seconds: float, holder: str) -> None:
    assert holder_at(holding(seconds), NOON) == holder
    with pytest.raises(LeaseHeldError, match="a worker, since 2026-11-25 12:00:00 UTC"):
        require_free("restore", holding(seconds), NOON)


@pytest.mark.parametrize("seconds", [-1, 0, 120.001, 3 * 3600])
def test_one_that_is_over_or_of_a_clock_that_was_ahead_is_free(seconds: float) -> None:
    assert holder_at(holding(seconds), NOON) is None
    require_free("restore", holding(seconds), NOON)
    assert holder_at(None, NOON) is None
