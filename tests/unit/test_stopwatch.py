from dataclasses import dataclass, field

import pytest

from budget_recovery_dagster.stopwatch import HOST_CLOCKS, Stopwatch


@dataclass
class Clocks:
    """Two clocks of a host that a test sets."""

    monotonic: float = 100.0
    wall: float = 1_000_000.0
    stopwatch: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.stopwatch = Stopwatch([lambda: self.monotonic, lambda: self.wall])


@pytest.mark.parametrize(
    ("monotonic", "wall", "passed"),
    [
        pytest.param(30, 30, 30, id="both run"),
        pytest.param(0, 3600, 3600, id="the host was suspended"),
        pytest.param(30, -3600, 30, id="the wall clock was set back"),
        pytest.param(30, 3600, 3600, id="the wall clock was set forward"),
        pytest.param(0, 0, 0, id="no time has passed"),
    ],
)
def test_the_clock_that_has_advanced_most_counts(
    monotonic: float, wall: float, passed: float
) -> None:
    clocks = Clocks()
    clocks.monotonic += monotonic
    clocks.wall += wall
    assert clocks.stopwatch.seconds() == passed


def test_the_time_never_goes_back() -> None:
    clocks = Clocks()
    clocks.wall += 3600
    assert clocks.stopwatch.seconds() == 3600
    clocks.wall -= 3600
    clocks.monotonic += 5
    assert clocks.stopwatch.seconds() == 3600
    clocks.monotonic += 3600
    assert clocks.stopwatch.seconds() == 3605


def test_the_clocks_of_this_host_run() -> None:
    # On Linux one of them goes on while the host is suspended.
    assert len(HOST_CLOCKS) == 3
    assert 0 <= Stopwatch().seconds() < 10
