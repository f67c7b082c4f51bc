"""Random histories: whatever happens, no restore makes it worse, and every incident ends.

``HISTORIES=500 FIRST_SEED=1 .venv/bin/python -m pytest tests/histories -k fakes`` plays 500. A
failure prints its seed and the steps.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from budget_recovery_dagster.embedded import PostgresServer
from tests.histories.conftest import COUNTS, report
from tests.histories.fake_world import FakeWorld
from tests.histories.history import History, Sizes
from tests.histories.scene import START
from tests.histories.server_world import Servers, ServerWorld
from tests.histories.worlds import World

# Each step takes some milliseconds on servers.
_SHORT = Sizes(steps=30, days=1, captures_a_day=4)

_SEEN: Counter[str] = Counter()
_HAPPENS = (
    "verdict same",
    "verdict lost",
    "verdict unknown",
    "verdict other_store",
    "verdict database_behind",
    "evidence marker_gone",
    "incident restored",
    "incident restored_manually",
    "incident nothing_lost",
    "incident accepted",
    "incident returned",
    "restore that waited",
    "worker died",
    "traffic during work",
    "capture that pruned",
    "reset recorded",
    "end needed a person",
)
"""What happens in the default histories, so that they can find faults."""


@pytest.fixture(scope="module")
def servers(
    server_dir: Path, postgres_server: PostgresServer, migrated_template: str
) -> Iterator[Servers]:
    servers = Servers(server_dir / "histories", postgres_server, migrated_template)
    with servers.running():
        yield servers


def played(world: World, seed: int, sizes: Sizes, request: pytest.FixtureRequest) -> Counter[str]:
    history = History(world, seed, sizes)
    history.play()
    report(request.node, history.seen)
    return history.seen


def test_nothing_gets_worse_and_all_ends_on_fakes(
    seed: int, request: pytest.FixtureRequest
) -> None:
    _SEEN.update(played(FakeWorld(START), seed, Sizes(), request))
    _SEEN["histories"] += 1


def test_the_histories_on_fakes_are_eventful() -> None:
    if _SEEN["histories"] < COUNTS["fakes"]:
        pytest.skip("needs all histories on fakes, in one process")
    assert [each for each in _HAPPENS if not _SEEN[each]] == []


def test_nothing_gets_worse_and_all_ends_on_servers(
    seed: int, servers: Servers, request: pytest.FixtureRequest
) -> None:
    with closing(ServerWorld(servers, START)) as world:
        played(world, seed, _SHORT, request)
