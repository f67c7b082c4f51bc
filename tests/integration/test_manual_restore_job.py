"""Manual jobs as started from the Launchpad: preview, apply, resolve; and what Dagster shows."""

from typing import Any

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import Hour
from tests.integration.manual_runs import run_job_with_config, run_manual_restore, shown
from tests.integration.recovery_runs import (
    check,
    incidents,
    requested,
    run_restore,
    state,
    usages,
    verdict,
)
from tests.integration.snapshot_job import failure_text, run_job
from tests.nats_servers import Bucket

LIFETIME = "lifetime"


@pytest.fixture
def lost(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> Bucket:
    """Return a bucket that was captured, checked and lost; an incident is open."""
    configured.spend("acme", "total", LIFETIME, {None: "80", "alice": "30"})
    configured.spend("globex", "total", LIFETIME, {None: "5"})
    assert run_job(instance, current_hour).success
    check(instance)
    configured.destroy()
    configured.create()
    assert requested(check(instance))
    return configured


@pytest.fixture
def failed(lost: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection) -> Bucket:
    """Return the same bucket, FAILED because all attempts died."""
    database.execute("update budget_recovery.incident set attempts = 3")
    assert not run_restore(instance).success
    assert state(database) == "failed"
    return lost


def test_a_preview_shows_what_would_be_done_and_writes_nothing(
    lost: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    before = lost.info().state.last_seq
    # With the default config of the Launchpad.
    result = run_manual_restore(instance)
    assert result.success
    assert lost.info().state.last_seq == before
    metadata = shown(result)
    assert metadata["what_would_be_done"] == "3 counters in 2 windows would be raised."
    assert metadata["choice"] == "every tenant, highest usage in all snapshots"
    assert metadata["counters_to_raise"] == 3
    windows = {row["tenant"]: row for row in metadata["windows"]}
    assert windows["acme"]["usage"] == "0 -> 80"
    assert windows["acme"]["rise"] == "80"
    assert (windows["acme"]["limit"], windows["acme"]["blocked"]) == ("unknown", "unknown")
    assert windows["acme"]["raised"] == "2 of 2"
    notes = {row["tenant"]: row["note"] for row in metadata["notes"]}
    assert "a restore brings back only the usage field" in notes["acme"]
    (choice,) = metadata["snapshots_to_choose"]
    assert choice["snapshot"].replace("T", " ").startswith(windows["acme"]["from_snapshot"])
    assert (choice["tenants"], choice["counters"]) == (2, 3)
    picture = metadata["largest_changes"]
    assert (
        "acme, total lifetime, the aggregate\n  [++++++++++++++++++++++++] nothing -> 80" in picture
    )
    assert state(database) == "recovering"


def test_a_preview_of_one_tenant_shows_every_counter(
    lost: Bucket, instance: dg.DagsterInstance
) -> None:
    lost.spend("acme", "total", LIFETIME, {"alice": "31"})
    metadata = shown(run_manual_restore(instance, tenant="acme", budget="total"))
    counters = {row["entity"]: row for row in metadata["counters"]}
    assert counters["'alice'"]["action"] == "keep"
    assert (counters["'alice'"]["live"], counters["'alice'"]["snapshot"]) == ("31", "30")
    assert counters["the aggregate"]["action"] == "raise"


def test_a_manual_restore_turns_a_failed_store_healthy(
    failed: Bucket,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    current_hour: Hour,
) -> None:
    assert run_manual_restore(instance).success
    result = run_manual_restore(instance, mode="apply", reason="the disk has room again")
    assert result.success
    assert state(database) == "healthy"
    assert usages(failed, "acme", "total", LIFETIME) == {None: "80", "alice": "30"}
    metadata = shown(result)
    assert metadata["result"].startswith("3 counters raised, ")
    assert metadata["reason"] == "the disk has room again"
    assert metadata["preview"].startswith("No difference from the preview of ")
    assert " and the loss is not restored" in metadata["incident"]
    table = {row["tenant"]: row for row in metadata["before_and_after"]}
    assert (table["acme"]["before"], table["acme"]["after"]) == ("0", "80")
    (incident,) = incidents(database)
    assert incident["outcome"] == "restored_manually"
    assert "the disk has room again" in incident["outcome_detail"]
    # Captures and checks resume.
    assert verdict(check(instance)) == "same"
    paused = run_job(instance, current_hour)
    assert paused.asset_materializations_for_node("budget_usage_snapshots")


def test_differences_from_the_preview_are_shown(lost: Bucket, instance: dg.DagsterInstance) -> None:
    assert run_manual_restore(instance, tenant="acme").success
    lost.spend("acme", "total", LIFETIME, {"alice": "31"})
    metadata = shown(
        run_manual_restore(instance, tenant="acme", mode="apply", reason="acme called")
    )
    assert metadata["preview"].endswith("live usage changed: 1.")
    assert metadata["differences"] == [
        {
            "tenant": "acme",
            "budget": "total",
            "window": LIFETIME,
            "entity": "'alice'",
            "change": "live_changed",
            "previewed": "nothing",
            "found": "31",
        }
    ]
    assert metadata["incident"].endswith(
        "stays open: 1 counter still lower than in the snapshots. Restored: acme, total lifetime:"
        " 80. Counted after the loss and not added, because the higher value counts: nothing. The"
        " automatic restore continues with the rest."
    )


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"tenant": "acmee"},
        "No snapshot of tenant 'acmee' is retained",
        "choose the tenant from: *, acme, globex.",
    ),
    (
        {"tenant": "acme", "budget": "totl"},
        "No snapshot of budget 'totl' of tenant 'acme' is retained",
        "choose the budget from: total.",
    ),
    (
        {"budget": "total"},
        "Budget 'total' needs a tenant, but the tenant is *",
        "give the tenant",
    ),
    ({"snapshot": "yesterday"}, "neither latest nor a timestamp in UTC", "latest, 20"),
    ({"snapshot": "2020-01-01"}, "No retained snapshot matches", "latest, 20"),
    ({"mode": "apply"}, "The reason is empty.", "give a reason"),
    ({"mode": "apply", "reason": " "}, "The reason is empty.", "give a reason"),
]


