"""The example writer of docs/integration.md: everything that it writes is captured."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import psycopg
import pytest

from budget_recovery_dagster.domain import BudgetDefinition, Enforcement, Period, SplitBy
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.documentation import block
from tests.integration.recovery_harness import Harness
from tests.nats_servers import Bucket
from tests.waiting import wait_until

COST, TIMES = Decimal("0.25"), 20


@pytest.fixture
def writer(tmp_path: Path) -> Path:
    file = tmp_path / "writer.py"
    file.write_text(block("docs/integration.md", "python", "import nats"), encoding="utf-8")
    return file


def start(writer: Path, bucket: Bucket) -> subprocess.Popen[bytes]:
    server = {"NATS_URL": os.environ["BUDGET_RECOVERY_NATS_URL"]}
    environment = {"BUDGET_RECOVERY_BUCKET": bucket.name, **server}
    return subprocess.Popen([sys.executable, "-W", "error", str(writer)], env=environment)


def captured(database: psycopg.Connection) -> dict[tuple[str, str, str | None], Decimal]:
    rows = database.execute(
        "select tenant, budget_id, entity, usage from budget_recovery.recovery_point"
    ).fetchall()
    return {(tenant, budget, entity): usage for tenant, budget, entity, usage in rows}


def test_two_concurrent_writers_lose_nothing_and_all_usage_is_captured(
    harness: Harness, writer: Path, database: psycopg.Connection
) -> None:
    # The writer creates the bucket, as it does after a wipe.
    harness.bucket.destroy()
    writers = [start(writer, harness.bucket) for _ in range(2)]
    assert [each.wait(timeout=60) for each in writers] == [0, 0]
    harness.capture()
    spent = COST * TIMES * len(writers)
    assert captured(database) == {
        ("acme", "team", None): spent,
        ("acme", "team", "user:alice@example.com"): spent,
    }


def test_the_writer_continues_from_raised_counters(
    harness: Harness, writer: Path, database: psycopg.Connection
) -> None:
    harness.bucket.destroy()
    assert start(writer, harness.bucket).wait(timeout=60) == 0
    harness.capture()
    # Leaves the marker: the writer can be so fast that nothing else differs in the new store.
    harness.check()
    harness.bucket.destroy()
    running = start(writer, harness.bucket)
    aggregate = f"usage.acme.team.{datetime.now(UTC):%Y-%m}.="
    wait_until(lambda: harness.bucket.stored(aggregate) is not None)
    harness.find_loss()
    harness.recover()
    assert running.wait(timeout=60) == 0
    before, all_of_it = COST * TIMES, 2 * COST * TIMES
    harness.capture()
    after = captured(database)
    assert len(after) == 2
    # Usage before the restore is not added to the raised usage; later usage is not lost.
    assert all(before <= usage <= all_of_it for usage in after.values())


def test_the_documented_limits_can_be_written_repeatedly(
    configured: Bucket, database: psycopg.Connection
) -> None:
    define = block("docs/integration.md", "sql", "insert into budget_recovery.budget")
    for _ in range(2):
        database.execute(define.encode())
    with opened_control_plane(services.present_settings()) as plane:
        per_user, per_centre = sorted(plane.budgets.of_tenant("acme"), key=lambda each: each.limit)
    assert per_user == BudgetDefinition(
        "acme", "team", Period.MONTH, Decimal(500), SplitBy.USER, Enforcement.ENFORCE
    )
    assert (per_centre.split_by, per_centre.metadata_key) == (SplitBy.METADATA, "cost_centre")
