"""The job on a real store and a real database, run in this process."""

import time
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.assets.capture_tables import table
from budget_recovery_dagster.definitions import defs
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.schedules import hourly_snapshot_schedule
from tests.integration.snapshot_job import checks, details, failure_text, metadata, run_job
from tests.integration.timeless_store import SteppedClock, capture, opened_at
from tests.nats_servers import Bucket

LIFETIME = "lifetime"
README = Path(__file__).parents[2] / "README.md"


def entries(database: psycopg.Connection) -> dict[tuple[str, str, str, str | None], Decimal]:
    rows = database.execute(
        "select tenant, budget_id, window_token, entity, usage from budget_recovery.budget_entry"
    )
    return {tuple(row[:4]): row[4] for row in rows}


def test_counters_arrive_in_postgres_exactly(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "0.662"})
    configured.spend("acme", "users", "2026-Q4", {"user:alice@example.com": "16777216.01"})
    configured.spend("team a / 東京", "models", LIFETIME, {"openai-main/gpt-4o": "1E-18"})

    result = run_job(instance, current_hour)

    assert result.success
    assert entries(database) == {
        ("acme", "total", LIFETIME, None): Decimal("0.662"),
        ("acme", "users", "2026-Q4", "user:alice@example.com"): Decimal("16777216.01"),
        ("team a / 東京", "models", LIFETIME, "openai-main/gpt-4o"): Decimal("1E-18"),
    }
    shown = metadata(result)
    assert (shown["tenants_stored"], shown["tenants_failed"], shown["counters"]) == (2, 0, 3)
    assert [row.data["tenant"] for row in shown["tenants"].records] == ["acme", "team a / 東京"]
    assert all(check.passed for check in checks(result).values())
    assert set(checks(result)) == {"tenant_coverage", "usage_never_drops"}


def test_all_snapshots_of_a_run_carry_one_time_within_its_hour(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    for tenant in ("one", "two", "three"):
        configured.spend(tenant, "total", LIFETIME, {None: "1"})
    assert run_job(instance, current_hour).success
    moments = database.execute("select distinct captured_at from budget_recovery.capture")
    ((captured_at,),) = moments.fetchall()
    assert current_hour.start <= captured_at < current_hour.end


def test_unreadable_values_are_named_and_the_others_go_on(
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
            "what": "unreadable value usage.acme.users.lifetime.bad",
            "detail": "-5 is negative",
            "what_to_do": "",
        }
    ]
    assert checks(result)["usage_never_drops"].passed
    newest = database.execute(
        "select entity, usage from budget_recovery.budget_entry"
        " where captured_at = (select max(captured_at) from budget_recovery.capture)"
    )
    assert newest.fetchall() == [("good", 1)]


def test_purged_keys_are_warned_about_until_they_are_back(
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


def test_a_recreated_bucket_is_a_possible_loss_and_stores_nothing(
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
    assert "Possible loss of the usage store" in failure_text(result)
    assert "recreated" in failure_text(result)
    assert entries(database) == before


def test_a_bucket_that_is_gone_is_a_possible_loss_too(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert run_job(instance, current_hour).success
    configured.destroy()
    assert "the bucket is gone" in failure_text(run_job(instance, current_hour))


def capture_at(url: str, moment: datetime) -> None:
    """Take a snapshot while the database's clock shows ``moment``."""
    clock = SteppedClock(moment)
    with opened_at(url, clock) as database:
        capture(database, clock)


def test_a_stored_past_hour_is_verified_and_one_without_snapshot_fails_with_help(
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


def test_a_paused_store_ends_the_run_without_output_and_skips_the_schedule(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert run_job(instance, current_hour).success
    database.execute("update budget_recovery.store set state = 'RECOVERING'")

    result = run_job(instance, current_hour)

    assert result.success
    assert result.asset_materializations_for_node("budget_usage_snapshots") == []
    skipped = tick(instance, current_hour.start)
    assert isinstance(skipped, dg.SkipReason)
    assert "RECOVERING" in str(skipped.skip_message)


def tick(instance: dg.DagsterInstance, at: datetime) -> dg.RunRequest | dg.SkipReason:
    context = dg.build_schedule_context(
        instance=instance, scheduled_execution_time=at, resources=defs.resources
    )
    answer = hourly_snapshot_schedule(context)
    assert isinstance(answer, dg.RunRequest | dg.SkipReason)
    return answer


def test_a_tick_asks_for_its_own_hour_once(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    request = tick(instance, current_hour.start)
    assert isinstance(request, dg.RunRequest)
    assert request.partition_key == request.run_key == current_hour.key
    # A schedule whose minute was edited ticks again within the hour: the same key, so no new run.
    again = tick(instance, current_hour.start + timedelta(minutes=59))
    assert isinstance(again, dg.RunRequest)
    assert again.run_key == request.run_key


def test_a_tick_for_a_closed_hour_is_skipped(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    skipped = tick(instance, current_hour.start - timedelta(hours=1))
    assert isinstance(skipped, dg.SkipReason)
    assert "has closed" in str(skipped.skip_message)


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/New_York"])
def test_the_hosts_time_zone_changes_nothing(
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


@pytest.mark.parametrize("name", ["NATS_URL", "POSTGRES_URL"])
def test_a_run_without_settings_fails_by_name(
    name: str,
    configured: Bucket,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(f"BUDGET_RECOVERY_{name}")
    assert f"BUDGET_RECOVERY_{name} is not set" in failure_text(run_job(instance, current_hour))


def test_a_capture_leaves_no_consumer_behind(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert run_job(instance, current_hour).success
    assert configured.consumers() == 0


def test_an_empty_store_is_not_a_snapshot(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    result = run_job(instance, current_hour)
    assert result.success
    assert result.asset_materializations_for_node("budget_usage_snapshots") == []


def test_damage_to_a_stored_hour_fails_its_verification_by_name(
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
    assert "do not hold" in failure_text(result)
    assert "acme" in failure_text(result)


def test_a_run_that_captures_no_tenant_fails_with_the_first_reason(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert run_job(instance, current_hour).success
    # The next snapshot would not be newer than this one.
    database.execute("alter table budget_recovery.budget_record disable trigger all")
    database.execute("alter table budget_recovery.capture disable trigger all")
    for name in ("capture", "budget_record"):
        database.execute(
            f"update budget_recovery.{name} set captured_at = captured_at + interval '1 day'"
        )
    result = run_job(instance, current_hour)
    assert not result.success
    assert "None of 1 tenants could be captured. The first, 'acme':" in failure_text(result)


def test_the_checks_of_an_hour_judge_that_hour(
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


def test_a_table_of_very_many_rows_is_cut_and_says_so() -> None:
    cut = table([{"tenant": f"t{number}", "counters": number} for number in range(205)])
    assert len(cut.records) == 201
    assert cut.records[-1].data["tenant"] == "and 5 more"
    assert len(table([{"tenant": "t", "counters": 1}] * 200).records) == 200


def test_a_store_that_was_replaced_on_purpose_can_be_accepted(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert run_job(instance, current_hour).success
    configured.destroy()
    configured.create()
    configured.spend("acme", "total", LIFETIME, {None: "1"})
    assert "accept it as the README says" in failure_text(run_job(instance, current_hour))

    statement = README.read_text().split("```sql")[-1].split("```")[0]
    created = configured.info().created.isoformat()
    database.execute(statement.replace("<created>", created).replace("<sequence>", "1"))
    assert run_job(instance, current_hour).success
