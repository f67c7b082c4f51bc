from datetime import UTC, datetime

import pytest

from budget_recovery_dagster.domain import StoreIdentity

BORN = datetime(2026, 11, 1, 12, tzinfo=UTC)


def test_an_identity_needs_a_time_zone_and_a_sequence_of_at_least_zero() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        StoreIdentity(datetime(2026, 11, 1), 1)  # noqa: DTZ001
    with pytest.raises(ValueError, match="below zero"):
        StoreIdentity(BORN, -1)
