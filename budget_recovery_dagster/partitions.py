"""The hourly partitions: a partition is the UTC hour in which a capture happens."""

from datetime import UTC, datetime, timedelta

import dagster as dg

from budget_recovery_dagster.settings import load_settings


def hourly_partitions(now: datetime) -> dg.HourlyPartitionsDefinition:
    """Return the hours from one day before retention, at midnight UTC, to the current one.

    The start is fixed until Dagster reloads the definitions, so it may lag; older hours stay
    listed until then, though their snapshots are gone.
    """
    days = load_settings().retention_days + 1
    start = (now.astimezone(UTC) - timedelta(days=days)).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    # end_offset=1: the current hour has begun and is the one to capture into.
    return dg.HourlyPartitionsDefinition(start_date=start, timezone="UTC", end_offset=1)


capture_hours = hourly_partitions(datetime.now(UTC))
