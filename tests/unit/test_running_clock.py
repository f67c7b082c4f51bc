"""The clock of a restore: the database's last reading, and the time since."""

from datetime import UTC, datetime, timedelta

from budget_recovery_dagster.domain import Window
from budget_recovery_dagster.services.restore.tenants import RunningClock
from tests.fakes.control_plane import ManualClock

SECOND = timedelta(seconds=1)
MAY = Window.parse("2026-05")
END = datetime(2026, 6, 1, tzinfo=UTC)


def test_time_passes_although_the_clock_of_the_database_stands_still() -> None:
    running = RunningClock(ManualClock(END - SECOND))
    before = running.now()
    assert before >= END - SECOND
    while running.now() == before:
        pass
    running.read_again()
    assert running.now() > before


def test_a_clock_that_is_set_back_opens_no_closed_window() -> None:
    clock = ManualClock(END)
    running = RunningClock(clock)
    assert not running.is_open(MAY)
    clock.set(END - timedelta(days=1))
    running.read_again()
    assert not running.is_open(MAY)


def test_a_clock_that_is_set_forward_closes_the_window_once_it_is_read() -> None:
    clock = ManualClock(END - timedelta(hours=1))
    running = RunningClock(clock)
    clock.set(END)
    assert running.is_open(MAY)
    running.read_again()
    assert not running.is_open(MAY)
