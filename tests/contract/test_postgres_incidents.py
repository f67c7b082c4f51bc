"""Incidents in PostgreSQL with concurrent workers."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import psycopg
import pytest

from budget_recovery_dagster.domain import Hour, Incident, Recovery, RecoveryState
from budget_recovery_dagster.errors import (
    AttemptsUsedUpError,
    BaselineMovedError,
    BudgetRecoveryError,
    CapturesPausedError,
    IncidentMovedError,
)
from budget_recovery_dagster.ports import Lease
from tests.contract.control_planes import NOON, ControlPlane, Counters, reading
from tests.contract.incident_scene import (
    ACCEPTED,
    CLOSING,
    GONE,
    LOSS,
    MARKED_TARGET,
    TARGET,
    claim_attempt,
    close,
    open_one,
)
from tests.waiting import wait_until

TEAM: Counters = {("team", "lifetime"): {"alice": "1"}}
Result = TypeVar("Result")


@pytest.fixture
def plane(postgres_plane: ControlPlane) -> ControlPlane:
    return postgres_plane


@pytest.fixture
def lease(plane: ControlPlane) -> Iterator[Lease]:
    """Return one lease for concurrent workers, so that only the database separates them."""
    with plane.restore_lease() as lease:
        yield lease


def at_once(admin: psycopg.Connection, work: Callable[[int], Result]) -> list[Result | type]:
    """Run four workers that all wait for the row of the store before one of them gets it."""

    def attempt(number: int) -> Result | type:
        try:
            return work(number)
        except BudgetRecoveryError as error:
            return type(error)

    with ThreadPoolExecutor(4) as pool:
        with admin.transaction():
            admin.execute("select from budget_recovery.store for update")
            workers = [pool.submit(attempt, number) for number in range(4)]
            wait_until(lambda: waiters(admin) == 4)
        return [worker.result() for worker in workers]


def waiters(admin: psycopg.Connection) -> int:
    # Within a transaction the server caches the statistics of sessions until they are cleared.
    admin.execute("select pg_stat_clear_snapshot()")
    waiting = "select from pg_stat_activity where wait_event_type = 'Lock'"
    return admin.execute(f"{waiting} and datname = current_database()".encode()).rowcount


def test_only_one_of_concurrent_openings_opens_an_incident(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.registry.accept(ACCEPTED, judged=None)
    outcomes = at_once(admin, lambda _: plane.incidents.open(LOSS, target=TARGET, judged=ACCEPTED))
    assert outcomes.count(IncidentMovedError) == 3
    (incident,) = plane.incidents.recent(10)
    assert incident in outcomes
    assert plane.incidents.recovery() == Recovery(RecoveryState.RECOVERING, incident)


def test_only_one_of_concurrent_launches_is_claimed(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    incident = open_one(plane)
    outcomes = at_once(admin, lambda _: plane.incidents.claim_launch(judged=incident))
    assert outcomes.count(None) == 3
    assert plane.incidents.recovery().incident in outcomes
    assert plane.incidents.recent(1)[0].launches == 1


def test_only_one_of_concurrent_claims_gets_the_third_attempt(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    incident = open_one(plane)
    for _ in range(2):
        incident = claim_attempt(plane, incident)
    plane.clock.advance(timedelta(minutes=5))
    with plane.restore_lease() as lease:
        outcomes = at_once(
            admin,
            lambda number: plane.incidents.claim_attempt(
                judged=incident, run_id=f"run {number}", holder="h", lease=lease
            ),
        )
    assert outcomes.count(AttemptsUsedUpError) == 3
    third = replace(incident, attempts=3, next_attempt_at=None)
    assert plane.incidents.recovery().incident == third
    assert len(plane.incidents.attempts_of(incident.incident_id)) == 3


def test_only_one_of_concurrent_joins_adds_a_loss(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    incident = open_one(plane)
    outcomes = at_once(
        admin, lambda _: plane.incidents.join(GONE, target=MARKED_TARGET, judged=incident)
    )
    assert outcomes.count(IncidentMovedError) == 3
    assert plane.incidents.recent(1)[0].losses == (LOSS, GONE)


def test_only_one_of_concurrent_closings_moves_the_baseline(
    plane: ControlPlane, admin: psycopg.Connection, lease: Lease
) -> None:
    incident = open_one(plane)
    outcomes = at_once(
        admin, lambda _: plane.incidents.close(CLOSING, judged=incident, lease=lease)
    )
    assert outcomes.count(IncidentMovedError) == 3
    assert plane.baseline is not None
    assert plane.baseline.version == 2


def test_no_concurrent_capture_is_stored_after_the_loss(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    """Either is refused after the other, so no snapshot is newer than the incident."""
    accepted = plane.registry.accept(ACCEPTED, judged=None)
    snapshots = [plane.take(reading(f"tenant {number}", TEAM)) for number in range(4)]

    with plane.lease() as lease:

        def work(number: int) -> Incident | None:
            if number % 2:
                return plane.incidents.open(LOSS, target=TARGET, judged=accepted)
            plane.snapshots.commit(
                snapshots[number], hour=Hour(NOON), run_id="r", lease=lease, judged=accepted
            )
            return None

        outcomes = at_once(admin, work)
    incidents = plane.incidents.recent(10)
    stored = plane.snapshots.tenants()
    if stored:
        assert (len(stored), incidents) == (1, ())
        assert outcomes.count(BaselineMovedError) == 3
    else:
        assert plane.baseline == accepted
        assert [incident.newest_point_at for incident in incidents] == [None]
        assert outcomes.count(CapturesPausedError) == 2


def test_a_capture_that_waits_for_an_opening_is_refused(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    accepted = plane.registry.accept(ACCEPTED, judged=None)
    snapshot = plane.take(reading("acme", TEAM))
    hold_back(admin, "insert on budget_recovery.store_loss")
    with plane.lease() as lease, ThreadPoolExecutor(2) as pool:
        opening = pool.submit(plane.incidents.open, LOSS, target=TARGET, judged=accepted)
        wait_until(lambda: waiters(admin) == 1)
        late = pool.submit(
            plane.snapshots.commit,
            snapshot,
            hour=Hour(NOON),
            run_id="r",
            lease=lease,
            judged=accepted,
        )
        wait_until(lambda: waiters(admin) == 2)
        let_go(admin)
        with pytest.raises(CapturesPausedError):
            late.result()
    assert plane.incidents.recovery().incident == opening.result()
    assert plane.snapshots.tenants() == frozenset()


def test_an_opening_that_waits_for_a_capture_must_be_judged_again(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    accepted = plane.registry.accept(ACCEPTED, judged=None)
    snapshot = plane.take(reading("acme", TEAM))
    hold_back(admin, "insert on budget_recovery.capture")
    with plane.lease() as lease, ThreadPoolExecutor(2) as pool:
        commit = pool.submit(
            plane.snapshots.commit,
            snapshot,
            hour=Hour(NOON),
            run_id="r",
            lease=lease,
            judged=accepted,
        )
        wait_until(lambda: waiters(admin) == 1)
        late = pool.submit(plane.incidents.open, LOSS, target=TARGET, judged=accepted)
        wait_until(lambda: waiters(admin) == 2)
        let_go(admin)
        with pytest.raises(BaselineMovedError):
            late.result()
        moved = commit.result()
    incident = plane.incidents.open(LOSS, target=TARGET, judged=moved)
    assert incident.newest_point_at == NOON


def hold_back(admin: psycopg.Connection, what: str) -> None:
    """Make this statement wait in a trigger until ``let_go``."""
    admin.execute("select pg_advisory_lock(1)")
    admin.execute(
        "create function hold_back() returns trigger language plpgsql as $$ begin"
        " perform pg_advisory_xact_lock(1); return new; end $$"
    )
    admin.execute(
        f"create trigger hold_back before {what} for each row execute function hold_back()".encode()
    )


def let_go(admin: psycopg.Connection) -> None:
    admin.execute("select pg_advisory_unlock(1)")


# Constraints of the tables


def test_the_table_refuses_a_second_open_incident(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    incident = open_one(plane)
    copy = (
        "insert into budget_recovery.incident"
        " (incident_id, opened_at, attempts, launches, launches_before)"
        " select gen_random_uuid(), opened_at, 0, 0, 0 from budget_recovery.incident"
    )
    with pytest.raises(psycopg.errors.UniqueViolation, match="incident_open"):
        admin.execute(copy.encode())
    close(plane, incident)
    following = open_one(plane)
    assert [each.incident_id for each in plane.incidents.recent(1)] == [following.incident_id]


@pytest.mark.parametrize(
    "change",
    [
        "update budget_recovery.store set marked_at = null",
        "update budget_recovery.store set marker_nonce = ''",
        "update budget_recovery.store set marker_revision = 18446744073709551616",
        (
            "update budget_recovery.store set baseline_created_at = null,"
            " baseline_last_sequence = null, baseline_version = null"
        ),
        "update budget_recovery.incident set incident_id = '1'",
        "update budget_recovery.incident set target_version = null",
        "update budget_recovery.incident set target_marked_at = now()",
        "update budget_recovery.incident set attempts = -1",
        "update budget_recovery.incident set launches_before = 1",
        "update budget_recovery.incident set waiting_since = now()",
        "update budget_recovery.incident set waiting_since = now(), waiting_reason = '', waits = 0",
        "update budget_recovery.incident set held_at = now(), held_by = 'ann'",
        "update budget_recovery.incident set held_reason = 'why'",
        "update budget_recovery.incident set failed_at = now(), failure = 'x', failure_detail = ''",
        "update budget_recovery.incident set closed_at = now()",
        "update budget_recovery.incident set outcome = 'restored'",
        "update budget_recovery.store_loss set verdict = 'unknown'",
        "update budget_recovery.store_loss set position = 0",
        "update budget_recovery.store_loss set before_last_sequence = -1",
        "update budget_recovery.store_loss set after_created_at = null",
        "delete from budget_recovery.store_loss",
        "update budget_recovery.restore_attempt set number = 0",
        "update budget_recovery.restore_attempt set loss = 2",
        "update budget_recovery.restore_attempt set outcome = 'done'",
        "delete from budget_recovery.incident",
    ],
)
def test_invalid_rows_are_refused(
    plane: ControlPlane, admin: psycopg.Connection, change: str
) -> None:
    claim_attempt(plane, open_one(plane))
    with pytest.raises(psycopg.IntegrityError):
        admin.execute(change.encode())


def test_incidents_survive_a_missing_row_of_the_store(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    incident = open_one(plane)
    admin.execute("delete from budget_recovery.store")
    plane.registry.claim()
    assert plane.incidents.recent(10) == (incident,)
