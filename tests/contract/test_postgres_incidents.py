"""Incidents in PostgreSQL while others are at work on the same store."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
    """One lease for workers that should not be at it together, to see what the database says."""
    with plane.restore_lease() as lease:
        yield lease


def at_once(admin: psycopg.Connection, work: Callable[[int], Result]) -> list[Result | type]:
    """Let four workers all wait for the store before one of them gets it."""

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
    # Within a transaction the server shows the same sessions again and again, unless it is told.
    admin.execute("select pg_stat_clear_snapshot()")
    waiting = "select from pg_stat_activity where wait_event_type = 'Lock'"
    return admin.execute(f"{waiting} and datname = current_database()".encode()).rowcount


def test_of_openings_at_once_one_opens_an_incident(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.registry.accept(ACCEPTED, judged=None)
    outcomes = at_once(admin, lambda _: plane.incidents.open(LOSS, target=TARGET, judged=ACCEPTED))
    assert outcomes.count(IncidentMovedError) == 3
    (incident,) = plane.incidents.recent(10)
    assert incident in outcomes
    assert plane.incidents.recovery() == Recovery(RecoveryState.RECOVERING, incident)


def test_of_launches_at_once_one_is_claimed(plane: ControlPlane, admin: psycopg.Connection) -> None:
    incident = open_one(plane)
    outcomes = at_once(admin, lambda _: plane.incidents.claim_launch(judged=incident))
    assert outcomes.count(None) == 3
    assert plane.incidents.recovery().incident in outcomes
    assert plane.incidents.recent(1)[0].launches == 1


def test_of_claims_of_the_third_attempt_one_gets_it(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    incident = open_one(plane)
    for _ in range(2):
        incident = claim_attempt(plane, incident)
    with plane.restore_lease() as lease:
        outcomes = at_once(
            admin,
            lambda number: plane.incidents.claim_attempt(
                judged=incident, run_id=f"run {number}", holder="h", lease=lease
            ),
        )
    assert outcomes.count(AttemptsUsedUpError) == 3
    assert plane.incidents.recovery().incident == replace(incident, attempts=3)
    assert len(plane.incidents.attempts_of(incident.incident_id)) == 3


def test_of_joins_at_once_on_one_judgement_one_is_added(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    incident = open_one(plane)
    outcomes = at_once(
        admin, lambda _: plane.incidents.join(GONE, target=MARKED_TARGET, judged=incident)
    )
    assert outcomes.count(IncidentMovedError) == 3
    assert plane.incidents.recent(1)[0].losses == (LOSS, GONE)


def test_of_closings_at_once_one_closes_and_the_baseline_moves_once(
    plane: ControlPlane, admin: psycopg.Connection, lease: Lease
) -> None:
    incident = open_one(plane)
    outcomes = at_once(
        admin, lambda _: plane.incidents.close(CLOSING, judged=incident, lease=lease)
    )
    assert outcomes.count(IncidentMovedError) == 3
    assert plane.baseline is not None
    assert plane.baseline.version == 2


def test_of_an_opening_and_a_capture_at_once_none_lands_after_the_loss(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    """Whichever comes first, the other is refused: no snapshot can be newer than the incident."""
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


def test_a_capture_that_waits_for_an_opening_stores_nothing(
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


def test_an_opening_that_waits_for_a_capture_is_judged_anew(
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
    """Let whoever does this wait in the midst of it, until ``let_go``."""
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


# What the tables themselves refuse


def test_a_second_open_incident_is_refused_by_the_table_itself(
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
def test_rows_that_make_no_sense_are_refused(
    plane: ControlPlane, admin: psycopg.Connection, change: str
) -> None:
    claim_attempt(plane, open_one(plane))
    with pytest.raises(psycopg.IntegrityError):
        admin.execute(change.encode())


def test_the_incidents_of_a_store_whose_row_was_lost_are_still_there(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    incident = open_one(plane)
    admin.execute("delete from budget_recovery.store")
    plane.registry.claim()
    assert plane.incidents.recent(10) == (incident,)
