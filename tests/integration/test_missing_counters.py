"""Counters that disappear while the store keeps its identity: found, named, restored, closed."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import dagster as dg
import psycopg
import pytest
from click.testing import CliRunner

from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.domain import Hour, Period, Window
from tests import services
from tests.integration.commands import run
from tests.integration.detection_records import store_checks
from tests.integration.own_store import OwnStore
from tests.integration.recovery_runs import check, observed, requested, skipped, usages, verdict
from tests.integration.snapshot_job import checks, run_job
from tests.nats_servers import Bucket
from tests.waiting import wait_until

LIFETIME = "lifetime"
MONTH = Window.containing(Period.MONTH, datetime.now(UTC)).token


def many(prefix: str, count: int, usage: str = "2") -> dict[str | None, str]:
    return {f"{prefix} {number:03}": usage for number in range(count)}


@pytest.fixture
def current_hour() -> Hour:
    """Return the current hour, in which a check still requests a capture until the test ends."""
    hour = Hour.containing(datetime.now(UTC))
    if hour.end - datetime.now(UTC) < timedelta(seconds=90):
        wait_until(lambda: hour.is_past(datetime.now(UTC)), seconds=120)
    return Hour.containing(datetime.now(UTC))


@pytest.fixture
def captured(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> Bucket:
    """Return a bucket with 603 counters of two tenants, captured and checked."""
    configured.spend("acme", "users", LIFETIME, many("user", 3, "40"))
    configured.spend("globex", "users", MONTH, many("user", 600))
    assert run_job(instance, current_hour).success
    assert skipped(check(instance))
    assert skipped(check(instance))
    return configured


def status() -> dict[str, object]:
    ended = CliRunner().invoke(main, ["status", "--json"])
    document: dict[str, object] = json.loads(ended.stdout)
    assert document["exit_code"] == ended.exit_code
    return document


def attention() -> list[str]:
    found = status()["attention"]
    assert isinstance(found, list)
    return [each["code"] for each in found]


def gone(result: dg.SensorResult) -> dict[tuple[str, str, str], int]:
    """Return how many counters the check found gone, by tenant, budget and window."""
    (event,) = result.asset_events
    found = event.metadata.get("gone")
    if found is None:
        return {}
    assert isinstance(found, dg.TableMetadataValue)
    rows = [row.data for row in found.records]
    return {
        (str(row["tenant"]), str(row["budget"]), str(row["window"])): int(row["counters"] or 0)
        for row in rows
    }


def run_requested(instance: dg.DagsterInstance, result: dg.SensorResult) -> dg.RunRequest:
    """Run the one capture that a check requested."""
    (request,) = requested(result)
    assert request.job_name == "hourly_snapshot_job"
    assert request.partition_key is not None
    assert run_job(instance, Hour.parse(request.partition_key)).success
    return request


def purge_acme(bucket: Bucket) -> None:
    bucket.purge("usage.acme.")


def delete_acme(bucket: Bucket) -> None:
    for number in range(3):
        bucket.remove(f"usage.acme.users.lifetime.user=20{number:03}")


def expire_acme(bucket: Bucket) -> None:
    """Let the counters of the tenant expire; the server leaves marks of it."""
    for number in range(3):
        key = f"usage.acme.users.lifetime.user=20{number:03}"
        bucket.put(key, b'{"usage":"40"}', {"Nats-TTL": "1s"})
    keys = [f"usage.acme.users.lifetime.user=20{number:03}" for number in range(3)]
    wait_until(lambda: all((each := bucket.stored(key)) and not each.data for key in keys))


@pytest.mark.parametrize("lose", [purge_acme, delete_acme, expire_acme])
def test_the_next_check_finds_a_tenant_that_others_hide(
    captured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    lose: Callable[[Bucket], None],
) -> None:
    lose(captured)
    # More new counters than were lost: the bucket has more keys than before.
    captured.spend("globex", "users", MONTH, many("new user", 20))

    result = check(instance)
    assert verdict(result) == "same"
    assert gone(result) == {("acme", "users", LIFETIME): 3}
    assert observed(result)["counters_gone"] == 3
    assert (
        "The largest: 3 of tenant 'acme', users lifetime." in store_checks(database)[-1]["reason"]
    )
    assert attention() == ["counters_gone"]
    # One request for one difference, whatever the number of checks.
    again = check(instance)
    assert [each.run_key for each in requested(again)] == [
        each.run_key for each in requested(result)
    ]

    run_requested(instance, result)
    assert attention() == ["usage_missing"]
    # What the capture has named is acknowledged.
    assert skipped(check(instance))
    assert gone(check(instance)) == {}


def fill(bucket: Bucket) -> None:
    """Write 603 counters of 20 KB, so that the server keeps them in several files."""
    bucket.create()
    value = json.dumps({"usage": "2", "team": "x" * 20_000}).encode()
    bucket.put_many({f"usage.globex.users.{MONTH}.u{n:03}": value for n in range(603)})


def test_records_that_a_crash_lost_in_the_middle_are_found(
    own_store: OwnStore,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    own_store.do(fill)
    assert run_job(instance, current_hour).success
    for _ in range(2):
        assert skipped(check(instance))
    before = own_store.last_sequence
    own_store.lose_half_of_the_first_block()
    assert own_store.last_sequence == before
    lost = 603 - own_store.do(Bucket.counters)
    assert 0 < lost < 603

    result = check(instance)
    assert verdict(result) == "same"
    assert gone(result) == {("globex", "users", MONTH): lost}
    run_requested(instance, result)
    missing = status()["missing"]
    assert isinstance(missing, dict)
    assert missing["counters"] == lost
    assert [each["usage"] for each in missing["largest"]] == [str(2 * lost)]


def test_each_further_fall_is_requested_once(
    captured: Bucket, instance: dg.DagsterInstance
) -> None:
    captured.remove("usage.acme.users.lifetime.user=20000")
    first = check(instance)
    captured.purge(f"usage.globex.users.{MONTH}.")
    second = check(instance)
    assert gone(second) == {("acme", "users", LIFETIME): 1, ("globex", "users", MONTH): 600}
    keys = {each.run_key for result in (first, second) for each in requested(result)}
    assert len(keys) == 2
    third = check(instance)
    assert {each.run_key for each in requested(third)} < keys


def test_a_purge_of_everything_is_open_until_it_is_restored(
    captured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    captured.purge("usage.")
    run_requested(instance, check(instance))
    # Traffic fills the counters again, with less than before.
    captured.spend("acme", "users", LIFETIME, many("user", 3, "1"))
    captured.spend("globex", "users", MONTH, many("user", 600, "0.5"))
    assert run_job(instance, current_hour).success
    assert skipped(check(instance))

    found = status()
    assert (found["condition"], found["exit_code"]) == ("attention", 4)
    missing = found["missing"]
    assert isinstance(missing, dict)
    # 3 times 39, and 600 times 1.5.
    assert [(each["tenant"], each["counters"], each["usage"]) for each in missing["largest"]] == [
        ("globex", 600, "900"),
        ("acme", 3, "117"),
    ]
    assert (missing["windows"], missing["counters"]) == (2, 603)

    for each in missing["largest"]:
        command = each["restore"].removeprefix("budget-recovery ").split()
        run(*command, "--yes")
    assert usages(captured, "acme", "users", LIFETIME) == many("user", 3, "40")
    # The restore is a reason to capture; the capture closes the falls.
    run_requested(instance, check(instance))
    assert (status()["condition"], attention()) == ("healthy", [])
    assert skipped(check(instance))


def test_a_recorded_reset_ends_a_fall(
    captured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    captured.purge("usage.acme.")
    assert run_job(instance, current_hour).success
    assert attention() == ["usage_missing"]
    run("record-reset", "--tenant", "acme", "--budget", "users", "--reason", "paid")
    run_requested(instance, check(instance))
    assert attention() == []
    ended = database.execute(
        "select tenant, counters, usage, outcome from budget_recovery.usage_fall"
    )
    assert ended.fetchall() == [("acme", 3, 120, "reset")]


def test_a_deletion_before_the_capture_is_not_found_twice(
    captured: Bucket, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    captured.remove("usage.acme.users.lifetime.user=20000")
    result = run_job(instance, current_hour)
    assert not checks(result)["usage_never_drops"].passed
    assert gone(check(instance)) == {}


def test_counts_start_again_after_a_recovered_loss(
    captured: Bucket, instance: dg.DagsterInstance
) -> None:
    captured.destroy()
    captured.create()
    assert len(requested(check(instance))) == 1
    result = (
        services.definitions().resolve_job_def("restore_job").execute_in_process(instance=instance)
    )
    assert result.success
    for _ in range(2):
        after = check(instance)
        assert (gone(after), len(requested(after))) == ({}, 0)
    # Sequences began again as well.
    captured.remove("usage.acme.users.lifetime.user=20000")
    assert gone(check(instance)) == {("acme", "users", LIFETIME): 1}


def test_an_age_limit_that_lets_everything_expire_is_found_and_reported(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    configured.destroy()
    # Without single expiry, the marker expires with the counters.
    configured.create_with()
    configured.spend("acme", "users", LIFETIME, many("user", 3, "40"))
    assert run_job(instance, current_hour).success
    for _ in range(2):
        assert skipped(check(instance))
    configured.reconfigure(max_age=4.0, duplicate_window=1.0)
    # The marker is younger. With it, the check keeps the new limit.
    wait_until(lambda: configured.messages() <= 1)
    changed = check(instance)
    assert verdict(changed) == "same"
    assert observed(changed)["configuration_changes"] == "max_age from unlimited to 4 s"
    wait_until(lambda: configured.messages() == 0)

    result = check(instance)
    assert verdict(result) == "same"
    assert gone(result) == {("acme", "users", LIFETIME): 3}
    run_requested(instance, result)
    found = status()
    assert found["exit_code"] == 4
    assert attention() == ["usage_missing"]
    changes = found["configuration_changes"]
    assert isinstance(changes, list)
    assert [(each["setting"], each["before"], each["after"]) for each in changes] == [
        ("max_age", "unlimited", "4 s")
    ]
    # Reported once by a check, and for a day by status.
    assert "configuration_changes" not in observed(check(instance))


def test_a_changed_limit_is_named_with_its_old_and_new_value(
    captured: Bucket, instance: dg.DagsterInstance
) -> None:
    captured.reconfigure(max_bytes=2**20)
    assert "changed: max_bytes from unlimited to 1048576." in skipped(check(instance))
    found = status()
    assert (found["exit_code"], attention()) == (0, [])
    assert isinstance(found["configuration_changes"], list)
    assert [each["after"] for each in found["configuration_changes"]] == ["1048576"]


def test_the_daemon_can_launch_what_a_check_requests(
    captured: Bucket, instance: dg.DagsterInstance
) -> None:
    captured.purge("usage.acme.")
    definitions = services.definitions()
    sensor = definitions.get_repository_def().get_sensor_def("store_loss_sensor")
    with dg.build_sensor_context(
        instance=instance,
        definitions=definitions,
        resources=definitions.resources,
        sensor_name=sensor.name,
    ) as context:
        evaluated = sensor.evaluate_tick(context)
    (request,) = evaluated.run_requests or []
    assert request.tags["dagster/partition"] == request.partition_key


@pytest.mark.parametrize("lose", [purge_acme, delete_acme])
def test_counters_gone_from_under_their_leaderboards_need_attention_until_they_are_restored(
    configured: Bucket,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[Bucket], None],
) -> None:
    monkeypatch.setenv("BUDGET_RECOVERY_CAPTURE_SOURCE", "leaderboards")
    configured.spend("acme", "users", LIFETIME, many("user", 3, "40"))
    configured.rank("acme", "users", LIFETIME, many("user", 3, "40"))
    assert run_job(instance, current_hour).success
    assert skipped(check(instance))
    assert skipped(check(instance))
    lose(configured)
    # The leaderboard still stands, so the capture finds nothing missing.
    request = run_requested(instance, check(instance))
    assert attention() == ["counters_gone"]
    shown = " ".join(run("status", code=4).split())
    assert "budget-recovery preview --tenant acme --budget users" in shown
    # Dagster runs no second capture with the same key.
    assert {each.run_key for each in requested(check(instance))} == {request.run_key}

    run("restore", "--tenant", "acme", "--budget", "users", "--reason", "a test", "--yes")

    assert usages(configured, "acme", "users", LIFETIME) == many("user", 3, "40")
    assert run_job(instance, current_hour).success
    assert attention() == []
