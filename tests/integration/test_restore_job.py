"""A store is lost and restored: sensors and job on real servers."""

from pathlib import Path
from uuid import uuid4

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import Hour
from tests.integration.confined_user import confined, documented_permissions
from tests.integration.recovery_runs import (
    check,
    incidents,
    outcome,
    requested,
    restored_table,
    run_restore,
    skipped,
    state,
    supervise,
    usages,
    verdict,
)
from tests.integration.snapshot_job import failure_text, run_job
from tests.nats_servers import Bucket

LIFETIME = "lifetime"


def wipe(bucket: Bucket) -> None:
    bucket.destroy()
    bucket.create()


def test_a_wiped_store_is_restored_and_the_next_snapshot_is_stored(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80", "alice": "30.000000000000000001"})
    configured.spend("globex", "total", LIFETIME, {None: "5"})
    assert run_job(instance, current_hour).success
    assert verdict(check(instance)) == "same"

    wipe(configured)
    configured.spend("acme", "total", LIFETIME, {"alice": "2", "bob": "1"})
    (request,) = requested(check(instance))
    assert state(database) == "recovering"
    result = run_restore(instance, request.tags)

    assert result.success
    assert outcome(instance, result) == "restored"
    assert usages(configured, "acme", "total", LIFETIME) == {
        None: "80",
        "alice": "30.000000000000000001",
        "bob": "1",
    }
    assert usages(configured, "globex", "total", LIFETIME) == {None: "5"}
    assert state(database) == "healthy"
    (incident,) = incidents(database)
    assert incident["outcome"] == "restored"
    assert incident["restored_counters"] == 3
    assert {
        (row["tenant"], row["before"], row["after"], row["raised"])
        for row in restored_table(result)
    } == {("acme", "0", "80", 2), ("globex", "0", "5", 1)}
    # The next check is good, and the next snapshot is stored.
    assert "same" in skipped(check(instance))
    assert run_job(instance, current_hour).success
    assert skipped(supervise(instance))
    assert len(incidents(database)) == 1


def test_a_restore_without_snapshots_fails_with_that_reason(
    configured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert verdict(check(instance)) == "first_seen"
    wipe(configured)
    (request,) = requested(check(instance))

    result = run_restore(instance, request.tags)

    assert not result.success
    assert "no snapshots to restore from" in failure_text(result)
    assert state(database) == "failed"
    (incident,) = incidents(database)
    assert incident["failure"] == "no_snapshots"


def test_the_permissions_in_the_readme_suffice(
    server_dir: Path,
    database_url: str,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = server_dir / f"confined {uuid4().hex}"
    with confined(documented_permissions(), place, database_url, monkeypatch) as bucket:
        bucket.spend("acme", "total", LIFETIME, {None: "80"})
        assert run_job(instance, current_hour).success
        assert verdict(check(instance)) == "same"
        wipe(bucket)
        (request,) = requested(check(instance))
        result = run_restore(instance, request.tags)
        assert outcome(instance, result) == "restored"
        assert bucket.stored("usage.acme.total.lifetime.=") is not None
        assert state(database) == "healthy"
