"""The job with leaderboards as its source, on a real store and a real database."""

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import BudgetWindow, Hour, TenantUsages, Window
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.confined_user import confined_to
from tests.integration.snapshot_job import (
    checks,
    details,
    entries,
    failure_text,
    metadata,
    run_job,
)
from tests.nats_servers import Bucket

LIFETIME = "lifetime"
USERS = BudgetWindow("users", Window.parse(LIFETIME))
SIX_HUNDRED: dict[str | None, str] = {f"u{number}": str(number) for number in range(1, 601)}


@pytest.fixture
def by_boards(configured: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setenv("BUDGET_RECOVERY_CAPTURE_SOURCE", "leaderboards")
    return configured


def recovery_point(tenant: str) -> TenantUsages:
    with opened_control_plane(services.present_settings()) as plane:
        return plane.points.current_usages(tenant, datetime.now(UTC))


def test_the_job_captures_the_leaderboards(
    by_boards: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    by_boards.rank("acme", "total", LIFETIME, {None: "16777216.01"})
    by_boards.rank("acme", "users", LIFETIME, SIX_HUNDRED)
    by_boards.rank("team a / 東京", "models", LIFETIME, {"openai-main/gpt-4o": "1E-18"})
    # The counters are not read.
    by_boards.spend("acme", "total", LIFETIME, {None: "1"})
    by_boards.spend("another", "total", LIFETIME, {None: "1"})

    result = run_job(instance, current_hour)

    assert result.success
    assert all(check.passed for check in checks(result).values())
    coverage = checks(result)["tenant_coverage"]
    assert coverage.description == (
        "All tenants are captured: 2. Windows with only the 500 largest: 1."
    )
    assert coverage.metadata["truncated_windows"].value == 1
    listed = {
        ("acme", "users", LIFETIME, f"u{number}"): Decimal(number) for number in range(101, 601)
    }
    assert entries(database) == listed | {
        ("acme", "total", LIFETIME, None): Decimal("16777216.01"),
        ("team a / 東京", "models", LIFETIME, "openai-main/gpt-4o"): Decimal("1E-18"),
    }
    rows = database.execute(
        "select tenant, budget_id, source, is_truncated, value_shape, expiry_seconds"
        " from budget_recovery.budget_record join budget_recovery.capture"
        " using (tenant, captured_at) order by tenant, budget_id"
    )
    assert rows.fetchall() == [
        ("acme", "total", "leaderboards", False, None, None),
        ("acme", "users", "leaderboards", True, None, None),
        ("team a / 東京", "models", "leaderboards", False, None, None),
    ]
    assert recovery_point("acme")[USERS] == {
        entity: usage for (*_, entity), usage in listed.items()
    }
    assert by_boards.consumers() == 0


def test_a_change_of_the_source_forgets_no_entity_and_causes_no_warning(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configured.spend("acme", "users", LIFETIME, SIX_HUNDRED)
    configured.rank("acme", "users", LIFETIME, SIX_HUNDRED)
    everybody = {entity: Decimal(usage) for entity, usage in SIX_HUNDRED.items()}
    for source in ("counters", "leaderboards", "counters"):
        monkeypatch.setenv("BUDGET_RECOVERY_CAPTURE_SOURCE", source)
        result = run_job(instance, current_hour)
        assert result.success
        assert all(check.passed for check in checks(result).values())
        assert recovery_point("acme")[USERS] == everybody
    rows = database.execute(
        "select source, entry_count, drop_count from budget_recovery.capture order by captured_at"
    )
    assert rows.fetchall() == [("counters", 600, 0), ("leaderboards", 500, 0), ("counters", 600, 0)]


def test_an_unreadable_leaderboard_is_reported_and_is_not_a_drop(
    by_boards: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    by_boards.rank("acme", "users", LIFETIME, {"alice": "12.5"})
    by_boards.rank("acme", "total", LIFETIME, {None: "12.5"})
    assert run_job(instance, current_hour).success
    by_boards.put("leaderboard.acme.users.lifetime", b'{"entries": "none"}')

    result = run_job(instance, current_hour)

    assert result.success
    assert details(checks(result)["tenant_coverage"]) == [
        {
            "tenant": "acme",
            "finding": "unreadable value leaderboard.acme.users.lifetime",
            "detail": "entries is not a list",
            "action": "",
        }
    ]
    assert checks(result)["usage_never_drops"].passed
    assert recovery_point("acme")[USERS] == {"alice": Decimal("12.5")}


@pytest.fixture
def confined(
    server_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """Start a server whose user has only the permissions that a capture of leaderboards needs."""
    with confined_to(
        "leaderboard.>",
        data_dir=server_dir / "nats-for-leaderboards",
        database_url=database_url,
        monkeypatch=monkeypatch,
    ) as bucket:
        yield bucket


def test_the_permissions_for_leaderboards_suffice(
    confined: Bucket,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    confined.rank("acme", "users", LIFETIME, {"alice": "12.5"})
    confined.spend("acme", "users", LIFETIME, {"alice": "12.5"})
    monkeypatch.setenv("BUDGET_RECOVERY_CAPTURE_SOURCE", "leaderboards")
    result = run_job(instance, current_hour)
    assert result.success
    shown = metadata(result)
    assert (shown["tenants_stored"], shown["tenants_failed"]) == (1, 0)
    assert recovery_point("acme")[USERS] == {"alice": Decimal("12.5")}
    # They do not suffice for counters; the error names the denied subject.
    monkeypatch.setenv("BUDGET_RECOVERY_CAPTURE_SOURCE", "counters")
    refused = run_job(instance, current_hour)
    assert not refused.success
    assert ".$KV.budget-usage.usage.acme.>" in failure_text(refused)
    assert confined.consumers() == 0
