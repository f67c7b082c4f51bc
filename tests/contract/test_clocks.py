import threading
import time
from datetime import datetime, timedelta

import pytest

from budget_recovery_dagster.adapters.postgres import Database
from budget_recovery_dagster.ports import Clock
from tests.contract.control_planes import NOON
from tests.fakes.control_plane import ManualClock


@pytest.fixture(params=["memory", "postgres"])
def clock(request: pytest.FixtureRequest) -> Clock:
    if request.param == "memory":
        return ManualClock(NOON)
    database: Database = request.getfixturevalue("database")
    return database


def test_waiting_ends_when_the_clock_has_reached_the_time(clock: Clock) -> None:
    at = clock.now() + timedelta(seconds=0.6)
    clock.wait_until(at)
    assert at <= clock.now() < at + timedelta(seconds=10)


def test_waiting_for_a_past_time_returns_at_once(clock: Clock) -> None:
    before = clock.now()
    clock.wait_until(before - timedelta(hours=1))
    assert before <= clock.now() < before + timedelta(seconds=10)


def test_a_time_without_a_zone_is_refused(clock: Clock) -> None:
    with pytest.raises(ValueError, match="no time zone"):
        clock.wait_until(datetime(2020, 1, 1))  # noqa: DTZ001 - it is what is refused


def test_waiting_uses_the_clock_of_the_database(database_url: str) -> None:
    manual = ManualClock(NOON)
    with Database(database_url, clock=lambda _: manual.now()) as database:
        done = threading.Event()

        def wait() -> None:
            database.wait_until(NOON + timedelta(milliseconds=100))
            done.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not done.wait(1), "it went by the clock of this host"
        # An hour of that clock passes at once, and the wait notices it.
        manual.advance(timedelta(hours=1))
        assert done.wait(10)
        thread.join()
        started = time.monotonic()
        database.wait_until(manual.now())
        assert time.monotonic() - started < 5
