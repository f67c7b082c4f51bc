"""Which histories are played, and a summary of what happened in them.

``HISTORIES=500 FIRST_SEED=1`` plays so many, from this seed on, and prints the summary.
"""

import os
from collections import Counter

import pytest

COUNTS = {"fakes": 50, "servers": 4}
"""How many histories each test plays by default."""
_SEEN = "histories"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test of histories its seeds."""
    for world, count in COUNTS.items():
        if metafunc.function.__name__.endswith(f"_on_{world}"):
            first = int(os.environ.get("FIRST_SEED", "1"))
            chosen = int(os.environ.get("HISTORIES", count))
            metafunc.parametrize("seed", range(first, first + chosen))


def report(node: pytest.Item, seen: Counter[str]) -> None:
    """Add what happened in a history to the summary."""
    node.user_properties.append((_SEEN, dict(seen)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how often each thing happened, if the number of histories was chosen."""
    if "HISTORIES" not in os.environ:
        return
    total: Counter[str] = Counter()
    for status in ("passed", "failed"):
        for each in terminalreporter.getreports(status):
            found = [seen for name, seen in each.user_properties if name == _SEEN]
            for seen in found:
                total.update(seen)
            total["histories"] += len(found)
    terminalreporter.section("histories")
    for name, count in sorted(total.items()):
        terminalreporter.write_line(f"{count:9,} {name}")
