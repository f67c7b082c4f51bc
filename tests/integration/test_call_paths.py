"""docs/architecture.md lists the files that a capture, a restore and a preview run through."""

from collections.abc import Iterator

import pytest

from tests.call_paths import TRACES
from tests.documentation import rows, spans_in
from tests.scenes.servers import Servers, running_servers

PAGE = "docs/architecture.md"


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with running_servers() as servers:
        yield servers


@pytest.mark.parametrize("path", TRACES)
def test_the_page_lists_the_files_of_each_call_path(
    servers: Servers, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the traced process gets this.
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    listed = [file for cells in rows(PAGE, path) for file in spans_in(cells[0])]
    run = TRACES[path](servers)
    missing = [file for file in run if file not in listed]
    idle = [file for file in listed if file not in run]
    assert not missing, f"{PAGE}, {path}: these files run and are not listed: {missing}"
    assert not idle, f"{PAGE}, {path}: these files are listed and do not run: {idle}"
    assert listed == run, f"{PAGE}, {path}: the order of the first calls is {run}"
