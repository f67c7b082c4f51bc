"""An entity of a lifetime window is missing for good, so no record covers the earlier ones."""

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest

from budget_recovery_dagster.domain import PruneReport
from tests.contract.control_planes import NOON, ControlPlane, Counters, of
from tests.waiting import wait_until

HOUR = timedelta(hours=1)
ENTITIES = 2000
FEW, MANY = 4, 24


@pytest.fixture
def plane(postgres_plane: ControlPlane) -> ControlPlane:
    return postgres_plane


def usages(tenant: str, hour: int) -> Counters:
    """Return usages that rise every hour, and one that exists only in the first hour."""
    rising = {f"{tenant} {number}": f"{hour}.{number:06}" for number in range(1, ENTITIES)}
    return {("team", "lifetime"): {**rising, **({"gone": "7"} if hour == 0 else {})}}


def capture_hours(plane: ControlPlane, tenant: str, hours: int) -> None:
    for hour in range(hours):
        plane.capture(tenant, usages(tenant, hour), at=NOON + hour * HOUR)


def peak_of(work: Callable[[], object]) -> int:
    """Return the peak size of Python objects in bytes during the work."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def tenants(plane: ControlPlane) -> None:
    capture_hours(plane, "few", FEW)
    capture_hours(plane, "many", MANY)


def test_the_memory_of_a_recovery_point_does_not_grow_with_its_records(
    plane: ControlPlane, tenants: None
) -> None:
    now = plane.clock.now()
    of_few = peak_of(lambda: plane.points.current_usages("few", now))
    of_many = peak_of(lambda: plane.points.current_usages("many", now))
    assert of_many < 1.5 * of_few
    point = plane.points.current_usages("many", now)[of("team", "lifetime")]
    assert len(point) == ENTITIES
    assert str(point["gone"]) == "7"


def test_the_memory_of_pruning_does_not_grow_with_the_records(
    plane: ControlPlane, tenants: None
) -> None:
    plane.clock.set(NOON + timedelta(days=7, hours=2))
    of_few = peak_of(lambda: plane.prune("few"))
    reports: list[PruneReport] = []
    of_many = peak_of(lambda: reports.append(plane.prune("many")))
    assert of_many < 1.5 * of_few
    # Of the two hours past retention, only the first contains the missing entity.
    assert reports == [PruneReport(records=1, captures=1, contents=1, failures=0)]
    point = plane.points.current_usages("many", plane.clock.now())
    assert str(point[of("team", "lifetime")]["gone"]) == "7"


def test_finding_needed_records_does_not_lock_the_store(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    lost: list[Counters] = [{("team", "lifetime"): {"a": "1", "gone": "7"}}]
    for hour, counters in enumerate([*lost, {("team", "lifetime"): {"a": "2"}}]):
        plane.capture("acme", counters, at=NOON + hour * HOUR)
    plane.clock.set(NOON + timedelta(days=30))
    plane.end_gap()
    with ThreadPoolExecutor(1) as pool:
        with admin.transaction():
            # The prune waits here while this lock is held.
            admin.execute("lock table budget_recovery.budget_content")
            pruning = pool.submit(plane.prune, "acme")
            wait_until(lambda: waits_for_the_contents(admin) or pruning.done())
            assert not pruning.done()
            admin.execute("select from budget_recovery.store for update nowait")
        assert pruning.result() == PruneReport(records=0, captures=0, contents=0, failures=0)


def waits_for_the_contents(admin: psycopg.Connection) -> bool:
    waiting = "select from pg_locks where not granted and relation = %s::regclass"
    return admin.execute(waiting, ("budget_recovery.budget_content",)).rowcount > 0
