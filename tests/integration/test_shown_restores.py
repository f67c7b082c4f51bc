"""restored_usage shows manual restores that no run has shown; previews of ticks say so."""

import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from dagster import DagsterRunStatus

from budget_recovery_dagster.domain import RESTORE_LEASE, Hour
from budget_recovery_dagster.restore_runs import show_once
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.commands import PROGRAM, answer, page
from tests.integration.launched_runs import due, lost, recorded
from tests.integration.live_capture import capture_now
from tests.integration.manual_runs import content_of, run_manual_restore, shown
from tests.integration.recovery_runs import (
    check,
    requested,
    run_restore,
    skipped,
    supervise,
)
from tests.integration.snapshot_job import run_job
from tests.nats_servers import Bucket
from tests.postgres_servers import expire_leases
from tests.shut_gates import shut_gate
from tests.waiting import wait_until

RESTORED = dg.AssetKey("restored_usage")
LIFETIME = "lifetime"
HEALTHY = "The store is HEALTHY."
ONE_SHOWN = "Now shown on restored_usage: 1 manual restore."
ALL = ("restore", "--reason", "ticket 7", "--yes")
OF_ACME = (*ALL, "--tenant", "acme")
_COPIES = """
insert into budget_recovery.restore_audit (
    at, run_id, who, why, tenant, budget_id, window_token, point_at, entries, planned, raised, kept,
    skipped, usage_before, usage_after, notes, finished_at
)
select at - n * %s, 'command copy ' || n, who, why, tenant, budget_id, window_token, point_at,
       entries, planned, raised, kept, skipped, usage_before, usage_after, notes, finished_at
from budget_recovery.restore_audit, generate_series(1, %s) as n
"""


