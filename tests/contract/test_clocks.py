"""The clock of the database, and waits, which do not depend on it."""

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import chain, repeat

import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import Database
from budget_recovery_dagster.ports import Clock
from tests.contract.control_planes import NOON
from tests.fakes.control_plane import ManualClock

HOUR = timedelta(hours=1)


@pytest.fixture(params=["memory", "postgres"])
def clock(request: pytest.FixtureRequest) -> Clock:
    if request.param == "memory":
        return ManualClock(NOON)
    database: Database = request.getfixturevalue("database")
    return database


def test_a_wait_lasts_its_span(clock: Clock) -> None:
    before = clock.now()
    clock.wait(timedelta(seconds=0.6))
    assert timedelta(seconds=0.6) <= clock.now() - before < timedelta(seconds=10)


def test_the_time_of_the_host_is_close_to_that_of_a_database_there(clock: Clock) -> None:
    assert abs(clock.host_time() - clock.now()) < timedelta(seconds=10)


@pytest.mark.parametrize("span", [timedelta(0), -HOUR])
def test_a_wait_of_nothing_returns_at_once(clock: Clock, span: timedelta) -> None:
    before = clock.now()
    clock.wait(span)
    assert before <= clock.now() < before + timedelta(seconds=10)


def standing(_: psycopg.Connection) -> datetime:
    return NOON


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(repeat(NOON), id="stands still"),
        pytest.param(chain([NOON], repeat(NOON - HOUR)), id="is set back"),
        pytest.param(chain([NOON], repeat(NOON + HOUR)), id="is set forward"),
    ],
)
def test_a_wait_does_not_depend_on_the_clock_of_the_database(
    database_url: str, shown: "repeat[datetime] | chain[datetime]"
) -> None:
    at: Callable[[object], datetime] = lambda _: next(shown)  # noqa: E731 - an iterator's next
    with Database(database_url, clock=at) as database:
        database.now()
        started = time.monotonic()
        database.wait(timedelta(seconds=0.6))
        assert 0.5 < time.monotonic() - started < 10
