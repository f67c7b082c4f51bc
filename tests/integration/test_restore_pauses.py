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
from budget_recovery_dagster.ports import OpenStore
from budget_recovery_dagster.services import Captured
from tests import services
from tests.integration.interrupted_store import Interruptions, interrupted
from tests.integration.recovery_harness import Harness
from tests.integration.recovery_runs import schedule_tick, usages
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


def capture(harness: Harness, *, open_store: OpenStore = opened_store, **parts: Any) -> Captured:
    """Capture the current hour with some parts replaced; failures are allowed."""
    captured = services.capture(
        replace(harness.plane, **parts),
        Hour.containing(harness.clock.time),
        open_store=open_store,
        run_id="under way",
        holder="under way",
    )
    assert isinstance(captured, Captured)
    return captured


@pytest.mark.parametrize("when", ["after it has read", "before it stores"])
def test_a_running_capture_stores_nothing_after_an_incident_opens(
    harness: Harness, database_url: str, database: psycopg.Connection, when: str
) -> None:
    for tenant in ("acme", "globex"):
        harness.bucket.spend(tenant, "total", LIFETIME, {None: "80"})
    harness.capture()
    harness.check()
    before = entries(database)
    captures = database.execute("select * from budget_recovery.capture").fetchall()
    harness.bucket.spend("acme", "total", LIFETIME, {None: "99"})

    def lose() -> None:
        harness.lose()
        harness.bucket.spend("acme", "total", LIFETIME, {None: "1"})
        harness.find_loss()

    if when == "after it has read":
        captured = capture(harness, open_store=interrupted(Interruptions(after_reading=lose)))
    else:
        with Database(database_url, clock=harness.clock) as own:
            captured = capture(harness, snapshots=InterruptedSnapshots(own, lose))

    assert isinstance(captured.stopped_by, CapturesPausedError)
    assert captured.stored == ()
    assert [failed.tenant for failed in captured.failed] == ["acme", "globex"]
    assert entries(database) == before
    assert database.execute("select * from budget_recovery.capture").fetchall() == captures
    # The capture does not disturb the restore.
    harness.recover()
    assert usages(harness.bucket, "acme", "total", LIFETIME) == {None: "80"}


@pytest.fixture
def recovering(harness: Harness) -> Harness:
    harness.bucket.spend("acme", "total", LIFETIME, {None: "80"})
    harness.capture()
    harness.lose()
    harness.find_loss()
    return harness


def test_the_schedule_skips_with_the_reason_until_the_store_is_healthy(
    recovering: Harness, current_hour: Hour, tmp_path: Path
) -> None:
    def tick() -> dg.RunRequest | dg.SkipReason:
        with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
            return schedule_tick(instance, current_hour.start)

    skipped = tick()
    assert isinstance(skipped, dg.SkipReason)
    message = str(skipped.skip_message)
    assert "Captures are paused: the usage store is RECOVERING" in message
    assert "The store was recreated" in message
    recovering.recover()
    resumed = tick()
    assert isinstance(resumed, dg.SkipReason)
    assert "was captured at" in str(resumed.skip_message)


def test_a_run_started_while_captures_are_paused_has_no_output(
    recovering: Harness,
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
