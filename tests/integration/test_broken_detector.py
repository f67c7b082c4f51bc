"""A detector that fails at every tick is reported."""

import dagster as dg
import psycopg
import pytest
from click.testing import CliRunner

from budget_recovery_dagster.cli.main import main
from tests.integration.recovery_runs import check, skipped, state
from tests.nats_servers import Bucket


def test_the_status_reports_a_detector_that_fails_for_an_hour(
    configured: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    # As dagster-io/dagster#29625: a broken sensor goes unnoticed.
    configured.spend("acme", "total", "lifetime", {None: "80"})
    check(instance)
    assert CliRunner().invoke(main, ["status"]).exit_code == 0
    # As after an unknown change of the database.
    database.execute(
        "alter table budget_recovery.store_check add check (checked_by = 'nobody') not valid"
    )
    cursor: str | None = "0"
    for _ in range(2):
        tick = check(instance, cursor)
        assert "Try:" in skipped(tick)
        cursor = tick.cursor
    for _ in range(4):
        with pytest.raises(dg.Failure, match="At least 3 ticks in a row are unknown"):
            check(instance, cursor)
    database.execute(
        "alter table budget_recovery.store_check drop constraint store_check_checked_by_check"
    )
    database.execute(
        "update budget_recovery.store_check set checked_at = checked_at - interval '1 hour'"
    )

    result = CliRunner().invoke(main, ["status"])

    assert result.exit_code == 3
    output = " ".join(result.output.split())
    assert "The store was last known to be intact 60 min ago" in output
    assert "a check is due every 10 min." in output
    assert "store_loss_sensor" in output
    assert state(database) == "healthy"
