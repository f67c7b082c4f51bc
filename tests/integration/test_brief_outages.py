"""Servers that are away for a moment while an hour is captured, and those that stay away."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
import psycopg
import pytest
from dagster import DagsterEventType

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.errors import StoreUnreachableError
from budget_recovery_dagster.resources import RETRY_AFTER
from budget_recovery_dagster.services import Captured, TenantOutcome, TenantStored
from budget_recovery_dagster.services.capture import TenantFailed
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.free_ports import unused_port
from tests.integration.own_store import OwnStore
from tests.integration.snapshot_job import failure_text, metadata, run_job
from tests.nats_servers import Bucket
from tests.waiting import wait_until

TENANTS = 30


@pytest.fixture
def store(own_store: OwnStore) -> OwnStore:
    """Return a server of this test alone, with a bucket of many tenants."""

    def fill(bucket: Bucket) -> None:
        bucket.create()
        for number in range(TENANTS):
            bucket.spend(f"tenant-{number:02}", "total", "lifetime", {None: "1"})

    own_store.do(fill)
    return own_store


def retries(instance: dg.DagsterInstance) -> int:
    """Return how often steps have been asked to try again."""
    return sum(
        len(instance.all_logs(run.run_id, of_type={DagsterEventType.STEP_UP_FOR_RETRY}))
        for run in instance.get_runs()
    )


@contextmanager
def back_after_a_failure(database: psycopg.Connection, store: OwnStore) -> Iterator[None]:
    """Stop the server, and start it again once a capture has failed without it."""
    store.server.stop()

    def has_failed() -> bool:
        failed = "select from budget_recovery.capture_run where outcome = 'failed'"
        return database.execute(failed).fetchone() is not None

    is_over = threading.Event()

    def start_again() -> None:
        wait_until(has_failed, seconds=60)
        store.server.start()
        # The server ends with the thread that has started it.
        is_over.wait()
        store.server.stop()

    starting = threading.Thread(target=start_again)
    starting.start()
    try:
        yield
    finally:
        is_over.set()
        starting.join()


def test_a_store_that_is_away_for_a_moment_costs_no_snapshot(
    store: OwnStore,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    with back_after_a_failure(database, store):
        result = run_job(instance, current_hour)
    assert result.success, failure_text(result)
    assert metadata(result)["tenants_stored"] == TENANTS
    assert retries(instance) == 1


def test_a_database_that_stays_away_fails_the_run_with_the_time_of_the_next_one(
    store: OwnStore,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = f"postgresql://127.0.0.1:{unused_port()}/none"
    monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", away)
    result = run_job(instance, current_hour)
    text = failure_text(result)
    assert "BUDGET_RECOVERY_POSTGRES_URL" in text
    assert ("requests the hour's capture again at" in text) != ("before the hour closes" in text)
    assert retries(instance) == len(RETRY_AFTER) == 2


# The server ends the first session that stores a snapshot, and then the one that releases the
# lease.
_END_TWO_SESSIONS = """
create sequence ended;
create function end_two() returns trigger language plpgsql as $$begin
    if nextval('ended') <= 2 then
        perform pg_terminate_backend(pg_backend_pid());
        perform pg_sleep(10);
    end if;
    return new;
end$$;
create trigger end_two before insert on budget_recovery.capture
    for each row execute function end_two();
create trigger end_two before update on budget_recovery.lease for each row
    when (new.name = 'capture' and new.holder is null) execute function end_two();
"""


def test_a_lease_that_a_try_could_not_release_does_not_stop_the_next_try(
    store: OwnStore,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    database.execute(_END_TWO_SESSIONS)
    result = run_job(instance, current_hour)
    assert result.success, failure_text(result)
    assert metadata(result)["tenants_stored"] == TENANTS
    assert retries(instance) == 1


def test_a_store_that_stays_away_is_logged_once_and_not_for_each_tenant(
    store: OwnStore, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    assert run_job(instance, current_hour).success
    store.server.stop()

    result = run_job(instance, current_hour)

    assert not result.success
    text = failure_text(result)
    assert f"0 tenants are stored, {TENANTS} are not." in text
    logs = instance.all_logs(result.run_id)
    assert [entry for entry in logs if "tenant-" in entry.user_message] == []
    assert retries(instance) == len(RETRY_AFTER)
    # The steps of the job, and its three tries.
    assert len(logs) < TENANTS


def test_a_store_that_goes_away_midway_ends_the_capture_at_the_first_tenant(
    store: OwnStore, database_url: str, instance: dg.DagsterInstance, current_hour: Hour
) -> None:
    with opened_control_plane(services.present_settings()) as plane:
        outcomes: list[TenantOutcome] = []

        def stop_after_three(outcome: TenantOutcome) -> None:
            outcomes.append(outcome)
            if len(outcomes) == 3:
                store.server.stop()

        captured = services.capture(plane, current_hour, on_outcome=stop_after_three)
    assert isinstance(captured, Captured)
    # The fourth was tried; the others have its reason without another try.
    assert [type(outcome) for outcome in outcomes] == [*[TenantStored] * 3, TenantFailed]
    assert (len(captured.stored), len(captured.failed)) == (3, TENANTS - 3)
    assert isinstance(captured.stopped_by, StoreUnreachableError)
    (reason,) = {failed.reason for failed in captured.failed[1:]}
    assert reason == captured.stopped_by.message


def test_many_failing_tenants_are_logged_bounded_and_counted(
    store: OwnStore,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    # As if a constraint refused the rows of every second tenant.
    database.execute(
        "create function refuse() returns trigger language plpgsql as "
        "'begin if right(new.tenant, 1)::int % 2 = 0 then raise exception ''no more rows''"
        " using errcode = ''check_violation''; end if; return new; end'"
    )
    database.execute(
        "create trigger refuse before insert on budget_recovery.capture"
        " for each row execute function refuse()"
    )
    result = run_job(instance, current_hour)
    assert result.success
    logs = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert len([text for text in logs if text.startswith("Tenant 'tenant-")]) == 10
    assert f"{TENANTS // 2} tenants failed in all; the run's table lists the reasons." in logs