@pytest.fixture
def lower(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> Bucket:
    """Return an intact store that was captured and lacks two counters since."""
    configured.spend("acme", "total", LIFETIME, {None: "80", "alice": "30"})
    configured.spend("globex", "total", LIFETIME, {None: "5"})
    check(instance)
    assert run_job(instance, current_hour).success
    configured.remove("usage.acme.total.lifetime.=")
    configured.remove("usage.globex.total.lifetime.=")
    return configured


def tick(instance: dg.DagsterInstance) -> dg.SensorResult:
    """Supervise once, and store the events as Dagster's daemon does."""
    result = supervise(instance)
    for event in result.asset_events:
        instance.report_runless_asset_event(event)
    return result


def materialized(instance: dg.DagsterInstance) -> list[dict[str, object]]:
    """Return the metadata of the asset's materializations, newest first; tables as rows."""
    records = instance.fetch_materializations(RESTORED, limit=1000).records
    events = [record.asset_materialization for record in records]
    return [
        {name: content_of(value) for name, value in event.metadata.items()}
        for event in events
        if event is not None
    ]


def reasons(instance: dg.DagsterInstance) -> list[object]:
    """Return the reasons of the shown manual restores, newest first."""
    return [metadata.get("reason") for metadata in materialized(instance)]


# Restores of commands


def test_a_restore_of_the_command_appears_within_one_tick_with_its_amounts(
    lower: Bucket, instance: dg.DagsterInstance
) -> None:
    assert skipped(tick(instance)) == HEALTHY
    assert answer(*ALL, "--json")["raised"] == 2
    result = tick(instance)
    assert skipped(result) == f"{HEALTHY} {ONE_SHOWN}"
    (metadata,) = materialized(instance)
    assert metadata["result"] == "2 counters raised, 0 leaderboards written."
    assert metadata["reason"] == "ticket 7"
    assert "@" in str(metadata["by"])
    assert str(metadata["restore"]).startswith("command ")
    assert (metadata["counters_raised"], metadata["windows_not_shown"]) == (2, 0)
    rows = metadata["before_and_after"]
    assert isinstance(rows, list)
    assert [(row["tenant"], row["raised"], row["before"], row["after"]) for row in rows] == [
        ("acme", 1, "0", "80"),
        ("globex", 1, "0", "5"),
    ]


def test_further_ticks_add_nothing(lower: Bucket, instance: dg.DagsterInstance) -> None:
    page(*OF_ACME)
    tick(instance)
    for _ in range(2):
        result = tick(instance)
        assert (skipped(result), [*result.asset_events]) == (HEALTHY, [])
    page(*ALL, "--tenant", "globex")
    assert len(tick(instance).asset_events) == 1
    assert [metadata["counters_raised"] for metadata in materialized(instance)] == [1, 1]


def test_a_tick_that_ends_before_its_cursor_is_stored_is_not_repeated(
    lower: Bucket, instance: dg.DagsterInstance
) -> None:
    for tenant in ("acme", "globex"):
        page("restore", "--reason", tenant, "--yes", "--tenant", tenant)
    # Dagster stored the first of two events, then the daemon died.
    first, second = supervise(instance).asset_events
    instance.report_runless_asset_event(first)
    (again,) = supervise(instance).asset_events
    assert again.metadata == second.metadata
    assert reasons(instance) == ["acme"]


def test_a_database_of_dagster_that_was_replaced_gets_the_last_day_again(
    lower: Bucket, instance: dg.DagsterInstance
) -> None:
    page(*OF_ACME)
    tick(instance)
    with dg.DagsterInstance.ephemeral() as replaced:
        assert len(tick(replaced).asset_events) == 1
        assert not tick(replaced).asset_events
        assert reasons(replaced) == reasons(instance) == ["ticket 7"]


def test_a_restore_of_the_command_that_raises_nothing_is_not_shown(
    lower: Bucket, instance: dg.DagsterInstance
) -> None:
    page(*ALL)
    tick(instance)
    assert answer(*ALL, "--json")["raised"] == 0
    assert skipped(tick(instance)) == HEALTHY


def test_resolve_raises_nothing_and_is_not_shown(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    lost(configured, instance, current_hour)
    page("resolve", "--keep-snapshots", "--reason", "emptied", "--yes")
    assert not tick(instance).asset_events


# In an incident


def test_restores_in_an_incident_are_shown_while_it_is_open_and_after_its_end(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    lost(configured, instance, current_hour)
    page("hold", "--reason", "by hand")
    page(*OF_ACME)
    held = skipped(tick(instance))
    assert "has been on hold since" in held
    assert held.endswith(ONE_SHOWN)
    page(*ALL, "--tenant", "*")
    # The same tick requests the snapshot after the incident.
    (capture,) = requested(tick(instance))
    assert capture.job_name == "hourly_snapshot_job"
    second, first = materialized(instance)
    assert str(first["incident"]).endswith(" is open.")
    assert " is closed. By " in str(second["incident"])
    assert (first["counters_raised"], second["counters_raised"]) == (1, 1)
    assert not tick(instance).asset_events


def test_a_tick_that_launches_a_restore_shows_nothing_and_the_next_one_does(
    configured: Bucket,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    database: psycopg.Connection,
) -> None:
    request = lost(configured, instance, current_hour)
    page(*OF_ACME)
    recorded(instance, request, DagsterRunStatus.FAILURE)
    due(database)
    launching = tick(instance)
    assert [each.job_name for each in requested(launching)] == ["restore_job"]
    assert not launching.asset_events
    assert skipped(tick(instance)).endswith(ONE_SHOWN)


# Restores of runs


def test_restores_of_runs_are_not_shown_twice(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    request = lost(configured, instance, current_hour)
    manual = run_manual_restore(instance, tenant="acme", mode="apply", reason="acme called")
    assert run_restore(instance, request.tags).success
    assert len(materialized(instance)) == 2
    assert not tick(instance).asset_events
    assert shown(manual)["restore"] == manual.run_id


def test_a_run_and_a_command_show_the_same_of_a_restore(
    lower: Bucket, instance: dg.DagsterInstance
) -> None:
    page(*OF_ACME)
    tick(instance)
    (by_command,) = materialized(instance)
    lower.remove("usage.acme.total.lifetime.=")
    by_run = shown(run_manual_restore(instance, tenant="acme", mode="apply", reason="ticket 7"))
    # A run also knows what was chosen, and its preview.
    assert set(by_run) - set(by_command) == {"choice", "preview"}
    assert set(by_command) - set(by_run) == {"began_at"}
    same = ("result", "reason", "before_and_after", "windows_not_shown", "counters_raised")
    assert [by_command[name] for name in same] == [by_run[name] for name in same]


@pytest.mark.parametrize(
    ("status", "is_shown"), [(DagsterRunStatus.STARTED, False), (DagsterRunStatus.FAILURE, True)]
)
def test_a_manual_run_that_died_before_it_showed_its_result_is_shown_once(
    lower: Bucket,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    status: DagsterRunStatus,
    *,
    is_shown: bool,
) -> None:
    page(*OF_ACME)
    job = services.definitions().resolve_job_def("manual_restore_job")
    run = instance.create_run_for_job(job, status=status)
    database.execute("update budget_recovery.restore_audit set run_id = %s", (run.run_id,))
    for _ in range(2):
        tick(instance)
    assert [metadata["restore"] for metadata in materialized(instance)] == [run.run_id] * is_shown


def test_a_manual_run_that_an_earlier_version_showed_is_not_shown_again(
    lower: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    page(*OF_ACME)
    job = services.definitions().resolve_job_def("manual_restore_job")
    run = instance.create_run_for_job(job, status=DagsterRunStatus.SUCCESS)
    database.execute("update budget_recovery.restore_audit set run_id = %s", (run.run_id,))
    # Its event does not name the restore.
    show_once(instance, run.run_id, dg.AssetMaterialization(RESTORED))
    assert skipped(tick(instance)) == HEALTHY


# Restores that are running, or died


@contextmanager
def restoring(log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Restore every tenant with the command, in a process of its own."""
    with (
        log.open("wb") as file,
        subprocess.Popen([*PROGRAM, *ALL], stdout=file, stderr=file) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_a_restore_that_died_is_shown_as_unfinished_once_the_lease_is_free(
    lower: Bucket,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    database_url: str,
    tmp_path: Path,
) -> None:
    with shut_gate(database_url, "globex", event="update") as gate:
        with restoring(tmp_path / "log") as process:
            wait_until(lambda: gate.has_waiting or process.poll() is not None, seconds=60)
            # The amounts of acme are recorded, and globex is raised.
            assert not tick(instance).asset_events
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        gate.open()
    assert "is restoring." in skipped(tick(instance))
    assert not materialized(instance)
    expire_leases(database)
    assert skipped(tick(instance)).endswith(ONE_SHOWN)
    (metadata,) = materialized(instance)
    assert metadata["result"] == (
        "At most 2 counters raised, 0 leaderboards written. The restore of 1 tenant did not finish "
        "(globex): the table shows what was planned there."
    )
    rows = metadata["before_and_after"]
    assert isinstance(rows, list)
    assert [(row["tenant"], row["after"]) for row in rows] == [("acme", "80"), ("globex", "5")]
    assert not tick(instance).asset_events


def test_while_a_restore_runs_those_before_it_are_shown(
    lower: Bucket, instance: dg.DagsterInstance
) -> None:
    for tenant in ("acme", "globex"):
        page("restore", "--reason", tenant, "--yes", "--tenant", tenant)
    # The last one may be between two tenants.
    with (
        opened_control_plane(services.present_settings()) as plane,
        plane.leases.hold(RESTORE_LEASE, "ann@ops"),
    ):
        assert skipped(tick(instance)) == f"ann@ops is restoring. {ONE_SHOWN}"
        assert reasons(instance) == ["acme"]
    tick(instance)
    assert reasons(instance) == ["globex", "acme"]


# Bounds


def test_restores_of_the_last_day_are_shown_a_few_at_a_time(
    lower: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    page(*OF_ACME)
    database.execute(_COPIES, (timedelta(hours=1), 1000))
    counts = [len(tick(instance).asset_events) for _ in range(4)]
    # The command, and the copies of the last 23 hours.
    assert counts == [10, 10, 4, 0]
    restores = [str(metadata["restore"]) for metadata in materialized(instance)]
    # In the order of their recording.
    assert restores[:-1] == [f"command copy {hours}" for hours in range(23, 0, -1)]


def test_of_very_many_restores_the_newest_are_shown(
    lower: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    page(*OF_ACME)
    # Each copy is recorded after the command, and the last one is the newest.
    database.execute(_COPIES, (timedelta(seconds=1), 1000))
    counts = [len(tick(instance).asset_events) for _ in range(7)]
    assert counts == [10, 10, 10, 10, 10, 0, 0]
    restores = {str(metadata["restore"]) for metadata in materialized(instance)}
    assert restores == {f"command copy {number}" for number in range(951, 1001)}


# Supervision goes on


def test_supervision_goes_on_while_the_audits_cannot_be_read(
    lower: Bucket, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    page(*OF_ACME)
    not_shown = "Manual restores are not shown on restored_usage: "
    with database.transaction():
        database.execute("lock table budget_recovery.restore_audit in access exclusive mode")
        waited = skipped(tick(instance))
    assert waited.startswith(f"{HEALTHY} {not_shown}The tick was not done within 3 s.")
    assert waited.endswith(" The next tick tries again.")
    name = f"away_{uuid.uuid4().hex[:8]}"
    database.execute(f"alter table budget_recovery.restore_audit rename to {name}")
    assert skipped(tick(instance)).startswith(f"{HEALTHY} {not_shown}")
    database.execute(f"alter table budget_recovery.{name} rename to restore_audit")
    assert skipped(tick(instance)) == f"{HEALTHY} {ONE_SHOWN}"


def test_a_preview_of_a_tick_says_what_would_be_shown_and_shows_nothing(
    lower: Bucket, instance: dg.DagsterInstance
) -> None:
    page(*OF_ACME)
    for _ in range(2):
        preview = supervise(instance, is_preview=True)
        assert skipped(preview) == (
            f"Dry run, nothing was changed. {HEALTHY} "
            "A tick would show 1 manual restore on restored_usage."
        )
        assert not preview.asset_events
    assert len(tick(instance).asset_events) == 1
    assert skipped(supervise(instance, is_preview=True)).endswith(HEALTHY)


# Previews of due captures


def test_a_preview_names_a_capture_that_is_due(
    configured: Bucket, instance: dg.DagsterInstance
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    check(instance)
    (request,) = requested(supervise(instance))
    assert request.job_name == "hourly_snapshot_job"
    assert skipped(supervise(instance, is_preview=True)).endswith(
        f"{HEALTHY} A tick would request a capture, once for this reason: The store is found, and "
        "no snapshot was ever taken."
    )


def test_a_preview_of_a_check_names_a_capture_that_missing_counters_request(
    configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    configured.spend("acme", "total", LIFETIME, {None: "80", "alice": "30"})
    check(instance)
    capture_now(current_hour)
    assert "capture" not in skipped(check(instance, is_preview=True))
    configured.remove("usage.acme.total.lifetime.alice")
    assert requested(check(instance))
    assert skipped(check(instance, is_preview=True)).endswith(
        "A tick would request a capture, once for this reason: Counters are missing from the "
        "store, or were restored or reset."
    )
