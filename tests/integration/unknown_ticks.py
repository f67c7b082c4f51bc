"""Ticks with an unknown verdict, and what they must not change."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.sensors import TICK_SECONDS
from tests.integration.recovery_runs import check, incidents, skipped, state, verdict
from tests.waiting import wait_until

_OVERHEAD_SECONDS = 3.0


def unknown(instance: dg.DagsterInstance, *, cursor: str | None = None) -> str:
    """Return the reason of a tick that must be unknown, on time, and counted."""
    started = time.monotonic()
    result = check(instance, cursor)
    assert time.monotonic() - started < TICK_SECONDS + _OVERHEAD_SECONDS
    reason = skipped(result)
    assert result.cursor == str(int(cursor or "0") + 1), reason
    if result.asset_events:
        assert verdict(result) == "unknown"
    return reason


def assert_red_from_the_third_in_a_row(instance: dg.DagsterInstance, *, reason: str) -> None:
    assert reason in unknown(instance)
    assert reason in unknown(instance, cursor="1")
    # A failed tick does not change the cursor.
    for _ in range(2):
        with pytest.raises(dg.Failure, match="At least 3 ticks in a row") as failure:
            check(instance, "2")
        assert reason in str(failure.value.description)


def assert_recovered(instance: dg.DagsterInstance, database: psycopg.Connection) -> None:
    """Require that the next tick finds the store intact, and that the count starts again."""
    result = check(instance, "2")
    assert verdict(result) == "same"
    assert result.cursor == "0"
    assert "Try:" not in skipped(result)
    assert incidents(database) == []
    assert state(database) == "healthy"


@contextmanager
def no_leaks() -> Iterator[None]:
    """Require that no new thread or connection is left at the end."""
    before = _threads(), _open_files()
    yield
    wait_until(lambda: _threads() <= before[0] and _open_files() <= before[1])


def _threads() -> int:
    return threading.active_count()


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
