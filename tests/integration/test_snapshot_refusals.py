"""What the job does not store, and how it reports this."""

from datetime import timedelta

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import Hour
from tests.integration.recovery_runs import incidents, requested, state, supervise
from tests.integration.snapshot_job import (
    capture_at,
    checks,
    details,
    entries,
    failure_text,
    metadata,
    run_job,
)
from tests.nats_servers import Bucket

LIFETIME = "lifetime"


def test_a_recreated_bucket_stores_nothing_and_opens_an_incident(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert run_job(instance, current_hour).success
    before = entries(database)
    configured.destroy()
    configured.create()
    configured.spend("acme", "total", LIFETIME, {None: "0.01"})

    result = run_job(instance, current_hour)

    assert not result.success
    assert "The store was recreated" in failure_text(result)
    assert entries(database) == before
    (incident,) = incidents(database)
    assert incident["incident_id"][:8] in failure_text(result)
    assert state(database) == "recovering"
    # The next tick launches the restore.
    (request,) = requested(supervise(instance))
    assert request.run_key == f"{incident['incident_id']}/launch-1"


def test_a_missing_bucket_is_a_loss(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert run_job(instance, current_hour).success
    configured.destroy()
    assert "The store is gone" in failure_text(run_job(instance, current_hour))


def test_a_past_hour_is_verified_if_captured_and_fails_with_a_hint_if_not(
    configured: Bucket,
    database_url: str,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    past = Hour(current_hour.start - timedelta(hours=2))
    capture_at(database_url, past.start + timedelta(minutes=10))
    before = entries(database)
    configured.spend("acme", "total", LIFETIME, {None: "99"})

    verified = run_job(instance, past)
    missed = run_job(instance, Hour(past.start - timedelta(hours=1)))

    assert verified.success
    assert metadata(verified)["verified"] is True
    assert not missed.success
    assert "No snapshot is stored for the hour" in failure_text(missed)
    assert current_hour.key in failure_text(missed)
    assert entries(database) == before


@pytest.mark.parametrize("name", ["NATS_URL", "POSTGRES_URL"])
def test_a_run_without_a_setting_fails_with_its_name(
    name: str,
    configured: Bucket,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(f"BUDGET_RECOVERY_{name}")
    assert f"BUDGET_RECOVERY_{name} is not set" in failure_text(run_job(instance, current_hour))


def test_an_empty_store_is_not_a_snapshot(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    result = run_job(instance, current_hour)
    assert result.success
    assert result.asset_materializations_for_node("budget_usage_snapshots") == []


def test_a_damaged_past_hour_fails_its_verification(
    configured: Bucket,
    database_url: str,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    past = Hour(current_hour.start - timedelta(hours=2))
    capture_at(database_url, past.start + timedelta(minutes=10))
    database.execute("update budget_recovery.budget_content set usages = '{8}'")
    result = run_job(instance, past)
    assert not result.success
    assert "are damaged" in failure_text(result)
    assert "acme" in failure_text(result)


def test_a_run_that_captures_no_tenant_fails_with_the_first_reason(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert run_job(instance, current_hour).success
    # As if a constraint refused the rows of each tenant.
    database.execute(
        "create function refuse() returns trigger language plpgsql as "
        "'begin raise exception ''no more rows'' using errcode = ''check_violation''; end'"
    )
    database.execute(
        "create trigger refuse before insert on budget_recovery.capture execute function refuse()"
    )
    result = run_job(instance, current_hour)
    assert not result.success
    assert "None of 1 tenants could be captured. The first, 'acme':" in failure_text(result)


def test_a_pause_during_a_run_keeps_what_was_stored_before(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    for tenant in ("a", "b"):
        configured.spend(tenant, "total", LIFETIME, {None: "80"})
    # As if an incident were opened between the first tenant and the second.
    database.execute(
        "create function pause() returns trigger language plpgsql as "
        "'begin update budget_recovery.store set state = ''recovering''; return null; end'"
    )
    database.execute(
        "create trigger pause after insert on budget_recovery.capture execute function pause()"
    )

    result = run_job(instance, current_hour)

    assert result.success
    shown = metadata(result)
    assert (shown["tenants_stored"], shown["tenants_failed"]) == (1, 1)
    assert {tenant for tenant, *_ in entries(database)} == {"a"}
    coverage = checks(result)["tenant_coverage"]
    assert [row["tenant"] for row in details(coverage)] == ["b"]
