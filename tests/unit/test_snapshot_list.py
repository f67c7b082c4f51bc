"""The table of `snapshots` never cuts a timestamp, which is what `--snapshot` takes."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import StringIO

import pytest
from rich.console import Console

from budget_recovery_dagster.domain import CaptureSource, ListedSnapshot
from budget_recovery_dagster.presentation.terminal import print_snapshots

AT = datetime(2026, 12, 1, 3, 39, 34, 795991, UTC)
REMARKS = (
    "1,234 omitted, 12 unreadable, 3 missing or lower (up to 41.50 in one budget and window),"
    " 2 partial, pruned"
)
LARGE = ListedSnapshot(
    captured_at=AT,
    source=CaptureSource.COUNTERS,
    tenants=1_000_000,
    records=2_345_678,
    entries=123_456_789,
    omitted=1234,
    unreadable=12,
    drops=3,
    most_missing=Decimal("41.50"),
    partial=2,
    is_pruned=True,
)
SMALL = ListedSnapshot(
    AT - timedelta(hours=1), CaptureSource.COUNTERS, 3, 28, 710, 0, 0, 0, None, 0, is_pruned=False
)
NUMBERS = ["1,000,000", "2,345,678", "123,456,789"]


def printed(*, width: int, is_terminal: bool) -> list[str]:
    output = StringIO()
    console = Console(file=output, width=width, force_terminal=is_terminal, highlight=False)
    print_snapshots(console, [LARGE, SMALL])
    return output.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_pipe_gets_one_whole_line_for_each_snapshot(width: int) -> None:
    head, large, small = printed(width=width, is_terminal=False)
    assert head.split() == ["captured", "at", "(UTC)", "tenants", "windows", "counters", "remarks"]
    assert large.split() == ["2026-12-01T03:39:34.795991Z", *NUMBERS, *REMARKS.split()]
    assert small.split() == ["2026-12-01T02:39:34.795991Z", "3", "28", "710"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_gets_whole_timestamps_and_numbers(width: int) -> None:
    _, large, *rest, small = printed(width=width, is_terminal=True)
    assert large.split()[:4] == ["2026-12-01T03:39:34.795991Z", *NUMBERS]
    remarks = [*large.split()[4:], *(word for line in rest for word in line.split())]
    assert remarks == REMARKS.split()
    assert small.split() == ["2026-12-01T02:39:34.795991Z", "3", "28", "710"]
