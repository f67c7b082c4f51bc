"""Deliberate resets by command and job: usage that was reset is not restored."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.rows import dict_row

from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.cli.options import current_user
from budget_recovery_dagster.domain import Hour
from tests import services
from tests.integration.live_capture import capture_now
from tests.integration.recovery_runs import (
    check,
    incidents,
    outcome,
    requested,
    run_restore,
    state,
    usages,
)
from tests.integration.snapshot_job import checks, failure_text, run_job
from tests.nats_servers import Bucket

LIFETIME = "lifetime"
WIDTH = 80


@pytest.fixture
def captured(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> Bucket:
    """Return a bucket with two tenants, captured and checked."""
    configured.spend("acme", "total", LIFETIME, {None: "80", "alice": "30", "bob": "20.5"})
    configured.spend("globex", "total", LIFETIME, {None: "5"})
    capture_now(current_hour)
    check(instance)
    return configured


def command(*arguments: str, budget: str = "total") -> Result:
    named = ("--tenant", "acme", "--budget", budget, "--reason", "pardoned")
    return CliRunner().invoke(main, ["record-reset", *named, *arguments])


def reset_job(instance: dg.DagsterInstance, **config: Any) -> dg.ExecuteInProcessResult:
    named = {"tenant": "acme", "budget": "total", "reason": "pardoned", **config}
    return (
        services.definitions()
        .resolve_job_def("record_reset_job")
        .execute_in_process(
            instance=instance,
            run_config={"ops": {"record_reset": {"config": named}}},
            raise_on_error=False,
        )
    )


def recorded(database: psycopg.Connection) -> list[dict[str, Any]]:
    with database.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(
            "select window_token, of_everyone, entity, at, reset_by, reason, recorded_at"
            " from budget_recovery.budget_reset order by reset_id"
        ).fetchall()


def wipe_and_restore(bucket: Bucket, instance: dg.DagsterInstance) -> None:
    bucket.destroy()
    bucket.create()
    (request,) = requested(check(instance))
    assert outcome(instance, run_restore(instance, request.tags)) == "restored"


def test_a_reset_survives_a_wipe_and_an_automatic_restore(
    captured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    captured.spend("acme", "total", LIFETIME, {"alice": "0"})
    assert command("--entity", "alice").exit_code == 0

    wipe_and_restore(captured, instance)

    assert usages(captured, "acme", "total", LIFETIME) == {None: "80", "bob": "20.5"}
    assert usages(captured, "globex", "total", LIFETIME) == {None: "5"}
    assert incidents(database)[0]["restored_counters"] == 3
    assert state(database) == "healthy"
    # The reset usage is not reported as dropped.
    snapshot = run_job(instance, current_hour)
    assert snapshot.success
    assert checks(snapshot)["usage_never_drops"].passed


def test_a_counter_lowered_by_a_recorded_reset_is_not_a_drop(
    captured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    captured.spend("acme", "total", LIFETIME, {"alice": "0"})
    before = run_job(instance, current_hour)
    assert not checks(before)["usage_never_drops"].passed
    assert reset_job(instance, entity="alice").success
    captured.spend("acme", "total", LIFETIME, {"alice": "2"})
    after = run_job(instance, current_hour)
    assert checks(after)["usage_never_drops"].passed
    # Usage after the reset is restored like any other.
    wipe_and_restore(captured, instance)
    assert usages(captured, "acme", "total", LIFETIME) == {
        None: "80",
        "alice": "2",
        "bob": "20.5",
    }


def test_a_reset_of_a_whole_budget_does_not_affect_other_budgets(
    captured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    captured.spend("acme", "team", LIFETIME, {"alice": "7"})
    capture_now(current_hour)
    assert command().exit_code == 0
    wipe_and_restore(captured, instance)
    assert usages(captured, "acme", "total", LIFETIME) == {}
    assert usages(captured, "acme", "team", LIFETIME) == {"alice": "7"}


# The command


def test_the_command_reports_the_reset_in_80_columns(
    captured: Bucket, database: psycopg.Connection
) -> None:
    at = datetime.now(UTC).replace(microsecond=0)
    result = command("--entity", "alice", "--window", LIFETIME, "--at", f"{at:%Y-%m-%d %H:%M:%S}")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= WIDTH
    output = " ".join(result.output.split())
    assert output.startswith(
        "Recorded: entity 'alice' in lifetime of budget 'total' of tenant 'acme', reset at"
        f" {at:%Y-%m-%d %H:%M:%S} UTC."
    )
    assert "the gateway must have lowered it before that time" in output
    (row,) = recorded(database)
    assert row.pop("recorded_at") - at < timedelta(minutes=1)
    assert row == {
        "window_token": LIFETIME,
        "of_everyone": False,
        "entity": "alice",
        "at": at,
        "reset_by": current_user(),
        "reason": "pardoned",
    }


def test_the_command_reports_the_reset_as_json(captured: Bucket) -> None:
    result = command("--aggregate", "--json")
    document = json.loads(result.output)
    assert datetime.fromisoformat(document.pop("at")) == datetime.fromisoformat(
        document.pop("recorded_at")
    )
    assert document == {
        "schema": 1,
        "tenant": "acme",
        "budget": "total",
        "window": None,
        "everyone": False,
        "entity": None,
        "by": current_user(),
        "reason": "pardoned",
        "excluded_windows": [LIFETIME],
        "restore_running": False,
        "unmarked": None,
        "error": None,
    }
    everyone = json.loads(command("--json").output)
    assert (everyone["everyone"], everyone["entity"]) == (True, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--at", "2999-01-01"), "The time of the reset is in the future: 2999-01-01 00:00:00 UTC"),
        (("--at", "yesterday"), "'yesterday' is not a time such as 2026-11-29T14:00"),
        (("--window", "2026-13"), "'2026-13' is not a budget window"),
        (("--entity", "a", "--aggregate"), "--entity and --aggregate are mutually exclusive"),
        (("--reason", " "), "The reason is empty."),
        (("--tenant", "acne"), "choose one of the tenants: 'acme', 'globex'."),
        (("--budget", "totals"), "choose one of its budgets: 'total'."),
    ],
)
def test_an_invalid_reset_is_refused_and_nothing_is_recorded(
    captured: Bucket, database: psycopg.Connection, arguments: tuple[str, ...], message: str
) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert recorded(database) == []


def test_the_help_explains_the_order_of_steps_in_80_columns() -> None:
    result = CliRunner().invoke(main, ["record-reset", "--help"])
    assert max(map(len, result.output.splitlines())) <= WIDTH
    assert "Lower the counters in the gateway FIRST" in " ".join(result.output.split())


# The job


def test_the_job_records_the_reset_of_its_config(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    run = reset_job(instance, aggregate=True, window=LIFETIME, at="2026-11-01T09:30+01:00")
    assert run.success
    (row,) = recorded(database)
    assert row.pop("recorded_at") > row["at"]
    assert row == {
        "window_token": LIFETIME,
        "of_everyone": False,
        "entity": None,
        "at": datetime(2026, 11, 1, 8, 30, tzinfo=UTC),
        "reset_by": f"run {run.run_id[:8]}",
        "reason": "pardoned",
    }
    assert reset_job(instance).success
    assert recorded(database)[1]["of_everyone"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tenant": "acne"}, "choose one of the tenants: 'acme', 'globex'."),
        ({"at": "2999-01-01"}, "is in the future"),
        ({"at": "yesterday"}, "'yesterday' is not a time"),
        ({"entity": "alice", "aggregate": True}, "choose one of them"),
        ({"reason": ""}, "The reason is empty."),
    ],
)
def test_the_job_fails_on_an_invalid_reset(
    captured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    config: dict[str, Any],
    message: str,
) -> None:
    run = reset_job(instance, **config)
    assert not run.success
    assert message in failure_text(run)
    assert recorded(database) == []
