"""docs/architecture.md lists the files that a capture, a restore and a preview run through."""

import pytest

from tests.call_paths import trace_paths
from tests.documentation import rows, spans_in
from tests.scenes.servers import running_servers

PAGE = "docs/architecture.md"


@pytest.fixture(scope="module")
def traced() -> dict[str, list[str]]:
    with running_servers() as servers:
        return trace_paths(servers)


@pytest.mark.parametrize("path", ["capture", "restore", "preview"])
def test_the_page_lists_the_files_of_each_call_path(
    traced: dict[str, list[str]], path: str
) -> None:
    listed = [file for cells in rows(PAGE, path) for file in spans_in(cells[0])]
    run = traced[path]
    missing = [file for file in run if file not in listed]
    idle = [file for file in listed if file not in run]
    assert not missing, f"{PAGE}, {path}: these files run and are not listed: {missing}"
    assert not idle, f"{PAGE}, {path}: these files are listed and do not run: {idle}"
    assert listed == run, f"{PAGE}, {path}: the order of the first calls is {run}"
