"""The job on a real store and a real database, run in this process."""

import time
from datetime import timedelta
from decimal import Decimal

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.presentation.metadata import table
from tests.integration.snapshot_job import (
    capture_at,
    checks,
    details,
    entries,
    metadata,
    run_job,
)
from tests.nats_servers import Bucket

LIFETIME = "lifetime"


def test_counters_are_stored_exactly(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "0.662"})
    users: dict[str | None, str] = {
        "user:alice@example.com": "16777216.01",
        "user:bob@example.com": "2",
    }
    configured.spend("acme", "users", "2026-Q4", users)
    configured.spend("team a / 東京", "models", LIFETIME, {"openai-main/gpt-4o": "1E-18"})

    result = run_job(instance, current_hour)

    assert result.success
    assert entries(database) == {
        ("acme", "total", LIFETIME, None): Decimal("0.662"),
        ("acme", "users", "2026-Q4", "user:alice@example.com"): Decimal("16777216.01"),
        ("acme", "users", "2026-Q4", "user:bob@example.com"): Decimal(2),
        ("team a / 東京", "models", LIFETIME, "openai-main/gpt-4o"): Decimal("1E-18"),
    }
    shown = metadata(result)
    assert (shown["tenants_stored"], shown["tenants_failed"], shown["counters"]) == (2, 0, 4)
    assert (shown["budget_windows"], shown["dagster/row_count"]) == (3, 4)
    assert [row.data["tenant"] for row in shown["tenants"].records] == ["acme", "team a / 東京"]
    assert all(check.passed for check in checks(result).values())
    assert set(checks(result)) == {"tenant_coverage", "usage_never_drops", "recovery_point_age"}


def test_keys_of_closed_windows_add_nothing_to_the_captured_usage(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "25"})
    before = metadata(run_job(instance, current_hour))
    assert (before["captured_usage"], before["closed_windows"]) == (25, 0)
    configured.spend("acme", "total", "2026-11-01", {None: "3996"})
    shown = metadata(run_job(instance, current_hour))
    assert (shown["captured_usage"], shown["closed_windows"]) == (25, 1)
    (tenant,) = shown["tenants"].records
    assert (tenant.data["most_used"], tenant.data["budget_windows"]) == ("25", 2)


def test_all_snapshots_of_a_run_have_the_same_time_within_its_hour(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    for tenant in ("one", "two", "three"):
        configured.spend(tenant, "total", LIFETIME, {None: "1"})
    assert run_job(instance, current_hour).success
    times = database.execute("select distinct captured_at from budget_recovery.capture")
    ((captured_at,),) = times.fetchall()
    assert current_hour.start <= captured_at < current_hour.end


def test_unreadable_values_are_reported_and_the_others_are_stored(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "users", LIFETIME, {"good": "1", "bad": "7"})
    assert run_job(instance, current_hour).success
    configured.put("usage.acme.users.lifetime.bad", b'{"usage": "-5"}')

    result = run_job(instance, current_hour)

    assert result.success
    coverage = checks(result)["tenant_coverage"]
    assert not coverage.passed
    assert coverage.severity is dg.AssetCheckSeverity.WARN
    assert details(coverage) == [
        {
            "tenant": "acme",
            "finding": "unreadable value usage.acme.users.lifetime.bad",
            "detail": "-5 is negative",
            "action": "",
        }
    ]
    assert checks(result)["usage_never_drops"].passed
    newest = database.execute(
        "select entity, usage from budget_recovery.budget_entry"
        " where captured_at = (select max(captured_at) from budget_recovery.capture)"
    )
    assert newest.fetchall() == [("good", 1)]


def test_purged_keys_cause_a_warning_until_they_are_back(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "users", LIFETIME, {"alice": "12.5"})
    configured.spend("acme", "models", LIFETIME, {"gpt-4o": "3"})
    assert run_job(instance, current_hour).success
    configured.purge("usage.acme.users.")

    for _ in range(2):
        result = run_job(instance, current_hour)
        assert result.success
        warning = checks(result)["usage_never_drops"]
        assert not warning.passed
        assert details(warning) == [
            {
                "tenant": "acme",
                "budget": "users",
                "window": LIFETIME,
                "entity": "alice",
                "before": "12.5",
                "now": "missing",
            }
        ]

    configured.spend("acme", "users", LIFETIME, {"alice": "12.5"})
    assert checks(run_job(instance, current_hour))["usage_never_drops"].passed


def test_the_largest_drop_is_named_first_among_many_small_ones(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    reserved = [f"reserved {number:03}" for number in range(652)]
    configured.spend("acme", "users", LIFETIME, dict.fromkeys(reserved, "9.00"))
    configured.spend("zoo", "users", LIFETIME, {"zoe": "40"})
    assert run_job(instance, current_hour).success
    configured.spend("acme", "users", LIFETIME, dict.fromkeys(reserved, "8.20"))
    configured.spend("zoo", "users", LIFETIME, {"zoe": "0.5"})

    result = run_job(instance, current_hour)

    warning = checks(result)["usage_never_drops"]
    zoe, *others = details(warning)
    assert (zoe["tenant"], zoe["entity"], zoe["before"], zoe["now"]) == ("zoo", "zoe", "40", "0.5")
    # The snapshot of acme names 100 of its 652.
    assert [row["entity"] for row in others] == reserved[:100]
    facts = {name: value.value for name, value in warning.metadata.items() if name != "details"}
    del facts["judged_run"]
    # 652 times 0.80; the 39.5 of the other tenant are not added.
    assert facts == {"missing_or_lower": 653, "most_missing": "521.6", "not_shown": 552}
    assert warning.description == (
        "653 counters of recovery points are missing or lower in the store. The budget and window"
        " that lacks most lacks 521.6. The largest come first."
    )
    shown = metadata(result)
    assert (shown["missing_or_lower"], shown["most_missing"]) == (653, "521.6")
    rows = [(row.data["tenant"], row.data["most_missing"]) for row in shown["tenants"].records]
    assert rows == [("acme", "521.6"), ("zoo", "39.5")]
    assert any(
        "653 counters of 2 tenants are missing or lower in the store. Tenant 'acme' lacks the most"
        " in one budget and window: 521.6." in entry.user_message
        for entry in instance.all_logs(result.run_id)
    )


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/New_York"])
def test_the_time_zone_of_the_host_does_not_matter(
    zone: str,
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        configured.spend("acme", "total", LIFETIME, {None: "80"})
        assert run_job(instance, current_hour).success
    finally:
        monkeypatch.undo()
        time.tzset()
    ((captured_at,),) = database.execute(
        "select captured_at from budget_recovery.capture"
    ).fetchall()
    assert Hour.containing(captured_at) == current_hour


def test_a_capture_leaves_no_consumer(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert run_job(instance, current_hour).success
    assert configured.consumers() == 0


def test_the_asset_checks_of_a_run_check_its_own_hour(
    configured: Bucket,
    database_url: str,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    past = Hour(current_hour.start - timedelta(hours=2))
    capture_at(database_url, past.start + timedelta(minutes=10))
    configured.purge("usage.acme.")
    configured.spend("other", "total", LIFETIME, {None: "1"})

    assert not checks(run_job(instance, current_hour))["usage_never_drops"].passed
    assert checks(run_job(instance, past))["usage_never_drops"].passed


def test_a_long_table_is_cut_with_a_count() -> None:
    cut = table([{"tenant": f"t{number}", "counters": number} for number in range(205)])
    assert len(cut.records) == 201
    assert cut.records[-1].data["tenant"] == "and 5 more"
    assert len(table([{"tenant": "t", "counters": 1}] * 200).records) == 200