def test_an_invalid_config_is_refused_with_the_choices_before_anything_is_written(
    lost: Bucket, instance: dg.DagsterInstance
) -> None:
    before = lost.info().state.last_seq
    for config, message, choices in REFUSALS:
        result = run_manual_restore(instance, **config)
        assert not result.success, config
        text = failure_text(result)
        assert message in text
        assert choices in text
    with pytest.raises(dg.DagsterInvalidConfigError, match="appply"):
        run_manual_restore(instance, mode="appply")
    assert lost.info().state.last_seq == before


def test_an_incident_is_resolved_with_a_reason(
    failed: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    job, op = "resolve_incident_job", "resolve_incident"
    with pytest.raises(dg.DagsterInvalidConfigError, match="usage_in_snapshots"):
        run_job_with_config(instance, job, op, {"reason": "emptied on purpose"})
    choice = {"usage_in_snapshots": "record_resets"}
    refused = run_job_with_config(instance, job, op, {"reason": "", **choice})
    assert "The reason is empty." in failure_text(refused)
    assert state(database) == "failed"
    failed.spend("acme", "total", LIFETIME, {"bob": "1"})
    done = run_job_with_config(instance, job, op, {"reason": "emptied on purpose", **choice})
    assert done.success
    assert state(database) == "healthy"
    (incident,) = incidents(database)
    assert incident["outcome"] == "accepted"
    assert "emptied on purpose" in incident["outcome_detail"]
    assert "snapshots: 3 counters. The largest: acme, total" in incident["outcome_detail"]
    assert usages(failed, "acme", "total", LIFETIME) == {"bob": "1"}
    # A full capture follows at once, and is shown at its asset.
    (event,) = [each for each in done.all_events if each.is_step_materialization]
    assert event.asset_key == dg.AssetKey("budget_usage_snapshots")
    assert database.execute(
        "select tenant from budget_recovery.capture where run_id = %s", (done.run_id,)
    ).fetchall() == [("acme",)]
    assert verdict(check(instance)) == "same"
    again = run_job_with_config(instance, job, op, {"reason": "again", **choice})
    assert "no incident is open" in failure_text(again)


def test_a_manual_restore_is_audited_with_run_and_reason(
    lost: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    result = run_manual_restore(instance, tenant="globex", mode="apply", reason="globex called")
    kept = database.execute(
        "select run_id, why, tenant, raised, usage_before, usage_after, incident_id is not null"
        " from budget_recovery.restore_audit"
    ).fetchall()
    assert kept == [(result.run_id, "globex called", "globex", 1, 0, 5, True)]
    # The automatic restore continues with the rest.
    assert state(database) == "recovering"
    assert run_restore(instance).success
    assert state(database) == "healthy"
    assert usages(lost, "acme", "total", LIFETIME) == {None: "80", "alice": "30"}
