"""No snapshot is taken between the opening of an incident and its end."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import Database, PostgresSnapshots
from budget_recovery_dagster.domain import Baseline, Hour, RecoveryState
from budget_recovery_dagster.errors import CapturesPausedError
from budget_recovery_dagster.jobs.snapshots import hourly_snapshot_schedule
from budget_recovery_dagster.ports import OpenStore
from budget_recovery_dagster.services import Captured
from tests import services
from tests.integration.interrupted_store import Interruptions, interrupted
from tests.integration.recovery_house import House
from tests.integration.recovery_runs import usages
from tests.integration.snapshot_job import entries, run_job
from tests.integration.timeless_store import opened_store

LIFETIME = "lifetime"


@dataclass(frozen=True)
class InterruptedSnapshots(PostgresSnapshots):
    """The real snapshots, with a hook before each commit."""

    before_commit: Callable[[], None]

    def commit(self, *arguments: Any, **named: Any) -> Baseline:
        self.before_commit()
        return super().commit(*arguments, **named)


def capture(house: House, *, open_store: OpenStore = opened_store, **parts: Any) -> Captured:
    """Capture the current hour with some parts replaced; failures are allowed."""
    captured = services.capture(
        replace(house.plane, **parts),
        Hour.containing(house.clock.moment),
        open_store=open_store,
        run_id="under way",
        holder="under way",
    )
    assert isinstance(captured, Captured)
    return captured


@pytest.mark.parametrize("moment", ["after it has read", "before it stores"])
def test_a_running_capture_stores_nothing_after_an_incident_opens(
    house: House, database_url: str, database: psycopg.Connection, moment: str
) -> None:
    for tenant in ("acme", "globex"):
        house.bucket.spend(tenant, "total", LIFETIME, {None: "80"})
    house.capture()
    house.check()
    before = entries(database)
    captures = database.execute("select * from budget_recovery.capture").fetchall()
    house.bucket.spend("acme", "total", LIFETIME, {None: "99"})

    def lose() -> None:
        house.lose()
        house.bucket.spend("acme", "total", LIFETIME, {None: "1"})
        house.find_loss()

    if moment == "after it has read":
        captured = capture(house, open_store=interrupted(Interruptions(after_reading=lose)))
    else:
        with Database(database_url, clock=house.clock) as own:
            captured = capture(house, snapshots=InterruptedSnapshots(own, lose))

    assert isinstance(captured.stopped_by, CapturesPausedError)
    assert captured.stored == ()
    assert [failed.tenant for failed in captured.failed] == ["acme", "globex"]
    assert entries(database) == before
    assert database.execute("select * from budget_recovery.capture").fetchall() == captures
    # The capture does not disturb the restore.
    house.recover()
    assert usages(house.bucket, "acme", "total", LIFETIME) == {None: "80"}


@pytest.fixture
def recovering(house: House) -> House:
    house.bucket.spend("acme", "total", LIFETIME, {None: "80"})
    house.capture()
    house.lose()
    house.find_loss()
    return house


def test_the_schedule_skips_with_the_reason_until_the_store_is_healthy(
    recovering: House, current_hour: Hour, tmp_path: Path
) -> None:
    def tick() -> dg.RunRequest | dg.SkipReason:
        with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
            context = dg.build_schedule_context(
                instance=instance,
                scheduled_execution_time=current_hour.start,
                resources=services.definitions().resources,
            )
            answer = hourly_snapshot_schedule(context)
        assert isinstance(answer, dg.RunRequest | dg.SkipReason)
        return answer

    skipped = tick()
    assert isinstance(skipped, dg.SkipReason)
    said = str(skipped.skip_message)
    assert "Captures are paused: the usage store is RECOVERING" in said
    assert "The store was recreated" in said
    recovering.recover()
    assert isinstance(tick(), dg.RunRequest)


def test_a_run_started_while_captures_are_paused_has_no_output(
    recovering: House,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    before = entries(database)
    recovering.bucket.spend("acme", "total", LIFETIME, {None: "1"})

    result = run_job(instance, current_hour)

    assert result.success
    assert result.asset_materializations_for_node("budget_usage_snapshots") == []
    assert entries(database) == before
    assert recovering.plane.incidents.recovery().state is RecoveryState.RECOVERING
